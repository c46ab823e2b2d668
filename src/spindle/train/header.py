"""Batch headers, exchanged a step ahead: a row of numbers for each micro-step and task, the same columns on every rank.

Signature, tokens, rows, fingerprint and variant of the task's next batch, where the rank reads it; then its part of an
earlier step's report, and five numbers: how many changes of tasks and plan it has requested, whether it wants the fit
to end, what it wants to be saved, which checkpoint it has written, and the busy share of its last timed step. All
headers of a plan have the same size, so that ranks still exchange headers, and detect it, when only some of them have
requested a change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.run import World, digest, fingerprint_of
from spindle.train.feed import Batch

_READ, _PARTIAL, _SIGNATURE, _TOKENS, _ROWS, _FINGERPRINT, _VARIANT = range(7)
_NUM_COLUMNS = 7
_CHANGES, _STOPS, _SAVES, _WRITTEN, _BUSY = range(-5, 0)
MicroSteps = Sequence[Mapping[str, Batch]]  # batches by micro-step and task
Table = list[list[float]]  # the headers of all ranks


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """A task's batch, on which all ranks that read it agree. `reader` is the first of these ranks."""

    reader: int
    num_rows: int
    signature: int
    variant: int
    tokens: int


def header_row(
    names: Sequence[str],
    micro_steps: MicroSteps,
    report: Sequence[float],
    num_changes: int,
    is_stopping: bool,
    busy_share: float,
    saves: int = 0,
    written: int = 0,
) -> torch.Tensor:
    """This rank's header, as float64: `micro_steps` x `names` x columns, then the report of an earlier step, then five
    numbers."""
    row: list[float] = []
    for batches in micro_steps:
        for name in names:
            batch = batches.get(name)
            if batch is None:
                row += [0.0] * _NUM_COLUMNS
                continue
            row += [
                1,
                batch.held is not None,
                batch.signature,
                batch.tokens,
                batch.num_rows,
                batch.fingerprint,
                batch.variant,
            ]
    return torch.tensor([*row, *report, num_changes, is_stopping, saves, written, busy_share], dtype=torch.float64)


def reports_in(table: Table, num_columns: int) -> Table:
    """Every rank's report of an earlier step."""
    return [row[_CHANGES - num_columns : _CHANGES] for row in table]


def idle_in(table: Table) -> float | None:
    """The idle share of the last timed step, averaged over ranks; None if no step was timed yet."""
    busy_shares = [row[_BUSY] for row in table if not math.isnan(row[_BUSY])]
    return 1 - sum(busy_shares) / len(busy_shares) if busy_shares else None


def check_first_batches(examples: Mapping[str, Any], world: World) -> None:
    """Refuse first batches that differ between ranks.

    All ranks read the first batches, to trace the tasks. Later batches are compared among the ranks that read them.
    """
    if world.size > 1:
        fingerprints = torch.tensor([fingerprint_of(nest) for nest in examples.values()], dtype=torch.float64)
        reference, *by_rank = world.start_all_gather(fingerprints).wait()
        for rank, row in enumerate(by_rank, 1):
            differing = (row != reference).tolist()
            if any(differing):
                raise _other_batch(0, list(examples)[differing.index(True)], rank, 0)


def _other_batch(step: int, task: str, rank: int, reader: int) -> TrainingError:
    return TrainingError(
        f"step {step}: the loader of task {task!r} gave rank {rank} a different batch than rank {reader}; every rank "
        "must "
        "read the same batches. Where they are generated or shuffled at random, call torch.manual_seed with the same "
        "seed on every rank before that (at the top of the script). Do not shard the dataset: Spindle gives each rank "
        "its rows"
    )


def is_stopped(table: Table) -> bool:
    """Whether any rank wants the fit to end."""
    return any(row[_STOPS] for row in table)


def saves_in(table: Table) -> int:
    """The largest `saves` of any rank: whether a checkpoint was requested."""
    return max(int(row[_SAVES]) for row in table)


def written_in(table: Table) -> list[int]:
    """Which checkpoint each rank has written (`Saver.written`)."""
    return [int(row[_WRITTEN]) for row in table]


def check_changes(table: Table, calls: Sequence[str], step: int) -> None:
    """Refuse changes of tasks or plan that not all ranks have requested. `calls` are this rank's calls, for the
    message."""
    counts = [int(row[_CHANGES]) for row in table]
    fewest, most = min(counts), max(counts)
    if fewest != most:
        called = ", ".join(calls[fewest:most]) or "remove_task, add_task or replan"
        raise TrainingError(
            f"step {step}: rank {counts.index(most)} called {called} during fit(), and rank "
            f"{counts.index(fewest)} did not; change tasks and plans on all ranks, in the same on_step"
        )


def read_batch_headers(
    table: Table, names: Sequence[str], num_micro_steps: int, step: int
) -> list[dict[str, BatchHeader]]:
    """The batches of each micro-step. All ranks that read a batch must agree on it. Tasks without rows are left out."""
    micro_steps = []
    for micro_step in range(num_micro_steps):
        headers: dict[str, BatchHeader] = {}
        for position, name in enumerate(names):
            begin = (micro_step * len(names) + position) * _NUM_COLUMNS
            columns = [(rank, row[begin : begin + _NUM_COLUMNS]) for rank, row in enumerate(table)]
            columns = [(rank, entries) for rank, entries in columns if entries[_READ]]
            if not columns:
                continue
            reader, reference = columns[0]
            # Parts of a batch have different shapes on different ranks, so all signatures together identify the whole
            # batch. Rows, fingerprint and variant are those of the whole batch on every rank.
            is_partial = any(entries[_PARTIAL] for _, entries in columns)
            signature = int(reference[_SIGNATURE])
            if is_partial:
                signature = digest(repr([entries[_SIGNATURE] for _, entries in columns]))
            compared = slice(_ROWS, None) if is_partial else slice(_SIGNATURE, None)
            for rank, entries in columns[1:]:
                if entries[compared] != reference[compared]:
                    raise _other_batch(step, name, rank, reader)
            if reference[_ROWS]:
                headers[name] = BatchHeader(
                    reader=reader,
                    num_rows=int(reference[_ROWS]),
                    signature=signature,
                    variant=int(reference[_VARIANT]),
                    tokens=int(reference[_TOKENS]),
                )
        micro_steps.append(headers)
    return micro_steps
