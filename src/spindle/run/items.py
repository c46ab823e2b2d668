"""Items of a batch (images, clips): entries cut by item, and the outputs of parts joined in item order.

What a part reads of its batch is cut to its items. The outputs of all parts of a call are joined by differentiable
operations, so that autograd sends each part the gradient of its rows. Row counts are host integers throughout: nothing
here waits for a GPU.

A part of one item may run on a sequence group. Each member then has all of the item's batch, and cuts what its layers
read to a slice of the tokens (`SequenceCode`), differentiably as well: weights before the cut get the gradient of the
member's tokens alone, as those behind it do, and all of them are summed over ranks with other gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from spindle.errors import TrainingError
from spindle.program import item_runs, join_of, max_slices, slice_bounds
from spindle.run.pytrees import PytreeMeta, TensorMeta

_MAX_LENGTHS = 6  # of items that are tried and measured
# The number of rows of each item, by the entry of a batch that holds these numbers.
Lengths = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRows:
    """How many rows along `axis` of a tensor an item has: its length times a ratio, rounded up; or, without an `entry`
    of lengths, always `numerator`."""

    axis: int
    entry: str | None
    numerator: int
    denominator: int = 1

    def of(self, lengths: Lengths, num_items: int) -> list[int]:
        """The number of rows of each item."""
        if self.entry is None:
            return [self.numerator] * num_items
        return [self.at(length) for length in lengths[self.entry]]

    def at(self, length: int) -> int:
        """The number of rows of an item of this length; or the row at which a slice starts, for a multiple of the
        denominator."""
        return self.numerator if self.entry is None else -(-length * self.numerator // self.denominator)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRows:
    """Integers that count an item's rows: `rows` of them, at these places of a tensor with so many elements, or the
    integer itself. On a member of a sequence group, they count the member's rows."""

    rows: ItemRows
    places: tuple[int, ...] = ()
    num_elements: int = 1


SliceRule = ItemRows | CountedRows | None  # by leaf; None: every member has all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCode:
    """How a sequence group shares an item of a call: by slices that start at multiples of `alignment`, on one of the
    allowed numbers of devices.

    The leaves that are sliced are those of the first layer's arguments, or those that cross the cut after
    `whole_layers` layers, which every member runs on all tokens. `cut` is empty for a call that reads slices.
    `attended` are the tokens of attention. `exchanged_bytes` says, by layer, what attention exchanges in forward for
    each row of an item.
    """

    degrees: tuple[int, ...]
    alignment: int
    whole_layers: int = 0
    cut: tuple[SliceRule, ...] = ()
    attended: ItemRows | None = None
    exchanged_bytes: tuple[float, ...] = ()

    def allows(self, length: int, degree: int) -> bool:
        """Whether this many devices may share an item of this length."""
        return degree == 1 or (degree in self.degrees and degree <= max_slices(length, self.alignment))

    def bounds(self, length: int, degree: int) -> tuple[int, ...]:
        """Where the slices of an item of this length start and end, in rows of its longest entry."""
        return slice_bounds(length, degree, self.alignment)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCode:
    """What is known of an item call: the entries of the batch that it, or the calls before it, read, each with the
    entry of its lengths (None: one row per item); and the rows of each leaf of its output.

    `can_split` says whether its items may run separately. `sequence` says how several devices may share an item, if
    they may. `changes_module` says whether each call changes its module (running statistics).
    """

    entries: tuple[tuple[str, str | None], ...]
    rows: tuple[ItemRows | None, ...] = ()
    can_split: bool = False
    sequence: SequenceCode | None = None
    changes_module: bool = False

    @property
    def length_entry(self) -> str | None:
        """The lengths on which the time of an item depends."""
        return next((entry for _, entry in self.entries if entry is not None), None)

    def num_items(self, batch: Any, lengths: Lengths) -> int:
        """The number of items of a batch. Only the shapes of the batch are used."""
        name, entry = self.entries[0]
        return len(lengths[entry]) if entry is not None else int(batch[name].shape[0])


