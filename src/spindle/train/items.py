"""Items of a task's batches: which entries have them, how many rows each has, and which calls read items alone.

An item (an image, a clip) belongs to a batch, not to one of its samples: code of the task puts its rows where they
belong. A call that reads only items, or outputs of calls that do, is an *item call*; item calls that read each other
are a group, whose items run together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from spindle.errors import TrainingError
from spindle.run import Lengths, digest
from spindle.train.task import TaskDefinition

if TYPE_CHECKING:
    from spindle.train.record import RecordedCall

EVERYTHING = ""  # stands for all entries of a batch, if their names are unknown
# By entry: the name of the entry with the items' lengths; None: one row per item.
Entries = tuple[tuple[str, str | None], ...]


def fields_of(code: Callable[..., Any]) -> frozenset[str]:
    """The entries of a batch that recorded code reads; EVERYTHING if that is unknown."""
    graph = getattr(getattr(code, "__self__", None), "graph", None)
    if graph is None:
        return frozenset({EVERYTHING})
    batch = next(node for node in graph.nodes if node.op == "placeholder")
    keys = [user.args[1] if user.target is operator.getitem else EVERYTHING for user in batch.users]
    # Slices of a tensor have keys that are not strings.
    names = [key for key in keys if isinstance(key, str) and key != EVERYTHING]
    return frozenset(names if len(names) == len(keys) else {EVERYTHING})


def item_entries(definition: TaskDefinition) -> dict[str, str | None]:
    """All entries with rows per item, including entries with lengths."""
    entries: dict[str, str | None] = {}
    for entry, rows in definition.items.items():
        entries[entry] = rows if isinstance(rows, str) else None
    for rows in definition.items.values():
        if isinstance(rows, str):
            entries.setdefault(rows, None)
    return entries


def entries_of_call(
    definition: TaskDefinition, sources: Sequence[str], arguments: Callable[..., Any], known: Mapping[str, Entries]
) -> Entries:
    """The item entries that a call reads, directly or through its sources. Empty if it is no item call. `known` has the
    entries of earlier calls."""
    entries = item_entries(definition)
    if not entries:
        return ()
    read = fields_of(arguments)
    if not read <= entries.keys() or not all(known.get(source) for source in sources):
        return ()
    names = {*read, *(name for source in sources for name, _ in known[source])}
    return tuple((name, rows) for name, rows in entries.items() if name in names)


def item_groups(calls: Sequence[RecordedCall]) -> list[list[str]]:
    """Item calls in groups whose calls read each other, in the order of the task."""
    groups: list[list[str]] = []
    for call in calls:
        if call.items:
            joined = [group for group in groups if not set(call.sources).isdisjoint(group)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(name for group in joined for name in group), call.name])
    return groups


def lengths_in(definition: TaskDefinition, batch: Any) -> dict[str, tuple[int, ...]]:
    """The number of rows of each item, by the name of the entry with lengths. The batch must be checked. Waits for the
    GPU if the lengths are there."""
    if not definition.items or batch is None:
        return {}
    where = f"task {definition.name!r}"
    if not isinstance(batch, Mapping):
        raise TrainingError(
            f"{where}: items are named entries of a batch, got a {type(batch).__name__}; let its loader yield dicts"
        )
    entries = item_entries(definition)
    if not any(entry in batch for entry in entries):  # a batch of text alone
        return {}
    lengths: dict[str, tuple[int, ...]] = {}
    for entry, rows in definition.items.items():
        if entry not in batch:
            there = ", ".join(map(repr, batch))
            raise TrainingError(
                f"{where}: items={{{entry!r}: {rows!r}}} names an entry that a batch lacks; it has {there}: let "
                f"batches without such items have {entry!r} as None, or correct the name"
            )
        if batch[entry] is None:
            continue
        if not isinstance(batch[entry], torch.Tensor) or batch[entry].dim() == 0:
            raise TrainingError(
                f"{where}: items={{{entry!r}: {rows!r}}} needs a tensor with rows for each item, got a "
                f"{type(batch[entry]).__name__}"
            )
        if not isinstance(rows, str):
            continue
        counted = batch.get(rows)
        if not isinstance(counted, torch.Tensor) or counted.is_floating_point() or counted.dim() != 1:
            what = f"a {type(counted).__name__}"
            if isinstance(counted, torch.Tensor):
                what = f"a tensor of {str(counted.dtype).removeprefix('torch.')} with shape {tuple(counted.shape)}"
            raise TrainingError(
                f"{where}: items={{{entry!r}: {rows!r}}} needs integers {rows!r}, the rows of each item, in a tensor "
                f"with one dimension, got {what}"
            )
        counts = tuple(int(count) for count in counted.tolist())
        lengths[rows] = counts
        if min(counts, default=1) < 1:
            raise TrainingError(
                f"{where}: item {counts.index(min(counts))} has {min(counts)} rows of {entry!r}; leave items without "
                "rows out of the batch"
            )
        if sum(counts) != batch[entry].shape[0]:
            raise TrainingError(
                f"{where}: {rows!r} adds up to {sum(counts)}, but {entry!r} has {batch[entry].shape[0]} rows; let it "
                "have the rows of each item, in order"
            )
    numbers = {len(counts) for counts in lengths.values()}
    for entry, rows in definition.items.items():
        if numbers and not isinstance(rows, str) and batch[entry] is not None and len(batch[entry]) not in numbers:
            raise TrainingError(
                f"{where}: items={{{entry!r}: 1}} has a row for each item, but {entry!r} has {len(batch[entry])} rows "
                f"and the batch {' or '.join(map(str, sorted(numbers)))} items; give it one row for each, or name the "
                "entry with its rows"
            )
    return lengths


def with_two_items(definition: TaskDefinition, batch: Any) -> Any:
    """The batch, with a single item doubled, because sizes of one would be recorded as constants."""
    if not has_items(definition, batch):
        return batch
    entries, widened = item_entries(definition), dict(batch)
    for name, rows in entries.items():
        counted = batch.get(name if rows is None else rows)
        if isinstance(counted, torch.Tensor) and len(counted) == 1 and isinstance(batch.get(name), torch.Tensor):
            widened[name] = torch.cat([batch[name], batch[name]])
    return widened


def with_lengths(signature: int, lengths: Lengths) -> int:
    """A signature of a batch that also depends on the lengths of its items."""
    return digest(repr((signature, sorted(lengths.items())))) if lengths else signature


def has_items(definition: TaskDefinition, batch: Any) -> bool:
    """Whether a batch has any item."""
    if not isinstance(batch, Mapping):
        return False
    return any(isinstance(batch.get(name), torch.Tensor) and len(batch[name]) for name in item_entries(definition))
