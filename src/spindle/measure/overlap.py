"""How do compute and the exchange of gradients slow each other on devices that are shares of one GPU?

All ranks compute without a pause, as in a backward pass, while small and large all-reduces go on beside it. What the
small ones take is what an all-reduce costs beside its bytes: its steps on the host, and waiting for a place among
kernels that are running. What the large ones take more is for their bytes.
"""

from __future__ import annotations

import math
import statistics
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from spindle.cluster import Link
from spindle.measure.rank_sync import RankSync
from spindle.measure.timing import Passes, Work, between_s, mark, medians, warmed
from spindle.profile import all_reduce_s, ring_bytes
from spindle.run.step import Pace
from spindle.run.world import World, compute_stream, peers

_PASSES = 8
_SMALL, _LARGE = 1 << 22, 1 << 28  # bytes, both large enough to go the way of gradients
_FEWEST, _MOST = 12, 200  # sums
_TELLING = 0.25  # of a sum's time, at least, must be for its bytes, to say how they slow compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How many times longer compute and the bytes of an exchange take beside each other, and what an all-reduce takes
    beside its bytes meanwhile."""

    overlap: float = 1.0
    exchange_overlap: float = 1.0
    collective_s: float | None = None


def measure_overlap(work: Work | None, rank_sync: RankSync, world: World, link: Link, summed: torch.dtype) -> Overlap:
    """The same on every rank, all of which must ask; `work` is something heavy, `link` was measured without it."""
    if work is None or rank_sync.size == 1:
        return Overlap(collective_s=link.collective_s)
    passes, alone_s = None, math.nan
    try:
        passes = warmed(work)
        alone_s = sum(medians(passes, _PASSES, work.device))
    except Exception:  # then it was not measured before, either
        pass
    alone = [row[0] for row in rank_sync.all_gather(alone_s)]
    if any(map(math.isnan, alone)):
        return Overlap(collective_s=link.collective_s)
    assert passes is not None
    found = []
    with peers("measuring sums beside compute"):
        for num_bytes in (_SMALL, _LARGE):
            expected_s = 2 * all_reduce_s(num_bytes, world.size, link)
            count = max(_FEWEST, min(_MOST, math.ceil(4 * max(alone) / expected_s)))
            buffer = torch.zeros(num_bytes // summed.itemsize, dtype=summed, device=world.device)
            found.append(_sums_beside(passes, buffer, count, world))
    gathered = rank_sync.all_gather(*(number for pair in found for number in pair))
    if any(math.isnan(number) for row in gathered for number in row):
        return Overlap(collective_s=link.collective_s)
    small_s, _, large_s, pass_s = (statistics.median(column) for column in zip(*gathered, strict=True))
    rate = ring_bytes(_LARGE - _SMALL, world.size) / max(large_s - small_s, 1e-6)
    fixed_s = max(0.0, small_s - ring_bytes(_SMALL, world.size) / rate)
    share = max(0.0, 1 - fixed_s / large_s)  # of the time in which its bytes were moving
    slowness = pass_s / statistics.median(alone)
    return Overlap(
        overlap=max(1.0, (slowness - (1 - share)) / share if share > _TELLING else slowness),
        exchange_overlap=max(1.0, link.bytes_per_s / rate),
        # All sums are started at once, and may be carried out before the first is waited for: then all marks come at
        # the end, and say nothing. Beside compute none is faster than without.
        collective_s=max(fixed_s, link.collective_s or 0.0),
    )


def _sums_beside(passes: Passes, buffer: torch.Tensor, count: int, world: World) -> tuple[float, float]:
    """Seconds of a sum and of both passes, while all ranks do the one and the other; NaN where compute failed."""
    device, group = world.device, world.everyone
    for _ in range(2):
        dist.all_reduce(buffer, group=group)  # warm-up
    stop, spans = threading.Event(), list[tuple[object, object]]()
    busy = threading.Thread(target=_compute, args=(passes, world, stop, spans), daemon=True)
    busy.start()
    try:
        ends = []
        for one in [dist.all_reduce(buffer, group=group, async_op=True) for _ in range(count)]:
            assert one is not None
            one.wait()
            ends.append(mark(device))
    finally:
        stop.set()
        busy.join()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    sum_s = statistics.median(between_s(begin, end) for begin, end in pairwise(ends))
    if not spans:
        return sum_s, math.nan
    # The first ones may have begun before the sums did.
    return sum_s, statistics.median(between_s(begin, end) for begin, end in spans[len(spans) // 3 :])


def _compute(passes: Passes, world: World, stop: threading.Event, spans: list[tuple[object, object]]) -> None:
    """Without a pause until it is stopped."""
    device, on_gpu = world.device, world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with torch.cuda.stream(compute_stream()) if on_gpu else nullcontext():
        pace = Pace(world)
        with suppress(Exception):  # out of memory, say: then there is nothing to tell
            while not (stop.is_set() and spans):
                pace.keep()
                begin = mark(device)
                passes.forward()
                passes.backward()
                spans.append((begin, mark(device)))
