"""Read a checkpoint: open and check it, then read any box of a tensor, whichever ranks wrote it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spindle.checkpoint.files import folder_name, read_index, read_state, read_verified, steps_in
from spindle.checkpoint.index import DTYPE_BYTES, SavedState, StoredBox, StoredTensor, text_of
from spindle.errors import CheckpointError, InputError
from spindle.program import Box

_CHUNK_BYTES = 16 << 20
# The numpy dtype of each element size; elements are only copied, so what they mean does not matter.
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class SavedCheckpoint:
    """The state and the tensors of one checkpoint. The bytes of tensors are read on demand."""

    def __init__(
        self, folder: Path, state: SavedState, digests: Mapping[str, str], tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.folder, self.state, self.tensors = folder, state, tensors
        self._digests = digests
        self._files: dict[str, NDArray[Any]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(stored.length for tensor in self.tensors.values() for stored in tensor.boxes)

    def artifact(self, name: str) -> dict[str, Any] | None:
        """The content of a further JSON file (`plan.json`, `profile.json`)."""
        return read_verified(self.folder, name, self._digests) if name in self._digests else None

    def check(self, share: int = 0, num_shares: int = 1) -> None:
        """Read every byte, or one of `num_shares` shares of them, and compare checksums. Raises a CheckpointError that
        names the first damaged file and box."""
        for number, name in enumerate(self._digests):
            if number % num_shares == share:
                read_verified(self.folder, name, self._digests)
        boxes = ((tensor, stored) for tensor in self.tensors.values() for stored in tensor.boxes)
        for number, (tensor, stored) in enumerate(boxes):
            if number % num_shares == share and self._crc32(stored) != stored.crc32:
                raise CheckpointError(
                    f"{self.folder / stored.file}: is damaged: bytes {stored.offset} to "
                    f"{stored.offset + stored.length} are not those that were written as {tensor.name!r}, box "
                    f"{text_of(stored.box)}"
                )

    def _crc32(self, stored: StoredBox) -> int:
        crc32 = 0
        with (self.folder / stored.file).open("rb") as file:
            file.seek(stored.offset)
            left = stored.length
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    return -1
                crc32 = zlib.crc32(chunk, crc32)
                left -= len(chunk)
        return crc32

    def read(self, name: str, box: Box) -> NDArray[Any]:
        """Read a box of a tensor, as unsigned numbers of the size of its elements."""
        tensor = self.tensors[name]
        dtype = _NUMPY[DTYPE_BYTES[tensor.dtype]]
        result: NDArray[Any] = np.empty(box.lengths, dtype)
        for stored, overlap in _overlaps(tensor, box):
            content = self._bytes(stored.file)[stored.offset : stored.offset + stored.length]
            source: NDArray[Any] = content.view(dtype).reshape(stored.box.lengths)
            result[_inside(box, overlap)] = source[_inside(stored.box, overlap)]
        return result

    def _bytes(self, file: str) -> NDArray[Any]:
        if file not in self._files:
            self._files[file] = np.memmap(self.folder / file, np.uint8, "r")
        return self._files[file]


def _overlaps(tensor: StoredTensor, box: Box) -> Iterator[tuple[StoredBox, Box]]:
    for stored in tensor.boxes:
        overlap = stored.box.overlap(box)
        if overlap is not None:
            yield stored, overlap


def _inside(outer: Box, inner: Box) -> tuple[slice, ...]:
    ends = zip(outer.offsets, inner.offsets, inner.lengths, strict=True)
    return tuple(slice(offset - start, offset - start + length) for start, offset, length in ends)


def open_checkpoint(folder: Path) -> SavedCheckpoint:
    """Read the state and the index of a checkpoint, and check the lengths of its files. Raises a CheckpointError that
    names the first wrong file."""
    try:
        state, digests = read_state(folder / "state.json")
        index = read_index(folder, digests)
        for tensor in index.tensors:
            tensor.check_tiling()
    except InputError as error:
        raise CheckpointError(str(error)) from error
    ends: dict[str, int] = {}
    for tensor in index.tensors:
        for stored in tensor.boxes:
            ends[stored.file] = max(ends.get(stored.file, 0), stored.offset + stored.length)
    for file, end in ends.items():
        path = folder / file
        size = path.stat().st_size if path.is_file() else None
        if size != end:
            raise CheckpointError(f"{path}: {'is missing' if size is None else f'has {size} bytes, expected {end}'}")
    return SavedCheckpoint(folder, state, digests, {tensor.name: tensor for tensor in index.tensors})


def folder_of_step(folder: Path, step: int | None = None) -> Path:
    """The folder of the newest checkpoint, or of a given step. The error for a missing step lists the existing
    ones."""
    steps = steps_in(folder)
    if not steps:
        raise InputError(f"{folder}: has no checkpoint" if folder.is_dir() else f"{folder}: no such folder")
    if step is not None and step not in steps:
        raise InputError(f"{folder}: has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return folder / folder_name(steps[-1] if step is None else step)
