"""A checkpoint's weights as a safetensors file, for plain PyTorch.

The format: eight bytes with the length of a JSON header, the header (dtype, shape and byte range of each tensor), and
the tensors end to end, row-major.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

from spindle.artifact import writable_target
from spindle.checkpoint.index import DTYPE_BYTES
from spindle.checkpoint.read import SavedCheckpoint
from spindle.checkpoint.writers import cut
from spindle.errors import CheckpointError, InputError
from spindle.program import Slice

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
_CHUNK_BYTES = 64 << 20


def exported_names(checkpoint: SavedCheckpoint) -> dict[str, str]:
    """Names as in `Trainer.state_dict()` → names of stored tensors; tied parameters have several names."""
    prefixes = ("parameter/", "buffer/")
    names = {name.partition("/")[2]: name for name in checkpoint.tensors if name.startswith(prefixes)}
    aliases = {alias: f"parameter/{name}" for alias, name in checkpoint.state.aliases.items()}
    for alias, name in aliases.items():
        if name not in checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.folder}: {alias!r} is another name of {name!r}, which is not there")
    return dict(sorted((names | aliases).items()))


def export_safetensors(
    checkpoint: SavedCheckpoint, path: Path, progress: Callable[[float], None] = lambda share: None
) -> int:
    """Write weights and persistent buffers, completely or not at all. Returns the number of bytes."""
    target = writable_target(path)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names, end = exported_names(checkpoint), 0
    for name, stored in names.items():
        tensor = checkpoint.tensors[stored]
        if tensor.dtype not in _NAMES:
            raise InputError(f"{name}: safetensors has no {tensor.dtype}")
        begin, end = end, end + prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = target.with_name(f".{target.name[:40]}.{os.getpid()}.part")
    written = 0
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for stored in names.values():
                tensor = checkpoint.tensors[stored]
                most = max(1, _CHUNK_BYTES // DTYPE_BYTES[tensor.dtype])
                for box in cut(Slice.whole(tensor.shape).box, most):  # in row-major order
                    written += file.write(checkpoint.read(stored, box).tobytes())
                    progress(written / end)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
    return written
