"""Nested plain values as JSON and back, exactly: tuples stay tuples; bytes, arrays and tensors are kept, too.

Nothing is pickled, so that reading a file cannot run code.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spindle.checkpoint import DTYPE_BYTES
from spindle.errors import CheckpointError, TrainingError


def to_plain(value: Any, where: str) -> Any:
    """The JSON form of a value. `where` starts the error message if it is not a plain value."""
    match value:
        case None | bool() | int() | float() | str():
            if type(value) in (type(None), bool, int, float, str):
                return value
        case bytes():
            return {"bytes": _text(value)}
        case list():
            return [to_plain(item, where) for item in value]
        case tuple():
            return {"tuple": [to_plain(item, where) for item in value]}
        case Mapping():
            return {
                "items": [[to_plain(key, where), to_plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
            }
        case torch.Tensor():
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(content)]}
        case np.ndarray() if value.dtype.kind in "biufc":
            return {"array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
        case np.generic() if value.dtype.kind in "biuf":
            return value.item()
        case _:
            pass
    raise TrainingError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: expected numbers, strings, tensors, and "
        "lists, tuples and dicts of these"
    )


def from_plain(data: Any, where: str) -> Any:
    """Read the JSON form that `to_plain` made."""
    if isinstance(data, list):
        return [from_plain(item, where) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((kind, content),) = data.items()
        match kind:
            case "bytes":
                return base64.b64decode(content, validate=True)
            case "tuple":
                return tuple(from_plain(item, where) for item in content)
            case "items":
                return {from_plain(key, where): from_plain(item, where) for key, item in content}
            case "tensor":
                name, shape, text = content
                if name not in DTYPE_BYTES:
                    raise ValueError(name)
                bytes_of = torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), np.uint8).copy())
                return bytes_of.view(getattr(torch, name)).reshape(shape)
            case "array":
                dtype, shape, text = content
                if np.dtype(dtype).kind not in "biufc":
                    raise ValueError(dtype)
                return np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype)).reshape(shape).copy()
            case _:
                raise ValueError(kind)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{where}: not a value that a checkpoint holds ({error})") from error


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
