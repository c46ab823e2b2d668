"""How fast a message goes from one rank to another."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from spindle.cluster import Link
from spindle.run.world import World, peers

_SMALL, _LARGE = 1, 1 << 18  # float32 elements
_REPEATS = 5


def measure_link(world: World, first: int, second: int) -> Link | None:
    """The link between two ranks, on the first of them; the other takes part, the rest return at once."""
    if world.rank not in (first, second):
        return None
    small_s, large_s = (_round_trip_s(world, first, second, size) / 2 for size in (_SMALL, _LARGE))
    if world.rank != first:
        return None
    return Link(bytes_per_s=4 * (_LARGE - _SMALL) / max(large_s - small_s, 1e-6), latency_s=small_s)


def _round_trip_s(world: World, first: int, second: int, size: int) -> float:
    buffer = torch.zeros(size, device=world.device)
    times = []
    with peers("measuring a link"):
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            if world.rank == first:
                dist.send(buffer, second)
                dist.recv(buffer, second)
            else:
                dist.recv(buffer, first)
                dist.send(buffer, first)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
