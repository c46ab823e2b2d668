"""What ranks tell each other a step ahead: a row of numbers for each task, the same columns on every rank.

Rows, signature and fingerprint of the task's next batch, where the rank reads it, and its part of the loss of a step
that is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spindle.errors import TrainingError
from spindle.run import Losses
from spindle.train.feed import Batch

_ROWS, _SIGNATURE, _FINGERPRINT, _LOSS = range(4)
Table = list[list[list[float]]]  # of all ranks, by rank, task and column


def header(names: Sequence[str], batches: Mapping[str, Batch], losses: Losses | None) -> torch.Tensor:
    """What this rank has to tell."""
    rows = []
    values = [0.0] * len(names) if losses is None else losses.tolist()
    for name, loss in zip(names, values, strict=True):
        batch = batches.get(name)
        known = (0, 0, 0) if batch is None else (batch.num_rows, batch.signature, batch.fingerprint)
        rows.append((*known, loss))
    return torch.tensor(rows, dtype=torch.float64)


def losses_in(table: Table, names: Sequence[str]) -> dict[str, float]:
    """The tasks' losses: what all ranks have of them."""
    return {name: sum(record[task][_LOSS] for record in table) for task, name in enumerate(names)}


def agreed(table: Table, names: Sequence[str], step: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """The rows and the signature of each task's batch, on which all ranks that read it must agree."""
    rows, signatures = [], {}
    for position, name in enumerate(names):
        found = [(rank, record[position][:_LOSS]) for rank, record in enumerate(table) if record[position][_ROWS]]
        reference_rank, reference = found[0]
        for rank, other in found[1:]:
            if other != reference:
                raise TrainingError(
                    f"step {step}: the loader of task {name!r} gave rank {rank} another batch than rank "
                    f"{reference_rank}; every rank must read the same batches: seed what shuffles them alike, and "
                    "do not shard the dataset, Spindle gives each rank its rows"
                )
        rows.append(int(reference[_ROWS]))
        signatures[name] = int(reference[_SIGNATURE])
    return tuple(rows), signatures
