"""Time a forward and a backward pass: medians after a warm-up, by CUDA events on a GPU.

On a GPU the two passes may run as CUDA graphs, as slots do in a step. Where gradients are reduced over ranks, the copy
of each parameter's gradient to its buffer is part of the backward pass then, as in a step.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from spindle.errors import PeerLostError
from spindle.measure.cache import Times
from spindle.measure.rank_sync import RankSync
from spindle.run import WeightPart, capture_input_part, capturing, compute_stream, own_workspaces, takes_gradient

_REPEATS = 3  # on a CPU
_GPU_WARM_UPS = 3
# Repetitions and limits of time: neighbours must overlap, and the clock drops under load within half a second.
_GPU_REPEATS, _GPU_MIN_S, _GPU_MAX_S = 50, 0.05, 0.4
_GPU_MIN_REPEATS, _GPU_MAX_REPEATS = 10, 2000
_LAUNCH_REPEATS = 7


Cut = tuple[list[Any], list[Any]]  # the input leaves of an autograd graph, and its outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to time.

    `run()` is a forward pass; its backward computes gradients of leaves and parameters, and with `copies_gradients`
    copies them to buffers. `pieces()` is the same forward with an autograd graph for each layer; the first of them has
    `leaves` as inputs.
    """

    run: Callable[[], Any]
    leaves: tuple[torch.Tensor, ...]
    parameters: tuple[nn.Parameter, ...]
    device: torch.device
    is_graphed: bool = False
    copies_gradients: bool = True
    pieces: Callable[[], list[Cut]] | None = None


def time_passes(work: Work, rank_sync: RankSync, num_busy: int | None = None) -> Times | Exception:
    """Seconds of both passes and of their launches, as medians over the ranks that measure; or the error on one of
    them.

    With `num_busy`, only this many ranks work while the others wait.
    """
    failure: Exception | None = None
    passes: Passes | None = None
    once_s, seconds = math.nan, (math.nan,) * len(Times._fields)
    try:
        passes = warm_up(work)
        once_s = sum(medians(passes, 1, work.device)) if work.device.type == "cuda" else 0.0
    except Exception as error:
        failure = error
    # ranks agree on the number of repeats, so that all of them are busy all the time
    gathered = [row[0] for row in rank_sync.all_gather(once_s)]
    num_busy = num_busy or rank_sync.size
    if not any(map(math.isnan, gathered)) and passes is not None:
        try:
            if rank_sync.rank < num_busy:
                seconds = medians(passes, _num_repeats(max(gathered), work.device), work.device)
                is_eager = work.device.type == "cuda" and isinstance(passes, _Eager)
                seconds += _launch_medians(passes, work.device) if is_eager else (0.0, 0.0)
        except Exception as error:
            failure = error
    passes = None  # frees its graphs
    if work.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of a graph cannot be reused by the next one
    rows = rank_sync.all_gather(*seconds)[:num_busy]
    if failure is not None:
        return failure
    if any(math.isnan(row[0]) for row in rows):
        return PeerLostError("another rank could not run it")
    return Times(*(statistics.median(column) for column in zip(*rows, strict=True)))


def _num_repeats(once_s: float, device: torch.device) -> int:
    if device.type != "cuda":
        return _REPEATS
    busy_s = min(_GPU_MAX_S, max(_GPU_MIN_S, _GPU_REPEATS * once_s))
    return max(_GPU_MIN_REPEATS, min(_GPU_MAX_REPEATS, math.ceil(busy_s / max(once_s, 1e-6))))


def warm_up(work: Work, stream: torch.cuda.Stream | None = None) -> Passes:
    """Warm up some work, and return its passes: as CUDA graphs if the work asks for them and they can be captured; on
    the SMs of a stream if one is given."""
    passes = _Eager(work)
    if work.device.type != "cuda":
        return passes
    # work must have run on a stream before the stream captures it
    if stream is None:
        stream = compute_stream() if work.is_graphed else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_GPU_WARM_UPS):
            passes.forward()
            passes.backward()
    torch.cuda.current_stream().wait_stream(stream)
    if not work.is_graphed:
        return passes
    try:
        graphed = Graphed(passes, stream)
        graphed.forward()
        graphed.backward()
        return graphed
    except Exception:  # for example code that synchronizes; the runtime runs it eagerly, too
        torch.cuda.synchronize()
        return passes


@dataclass(slots=True)
class _Eager:
    work: Work
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)  # gradients of the outputs
    buffers: list[torch.Tensor] = field(default_factory=list)  # buffers for gradients of parameters

    def __post_init__(self) -> None:
        self.forward()
        # not zeros: multiplying zeros draws less power, so the GPU would run faster
        self.gradients = [torch.randn_like(output) for output in self.outputs]
        if self.work.is_graphed and self.work.copies_gradients:
            self.buffers = [torch.empty_like(parameter) for parameter in self.work.parameters]
        self.backward()

    def forward(self) -> None:
        self.outputs = [leaf for leaf in tree_leaves(self.work.run()) if takes_gradient(leaf)]

    def backward(self) -> None:
        inputs = (*self.work.leaves, *self.work.parameters)
        outputs, self.outputs = self.outputs, []
        if not outputs or not inputs:
            return
        gradients = torch.autograd.grad(outputs, inputs, self.gradients, allow_unused=True)
        for buffer, gradient in zip(self.buffers, gradients[len(self.work.leaves) :], strict=False):
            if gradient is not None:
                buffer.copy_(gradient)
        if not self.work.is_graphed:
            # In a step, gradients are accumulated, which copies those that do not have the layout of their tensor.
            for tensor, gradient in zip(inputs, gradients, strict=True):
                if gradient is not None and gradient.stride() != tensor.stride():
                    torch.empty_like(tensor).copy_(gradient)


