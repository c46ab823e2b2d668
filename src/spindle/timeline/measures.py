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
    """Nanoseconds of the step, with a row for each rank, and columns for computing, only transferring, only reducing
    gradients, and being idle."""
    times = np.zeros((timeline.num_ranks, 4), dtype=np.int64)
    # Per rank, in order of precedence: what transfers add to the time that compute covers, and what reductions add.
    for rank, spans in enumerate(_spans_by_rank(timeline)):
        lanes = timeline.lane[spans]
        compute = _covered(timeline, spans[are_compute(lanes)])
        with_transfer = union(compute, _covered(timeline, spans[lanes == TRANSFER]))
        with_sync = union(with_transfer, _covered(timeline, spans[lanes == SYNC]))
        covered = [0, *map(length, (compute, with_transfer, with_sync)), timeline.makespan_ns]
        times[rank] = np.diff(covered)
    return times


def busy_intervals(timeline: Timeline, lanes: Collection[int]) -> Iterator[Intervals]:
    """For each rank, the intervals in which any of these lanes is busy."""
    for spans in _spans_by_rank(timeline):
        yield _covered(timeline, spans[np.isin(timeline.lane[spans], list(lanes))])


def _spans_by_rank(timeline: Timeline) -> list[np.ndarray]:
    """For each rank, the positions of its spans."""
    order = np.argsort(timeline.rank, kind="stable")
    return np.split(order, np.searchsorted(timeline.rank[order], np.arange(1, timeline.num_ranks)))


Intervals = np.ndarray  # rows of (start, end), disjoint and sorted


def _covered(timeline: Timeline, spans: np.ndarray) -> Intervals:
    return union(np.stack([timeline.start[spans], timeline.end[spans]], axis=1), np.zeros((0, 2), dtype=np.int64))


def union(first: Intervals, second: Intervals) -> Intervals:
    """The union of two lists of intervals."""
    intervals = np.concatenate([first, second])
    if not len(intervals):
        return intervals
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    # Sorted by start, an interval opens a new piece if it starts after everything before it has ended.
    reach = np.maximum.accumulate(intervals[:, 1])
    opens = np.flatnonzero(np.append(True, intervals[1:, 0] > reach[:-1]))
    return np.stack([intervals[opens, 0], np.append(reach[opens[1:] - 1], reach[-1])], axis=1)


def length(intervals: Intervals) -> int:
    """The total nanoseconds of intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())
