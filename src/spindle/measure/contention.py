"""How much layers that run at the same time on one device slow each other down: pressure and fill, measured on copies.

Copies of a layer have their own weights, so that they do not share cache lines. Each is a CUDA graph on its own stream,
so that the result does not depend on how fast the host launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spindle.measure.timing import Graphed, Work, between_s, mark, warmed
from spindle.profile import Contention

NUM_COPIES = 4
ALONE = Contention(forward=(1.0, 1.0), backward=(1.0, 1.0))  # of a layer that cannot share: two take twice as long
_BUSY_S = 0.02  # of each timing
_MIN_REPEATS, _MAX_REPEATS = 5, 200
_LEAST_FILL = 0.05  # less cannot be distinguished from a launch


def measure_contention(works: Sequence[Work]) -> Contention:
    """Pressure and fill of the forward and the backward of a layer, given copies of it."""
    try:
        contention = _contention(works)
    except torch.OutOfMemoryError:  # such copies do not run together in training, either
        contention = ALONE
    torch.cuda.empty_cache()
    return contention


def _contention(works: Sequence[Work]) -> Contention:
    copies = [warmed(work) for work in works]
    graphed = [passes for passes in copies if isinstance(passes, Graphed)]
    if len(graphed) < len(copies):
        return ALONE
    return Contention(
        forward=_shares([passes.forward for passes in graphed]),
        backward=_shares([passes.backward for passes in graphed]),
    )


def _shares(replays: Sequence[Callable[[], None]]) -> tuple[float, float]:
    """Pressure: the slowdown, minus one, of two at a time. Fill: all at a time, over one after another."""
    streams = [torch.cuda.Stream() for _ in replays]  # type: ignore[no-untyped-call]
    once_s = max(_together_s(replays[:1], streams, _MIN_REPEATS), 1e-6)
    num_repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, round(_BUSY_S / once_s)))
    alone_s, pair_s, all_s = (_together_s(replays[:count], streams, num_repeats) for count in (1, 2, len(replays)))
    if alone_s <= 0:
        return 0.0, _LEAST_FILL
    fill = all_s / (len(replays) * alone_s)
    return max(0.0, pair_s / alone_s - 1), min(1.0, max(_LEAST_FILL, fill))


def _together_s(replays: Sequence[Callable[[], None]], streams: Sequence[torch.cuda.Stream], num_repeats: int) -> float:
    """Seconds of one repeat, with each replay on its own stream."""
    here = torch.cuda.current_stream()
    begin = mark(here.device)
    for stream in streams:
        stream.wait_stream(here)
    for _ in range(num_repeats):
        for replay, stream in zip(replays, streams, strict=False):
            with torch.cuda.stream(stream):
                replay()
    for stream in streams:
        here.wait_stream(stream)
    end = mark(here.device)
    torch.cuda.synchronize()
    return between_s(begin, end) / num_repeats