class Graphed:
    def __init__(self, passes: _Eager, stream: torch.cuda.Stream) -> None:
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.buffers = passes.buffers
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Graphs captured on one stream share cuBLAS' workspace. If copies that are replayed at the same time both
            # used it, kernels that count finished blocks in it could wait forever. The generator is for layers that
            # draw random numbers, which are captured in a step, too.
            generator = torch.Generator(device="cuda")
            with own_workspaces(), capturing(self._forward, torch.cuda.graph_pool_handle(), generator):
                passes.forward()
            self._has_backward = bool(passes.outputs)
            if self._has_backward:
                # With a pool of its own: in that of forward, it would overwrite what forward saved. Replayed again
                # without a forward, it would read arbitrary bytes as the indices of an embedding or of a loss.
                with own_workspaces(), capturing(self._backward, torch.cuda.graph_pool_handle()):
                    passes.backward()
        torch.cuda.current_stream().wait_stream(stream)

    def forward(self) -> None:
        self._forward.replay()

    def backward(self) -> None:
        if self._has_backward:
            self._backward.replay()


Passes = _Eager | Graphed


def split_backward_of(work: Work) -> SplitGraphed | None:
    """The backward pass of some work that has run before, split in two CUDA graphs. None if it cannot be split."""
    if work.pieces is None:
        return None
    try:
        return SplitGraphed(work, compute_stream())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # as in `warm_up`
        torch.cuda.synchronize()
        cause = error.__context__ or error
        warnings.warn(
            f"weight gradients stay on the lane of input gradients, because they could not be measured separately: "
            f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def input_parts(
    pieces: Sequence[Cut], gradients: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> list[WeightPart]:
    """Run the input gradients of pieces, last one first. Returns the parts that compute the weight gradients.

    A first piece whose inputs need no gradient is left out if there are others, because most layers of its op are like
    those.
    """
    parts = []
    for number in reversed(range(len(pieces))):
        inputs, outputs = pieces[number]
        wanted = [leaf for leaf in (inputs if number else leaves) if takes_gradient(leaf)]
        if wanted or number or len(pieces) == 1:
            parts.append(capture_input_part(outputs, gradients, wanted))
        gradients = [leaf.grad if takes_gradient(leaf) else None for leaf in inputs]
    return parts


class SplitGraphed:
    """Both parts of a split backward pass as CUDA graphs, as slots with a weight lane have them."""

    def __init__(self, work: Work, stream: torch.cuda.Stream) -> None:
        assert work.pieces is not None
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        forward, inputs, weights = self._graphs
        pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with own_workspaces(), capturing(forward, pool, torch.Generator(device="cuda")):
                pieces = work.pieces()
            outputs = pieces[-1][1]
            gradients = [torch.randn_like(leaf) if takes_gradient(leaf) else None for leaf in outputs]
            with own_workspaces(), capturing(inputs, pool):
                self._parts = input_parts(pieces, gradients, work.leaves)
            with own_workspaces(), capturing(weights, torch.cuda.graph_pool_handle()):
                self._computed = [part.gradients(work.parameters) for part in self._parts]
        self._read = pieces, gradients  # by number of replays
        torch.cuda.current_stream().wait_stream(stream)
        for graph in self._graphs:
            graph.replay()

    def inputs(self) -> None:
        self._graphs[1].replay()

    def weights(self) -> None:
        self._graphs[2].replay()


def medians(passes: Passes, num_repeats: int, device: torch.device) -> tuple[float, float]:
    """Forward and backward seconds, as medians over the second half of the repeats. Nothing waits between repeats, so
    the device is never idle."""
    marks = []
    for _ in range(num_repeats):
        begin = timestamp(device)
        passes.forward()
        middle = timestamp(device)
        passes.backward()
        marks.append((begin, middle, timestamp(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        marks = marks[num_repeats // 2 :]
    return (
        statistics.median(elapsed_s(begin, middle) for begin, middle, _ in marks),
        statistics.median(elapsed_s(middle, end) for _, middle, end in marks),
    )


def _launch_medians(passes: Passes, device: torch.device) -> tuple[float, float]:
    """Host seconds to launch the forward and the backward pass. The device is idle before each repeat, because launches
    block while its queue is full."""
    forward_s, backward_s = [], []
    for _ in range(_LAUNCH_REPEATS):
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        passes.forward()
        middle_s = time.perf_counter()
        passes.backward()
        forward_s.append(middle_s - begin_s)
        backward_s.append(time.perf_counter() - middle_s)
    return statistics.median(forward_s), statistics.median(backward_s)


def timestamp(device: torch.device) -> Any:
    """The current time: of the host clock, or on a GPU an event of the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed_s(begin: Any, end: Any) -> float:
    """Seconds between two timestamps, which a GPU must have reached."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


def median_s(repeat: Callable[[], object], times: int, device: torch.device) -> float:
    """The median seconds of back-to-back repeats, after a warm-up."""
    repeat()
    marks = [timestamp(device)]
    for _ in range(times):
        repeat()
        marks.append(timestamp(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(elapsed_s(begin, end) for begin, end in pairwise(marks))
