"""How long does a small message take that a rank waits for, while all of them compute?

    one    ▐██ work ██▌▒ more ▒ · · · · · · · ▐██ work ██▌▒ more ▒
                      ╲                      ╱
    other   · · · · · · ▐██ work ██▌▒ more ▒ · · · · · ·

Ranks in pairs hand on to each other. As in a step, whoever has sent goes on computing, so a message has to find its
place among kernels, and threads of the host among others. A round is the work of both and two hand-overs: no process
needs another's clock.
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
from spindle.measure.timing import Passes, Work, between_s, mark, medians, warmed
from spindle.run.step import Pace
from spindle.run.world import Message, World, compute_stream, peers, wait

_SECONDS = 1.0  # of all rounds, about
_ROUNDS, _ROUNDS_ON_GPU = (16, 25), (6, 100)  # at least and at most
_WARM_UP = 0.25  # of them
_STAND_IN, _STAND_IN_ON_GPU = 256, 4096  # rows and width


def measure_p2p_latency(work: Work | None, world: World) -> float | None:
    """Seconds from the end of what one rank waits for to its own start, bytes aside; None where nobody waits for
    anybody or one cannot compute.

    The same on every rank, all of which must ask. Either all have work or none; then a layer stands in for it.
    """
    if world.size == 1:
        return None
    rank_sync = RankSync(world, enabled=True)
    passes, once_s = None, math.nan
    with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        try:
            passes = warmed(work or _stand_in(world.device))
            once_s = sum(medians(passes, 1, world.device))
        except Exception:  # then it was not measured before, either
            pass
    gathered = [seconds for (seconds,) in rank_sync.all_gather(once_s)]
    if any(map(math.isnan, gathered)):
        return None
    assert passes is not None
    fewest, most = _ROUNDS_ON_GPU if world.device.type == "cuda" else _ROUNDS
    count = max(fewest, min(most, int(_SECONDS / (2 * max(*gathered, 1e-6)))))
    with peers("measuring hand-overs"):
        works_s, others_s = _rounds(passes, count, world)
    rows = rank_sync.all_gather(*works_s, *others_s)
    if any(math.isnan(number) for row in rows for number in row):
        return None
    return p2p_latency_from([(row[:count], row[count:]) for row in rows])


def p2p_latency_from(rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The median, from what `_rounds` gives on each rank: what the first of a pair waits beyond the other's work is two
    hand-overs."""
    found = [
        (other_s - work_s) / 2
        for (_, others_s), (works_s, _) in zip(rounds[::2], rounds[1::2], strict=False)
        for other_s, work_s in list(zip(others_s, works_s, strict=True))[int(_WARM_UP * len(works_s)) : -1]
    ]
    return max(0.0, statistics.median(found))


def _rounds(passes: Passes, count: int, world: World) -> tuple[list[float], list[float]]:
    """In each round, seconds of this rank's work, and from its end to the next one's begin; NaN where it failed. The
    last round has no next one."""
    device, partner = world.device, world.rank ^ 1
    is_first, is_alone = world.rank < partner, partner >= world.size
    value, place = torch.zeros(1, device=device), torch.zeros(1, device=device)
    coming, sending, begins, ends, failed = None, [], [], [], False
    with torch.cuda.stream(compute_stream()) if device.type == "cuda" else nullcontext():
        pace = Pace(world)
        if not (is_first or is_alone):
            coming = _receive(world, place)
        for number in range(count):
            if coming is not None:
                wait(coming)
            pace.keep()
            begins.append(mark(device))
            failed = failed or not _computes(passes, whole=True)
            ends.append(mark(device))
            if not is_alone:
                sending += world.start_exchange([Message(value, partner)], [])[0]
                # Behind the send: some backends carry out the messages of a pair in the order of the calls.
                coming = _receive(world, place) if is_first or number < count - 1 else None
            pace.keep()
            failed = failed or not _computes(passes, whole=is_alone)
        for request in (*sending, *([] if coming is None else [coming])):
            wait(request)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if failed:
        return [math.nan] * count, [math.nan] * count
    works_s = [between_s(begin, end) for begin, end in zip(begins, ends, strict=True)]
    others_s = [between_s(end, begin) for end, begin in zip(ends, begins[1:], strict=False)]
    return works_s, [*others_s, 0.0]


def _receive(world: World, place: torch.Tensor) -> Any:
    return world.start_exchange([], [Message(place, world.rank ^ 1)])[1][0]


def _computes(passes: Passes, *, whole: bool) -> bool:
    """Whether it did. A rank that cannot goes on all the same, because its partner waits for it."""
    try:
        passes.forward()
        if whole:
            passes.backward()
    except Exception:
        return False
    return True


def _stand_in(device: torch.device) -> Work:
    width = _STAND_IN_ON_GPU if device.type == "cuda" else _STAND_IN
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = nn.Linear(width, width, device=device, dtype=dtype)
    rows = torch.randn(width, width, device=device, dtype=dtype)
    return Work(run=lambda: layer(rows), leaves=(), parameters=tuple(layer.parameters()), device=device)
