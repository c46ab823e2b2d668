"""Pickled values between ranks, each prefixed by an HMAC that is checked before anything is unpickled.

Unpickling can run arbitrary code, and a port of this job may be open to other users of a host. The key is
$SPINDLE_SECRET, which `spindle launch` draws for each job and which only processes of the same user can read. Under
torchrun, set it to the same random text on all hosts; without it the digest has no key, and protects from accidents
alone, as torch's own object collectives do.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.launch import variables

_DIGEST_BYTES = 32


def dumps(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _digest(data) + data


def loads(message: bytes) -> Any:
    """The value in a message from another rank of this job. Refuses any other message without unpickling it."""
    digest, data = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(data)):
        raise TrainingError(
            "a message does not have the signature of this job, and was not read: either a process outside the job "
            f"has sent the message, or ranks were started with different {variables.SECRET}"
        )
    return pickle.loads(data)


def to_tensor(value: Any) -> torch.Tensor:
    """A signed message as bytes in a tensor of the host."""
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def from_tensor(message: torch.Tensor) -> Any:
    return loads(message.cpu().numpy().tobytes())


def _digest(data: bytes) -> bytes:
    secret = os.environ.get(variables.SECRET, "").encode()
    key = hashlib.blake2b(secret).digest() if secret else b""  # a key has at most 64 bytes
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=key).digest()
