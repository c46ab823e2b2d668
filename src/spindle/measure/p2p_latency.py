"""Measure the latency of a small message that a rank waits for, while all ranks compute.

    rank 0 ▐██ work ██▌▒ more ▒ · · · · · · · ▐██ work ██▌▒ more ▒
                      ╲                      ╱
    rank 1  · · · · · · ▐██ work ██▌▒ more ▒ · · · · · ·

Ranks play ping-pong in pairs. As in a step, the sender goes on computing, so a message competes with kernels for the
GPU, and with other threads for the host. A round consists of the work of both ranks and two messages, so no clocks need
to be compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from spindle.measure.rank_sync import RankSync
from spindle.measure.timing import Passes, Work, elapsed_s, medians, timestamp, warm_up
from spindle.run import LaunchThrottle, Message, World, compute_stream, peers, wait

_SECONDS = 1.0  # seconds for all rounds, about
_ROUNDS, _ROUNDS_ON_GPU = (16, 25), (6, 100)  # the smallest and the largest number of rounds
_WARM_UP = 0.25  # the share of the rounds that warm up
_WIDTH, _WIDTH_ON_GPU = 256, 4096  # the size of the linear layer that is used if there is no work


def measure_p2p_latency(work: Work | None, world: World) -> float | None:
    """Seconds from the end of the sender's work to the start of the receiver's, for a message without bytes.

    None with a single rank, or if a rank cannot compute. All ranks call it, and get the same result. Either all ranks
    have `work` or none has; without it, a linear layer is used.
    """
    if world.size == 1:
        return None
    rank_sync = RankSync(world, enabled=True)
    passes, once_s = None, math.nan
    with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        try:
            passes = warm_up(work or _linear_work(world.device))
            once_s = sum(medians(passes, 1, world.device))
        except Exception:  # out of memory, for example
            pass
    gathered = [seconds for (seconds,) in rank_sync.all_gather(once_s)]
    if any(map(math.isnan, gathered)):
        return None
    assert passes is not None
    min_rounds, max_rounds = _ROUNDS_ON_GPU if world.device.type == "cuda" else _ROUNDS
    count = max(min_rounds, min(max_rounds, int(_SECONDS / (2 * max(*gathered, 1e-6)))))
    with peers("measuring message latency"):
        works_s, waits_s = _rounds(passes, count, world)
    rows = rank_sync.all_gather(*works_s, *waits_s)
    if any(math.isnan(number) for row in rows for number in row):
        return None
    return p2p_latency_from([(row[:count], row[count:]) for row in rows])


def p2p_latency_from(rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The median latency from the results of `_rounds` by rank: the wait of the first rank of a pair, minus the work of
    the second one, is two messages."""
    latencies_s = [
        (wait_s - work_s) / 2
        for (_, waits_s), (works_s, _) in zip(rounds[::2], rounds[1::2], strict=False)
        for wait_s, work_s in list(zip(waits_s, works_s, strict=True))[int(_WARM_UP * len(works_s)) : -1]
    ]
    return max(0.0, statistics.median(latencies_s))


def _rounds(passes: Passes, count: int, world: World) -> tuple[list[float], list[float]]:
    """For each round: the seconds of this rank's work, and of its wait until the next round starts (0 for the last).
    NaN if this rank failed."""
    device, partner = world.device, world.rank ^ 1
    is_first, is_unpaired = world.rank < partner, partner >= world.size
    outgoing, incoming = torch.zeros(1, device=device), torch.zeros(1, device=device)
    receive, sends, begins, ends, failed = None, [], [], [], False
    with torch.cuda.stream(compute_stream()) if device.type == "cuda" else nullcontext():
        throttle = LaunchThrottle(world)
        if not (is_first or is_unpaired):
            receive = _receive(world, incoming)
        for number in range(count):
            if receive is not None:
                wait(receive)
            throttle.wait()
            begins.append(timestamp(device))
            failed = failed or not _try_pass(passes, whole=True)
            ends.append(timestamp(device))
            if not is_unpaired:
                sends += world.start_exchange([Message(outgoing, partner)], [])[0]
                # after the send, because some backends process the messages of a pair in the order of the calls
                receive = _receive(world, incoming) if is_first or number < count - 1 else None
            throttle.wait()
            failed = failed or not _try_pass(passes, whole=is_unpaired)
        for request in (*sends, *([] if receive is None else [receive])):
            wait(request)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if failed:
        return [math.nan] * count, [math.nan] * count
    works_s = [elapsed_s(begin, end) for begin, end in zip(begins, ends, strict=True)]
    waits_s = [elapsed_s(end, begin) for end, begin in zip(ends, begins[1:], strict=False)]
    return works_s, [*waits_s, 0.0]


def _receive(world: World, buffer: torch.Tensor) -> Any:
    return world.start_exchange([], [Message(buffer, world.rank ^ 1)])[1][0]


def _try_pass(passes: Passes, *, whole: bool) -> bool:
    """Run a pass. Returns whether that worked. A rank that cannot compute continues, because its partner waits
    for it."""
    try:
        passes.forward()
        if whole:
            passes.backward()
    except Exception:
        return False
    return True


def _linear_work(device: torch.device) -> Work:
    width = _WIDTH_ON_GPU if device.type == "cuda" else _WIDTH
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = nn.Linear(width, width, device=device, dtype=dtype)
    rows = torch.randn(width, width, device=device, dtype=dtype)
    return Work(run=lambda: layer(rows), leaves=(), parameters=tuple(layer.parameters()), device=device)
