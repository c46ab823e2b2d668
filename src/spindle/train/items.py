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

EVERYTHING = ""  # stands for all entries of a batch, where their names are unknown
Entries = tuple[tuple[str, str | None], ...]  # with the entry of their lengths; None: a row for each item


def fields_of(code: Callable[..., Any]) -> frozenset[str]:
    """The entries of a batch that recorded code reads; EVERYTHING where that is unknown."""
    graph = getattr(getattr(code, "__self__", None), "graph", None)
    if graph is None:
        return frozenset({EVERYTHING})
    batch = next(node for node in graph.nodes if node.op == "placeholder")
    keys = [user.args[1] if user.target is operator.getitem else EVERYTHING for user in batch.users]
    names = [key for key in keys if isinstance(key, str) and key != EVERYTHING]  # of a tensor, keys are slices
    return frozenset(names if len(names) == len(keys) else {EVERYTHING})


def item_entries(definition: TaskDefinition) -> dict[str, str | None]:
    """All entries with rows for each item, those of lengths included."""
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
    """The item entries that a call reads, itself or through its sources; empty if it is no item call. `known` has those
    of earlier calls."""
    entries = item_entries(definition)
    if not entries:
        return ()
    read = fields_of(arguments)
    if not read <= entries.keys() or not all(known.get(source) for source in sources):
        return ()
    names = {*read, *(name for source in sources for name, _ in known[source])}
    return tuple((name, rows) for name, rows in entries.items() if name in names)


def item_groups(calls: Sequence[RecordedCall]) -> list[list[str]]:
    """Item calls in groups: those that read each other, in the order of the task."""
    groups: list[list[str]] = []
    for call in calls:
        if call.items:
            joined = [group for group in groups if not set(call.sources).isdisjoint(group)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(name for group in joined for name in group), call.name])
    return groups


def lengths_in(definition: TaskDefinition, batch: Any) -> dict[str, tuple[int, ...]]:
    """The rows of each item, by entry of lengths, of a batch whose items are checked. Waits for a GPU if they are
    there."""
    if not definition.items or batch is None:
        return {}
    where = f"task {definition.name!r}"
    if not isinstance(batch, Mapping):
        raise TrainingError(
            f"{where}: items are named entries of a batch, got a {type(batch).__name__}; let its loader yield dicts"
        )
    entries = item_entries(definition)
    if not any(entry in batch for entry in entries):  # text alone
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
        if not isinstance(batch.get(rows), torch.Tensor):
            raise TrainingError(
                f"{where}: items={{{entry!r}: {rows!r}}} needs an integer tensor {rows!r} with the rows of each item, "
                f"got {type(batch.get(rows)).__name__}"
            )
        counts = tuple(int(count) for count in batch[rows].reshape(-1).tolist())
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
    counted = {len(counts) for counts in lengths.values()}
    for entry, rows in definition.items.items():
        if counted and not isinstance(rows, str) and batch[entry] is not None and len(batch[entry]) not in counted:
            raise TrainingError(
                f"{where}: items={{{entry!r}: 1}} has a row for each item, but {entry!r} has {len(batch[entry])} rows "
                f"and the batch {' or '.join(map(str, sorted(counted)))} items"
            )
    return lengths


def with_two_items(definition: TaskDefinition, batch: Any) -> Any:
    """A batch in which an item that is alone comes twice. Sizes of one are recorded as constants."""
    if not has_items(definition, batch):
        return batch
    entries, widened = item_entries(definition), dict(batch)
    for name, rows in entries.items():
        counted = batch.get(name if rows is None else rows)
        if isinstance(counted, torch.Tensor) and len(counted) == 1 and isinstance(batch.get(name), torch.Tensor):
            widened[name] = torch.cat([batch[name], batch[name]])
    return widened


def with_lengths(signature: int, lengths: Lengths) -> int:
    """A signature of a batch that differs with the lengths of its items, too."""
    return digest(repr((signature, sorted(lengths.items())))) if lengths else signature


def has_items(definition: TaskDefinition, batch: Any) -> bool:
    """Whether a batch has any item."""
    if not isinstance(batch, Mapping):
        return False
    return any(isinstance(batch.get(name), torch.Tensor) and len(batch[name]) for name in item_entries(definition))
