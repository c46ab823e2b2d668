"""Which item calls may run in parts: tried on a few items of a task's first batch.

A group of item calls runs on two items, again with the values of one of them changed, and on single items of several
lengths. If an item's output depends on the other or on its place, or has no rows of its own, the group stays whole. How
many rows an item's output has is read off the single items: a constant, or a ratio of its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from spindle.run import ItemCode, ItemRows, Lengths, cut_items, items_to_measure
from spindle.train.items import Entries, item_groups, lengths_in
from spindle.train.record import RecordedCall
from spindle.train.trace import TracedTask

_SEED = 20240611
_MOST_TERM = 64  # the largest denominator in a ratio of rows to lengths
# Tolerances for values from the same kernels, and from kernels for other sizes, which round differently.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_OF_SIZES = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF, _HALF_OF_SIZES = 1e-2, 0.1


def probe_items(task: TracedTask, batch: Any, is_random: set[str]) -> tuple[dict[str, ItemCode], dict[str, str]]:
    """The item calls of a task by name, and the reasons why others are not divided. `is_random` are calls that draw
    random numbers."""
    codes: dict[str, ItemCode] = {}
    reasons: dict[str, str] = {}
    calls = {call.name: call for call in task.recorded.calls}
    lengths = lengths_in(task.recorded.definition, batch)
    for group in item_groups(task.recorded.calls):
        members = [calls[name] for name in group]
        entries: Entries = tuple(dict.fromkeys(entry for call in members for entry in call.items))
        whole = ItemCode(entries=entries)
        codes |= dict.fromkeys(group, whole)
        num_items = whole.num_items(batch, lengths)
        if num_items == 0:
            continue
        try:
            rows, reason = _probe_group(members, batch, whole, lengths, num_items, is_random)
        except Exception as error:  # the user's code may fail on fewer items than it expects
            text = (str(error).splitlines() or [""])[0][:200]
            rows, reason = {}, f"it does not run on some of its items ({type(error).__name__}: {text})"
        if reason:
            reasons |= dict.fromkeys(group, reason)
        else:
            codes |= {name: ItemCode(entries=entries, rows=rows[name], can_split=True) for name in group}
    return codes, reasons


def _probe_group(
    calls: Sequence[RecordedCall],
    batch: Any,
    code: ItemCode,
    lengths: Lengths,
    num_items: int,
    is_random: set[str],
) -> tuple[dict[str, tuple[ItemRows | None, ...]], str]:
    """The number of output rows of each call per item, and the reason why the group must not be divided, if any."""
    if num_items == 1:  # the item and a copy of it
        batch, num_items = cut_items(batch, code, lengths, [0, 0]), 2
        lengths = {name: 2 * rows for name, rows in lengths.items()}
    entry = code.length_entry
    of_item = lengths[entry] if entry is not None else (1,) * num_items
    single = items_to_measure(of_item)
    first, second = single[0], single[-1]
    if first == second:
        second = next(item for item in range(num_items) if item != first)
    pair = [first, second]

    def run(batch: Any, items: Sequence[int]) -> dict[str, list[Any]]:
        return _run(calls, cut_items(batch, code, lengths, items))

    pair_outputs = run(batch, pair)
    single_outputs = {item: run(batch, [item]) for item in {*single, *pair}}
    outputs_with_noise = [run(_with_noise(batch, code, lengths, item), pair) for item in pair]
    rows: dict[str, tuple[ItemRows | None, ...]] = {}
    for call in calls:
        name = call.name
        leaf_rows: list[ItemRows | None] = []
        for leaf, pair_output in enumerate(pair_outputs[name]):
            singles = {item: outputs[name][leaf] for item, outputs in single_outputs.items()}
            first_output, second_output = singles[first], singles[second]
            if not isinstance(pair_output, torch.Tensor):
                leaf_rows.append(None)
                if pair_output != first_output:
                    return {}, "a value that it returns depends on how many items there are"
                continue
            axis = _item_axis(first_output, second_output, pair_output)
            if axis is None:
                return {}, "its output has no rows for each item"
            counts = {of_item[item]: output.shape[axis] for item, output in singles.items()}
            item_rows = row_rule(axis, entry, counts)
            if item_rows is None:
                return {}, "the rows of an item's output do not follow from its length"
            leaf_rows.append(item_rows)
            size = first_output.shape[axis]
            halves = pair_output.narrow(axis, 0, size), pair_output.narrow(axis, size, pair_output.shape[axis] - size)
            for number, noisy in enumerate(outputs_with_noise):
                unchanged = 1 - number  # the item whose values were not changed
                expected = noisy[name][leaf].narrow(axis, size * unchanged, halves[unchanged].shape[axis])
                if not _all_close(halves[unchanged], expected):
                    return {}, "its items influence each other"
            if name not in is_random and not all(
                _all_close(both_rows, alone, of_sizes=True)
                for both_rows, alone in zip(halves, (first_output, second_output), strict=True)
            ):
                return {}, "what it does with an item depends on the items beside it"
        rows[name] = tuple(leaf_rows)
    return rows, ""


def _run(calls: Sequence[RecordedCall], batch: Any) -> dict[str, list[Any]]:
    """The leaves of the outputs of the calls."""
    outputs: dict[str, Any] = {}
    torch.manual_seed(_SEED)
    with torch.no_grad():
        for call in calls:
            args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
            outputs[call.name] = call.chain(*args, **kwargs)
    return {name: tree_leaves(output) for name, output in outputs.items()}


def _with_noise(batch: Any, code: ItemCode, lengths: Lengths, item: int) -> Any:
    """A batch in which the values of one item are different: noise added to numbers, rows of indices reversed."""
    noisy = dict(batch)
    has_numbers = any(
        leaf.is_floating_point()
        for name, _ in code.entries
        for leaf in tree_leaves(batch[name])
        if isinstance(leaf, torch.Tensor)
    )
    for name, entry in code.entries:
        if name in lengths:
            continue
        ends = [0]
        for number in range(item + 1):
            ends.append(ends[-1] + (1 if entry is None else lengths[entry][number]))
        begin, end = ends[item], ends[item + 1]

        def change(leaf: Any, begin: int = begin, end: int = end) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            values = leaf[begin:end]
            if leaf.is_floating_point():
                generator = torch.Generator().manual_seed(_SEED)
                noise = torch.rand(values.shape, generator=generator, dtype=torch.float32)
                values = values + noise.to(leaf.device, leaf.dtype)
            elif not has_numbers:
                values = values.flip(0)
            return torch.cat([leaf[:begin], values, leaf[end:]])

        noisy[name] = tree_map(change, batch[name])
    return noisy


def _item_axis(first: torch.Tensor, second: torch.Tensor, pair: torch.Tensor) -> int | None:
    """The dimension along which the output of two items is the concatenation of the single outputs."""
    if not first.dim() == second.dim() == pair.dim():
        return None
    grown = [axis for axis in range(pair.dim()) if pair.shape[axis] != first.shape[axis]]
    if len(grown) != 1 or first.shape[grown[0]] + second.shape[grown[0]] != pair.shape[grown[0]]:
        return None
    is_alike = all(first.shape[axis] == second.shape[axis] for axis in range(pair.dim()) if axis != grown[0])
    return grown[0] if is_alike else None


def row_rule(axis: int, entry: str | None, counts: Mapping[int, int]) -> ItemRows | None:
    """The rule that gives these numbers of rows for these lengths. If all lengths are equal, a ratio if it is a simple
    one."""
    rows = set(counts.values())
    (_, count), *others = counts.items()
    if entry is None or (len(rows) == 1 and others):
        return ItemRows(axis=axis, entry=None, numerator=rows.pop()) if len(rows) == 1 else None
    for denominator in range(1, _MOST_TERM + 1):
        for numerator in range(1, _MOST_TERM + 1):
            if gcd(numerator, denominator) == 1 and all(
                -(-length * numerator // denominator) == count for length, count in counts.items()
            ):
                return ItemRows(axis=axis, entry=entry, numerator=numerator, denominator=denominator)
    return ItemRows(axis=axis, entry=None, numerator=count) if not others else None


def _all_close(first: torch.Tensor, second: torch.Tensor, *, of_sizes: bool = False) -> bool:
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    scale = float(first.abs().max()) if first.numel() else 0.0
    tolerances, half = (_TOLERANCE_OF_SIZES, _HALF_OF_SIZES) if of_sizes else (_TOLERANCE, _HALF)
    tolerance = tolerances.get(first.dtype, half)
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
