"""How much layers that run at the same time on one device slow each other down: pressure and fill, measured on copies.

Copies of a layer have their own weights, so that they do not share cache lines. Each is a CUDA graph on its own stream,
so that the result does not depend on how fast the host launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from spindle.measure.timing import Graphed, SplitGraphed, Work, elapsed_s, split_backward_of, timestamp, warm_up
from spindle.profile import Contention

NUM_COPIES = 4
# Pressure of a layer that cannot share a device: two copies take twice as long.
NO_SHARING = Contention(forward=(1.0, 1.0), backward=(1.0, 1.0))
_MIN_TIMING_S = 0.02  # the least duration of each timing
_MIN_REPEATS, _MAX_REPEATS = 5, 200
_MIN_FILL = 0.05  # a smaller fill cannot be distinguished from a launch


def measure_contention(works: Sequence[Work], *, splits: bool = False) -> tuple[Contention, float | None]:
    """Pressure and fill of the forward and backward of a layer, measured with copies of it. With `splits`, also of both
    parts of a split backward, and the share of the time that its weight gradients take."""
    share = None
    if not all(work.is_graphed for work in works):
        return NO_SHARING, share
    try:
        contention = _contention(works)
        if splits and contention is not NO_SHARING:
            contention, share = _split_contention(works, contention)
    except torch.OutOfMemoryError:  # such copies would not run at the same time in training, either
        contention = NO_SHARING
    torch.cuda.empty_cache()
    return contention, share


def _split_contention(works: Sequence[Work], contention: Contention) -> tuple[Contention, float | None]:
    """The contention including that of both parts of a split backward, and the share of weight gradients in its
    time."""
    copies = [split_backward_of(work) for work in works]
    graphed = [passes for passes in copies if isinstance(passes, SplitGraphed)]
    if len(graphed) < len(copies):
        return contention, None
    inputs, weights = [passes.inputs for passes in graphed], [passes.weights for passes in graphed]
    inputs_s, weights_s = _alone_s(inputs[0]), _alone_s(weights[0])
    if inputs_s + weights_s <= 0:
        return contention, None
    return replace(contention, inputs=_pressure_and_fill(inputs), weights=_pressure_and_fill(weights)), weights_s / (
        inputs_s + weights_s
    )


def _alone_s(replay: Callable[[], None]) -> float:
    streams = [torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    once_s = max(_concurrent_s([replay], streams, _MIN_REPEATS), 1e-6)
    return _concurrent_s([replay], streams, min(_MAX_REPEATS, max(_MIN_REPEATS, round(_MIN_TIMING_S / once_s))))


def _contention(works: Sequence[Work]) -> Contention:
    copies = [warm_up(work) for work in works]
    graphed = [passes for passes in copies if isinstance(passes, Graphed)]
    if len(graphed) < len(copies):
        return NO_SHARING
    return Contention(
        forward=_pressure_and_fill([passes.forward for passes in graphed]),
        backward=_pressure_and_fill([passes.backward for passes in graphed]),
    )


def _pressure_and_fill(replays: Sequence[Callable[[], None]]) -> tuple[float, float]:
    """Pressure: the slowdown of two copies at a time, minus one. Fill: the time of all copies at once, relative to one
    after another."""
    streams = [torch.cuda.Stream() for _ in replays]  # type: ignore[no-untyped-call]
    once_s = max(_concurrent_s(replays[:1], streams, _MIN_REPEATS), 1e-6)
    num_repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, round(_MIN_TIMING_S / once_s)))
    alone_s, pair_s, all_s = (_concurrent_s(replays[:count], streams, num_repeats) for count in (1, 2, len(replays)))
    if alone_s <= 0:
        return 0.0, _MIN_FILL
    fill = all_s / (len(replays) * alone_s)
    return max(0.0, pair_s / alone_s - 1), min(1.0, max(_MIN_FILL, fill))


def slowdown_of_pair(replays: Sequence[Callable[[], None]], streams: Sequence[torch.cuda.Stream]) -> float:
    """The slowdown of two replays at a time, each on its own stream, minus one."""
    once_s = max(_concurrent_s(replays[:1], streams, _MIN_REPEATS), 1e-6)
    num_repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, round(_MIN_TIMING_S / once_s)))
    alone_s = max(
        _concurrent_s([replay], [stream], num_repeats) for replay, stream in zip(replays, streams, strict=True)
    )
    return max(0.0, _concurrent_s(replays, streams, num_repeats) / alone_s - 1) if alone_s > 0 else 0.0


def _concurrent_s(
    replays: Sequence[Callable[[], None]], streams: Sequence[torch.cuda.Stream], num_repeats: int
) -> float:
    """Seconds of one repeat in which each replay runs on its own stream."""
    current = torch.cuda.current_stream()
    begin = timestamp(current.device)
    for stream in streams:
        stream.wait_stream(current)
    for _ in range(num_repeats):
        for replay, stream in zip(replays, streams, strict=False):
            with torch.cuda.stream(stream):
                replay()
    for stream in streams:
        current.wait_stream(stream)
    end = timestamp(current.device)
    torch.cuda.synchronize()
    return elapsed_s(begin, end) / num_repeats
