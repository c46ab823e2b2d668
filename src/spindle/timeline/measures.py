"""Where the time of a step goes: compute, transfers, gradient reductions, idle."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from spindle.program import SYNC, TRANSFER, are_compute
from spindle.timeline.timeline import Column, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Shares of the time of all devices in a step.

    Time in which a device does not compute counts as transfer if a transfer is in flight on it, else as sync if a
    gradient reduction is in flight on it, else as idle. So the four shares add up to 1, and a transfer that is hidden
    by compute costs nothing.
    """

    makespan_s: float
    compute_share: float
    transfer_share: float
    sync_share: float
    idle_share: float
    peak_bytes: int


def measure(timeline: Timeline) -> Measures:
    """Compute the measures of a timeline."""
    total = timeline.makespan_ns * timeline.num_ranks
    compute, transfer, sync, idle = device_times(timeline).sum(0).tolist()
    return Measures(
        makespan_s=timeline.makespan_s,
        compute_share=compute / total if total else 0.0,
        transfer_share=transfer / total if total else 0.0,
        sync_share=sync / total if total else 0.0,
        idle_share=idle / total if total else 0.0,
        peak_bytes=int(timeline.peak_bytes().max(initial=0)),
    )


def device_times(timeline: Timeline) -> Column:
    """Of each rank (rows), the nanoseconds of the step in which it computes, only transfers, only reduces gradients,
    and is idle (columns)."""
    times = np.zeros((timeline.num_ranks, 4), dtype=np.int64)
    order = np.argsort(timeline.rank, kind="stable")
    bounds = np.searchsorted(timeline.rank[order], np.arange(timeline.num_ranks + 1))
    # Per rank, in order of precedence: what transfers add to the time that compute covers, and what reductions add.
    for rank in range(timeline.num_ranks):
        spans = order[bounds[rank] : bounds[rank + 1]]
        lanes = timeline.lane[spans]
        compute = _covered(timeline, spans[are_compute(lanes)])
        with_transfer = union(compute, _covered(timeline, spans[lanes == TRANSFER]))
        with_sync = union(with_transfer, _covered(timeline, spans[lanes == SYNC]))
        covered = [0, *map(length, (compute, with_transfer, with_sync)), timeline.makespan_ns]
        times[rank] = np.diff(covered)
    return times


def busy_intervals(timeline: Timeline, lanes: Collection[int]) -> Iterator[Intervals]:
    """For each rank, when one of these lanes is busy."""
    order = np.argsort(timeline.rank, kind="stable")
    bounds = np.searchsorted(timeline.rank[order], np.arange(timeline.num_ranks + 1))
    for rank in range(timeline.num_ranks):
        spans = order[bounds[rank] : bounds[rank + 1]]
        yield _covered(timeline, spans[np.isin(timeline.lane[spans], list(lanes))])


Intervals = np.ndarray  # rows of (start, end), disjoint and sorted


def _covered(timeline: Timeline, spans: np.ndarray) -> Intervals:
    return union(np.stack([timeline.start[spans], timeline.end[spans]], axis=1), np.zeros((0, 2), dtype=np.int64))


def union(first: Intervals, second: Intervals) -> Intervals:
    """What one or the other covers."""
    both = np.concatenate([first, second])
    if not len(both):
        return both
    both = both[np.argsort(both[:, 0], kind="stable")]
    # Sorted by start, an interval opens a new piece if it starts after everything before it has ended.
    reach = np.maximum.accumulate(both[:, 1])
    opens = np.flatnonzero(np.append(True, both[1:, 0] > reach[:-1]))
    return np.stack([both[opens, 0], np.append(reach[opens[1:] - 1], reach[-1])], axis=1)


def length(intervals: Intervals) -> int:
    """Nanoseconds that intervals cover."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())
