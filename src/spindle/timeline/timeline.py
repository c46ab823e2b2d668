"""A step as it was simulated or measured: one span per instruction and rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.program import Instruction

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Columns by span. Times are integer nanoseconds from the start of the step.

    `posted`: the rank was ready for the instruction; `start`: the work began (a transfer waits for its peer); `end`: it
    was done. `bytes_at_start` and `bytes_at_end` are changes of the rank's live memory; `static_bytes` is the memory
    that each rank uses all the time.
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

    def busy_s(self, rank: int, instructions: Collection[int]) -> float:
        """The seconds that these instructions took on a rank, together."""
        chosen = (self.rank == rank) & np.isin(self.instruction, list(instructions))
        return 1e-9 * int((self.end - self.start)[chosen].sum())

    def memory_of(self, rank: int) -> tuple[Column, Column]:
        """Times at which the live bytes of a rank change, and the live bytes from then on."""
        spans = np.flatnonzero(self.rank == rank)
        times = np.concatenate([self.start[spans], self.end[spans]])
        changes = np.concatenate([self.bytes_at_start[spans], self.bytes_at_end[spans]])
        # At equal times, memory is freed before it is allocated.
        order = np.lexsort((np.repeat([1, 0], len(spans)), times))
        live = self.static_bytes[rank] + np.cumsum(changes[order])
        return np.concatenate([[0], times[order]]), np.concatenate([[self.static_bytes[rank]], live])

    def peak_bytes(self) -> Column:
        """The peak of live memory of each rank."""
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
