"""Nests of tensors, cut and joined along their first dimension, and moved between ranks as one message.

A tensor whose first dimension is not the number of rows (a position table) belongs to every row alike: it is not cut.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

HEADER_BYTES = 2048


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a tensor in the form of a nest."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def cut_rows(nest: Any, num_rows: int, first: int, last: int) -> Any:
    """Rows `[first, last)` of a nest that holds `num_rows`."""
    leaves, spec = tree_flatten(nest)
    return tree_unflatten(
        [leaf[first:last] if _has_rows(leaf, num_rows) else leaf for leaf in leaves],
        spec,
    )


def _has_rows(leaf: Any, num_rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == num_rows


def join_rows(parts: Sequence[tuple[int, Any]], num_rows: Sequence[int]) -> Any:
    """One nest from parts with their first rows; `num_rows` are the rows of each."""
    if len(parts) == 1:
        return parts[0][1]
    order = sorted(range(len(parts)), key=lambda number: parts[number][0])
    flat = [tree_flatten(parts[number][1]) for number in order]
    sizes = [num_rows[number] for number in order]
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(_has_rows(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)):
            joined.append(torch.cat(leaves))
        else:
            joined.append(leaves[0])
    return tree_unflatten(joined, flat[0][1])


def _shape_of(leaf: Any) -> Any:
    return _Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def pack(nest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A header of fixed size that describes a nest, and its tensors as bytes."""
    leaves = tree_leaves(nest)
    # The nest itself describes its form, with each tensor's shape and type in its place.
    form = tree_map(_shape_of, nest)
    text = pickle.dumps(form)
    if len(text) > HEADER_BYTES - 8:
        raise ValueError(
            f"a nest of {len(leaves)} values needs a header of {len(text)} bytes, the most is {HEADER_BYTES}"
        )
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    pieces = [
        leaf.detach().contiguous().reshape(-1).view(torch.uint8) for leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    return header, torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.uint8)


def describe(header: torch.Tensor) -> tuple[Any, int]:
    """What a header says: the nest's form, and how many bytes follow."""
    form = pickle.loads(header.numpy().tobytes())
    return form, sum(leaf.num_bytes for leaf in tree_leaves(form) if isinstance(leaf, _Shape))


def unpack(header: torch.Tensor, data: torch.Tensor) -> Any:
    """The nest of a header and its bytes."""
    form, _ = describe(header)
    place = 0

    def filled(leaf: Any) -> Any:
        nonlocal place
        if not isinstance(leaf, _Shape):
            return leaf
        place += leaf.num_bytes
        return data[place - leaf.num_bytes : place].view(leaf.dtype).reshape(leaf.shape)

    return tree_map(filled, form)
