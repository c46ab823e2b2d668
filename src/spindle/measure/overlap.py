"""Measure how compute and gradient all-reduces slow each other down on devices that are shares of one GPU.

All ranks compute continuously, as in a backward pass, while small and large all-reduces run. The time of a small one is
the fixed overhead of an all-reduce: its work on the host, and waiting for SMs among running kernels. The additional
time of a large one is due to its bytes.
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
from spindle.measure.timing import Passes, Work, elapsed_s, medians, timestamp, warm_up
from spindle.profile import all_reduce_s, ring_bytes
from spindle.run import LaunchThrottle, World, compute_stream, peers

_PASSES = 8
_SMALL, _LARGE = 1 << 22, 1 << 28  # bytes; both large enough to use the same protocol as gradients
_MIN_COUNT, _MAX_COUNT = 12, 200  # how many all-reduces
_MIN_BYTE_SHARE = 0.25  # of the time of an all-reduce; below it, the effect of its bytes on compute is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The slowdown of compute during all-reduces (`overlap`), that of the bytes of all-reduces during compute
    (`exchange_overlap`), and the fixed overhead of an all-reduce during compute."""

    overlap: float = 1.0
    exchange_overlap: float = 1.0
    collective_s: float | None = None


def measure_overlap(work: Work | None, rank_sync: RankSync, world: World, link: Link, summed: torch.dtype) -> Overlap:
    """Measure the overlap. All ranks call it, and get the same result. `work` is a long layer; `link` was measured
    without compute."""
    if work is None or rank_sync.size == 1:
        return Overlap(collective_s=link.collective_s)
    passes, alone_s = None, math.nan
    try:
        passes = warm_up(work)
        alone_s = sum(medians(passes, _PASSES, work.device))
    except Exception:  # out of memory, for example
        pass
    alone = [row[0] for row in rank_sync.all_gather(alone_s)]
    if any(map(math.isnan, alone)):
        return Overlap(collective_s=link.collective_s)
    assert passes is not None
    times = []
    with peers("measuring all-reduces during compute"):
        for num_bytes in (_SMALL, _LARGE):
            expected_s = 2 * all_reduce_s(num_bytes, world.size, link)
            count = max(_MIN_COUNT, min(_MAX_COUNT, math.ceil(4 * max(alone) / expected_s)))
            buffer = torch.zeros(num_bytes // summed.itemsize, dtype=summed, device=world.device)
            times.append(_all_reduces_during_compute(passes, buffer, count, world))
    gathered = rank_sync.all_gather(*(seconds for pair in times for seconds in pair))
    if any(math.isnan(number) for row in gathered for number in row):
        return Overlap(collective_s=link.collective_s)
    small_s, _, large_s, pass_s = (statistics.median(column) for column in zip(*gathered, strict=True))
    # Two sizes give two unknowns: the rate of bytes and the fixed overhead.
    rate = ring_bytes(_LARGE - _SMALL, world.size) / max(large_s - small_s, 1e-6)
    fixed_s = max(0.0, small_s - ring_bytes(_SMALL, world.size) / rate)
    share = max(0.0, 1 - fixed_s / large_s)  # of the time of a large all-reduce that is due to its bytes
    slowness = pass_s / statistics.median(alone)
    return Overlap(
        overlap=max(1.0, (slowness - (1 - share)) / share if share > _MIN_BYTE_SHARE else slowness),
        exchange_overlap=max(1.0, link.bytes_per_s / rate),
        # All are started at once, and may finish before the first one is waited for; then the timestamps mean nothing.
        # So the overhead is at least that without compute.
        collective_s=max(fixed_s, link.collective_s or 0.0),
    )


def _all_reduces_during_compute(passes: Passes, buffer: torch.Tensor, count: int, world: World) -> tuple[float, float]:
    """Seconds of an all-reduce, and of a forward and backward pass, while all ranks do both. NaN if compute failed."""
    device, group = world.device, world.everyone
    for _ in range(2):
        dist.all_reduce(buffer, group=group)  # warm-up
    stop, spans = threading.Event(), list[tuple[object, object]]()
    busy = threading.Thread(target=_compute, args=(passes, world, stop, spans), daemon=True)
    busy.start()
    try:
        ends = []
        for request in [dist.all_reduce(buffer, group=group, async_op=True) for _ in range(count)]:
            assert request is not None
            request.wait()
            ends.append(timestamp(device))
    finally:
        stop.set()
        busy.join()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    all_reduce_time_s = statistics.median(elapsed_s(begin, end) for begin, end in pairwise(ends))
    if not spans:
        return all_reduce_time_s, math.nan
    # the first passes may have begun before the all-reduces
    return all_reduce_time_s, statistics.median(elapsed_s(begin, end) for begin, end in spans[len(spans) // 3 :])


def _compute(passes: Passes, world: World, stop: threading.Event, spans: list[tuple[object, object]]) -> None:
    """Compute continuously until `stop` is set. Appends the start and end of each pass to `spans`."""
    device, on_gpu = world.device, world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with torch.cuda.stream(compute_stream()) if on_gpu else nullcontext():
        throttle = LaunchThrottle(world)
        with suppress(Exception):  # out of memory, for example; then there are no spans
            while not (stop.is_set() and spans):
                throttle.wait()
                begin = timestamp(device)
                passes.forward()
                passes.backward()
                spans.append((begin, timestamp(device)))
