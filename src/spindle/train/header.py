"""Batch headers, exchanged a step ahead: a row of numbers for each micro-step and task, the same columns on every rank.

Signature, tokens, rows, fingerprint and variant of the task's next batch, where the rank reads it; then its parts of
the losses of an earlier step, how many changes of tasks and plan it has asked for, and which share of its last timed
step it computed. All headers of a plan have the same size, so that ranks still exchange headers, and detect it, when
only some of them have asked for a change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spindle.errors import TrainingError
from spindle.run.pytrees import digest
from spindle.train.feed import Batch

_READ, _PARTIAL, _SIGNATURE, _TOKENS, _ROWS, _FINGERPRINT, _WAY = range(7)
_COLUMNS = 7
MicroSteps = Sequence[Mapping[str, Batch]]  # by micro-step and task
Table = list[list[float]]  # of all ranks


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """A task's batch, as all ranks that read it say, and the first of these."""

    reader: int
    num_rows: int
    signature: int
    variant: int
    tokens: int


def header(
    names: Sequence[str], micro_steps: MicroSteps, losses: Sequence[float] | None, num_changes: int, busy: float
) -> torch.Tensor:
    """What this rank has to tell."""
    told: list[float] = []
    for batches in micro_steps:
        for name in names:
            batch = batches.get(name)
            told += (
                [0.0] * _COLUMNS
                if batch is None
                else [
                    1,
                    batch.held is not None,
                    batch.signature,
                    batch.tokens,
                    batch.num_rows,
                    batch.fingerprint,
                    batch.variant,
                ]
            )
    told += [0.0] * len(names) if losses is None else losses
    return torch.tensor([*told, num_changes, busy], dtype=torch.float64)


def losses_in(table: Table, names: Sequence[str]) -> dict[str, float]:
    """The tasks' losses: what all ranks have of them."""
    behind = len(names) + 2
    return {name: sum(record[task - behind] for record in table) for task, name in enumerate(names)}


def idle_in(table: Table) -> float | None:
    """Which share of the last timed step ranks did not compute, on average; None before there is one."""
    known = [record[-1] for record in table if not math.isnan(record[-1])]
    return 1 - sum(known) / len(known) if known else None


def check_changes(table: Table, calls: Sequence[str], step: int) -> None:
    """Refuses changes of tasks and plan that not all ranks have asked for; `calls` are those of this rank, which the
    message has where it is one that asked."""
    counts = [int(record[-2]) for record in table]
    least, most = min(counts), max(counts)
    if least != most:
        called = ", ".join(calls[least:most]) or "remove_task, add_task or replan"
        raise TrainingError(
            f"step {step}: rank {counts.index(most)} called {called} in the midst of the fit, and rank "
            f"{counts.index(least)} did not; change tasks and plans on all ranks, in the same on_step"
        )


def read_batch_headers(
    table: Table, names: Sequence[str], num_micro_steps: int, step: int
) -> list[dict[str, BatchHeader]]:
    """The batches of each micro-step, on which all ranks that read them must agree. Tasks without rows are left out."""
    micro_steps = []
    for micro_step in range(num_micro_steps):
        found: dict[str, BatchHeader] = {}
        for position, name in enumerate(names):
            begin = (micro_step * len(names) + position) * _COLUMNS
            told = [(rank, record[begin : begin + _COLUMNS]) for rank, record in enumerate(table)]
            told = [(rank, one) for rank, one in told if one[_READ]]
            if not told:
                continue
            reader, reference = told[0]
            # Parts of a batch have other shapes on other ranks; all of these together stand for the whole one's.
            is_partial = any(one[_PARTIAL] for _, one in told)
            signature = digest(repr([one[_SIGNATURE] for _, one in told])) if is_partial else int(reference[_SIGNATURE])
            alike = slice(_ROWS, None) if is_partial else slice(_SIGNATURE, None)
            for rank, other in told[1:]:
                if other[alike] != reference[alike]:
                    raise TrainingError(
                        f"step {step}: the loader of task {name!r} gave rank {rank} another batch than rank "
                        f"{reader}; every rank must read the same batches. Where they are generated or shuffled at "
                        "random, call torch.manual_seed with the same seed on every rank before that (at the top of "
                        "the script). Do not shard the dataset: Spindle gives each rank its rows"
                    )
            if reference[_ROWS]:
                found[name] = BatchHeader(
                    reader=reader,
                    num_rows=int(reference[_ROWS]),
                    signature=signature,
                    variant=int(reference[_WAY]),
                    tokens=int(reference[_TOKENS]),
                )
        micro_steps.append(found)
    return micro_steps
