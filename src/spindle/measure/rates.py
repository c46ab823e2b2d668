"""How much faster is a device while its neighbours idle? For devices that are shares of one GPU.

Curves are measured with all of them busy, so that is the rate of one; power, clocks and bandwidth that idle neighbours
leave make it more.
"""

from __future__ import annotations

from bisect import bisect_right

from spindle.measure.rank_sync import RankSync
from spindle.measure.timing import Work, time_passes


def measure_rates(work: Work | None, rank_sync: RankSync) -> tuple[float, ...]:
    """The rate of each of 1, 2, ... busy ranks, from one heavy piece of work; nothing where it could not be found."""
    if work is None or rank_sync.size == 1:
        return ()
    counts = [1 << power for power in range(rank_sync.size.bit_length()) if 1 << power < rank_sync.size]
    times_s: dict[int, float] = {}
    for count in (*counts, rank_sync.size):
        passes = time_passes(work, rank_sync, count)
        if isinstance(passes, Exception):
            return ()
        times_s[count] = passes.forward_s + passes.backward_s
    return rates_from(times_s)


def rates_from(times_s: dict[int, float]) -> tuple[float, ...]:
    """Rates from times with so many busy, the last of them all: straight lines between, never rising."""
    counts = sorted(times_s)
    known = [times_s[counts[-1]] / times_s[count] for count in counts]
    for place in reversed(range(len(known) - 1)):
        known[place] = max(known[place], known[place + 1])
    rates = []
    for busy in range(1, counts[-1] + 1):
        place = min(bisect_right(counts, busy) - 1, len(counts) - 2)
        share = (busy - counts[place]) / (counts[place + 1] - counts[place])
        rates.append(known[place] + share * (known[place + 1] - known[place]))
    return tuple(rates)
