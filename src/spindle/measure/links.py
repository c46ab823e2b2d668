"""Measure links between ranks.

Latency is half the round trip of a small message while nothing computes (`p2p_latency` measures it while ranks
compute). Bandwidth on GPUs of one host is that of an all-reduce over all ranks, as bytes that each rank sends around a
ring, because most traffic is gradients; elsewhere it is that of a large message.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from spindle.cluster import Link
from spindle.measure.timing import median_s
from spindle.profile import ring_bytes
from spindle.run import Message, World, peers

# Float32 elements. The large message takes clearly longer than the latency, even on a busy machine.
_SMALL, _LARGE = 1, 1 << 21
_SMALL_REDUCE, _LARGE_REDUCE = 1 << 22, 1 << 28  # bytes; both large enough to use the protocol of gradients
_MIN_BYTE_SHARE = 0.25  # of the time of a large all-reduce that is due to its bytes
_REPEATS, _REPEATS_ON_GPU = 5, 25


def measure_link(world: World, pair: tuple[int, int] = (0, 1), *, summed: torch.dtype | None = None) -> Link:
    """Measure the link between two ranks. A collective: all ranks call it, and get the same result.

    With `summed`, the dtype of gradients, the bandwidth is that of their all-reduce.
    """
    link = None
    _ = world.everyone  # all ranks must take part in creating a group
    if world.rank in pair:
        small_s, large_s = (_round_trip_s(world, pair, size) / 2 for size in (_SMALL, _LARGE))
        link = Link(bytes_per_s=4 * (_LARGE - _SMALL) / max(large_s - small_s, 1e-6), latency_s=small_s)
    shared: Link = world.broadcast_object(link, pair[0])
    if summed is None:
        return shared
    small_s, large_s = (_all_reduce_s(world, size, summed) for size in (_SMALL_REDUCE, _LARGE_REDUCE))
    rate = ring_bytes(_LARGE_REDUCE - _SMALL_REDUCE, world.size) / max(large_s - small_s, _MIN_BYTE_SHARE * large_s)
    fixed_s = max(0.0, small_s - ring_bytes(_SMALL_REDUCE, world.size) / rate)
    result: Link = world.broadcast_object(replace(shared, bytes_per_s=rate, collective_s=fixed_s))
    return result


def _all_reduce_s(world: World, num_bytes: int, dtype: torch.dtype) -> float:
    buffer = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=world.device)

    def all_reduce_and_wait() -> None:
        dist.all_reduce(buffer, group=world.everyone)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # otherwise it would overlap with the host's work for the next one

    world.barrier()
    with peers("measuring links"):
        return median_s(all_reduce_and_wait, _REPEATS_ON_GPU, world.device)


def _round_trip_s(world: World, pair: tuple[int, int], size: int) -> float:
    buffer = torch.zeros(size, device=world.device)

    def round_trip() -> None:
        message = Message(buffer, pair[world.rank == pair[0]])
        if world.rank == pair[0]:
            world.exchange([message], [])
            world.exchange([], [message])
        else:
            world.exchange([], [message])
            world.exchange([message], [])

    return median_s(round_trip, _REPEATS_ON_GPU if world.device.type == "cuda" else _REPEATS, world.device)
