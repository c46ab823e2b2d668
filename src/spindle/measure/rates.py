"""Measure how much faster a device is while its neighbours are idle, for devices that are shares of one GPU.

Curves are measured with all devices busy, which is rate 1. With idle neighbours a device has more power, clock and
bandwidth, and a higher rate.
"""

from __future__ import annotations

from bisect import bisect_right

from spindle.measure.rank_sync import RankSync
from spindle.measure.timing import Work, time_passes


def measure_rates(work: Work | None, rank_sync: RankSync) -> tuple[float, ...]:
    """The rate of a device while 1, 2, ... ranks are busy, measured on a long layer. Empty if that fails."""
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
    """Rates from times by number of busy ranks: interpolated linearly, and never increasing with that number."""
    counts = sorted(times_s)
    measured = [times_s[counts[-1]] / times_s[count] for count in counts]
    # Noise may make more busy ranks look faster, so a rate is at least that of the next larger number.
    for position in reversed(range(len(measured) - 1)):
        measured[position] = max(measured[position], measured[position + 1])
    rates = []
    for busy in range(1, counts[-1] + 1):
        position = min(bisect_right(counts, busy) - 1, len(counts) - 2)
        share = (busy - counts[position]) / (counts[position + 1] - counts[position])
        rates.append(measured[position] + share * (measured[position + 1] - measured[position]))
    return tuple(rates)