def cut_items(
    batch: Any, code: ItemCode, lengths: Lengths, items: Sequence[int], held: Sequence[int] | None = None
) -> Any:
    """A batch with only these items, in this order, in the entries of an item call. All other entries are unchanged.
    With `held`, the given batch has only the items `held`."""
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


def cut_slice(tree: Any, rules: Sequence[SliceRule], bounds: Sequence[int], member: int) -> Any:
    """One member's slice of the leaves of a pytree that belong to one item with these bounds. Refuses leaves that do
    not follow their rules."""
    leaves, spec = tree_flatten(tree)
    if len(leaves) != len(rules):
        raise _rows_error(f"{len(leaves)} values, where its first batch had {len(rules)}")
    return tree_unflatten([_sliced(leaf, rule, bounds, member) for leaf, rule in zip(leaves, rules, strict=True)], spec)


def _sliced(leaf: Any, rule: SliceRule, bounds: Sequence[int], member: int) -> Any:
    first, last, length = bounds[member], bounds[member + 1], bounds[-1]
    match rule:
        case None:
            return leaf
        case ItemRows(axis=axis):
            begin, end = rule.at(first), rule.at(last)
            if leaf.shape[axis] != rule.at(length):
                raise _rows_error(f"{leaf.shape[axis]} rows for an item of {length}, expected {rule.at(length)}")
            return leaf.narrow(axis, begin, end - begin)
        case CountedRows(rows=rows, places=places):
            count, whole = rows.at(last) - rows.at(first), rows.at(length)
            if not isinstance(leaf, torch.Tensor):
                if leaf != whole:
                    raise _rows_error(f"a count of {leaf} for an item of {length}, expected {whole}")
                return count
            if leaf.numel() != rule.num_elements:
                raise _rows_error(f"{leaf.numel()} counts for an item of {length}, expected {rule.num_elements}")
            counted = leaf.clone(memory_format=torch.contiguous_format)
            for element in (counted.view(-1)[counted_at] for counted_at in places):
                if leaf.device.type == "cuda":  # reading the value would wait for the GPU
                    torch._assert_async(element == whole, f"counts tokens of an item as {whole}")
                elif element != whole:
                    raise _rows_error(f"a count of {int(element)} for an item of {length}, expected {whole}")
                element.fill_(count)
            return counted


def _rows_error(text: str) -> TrainingError:
    return TrainingError(
        f"a module whose items several ranks share passes {text} from layer to layer; let that follow from the rows of "
        "an item, or leave its items on one rank each (spindle.Planning(sequence_parallel_degrees={...: 1}))"
    )


def slice_rows(code: ItemCode, lengths: Lengths, item: int, degree: int, leaf: int) -> list[int] | None:
    """The bounds of the members' rows of one leaf of a call's output. None if the leaf has no rows."""
    rows, entry = code.rows[leaf], code.length_entry
    if rows is None:
        return None
    assert code.sequence is not None
    assert entry is not None
    return [rows.at(bound) for bound in code.sequence.bounds(lengths[entry][item], degree)]


def join_items(parts: Sequence[tuple[tuple[int, ...], Any]], code: ItemCode, lengths: Lengths, name: str) -> Any:
    """The output of an item call from the outputs of its parts, each given with its items."""
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
    """The metadata of an item call's output for these items, derived from that for other items."""
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


def items_to_measure(lengths: Sequence[int]) -> list[int]:
    """A few items of different lengths, shortest first, including the shortest and the longest."""
    by_length = {length: item for item, length in reversed(list(enumerate(lengths)))}
    distinct = sorted(by_length)
    count = min(_MAX_LENGTHS, len(distinct))
    places = {round(number * (len(distinct) - 1) / max(1, count - 1)) for number in range(count)}
    return [by_length[distinct[place]] for place in sorted(places)]
