"""Where a step went, by one rule for simulated and measured timelines.

On each rank's compute lane: time inside forward and backward is compute, inside the optimizer step optimizer. The gap
right before the optimizer step is waiting for synchronisation; all other gaps, the one behind the last instruction
included, are waiting for transfers and for other ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from spindle.program import OptimizerStep
from spindle.program.instructions import COMPUTE
from spindle.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Seconds of a step, means over ranks. The four parts add up to the step."""

    step_s: float
    compute_s: float
    optimizer_s: float
    sync_s: float
    wait_s: float

    @property
    def idle(self) -> float:
        """The share of the step in which a device neither computes nor updates."""
        return (self.sync_s + self.wait_s) / self.step_s if self.step_s else 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"idle": self.idle}


def split_of(timeline: Timeline) -> Split:
    """The split of a timeline."""
    parts = np.array([_rank_parts(timeline, rank) for rank in range(timeline.num_ranks)])
    compute_s, optimizer_s, sync_s, wait_s = (parts.mean(axis=0) * 1e-9).tolist()
    return Split(step_s=timeline.makespan_s, compute_s=compute_s, optimizer_s=optimizer_s, sync_s=sync_s, wait_s=wait_s)


def _rank_parts(timeline: Timeline, rank: int) -> tuple[int, int, int, int]:
    """Nanoseconds of compute, optimizer, waiting for synchronisation and other waiting on one rank."""
    compute = optimizer = sync = wait = now = 0
    mine = np.flatnonzero((timeline.rank == rank) & (timeline.lane == COMPUTE))
    for span in mine[np.argsort(timeline.start[mine], kind="stable")].tolist():
        start, end = int(timeline.start[span]), int(timeline.end[span])
        updates = isinstance(timeline.instructions[timeline.instruction[span]], OptimizerStep)
        gap, inside = max(0, start - now), max(0, end - max(start, now))
        now = max(now, end)
        if updates:
            sync, optimizer = sync + gap, optimizer + inside
        else:
            wait, compute = wait + gap, compute + inside
    return compute, optimizer, sync, wait + timeline.makespan_ns - now
