"""What the report's page computes in JavaScript, again in Python: time by class, and the critical path."""

from __future__ import annotations

from typing import assert_never

import numpy as np

from spindle.profile import Profile
from spindle.program import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
)
from spindle.report.sums import CLASSES, recompute_shares
from spindle.timeline import Column, Timeline, length, union


def time_sums(timeline: Timeline, program: Program, profile: Profile) -> Column:
    """Nanoseconds by rank and by `CLASSES`, which add up to the step on every rank.

    Where several go on at once, time counts for the first of them in the order of `CLASSES`: so transfers and
    reductions count where they are exposed, as in `Measures`. A backward pass that recomputes activations begins with
    it, for the share of its time that its curve says.
    """
    kind = np.array([_class_of(instruction) for instruction in timeline.instructions], dtype=np.int64)
    share = recompute_shares(program, profile)[timeline.instruction]
    kinds = kind[timeline.instruction]
    recomputed = np.floor((timeline.end - timeline.start) * share).astype(np.int64)
    middle = timeline.start + recomputed
    sums = np.zeros((timeline.num_ranks, len(CLASSES)), dtype=np.int64)
    order = np.argsort(timeline.rank, kind="stable")
    bounds = np.searchsorted(timeline.rank[order], np.arange(timeline.num_ranks + 1))
    for rank in range(timeline.num_ranks):
        spans = order[bounds[rank] : bounds[rank + 1]]
        covered = np.zeros((0, 2), dtype=np.int64)
        covered_ns = 0
        for number, name in enumerate(CLASSES[:-1]):
            if name == "recompute":
                chosen = spans[recomputed[spans] > 0]
                pieces = np.stack([timeline.start[chosen], middle[chosen]], axis=1)
            else:
                chosen = spans[kinds[spans] == number]
                pieces = np.stack([middle[chosen], timeline.end[chosen]], axis=1)
            covered = union(covered, pieces)
            sums[rank, number] = length(covered) - covered_ns
            covered_ns += sums[rank, number]
        sums[rank, -1] = timeline.makespan_ns - covered_ns
    return sums


def _class_of(instruction: Instruction) -> int:
    match instruction:
        case Forward():
            name = "forward"
        case Backward():
            name = "backward"
        case OptimizerStep():
            name = "optimizer"
        case Exchange():
            name = "transfer"
        case SyncGradients() | GatherParameters():
            name = "sync"
        case _:
            assert_never(instruction)
    return CLASSES.index(name)


def critical_path(timeline: Timeline, needs: Column) -> list[int]:
    """Spans from the first to the one that ends last, each waiting for the one before it."""
    if not len(needs):
        return []
    path = [int(np.argmax(timeline.end))]
    while needs[path[-1]] >= 0:
        path.append(int(needs[path[-1]]))
    return path[::-1]
