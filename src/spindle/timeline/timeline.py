"""A step as it was simulated or measured: one span for each instruction on each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.program import Instruction

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Columns by span. Times are integer nanoseconds from the start of the step.

    `posted` is when the rank was ready for it, `start` when the work itself began (a transfer waits for its peer),
    `end` when it was done. `bytes_at_start` and `bytes_at_end` are what the rank's live memory changes by then;
    `static_bytes` is what each rank holds all the time.
    """

    instructions: tuple[Instruction, ...]
    num_ranks: int
    rank: Column
    lane: Column
    instruction: Column
    posted: Column
    start: Column
    end: Column
    bytes_at_start: Column
    bytes_at_end: Column
    static_bytes: Column

    @property
    def makespan_ns(self) -> int:
        return int(self.end.max(initial=0))

    @property
    def makespan_s(self) -> float:
        return self.makespan_ns * 1e-9

    def memory_of(self, rank: int) -> tuple[Column, Column]:
        """Times and live bytes of one rank; between two times the bytes hold."""
        mine = np.flatnonzero(self.rank == rank)
        times = np.concatenate([self.start[mine], self.end[mine]])
        changes = np.concatenate([self.bytes_at_start[mine], self.bytes_at_end[mine]])
        # What is freed at an instant is free for what starts at it.
        order = np.lexsort((np.repeat([1, 0], len(mine)), times))
        live = self.static_bytes[rank] + np.cumsum(changes[order])
        return np.concatenate([[0], times[order]]), np.concatenate([[self.static_bytes[rank]], live])

    def peak_bytes(self) -> Column:
        """The largest live memory of each rank."""
        times = np.concatenate([self.start, self.end])
        changes = np.concatenate([self.bytes_at_start, self.bytes_at_end])
        ranks = np.concatenate([self.rank, self.rank])
        order = np.lexsort((np.repeat([1, 0], len(self.rank)), times, ranks))
        live = np.cumsum(changes[order])
        ranks = ranks[order]
        first = np.searchsorted(ranks, np.arange(self.num_ranks))
        count = np.append(first[1:], len(ranks)) - first
        peaks = self.static_bytes.copy()
        for rank in np.flatnonzero(count):
            begin = first[rank]
            before = live[begin - 1] if begin else 0
            peaks[rank] += max(0, int(live[begin : begin + count[rank]].max()) - int(before))
        return peaks
