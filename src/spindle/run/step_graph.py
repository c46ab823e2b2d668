"""Forward and backward of a whole step as one CUDA graph, for a rank that communicates with no other.

The step is captured without running: every lane is a branch of the graph, which forks where lanes begin and joins
after the last backward pass, and events between lanes become edges. Replaying it is one launch, and no lane waits for
the host between its slots. If weight gradients have lanes of their own, each instruction is a child graph
(`composed_graph`), because in a single capture they would stay on the lane of their slot.

What differs from step to step goes in through memory that the graph reads: batches, and the factors of the losses.
Losses, metrics and gradients are where they were captured. The optimizer's step is not part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spindle.errors import TrainingError
from spindle.run.composed_graph import ComposedGraph
from spindle.run.gradients import Gradients
from spindle.run.step import Step, StepTimer


class StepGraph:
    """The graph of one step, for batches of one set of shapes. `losses` are its slots that compute losses."""

    def __init__(self, losses: Sequence[int], device: torch.device) -> None:
        self._device = device
        # Factors of the losses' gradients. They are not in the graph's pool, whose memory each replay overwrites.
        self._factors = {slot: torch.zeros((), dtype=torch.float64, device=device) for slot in losses}
        self._values: dict[int, float] = {}  # values of the factors
        self._graph: torch.cuda.CUDAGraph | ComposedGraph | None = None
        self._timer: StepTimer | None = None  # its events are nodes of the graph
        self._losses: dict[int, torch.Tensor] = {}
        self._metrics: dict[int, torch.Tensor] = {}
        self._last: StepTimer | None = None  # the timer of a timed step, whose events the next replay records anew

    def loss_gradient(self, slot: int, loss: torch.Tensor) -> torch.Tensor:
        """The gradient with which a loss's backward starts, inside the graph."""
        return self._factors[slot].to(loss.dtype).expand_as(loss)

    def set_factors(self, factors: Mapping[int, float], loss_scale: torch.Tensor | None) -> None:
        """Set the gradients with which losses start, by slot, for the next replay."""
        for slot, factor in factors.items():
            if loss_scale is not None:
                self._factors[slot].copy_(loss_scale).mul_(factor)
            elif self._values.get(slot) != factor:
                self._factors[slot].fill_(factor)
        self._values = dict(factors) if loss_scale is None else {}

    def capture(self, run: Callable[[StepTimer], Step], capturing: Callable[[torch.cuda.CUDAGraph], Any]) -> None:
        """Capture what `run` launches. `run` returns the captured step, whose losses and metrics are kept."""
        graph, timer = torch.cuda.CUDAGraph(), StepTimer(self._device, in_graph=True)
        with capturing(graph):
            captured = run(timer)
        self._keep(graph, timer, captured)

    def compose(self, run: Callable[[StepTimer], Step], capturing: Callable[[ComposedGraph], Any]) -> None:
        """Like `capture`, with a child graph for each instruction that `run` launches inside `capturing`."""
        graph, timer = ComposedGraph(), StepTimer(self._device, in_graph=True)
        with capturing(graph):
            captured = run(timer)
        graph.instantiate()
        self._keep(graph, timer, captured)

    def _keep(self, graph: torch.cuda.CUDAGraph | ComposedGraph, timer: StepTimer, captured: Step) -> None:
        self._graph, self._timer = graph, timer
        self._losses = {slot: loss.detach() for slot, loss in captured.losses.items()}
        self._metrics = {slot: metrics.detach() for slot, metrics in captured.metrics.items()}

    def replay(self, step: Step, timer: StepTimer) -> None:
        """Run the step."""
        if self._graph is None or self._timer is None:
            raise TrainingError("this step has not been captured")
        if self._last is not None:
            self._last.read_events()
            self._last = None
        self._graph.replay()
        step.losses.update(self._losses)
        step.metrics.update(self._metrics)
        if timer.take_events(self._timer):
            self._last = timer


def accumulate(written: Sequence[nn.Parameter], before: Mapping[int, torch.Tensor], gradients: Gradients) -> None:
    """Set the gradients of parameters that a graph has written, and add those of earlier micro-steps, by parameter."""
    for parameter in written:
        buffer = gradients.grad_buffer(parameter)
        if id(parameter) in before:
            buffer += before[id(parameter)]
        parameter.grad = buffer
