"""How fast do messages go between ranks?

Latency is that of a small message to a neighbour and back, while nothing computes (`hand_over`: while all do). On GPUs
of one host the rate is that of an all-reduce over all ranks, as the bytes that each sends around a ring, because
gradients are most of what travels; elsewhere it is that of a larger message.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from spindle.cluster import Link
from spindle.measure.timing import median_s
from spindle.profile import ring_bytes
from spindle.run.world import Message, World, peers

_SMALL, _LARGE = 1, 1 << 21  # float32 elements; long enough to be told from the latency on a busy machine
_SMALL_SUM, _LARGE_SUM = 1 << 22, 1 << 28  # bytes, both large enough to go the way of gradients
_TELLING = 0.25  # of a large sum's time, at least, is for its bytes
_REPEATS, _REPEATS_ON_GPU = 5, 25


def measure_link(world: World, pair: tuple[int, int] = (0, 1), *, summed: torch.dtype | None = None) -> Link:
    """The link between two ranks, the same on every rank, all of which must ask.

    With `summed`, the type of gradients, its rate is that of their all-reduce.
    """
    link = None
    _ = world.everyone  # a group is made by all ranks, whoever uses it
    if world.rank in pair:
        small_s, large_s = (_round_trip_s(world, pair, size) / 2 for size in (_SMALL, _LARGE))
        link = Link(bytes_per_s=4 * (_LARGE - _SMALL) / max(large_s - small_s, 1e-6), latency_s=small_s)
    shared: Link = world.broadcast_object(link, pair[0])
    if summed is None:
        return shared
    small_s, large_s = (_all_reduce_s(world, size, summed) for size in (_SMALL_SUM, _LARGE_SUM))
    rate = ring_bytes(_LARGE_SUM - _SMALL_SUM, world.size) / max(large_s - small_s, _TELLING * large_s)
    beside_s = max(0.0, small_s - ring_bytes(_SMALL_SUM, world.size) / rate)
    result: Link = world.broadcast_object(replace(shared, bytes_per_s=rate, collective_s=beside_s))
    return result


def _all_reduce_s(world: World, num_bytes: int, dtype: torch.dtype) -> float:
    buffer = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=world.device)

    def to_the_end() -> None:
        dist.all_reduce(buffer, group=world.everyone)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # else bytes would move while the host is at the next one

    world.barrier()
    with peers("measuring links"):
        return median_s(to_the_end, _REPEATS_ON_GPU, world.device)


def _round_trip_s(world: World, pair: tuple[int, int], size: int) -> float:
    buffer = torch.zeros(size, device=world.device)

    def there_and_back() -> None:
        message = Message(buffer, pair[world.rank == pair[0]])
        if world.rank == pair[0]:
            world.exchange([message], [])
            world.exchange([], [message])
        else:
            world.exchange([], [message])
            world.exchange([message], [])

    return median_s(there_and_back, _REPEATS_ON_GPU if world.device.type == "cuda" else _REPEATS, world.device)
