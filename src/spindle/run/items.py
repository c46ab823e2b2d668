"""Items of a batch (images, clips): entries cut by item, and the outputs of parts joined in item order.

What a part reads of its batch is cut to its items. The outputs of all parts of a call are joined by differentiable
operations, so that autograd sends each part the gradient of its rows. Row counts are host integers throughout: nothing
here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from spindle.errors import TrainingError
from spindle.program import item_runs, join_of
from spindle.run.pytrees import PytreeMeta, TensorMeta

_MOST_LENGTHS = 6  # that are tried, and measured
Lengths = Mapping[str, tuple[int, ...]]  # rows of each item, by the entry of a batch that says so


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRows:
    """How many rows along `axis` of a tensor an item has: its length times a ratio, rounded up; or, without an
    `entry` of lengths, always `numerator`."""

    axis: int
    entry: str | None
    numerator: int
    denominator: int = 1

    def of(self, lengths: Lengths, num_items: int) -> list[int]:
        """The rows of each item."""
        if self.entry is None:
            return [self.numerator] * num_items
        return [-(-length * self.numerator // self.denominator) for length in lengths[self.entry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCode:
    """What is known of an item call: the entries of the batch that it or the calls before it read, each with the entry
    of its lengths (None: one row for each item), and the rows of each leaf of its output. `can_split` says whether its
    items may run apart from each other."""

    entries: tuple[tuple[str, str | None], ...]
    rows: tuple[ItemRows | None, ...] = ()
    can_split: bool = False

    @property
    def length_entry(self) -> str | None:
        """The lengths that the time of an item depends on."""
        return next((entry for _, entry in self.entries if entry is not None), None)

    def num_items(self, batch: Any, lengths: Lengths) -> int:
        """The number of items of a batch, of which only the shapes matter."""
        name, entry = self.entries[0]
        return len(lengths[entry]) if entry is not None else int(batch[name].shape[0])


def cut_items(
    batch: Any, code: ItemCode, lengths: Lengths, items: Sequence[int], held: Sequence[int] | None = None
) -> Any:
    """A batch with only these items, in this order, in the entries of an item call; other entries as they are. With
    `held`, the batch has only those of its items."""
    cut = dict(batch)
    if held is not None:
        lengths = {name: tuple(rows[item] for item in held) for name, rows in lengths.items()}
        places = {item: place for place, item in enumerate(held)}
        items = [places[item] for item in items]
    for name, entry in code.entries:
        if batch[name] is not None:
            cut[name] = tree_map(
                lambda leaf, entry=entry: _cut_rows(leaf, None if entry is None else lengths[entry], items), batch[name]
            )
    return cut


def _cut_rows(leaf: Any, rows: Sequence[int] | None, items: Sequence[int]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    runs = item_runs((1,) * leaf.shape[0] if rows is None else rows, items)
    slices = [leaf.narrow(0, first, last - first) for first, last in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices) if slices else leaf.narrow(0, 0, 0)


def join_items(parts: Sequence[tuple[tuple[int, ...], Any]], code: ItemCode, lengths: Lengths, name: str) -> Any:
    """The output of an item call, from the outputs of its parts, each given with its items."""
    if len(parts) == 1 and parts[0][0] == tuple(range(len(parts[0][0]))):
        return parts[0][1]
    items = [part_items for part_items, _ in parts]
    num_items = sum(map(len, items))
    flat = [tree_flatten(tree) for _, tree in parts]
    spec = flat[0][1]
    leaves: list[Any] = []
    for number, rows in enumerate(code.rows):
        tensors = [part_leaves[number] for part_leaves, _ in flat]
        if rows is None or not isinstance(tensors[0], torch.Tensor):
            leaves.append(tensors[0])
            continue
        rows_of = rows.of(lengths, num_items)
        join = join_of(items, rows_of)
        for part, tensor, sizes in zip(items, tensors, join.sizes, strict=True):
            if tensor.shape[rows.axis] != sum(sizes):
                raise TrainingError(
                    f"{name} returned {tensor.shape[rows.axis]} rows for {len(part)} items, where its first batch had "
                    f"{_ratio(rows)}: expected {sum(sizes)}; let the rows of an item follow from its length alone, or "
                    "leave the task's items out"
                )
        pieces = [
            tensor.split(sizes, dim=rows.axis) if len(sizes) > 1 else (tensor,)
            for tensor, sizes in zip(tensors, join.sizes, strict=True)
        ]
        leaves.append(torch.cat([pieces[part][run] for part, run in join.order], dim=rows.axis))
    return tree_unflatten(leaves, spec)


def _ratio(rows: ItemRows) -> str:
    if rows.entry is None:
        return f"{rows.numerator} for each item"
    return f"{rows.numerator} for every {rows.denominator} of {rows.entry!r}"


def meta_of_items(example: PytreeMeta, code: ItemCode, lengths: Lengths, items: Sequence[int]) -> PytreeMeta:
    """The metadata of an item call's output for these items, from that for other items."""
    leaves = []
    num_items = 1 + max(items, default=-1)
    for leaf, rows in zip(example.leaves, code.rows, strict=True):
        if rows is None or not isinstance(leaf, TensorMeta):
            leaves.append(leaf)
            continue
        rows_of = rows.of(lengths, num_items)
        shape = list(leaf.shape)
        shape[rows.axis] = sum(rows_of[item] for item in items)
        leaves.append(TensorMeta(tuple(shape), leaf.dtype, leaf.requires_grad))
    return PytreeMeta(example.spec, tuple(leaves), 1)


def chosen_items(lengths: Sequence[int]) -> list[int]:
    """A few items of different lengths, shortest and longest included, shortest first."""
    by_length = {length: item for item, length in reversed(list(enumerate(lengths)))}
    distinct = sorted(by_length)
    count = min(_MOST_LENGTHS, len(distinct))
    places = {round(number * (len(distinct) - 1) / max(1, count - 1)) for number in range(count)}
    return [by_length[distinct[place]] for place in sorted(places)]
