"""The index of a checkpoint: every tensor as boxes, each a range of bytes in some file; and the state that is not
tensors.

    step-400/
      state.json       SavedState, the digests of the other JSON files, and its own
      index.json       Index: dtype, shape and boxes of each tensor; file, offset, length and CRC-32 of each box
      rank-0.bin ...   raw bytes, row-major, in the byte order of x86 and ARM
      plan.json, profile.json   the plan that was running, and what it was made from

Names of tensors: `parameter/NAME`, `buffer/NAME`, `nonpersistent_buffer/NAME` and `optimizer/NAME/KEY`, with the
names of the user's modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from spindle.errors import CheckpointError
from spindle.program import Box

# The size of an element, by torch's name of a dtype.
DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_MOST_ELEMENTS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box of a tensor, and the bytes `[offset, offset + length)` of a file that hold it."""

    box: Box
    file: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}")
        if any(size < 0 for size in self.shape) or prod(self.shape) > _MOST_ELEMENTS:
            raise CheckpointError(f"tensor {self.name!r} has the invalid shape {list(self.shape)}")
        for stored in self.boxes:
            self._check(stored)

    def _check(self, stored: StoredBox) -> None:
        box = stored.box
        if not len(box.offsets) == len(box.lengths) == len(self.shape):
            raise CheckpointError(
                f"tensor {self.name!r}, box at {list(box.offsets)} of {list(box.lengths)}: expected {len(self.shape)} "
                "dimensions"
            )
        where = f"tensor {self.name!r}, box {text_of(box)}"
        for offset, length, size in zip(box.offsets, box.lengths, self.shape, strict=True):
            if offset < 0 or length < 0 or offset + length > size:
                raise CheckpointError(f"{where}: not inside the shape {list(self.shape)}")
        if stored.length != box.num_elements * DTYPE_BYTES[self.dtype] or stored.offset < 0:
            raise CheckpointError(f"{where}: {stored.length} bytes at {stored.offset} cannot be a box of {self.dtype}")
        if not is_plain_name(stored.file):
            raise CheckpointError(f"{where}: {stored.file!r} is not the name of a file in the folder of the checkpoint")

    def check_tiling(self) -> None:
        """Raise an error unless the boxes cover every element once."""
        covered = sum(stored.box.num_elements for stored in self.boxes)
        if covered != prod(self.shape):
            raise CheckpointError(f"tensor {self.name!r}: its boxes cover {covered} of {prod(self.shape)} elements")
        boxes = [stored.box for stored in self.boxes]
        for number, box in enumerate(boxes):
            if any(box.overlap(earlier) is not None for earlier in boxes[:number]):
                raise CheckpointError(f"tensor {self.name!r}: two of its boxes overlap in {text_of(box)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    tensors: tuple[StoredTensor, ...]

    def __post_init__(self) -> None:
        names = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise CheckpointError(f"tensor {tensor.name!r} appears twice")
            names.add(tensor.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLoader:
    """How many batches of a task were trained, where its loader continues (None from a rank that does not read it), and
    what another loader must have in common with it to continue from there."""

    num_batches: int
    position: Any
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        if self.num_batches < 0:
            raise CheckpointError(f"expected num_batches of at least 0, got {self.num_batches}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """Parameters with the same optimizer settings."""

    parameters: tuple[str, ...]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank wrote: its boxes, and its share of the non-tensor state, by field of `SavedState`."""

    tensors: tuple[StoredTensor, ...]
    data: dict[str, SavedLoader] = field(default_factory=dict)
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[SavedGroup, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a training run after `step` steps, without its tensors."""

    step: int
    fit: int  # which call of Trainer.fit it was in, from 0
    first_step: int  # the first step of that call
    was_stopped: bool  # Trainer.stop ended that call
    seed: int
    num_ranks: int
    tasks: tuple[str, ...]
    ended_tasks: tuple[str, ...]
    modules: tuple[str, ...]
    frozen: tuple[str, ...]  # parameters that were not trained
    in_evaluation: tuple[str, ...]  # submodules in evaluation mode
    aliases: dict[str, str]  # further names of tied parameters → the name that they are stored under
    variants: dict[str, dict[str, str]]  # task → key → name
    checked: tuple[str, ...]  # task variants whose split loss was compared with the whole one
    data: dict[str, SavedLoader]  # by task
    random_state: Any
    num_updates: int
    optimizer_values: dict[str, dict[str, Any]]  # by parameter: optimizer state that is not a tensor
    groups: tuple[SavedGroup, ...]
    frozen_groups: tuple[SavedGroup, ...]  # groups of parameters that are frozen now
    planning: str
    extra: dict[str, Any] = field(default_factory=dict)
    written_s: float = 0.0  # seconds since 1970

    def __post_init__(self) -> None:
        for name in ("step", "fit", "first_step", "num_ranks", "num_updates"):
            if getattr(self, name) < 0:
                raise CheckpointError(f"expected {name} of at least 0, got {getattr(self, name)}")
        if self.first_step > self.step:
            raise CheckpointError(f"the fit cannot have begun with step {self.first_step}, after step {self.step}")
        if not 0 <= self.written_s < 1e11:
            raise CheckpointError(f"it cannot have been written at {self.written_s:g} seconds since 1970")
        for keys in self.variants.values():
            for key in keys:
                if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 40):
                    raise CheckpointError(f"{key!r} is not the key of a variant of a task")


def is_plain_name(name: str) -> bool:
    is_short = len(name) <= 100  # file systems allow names of up to 255 bytes
    return bool(name) and is_short and name not in (".", "..") and not {"/", "\\", "\0"} & set(name)


def text_of(box: Box) -> str:
    """A box as an index expression: `[0:4, 16:32]`."""
    ranges = (f"{offset}:{offset + length}" for offset, length in zip(box.offsets, box.lengths, strict=True))
    return f"[{', '.join(ranges)}]"


def joined(parts: Iterable[Part]) -> Index:
    """The index of the tensors of all parts. Raises a CheckpointError unless their boxes tile each tensor."""
    tensors: dict[str, StoredTensor] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for part in parts:
        for tensor in part.tensors:
            known = tensors.setdefault(tensor.name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"tensor {tensor.name!r}: ranks disagree, {known.dtype} {known.shape} and {tensor.dtype} "
                    f"{tensor.shape}"
                )
            boxes.setdefault(tensor.name, []).extend(tensor.boxes)
    joined_tensors = tuple(
        StoredTensor(name=name, dtype=tensor.dtype, shape=tensor.shape, boxes=tuple(boxes[name]))
        for name, tensor in sorted(tensors.items())
    )
    for tensor in joined_tensors:
        tensor.check_tiling()
    return Index(tensors=joined_tensors)
