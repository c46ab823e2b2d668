"""Nests of tensors and their rows: cut, joined, described.

Every leaf of a nest has a row axis, found by running the code on batches of two sizes: the dimension that grows with
the batch. A leaf without one (a position table, a temperature) belongs to every row alike and is never cut. A dimension
may hold several entries for each row (tokens of a flattened batch). A number that grows with the batch is a number of
rows, or of such entries: it has an axis too, and is cut like a tensor of that length.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

Axes = tuple[int | None, ...]  # by leaf, in the order of `tree_leaves`
_SAMPLES = 64


def axes_of(small: Any, small_rows: int, large: Any, large_rows: int) -> tuple[Axes, bool]:
    """The row axis of each leaf from the same nest at two numbers of rows, and whether some leaf mixes rows: it grows
    in two dimensions (a similarity of all pairs), or not by whole rows."""
    axes: list[int | None] = []
    mixes = False
    few, many = tree_leaves(small), tree_leaves(large)
    if len(few) != len(many):
        return (None,) * len(many), True
    for one, other in zip(few, many, strict=True):
        if type(one) is int and type(other) is int:
            axes.append(None if one == other else 0)
            mixes |= one != other and one * large_rows != other * small_rows
            continue
        if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor) or one.dim() != other.dim():
            axes.append(None)
            mixes |= isinstance(other, torch.Tensor) or one != other
            continue
        growing = [axis for axis in range(other.dim()) if one.shape[axis] != other.shape[axis]]
        axes.append(growing[0] if growing else None)
        whole = all(one.shape[axis] * large_rows == other.shape[axis] * small_rows for axis in growing)
        mixes |= len(growing) > 1 or not whole
    return tuple(axes), mixes


def cut(nest: Any, axes: Axes, num_rows: int, first: int, last: int) -> Any:
    """Rows `[first, last)` of a nest that holds `num_rows`."""
    if first == 0 and last == num_rows:
        return nest
    leaves, spec = tree_flatten(nest)
    return tree_unflatten(
        [cut_leaf(leaf, axis, num_rows, first, last) for leaf, axis in zip(leaves, axes, strict=True)], spec
    )


def cut_leaf(leaf: Any, axis: int | None, num_rows: int, first: int, last: int) -> Any:
    if axis is None:
        return leaf
    if not isinstance(leaf, torch.Tensor):
        return leaf // num_rows * (last - first)
    each = leaf.shape[axis] // num_rows
    return leaf.narrow(axis, first * each, (last - first) * each)


@dataclass(frozen=True, slots=True)
class LeafForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Form:
    """A nest without its tensors' values: for each leaf a LeafForm, or the leaf itself where it is no tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    num_rows: int


def form_of(nest: Any, num_rows: int) -> Form:
    leaves, spec = tree_flatten(nest)
    return Form(
        spec,
        tuple(
            LeafForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ),
        num_rows,
    )


def form_with(form: Form, axes: Axes, rows: int) -> Form:
    """The same form with so many rows."""
    if form.num_rows == rows:
        return form
    leaves = [
        LeafForm(shape_for(leaf, axis, form.num_rows, rows), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, LeafForm)
        else cut_leaf(leaf, axis, form.num_rows, 0, rows)
        for leaf, axis in zip(form.leaves, axes, strict=True)
    ]
    return Form(form.spec, tuple(leaves), rows)


def form_to_bytes(form: Form) -> bytes:
    """A form as a message: the nest itself with a LeafForm for each tensor, because nests' own descriptions change
    with torch's versions."""
    return pickle.dumps((tree_unflatten(list(form.leaves), form.spec), form.num_rows))


def form_from_bytes(text: bytes) -> Form:
    nest, num_rows = pickle.loads(text)
    leaves, spec = tree_flatten(nest)
    return Form(spec, tuple(leaves), num_rows)


def shape_for(form: LeafForm, axis: int | None, num_rows: int, rows: int) -> tuple[int, ...]:
    """The shape of a leaf of `num_rows` rows when it holds `rows` of them."""
    if axis is None:
        return form.shape
    return (*form.shape[:axis], form.shape[axis] // num_rows * rows, *form.shape[axis + 1 :])


def plain(batch: Any) -> Any:
    """A batch as dicts, tuples and lists: other mappings (a tokenizer's) become dicts."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(plain, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(plain, batch))
    return batch


def signature_of(batch: Any) -> int:
    """48 bits that tell batches of different shapes apart."""
    form = form_of(batch, 0)
    return digest(repr((str(form.spec), form.leaves)))


def fingerprint_of(batch: Any) -> int:
    """48 bits from a few values of each tensor: batches that differ in them are not the same."""
    parts: list[bytes] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
            parts.append(some.view(torch.uint8).numpy().tobytes() if some.dtype != torch.bool else bytes(some.tolist()))
    return digest(b"".join(parts))


def digest(text: str | bytes) -> int:
    """48 bits, which a float64 holds."""
    return int.from_bytes(
        hashlib.blake2b(text if isinstance(text, bytes) else text.encode(), digest_size=6).digest(), "big"
    )


def joined(parts: Sequence[tuple[int, torch.Tensor]], axis: int) -> torch.Tensor:
    """Parts with their first rows as one tensor."""
    if len(parts) == 1:
        return parts[0][1]
    return torch.cat([part for _, part in sorted(parts, key=lambda entry: entry[0])], dim=axis)


def leaves_of(nest: Any) -> list[Any]:
    """The leaves of a nest; most nests between layers are a tuple of tensors, for which torch's way takes long."""
    return list(nest) if _is_plain(nest) else tree_leaves(nest)


def _is_plain(nest: Any) -> bool:
    return type(nest) is tuple and all(isinstance(leaf, torch.Tensor) for leaf in nest)


def as_leaves(nest: Any) -> Any:
    """The same values, cut off from the graph that made them, collecting gradients where that one did."""
    if _is_plain(nest):
        return tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in nest)
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, nest
    )


def copied(nest: Any) -> Any:
    """Copies that may be written to; gradients pass through."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, nest)


def detached(nest: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, nest)


def on_device(nest: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, nest)


def takes_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
