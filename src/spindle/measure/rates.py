"""How much faster is a device while its neighbours idle, and how much slower while gradients are exchanged? For devices
that are shares of one GPU.

Curves are measured with all of them busy, so that is the rate of one; power, clocks and bandwidth that idle neighbours
leave make it more.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right

import torch
import torch.distributed as dist

from spindle.cluster import Link
from spindle.measure.timing import Work, medians, time_passes, warmed
from spindle.measure.together import Together
from spindle.profile import all_reduce_s
from spindle.run.world import World, peers

_PASSES = 8
_SUMMED_BYTES = 1 << 26


def measure_rates(work: Work | None, together: Together) -> tuple[float, ...]:
    """The rate of each of 1, 2, ... busy ranks, from one heavy piece of work; nothing where it could not be found."""
    if work is None or together.size == 1:
        return ()
    counts = [1 << power for power in range(together.size.bit_length()) if 1 << power < together.size]
    times_s: dict[int, float] = {}
    for count in (*counts, together.size):
        passes = time_passes(work, together, count)
        if isinstance(passes, Exception):
            return ()
        times_s[count] = sum(passes)
    return rates_from(times_s)


def measure_overlap(work: Work | None, together: Together, world: World, link: Link) -> float:
    """How many times longer a device takes over its work while gradients are summed over all of them beside it."""
    if work is None or together.size == 1 or work.device.type != "cuda":
        return 1.0
    alone_s = beside_s = math.nan
    try:
        passes = warmed(work)
        alone_s = sum(medians(passes, _PASSES, work.device))
    except Exception:  # then it was not measured before, either
        passes = None
    alone = [row[0] for row in together.tell(alone_s)]
    if any(map(math.isnan, alone)):
        return 1.0
    assert passes is not None
    sum_s = all_reduce_s(_SUMMED_BYTES, together.size, link)
    buffer = torch.zeros(_SUMMED_BYTES, dtype=torch.uint8, device=work.device).view(torch.bfloat16)
    count = math.ceil(2 * _PASSES * max(alone) / sum_s)
    with peers("measuring what they cost compute"):
        sums = [dist.all_reduce(buffer, async_op=True) for _ in range(count)]
        beside_s = sum(medians(passes, _PASSES, work.device))
        for one in sums:
            one.wait()
    torch.cuda.synchronize(work.device)
    slowness = statistics.median(row[0] for row in together.tell(beside_s)) / statistics.median(alone)
    # Between two sums the device is left alone for a while.
    between_s = link.collective_s or 0.0
    busy_s = max(sum_s - between_s, 1e-6)
    return max(1.0, (slowness * sum_s - between_s) / busy_s)


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
