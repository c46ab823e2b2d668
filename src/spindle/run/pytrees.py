"""Pytrees of tensors and their rows: sliced, concatenated, described without values.

Every leaf has a row axis, found by running the code on batches of two sizes: the dimension that grows with the batch. A
leaf without one (a position table, a temperature) belongs to every row alike and is never sliced. A dimension may hold
several entries per row (tokens of a flattened batch). An integer that grows with the batch counts rows, or such
entries: it has an axis, too, and is sliced like a tensor of that length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from spindle.errors import TrainingError
from spindle.run import signed_pickle

Axes = tuple[int | None, ...]  # by leaf, in the order of `tree_leaves`
_SAMPLES = 64


def axes_of(small: Any, small_rows: int, large: Any, large_rows: int) -> tuple[Axes, bool]:
    """The row axis of each leaf, derived from the same pytree at two numbers of rows. Also returns whether any leaf
    mixes rows: whether it grows in two dimensions (a similarity of all pairs), or not in proportion to the rows."""
    axes: list[int | None] = []
    mixes = False
    small_leaves, large_leaves = tree_leaves(small), tree_leaves(large)
    if len(small_leaves) != len(large_leaves):
        return (None,) * len(large_leaves), True
    for few, many in zip(small_leaves, large_leaves, strict=True):
        if type(few) is int and type(many) is int:
            axes.append(None if few == many else 0)
            mixes |= few != many and few * large_rows != many * small_rows
            continue
        if not isinstance(many, torch.Tensor) or not isinstance(few, torch.Tensor) or few.dim() != many.dim():
            axes.append(None)
            mixes |= isinstance(many, torch.Tensor) or few != many
            continue
        growing = [axis for axis in range(many.dim()) if few.shape[axis] != many.shape[axis]]
        axes.append(growing[0] if growing else None)
        whole = all(few.shape[axis] * large_rows == many.shape[axis] * small_rows for axis in growing)
        mixes |= len(growing) > 1 or not whole
    return tuple(axes), mixes


def has_uneven_rows(small: Any, small_rows: int, large: Any, large_rows: int) -> bool:
    """Whether a tensor has different numbers of entries for different rows: such a tensor cannot be cut by rows."""
    return any(
        size != larger and size * large_rows != larger * small_rows
        for few, many in zip(tree_leaves(small), tree_leaves(large), strict=False)
        if isinstance(few, torch.Tensor) and isinstance(many, torch.Tensor) and few.dim() == many.dim()
        for size, larger in zip(few.shape, many.shape, strict=True)
    )


def cut(tree: Any, axes: Axes, num_rows: int, first: int, last: int) -> Any:
    """Rows `[first, last)` of a pytree of `num_rows` rows."""
    if first == 0 and last == num_rows:
        return tree
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(
        [cut_leaf(leaf, axis, num_rows, first, last) for leaf, axis in zip(leaves, axes, strict=True)], spec
    )


def cut_leaf(leaf: Any, axis: int | None, num_rows: int, first: int, last: int) -> Any:
    # All rows of a leaf are all of its entries, even if rows have different numbers of them.
    if axis is None or (first == 0 and last == num_rows):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        return leaf // num_rows * (last - first)
    each, rest = divmod(leaf.shape[axis], num_rows)
    if rest:
        raise TrainingError(
            f"a tensor of shape {tuple(leaf.shape)} cannot be divided among devices: its {num_rows} samples have "
            "different numbers of rows; register the module that returns it, and those that read it, with "
            "whole_batch=True"
        )
    return leaf.narrow(axis, first * each, (last - first) * each)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype and `requires_grad` of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class PytreeMeta:
    """A pytree without values: a TensorMeta for each tensor, and any other leaf itself."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    num_rows: int


def pytree_meta(tree: Any, num_rows: int) -> PytreeMeta:
    leaves, spec = tree_flatten(tree)
    return PytreeMeta(
        spec,
        tuple(
            TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ),
        num_rows,
    )


def with_rows(meta: PytreeMeta, axes: Axes, rows: int) -> PytreeMeta:
    """The same metadata with another number of rows."""
    if meta.num_rows == rows:
        return meta
    leaves = [
        TensorMeta(shape_for(leaf, axis, meta.num_rows, rows), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, TensorMeta)
        else cut_leaf(leaf, axis, meta.num_rows, 0, rows)
        for leaf, axis in zip(meta.leaves, axes, strict=True)
    ]
    return PytreeMeta(meta.spec, tuple(leaves), rows)


def meta_to_bytes(meta: PytreeMeta) -> bytes:
    """Metadata as a message: the pytree itself with a TensorMeta for each tensor, because a TreeSpec does not pickle
    across versions of torch."""
    return signed_pickle.dumps((tree_unflatten(list(meta.leaves), meta.spec), meta.num_rows))


def meta_from_bytes(text: bytes) -> PytreeMeta:
    """Read what `meta_to_bytes` made."""
    tree, num_rows = signed_pickle.loads(text)
    leaves, spec = tree_flatten(tree)
    return PytreeMeta(spec, tuple(leaves), num_rows)


def shape_for(meta: TensorMeta, axis: int | None, num_rows: int, rows: int) -> tuple[int, ...]:
    """The shape of a leaf of `num_rows` rows when it holds `rows` of them."""
    if axis is None or rows == num_rows:
        return meta.shape
    return (*meta.shape[:axis], meta.shape[axis] // num_rows * rows, *meta.shape[axis + 1 :])


def plain(batch: Any) -> Any:
    """A batch as dicts, tuples and lists. Other mappings (such as a tokenizer's) become dicts."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(plain, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(plain, batch))
    return batch


def signature_of(batch: Any) -> int:
    """A 48-bit digest of a batch's structure, shapes and dtypes."""
    meta = pytree_meta(batch, 0)
    return digest(repr((str(meta.spec), meta.leaves)))


def fingerprint_of(batch: Any) -> int:
    """A 48-bit digest of a few values of each tensor. Batches with different digests are different."""
    parts: list[bytes] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu().resolve_conj().resolve_neg()
            parts.append(some.view(torch.uint8).numpy().tobytes() if some.dtype != torch.bool else bytes(some.tolist()))
    return digest(b"".join(parts))


def digest(text: str | bytes) -> int:
    """A 48-bit digest, which a float64 holds exactly."""
    return int.from_bytes(
        hashlib.blake2b(text if isinstance(text, bytes) else text.encode(), digest_size=6).digest(), "big"
    )


def joined(parts: Sequence[tuple[int, torch.Tensor]], axis: int) -> torch.Tensor:
    """Concatenate parts in the order of their first rows."""
    if len(parts) == 1:
        return parts[0][1]
    return torch.cat([part for _, part in sorted(parts, key=lambda entry: entry[0])], dim=axis)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree. Has a fast path for a tuple of tensors, which is most of what passes between layers."""
    return list(tree) if _is_plain(tree) else tree_leaves(tree)


def _is_plain(tree: Any) -> bool:
    return type(tree) is tuple and all(isinstance(leaf, torch.Tensor) for leaf in tree)


def as_leaves(tree: Any) -> Any:
    """Detach all leaves. Those that required gradients become leaves of a new autograd graph."""
    if _is_plain(tree):
        return tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in tree)
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def copied(tree: Any) -> Any:
    """Clone all tensors, so that they may be written to; gradients pass through."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def detached(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def on_device(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def takes_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
