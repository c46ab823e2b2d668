"""Measure links between ranks.

Latency is half the round trip of a small message while nothing computes (`p2p_latency` measures it while ranks
compute). Bandwidth inside a host is that of an all-reduce over all ranks, as bytes that each rank sends around a ring,
because most traffic is gradients (and gloo's all-reduces move a third of the bytes per second that its messages do);
between hosts it is that of a large message. All-to-alls, with which sequence groups exchange tokens, are measured over
all ranks of one host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from spindle.cluster import Link
from spindle.measure.timing import median_s
from spindle.profile import ring_bytes
from spindle.run import Message, World, peers

# Float32 elements. Even on a busy machine, the large message takes clearly longer than the latency.
_SMALL, _LARGE = 1, 1 << 21
# Bytes of all-reduces, both large enough to use the same protocol as gradients.
_REDUCES, _REDUCES_ON_GPU = (1 << 18, 1 << 22), (1 << 22, 1 << 28)
_SMALL_EXCHANGE, _LARGE_EXCHANGE = 1 << 12, 1 << 22  # bytes per rank, on a CPU; more on a GPU
_GPU_EXCHANGE = 16
_MIN_BYTE_SHARE = 0.25  # the smallest share of a large collective's time that is attributed to its bytes
_REPEATS, _REPEATS_ON_GPU = 5, 25


def measure_link(world: World, pair: tuple[int, int] = (0, 1), *, summed: torch.dtype | None = None) -> Link:
    """Measure the link between two ranks. All ranks call it, and get the same result. With `summed`, the dtype of
    gradients, the bandwidth is that of their all-reduce."""
    link = None
    _ = world.everyone  # all ranks must take part in creating a group
    if world.rank in pair:
        small_s, large_s = (_round_trip_s(world, pair, size) / 2 for size in (_SMALL, _LARGE))
        link = Link(bytes_per_s=4 * (_LARGE - _SMALL) / max(large_s - small_s, 1e-6), latency_s=small_s)
    shared: Link = world.broadcast_object(link, pair[0])
    if summed is None:
        return shared
    small, large = _REDUCES_ON_GPU if world.device.type == "cuda" else _REDUCES
    small_s, large_s = (_all_reduce_s(world, size, summed) for size in (small, large))
    rate = ring_bytes(large - small, world.size) / max(large_s - small_s, _MIN_BYTE_SHARE * large_s)
    fixed_s = max(0.0, small_s - ring_bytes(small, world.size) / rate)
    result: Link = world.broadcast_object(replace(shared, bytes_per_s=rate, collective_s=fixed_s))
    return result


def measure_all_to_all(world: World) -> Link:
    """Measure the link for all-to-alls over all ranks. All ranks call it, and get the same result."""
    on_gpu = world.device.type == "cuda"
    sizes = [size * (_GPU_EXCHANGE if on_gpu else 1) for size in (_SMALL_EXCHANGE, _LARGE_EXCHANGE)]
    seconds = []
    for size in sizes:
        sent = torch.zeros(world.size, size // world.size, dtype=torch.uint8, device=world.device)
        received = torch.empty_like(sent)

        def exchange(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            dist.all_to_all_single(received, sent, group=world.everyone)
            if on_gpu:
                torch.cuda.synchronize(world.device)

        world.barrier()
        with peers("measuring links"):
            seconds.append(median_s(exchange, _REPEATS_ON_GPU if on_gpu else _REPEATS, world.device))
    small_s, large_s = seconds
    num_bytes = [size * (world.size - 1) / world.size for size in sizes]
    rate = (num_bytes[1] - num_bytes[0]) / max(large_s - small_s, _MIN_BYTE_SHARE * large_s)
    fixed_s = max(0.0, small_s - num_bytes[0] / rate)
    link: Link = world.broadcast_object(Link(bytes_per_s=rate, latency_s=fixed_s, collective_s=fixed_s))
    return link


def _all_reduce_s(world: World, num_bytes: int, dtype: torch.dtype) -> float:
    buffer = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=world.device)

    def all_reduce_and_wait() -> None:
        dist.all_reduce(buffer, group=world.everyone)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # otherwise it would overlap with the host's work for the next one

    world.barrier()
    with peers("measuring links"):
        return median_s(all_reduce_and_wait, _repeats(world), world.device)


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

    return median_s(round_trip, _repeats(world), world.device)


def _repeats(world: World) -> int:
    return _REPEATS_ON_GPU if world.device.type == "cuda" else _REPEATS
