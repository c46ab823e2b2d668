"""Where the time of a step went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Shares are of all devices' time in the step.

    A device is busy while it computes. What it waits for is charged, while it does not compute, to a transfer in flight
    on it, else to a synchronisation in flight on it; the rest is idle. So the four shares add up to 1, and a transfer
    hidden behind compute costs nothing.
    """

    makespan_s: float
    compute_share: float
    transfer_share: float
    sync_share: float
    idle_share: float
    peak_bytes: int


def measure(timeline: Timeline) -> Measures:
    """The measures of a timeline."""
    total = timeline.makespan_ns * timeline.num_ranks
    busy = transfer = sync = 0
    order = np.argsort(timeline.rank, kind="stable")
    bounds = np.searchsorted(timeline.rank[order], np.arange(timeline.num_ranks + 1))
    for rank in range(timeline.num_ranks):
        mine = order[bounds[rank] : bounds[rank + 1]]
        kinds = [_covered(timeline, mine[timeline.lane[mine] == lane]) for lane in (COMPUTE, TRANSFER, SYNC)]
        compute_ns = _length(kinds[COMPUTE])
        with_transfer_ns = _length(_union(kinds[COMPUTE], kinds[TRANSFER]))
        with_sync_ns = _length(_union(_union(kinds[COMPUTE], kinds[TRANSFER]), kinds[SYNC]))
        busy += compute_ns
        transfer += with_transfer_ns - compute_ns
        sync += with_sync_ns - with_transfer_ns
    return Measures(
        makespan_s=timeline.makespan_s,
        compute_share=busy / total if total else 0.0,
        transfer_share=transfer / total if total else 0.0,
        sync_share=sync / total if total else 0.0,
        idle_share=(total - busy - transfer - sync) / total if total else 0.0,
        peak_bytes=int(timeline.peak_bytes().max(initial=0)),
    )


Intervals = np.ndarray  # rows of (start, end), disjoint, rising


def _covered(timeline: Timeline, spans: np.ndarray) -> Intervals:
    return _union(np.stack([timeline.start[spans], timeline.end[spans]], axis=1), np.zeros((0, 2), dtype=np.int64))


def _union(first: Intervals, second: Intervals) -> Intervals:
    both = np.concatenate([first, second])
    if not len(both):
        return both
    both = both[np.argsort(both[:, 0], kind="stable")]
    reach = np.maximum.accumulate(both[:, 1])
    opens = np.flatnonzero(np.append(True, both[1:, 0] > reach[:-1]))
    return np.stack([both[opens, 0], np.append(reach[opens[1:] - 1], reach[-1])], axis=1)


def _length(intervals: Intervals) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum())
