"""The code of an op as the executor runs it: made by `train` from tasks and modules, which `run` does not know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spindle.models import StyledModule
from spindle.run.items import ItemCode
from spindle.run.pytrees import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCode:
    """One layer. `run(*values)` returns its outputs, a tuple whose leaves have these batch dimensions.

    `writes_input` says whether it changes its input in place, `is_random` whether it draws random numbers. `buffers()`
    are the tensors that it may change besides its outputs (running statistics). `styled` are its tensor-parallel
    submodules. Layers with equal `likeness`, if they have one, return equal shapes for equal input shapes. `compiled`
    does the same with its modules compiled; it is not for tensors without values.
    """

    run: Callable[..., tuple[Any, ...]]
    axes: Axes
    parameters: tuple[nn.Parameter, ...] = ()
    buffers: Callable[[], list[torch.Tensor]] = list
    writes_input: bool = False
    is_random: bool = False
    styled: tuple[StyledModule, ...] = ()
    likeness: Any = None
    compiled: Callable[..., tuple[Any, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersCode:
    """Layers of a module.

    The first op of a call has `arguments(batch, *outputs)`, which computes its arguments from the batch and the outputs
    of the calls `sources`. Item calls, which may run in parts, have `items`.
    """

    layers: tuple[LayerCode, ...]
    arguments: Callable[..., Any] | None = None
    sources: tuple[str, ...] = ()
    reads_values: bool = False  # whether shapes in this task may differ between batches of equal shapes
    items: ItemCode | None = None

    @property
    def is_random(self) -> bool:
        return any(layer.is_random for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCode:
    """A loss of the outputs of `sources`: a value, or with `is_mean` a total and a count that are summed before
    dividing.

    With `metrics` (their names), `loss` also returns a tuple of their values. The weight of the loss in a step may be a
    function of the step's number.
    """

    loss: Callable[..., Any]
    sources: tuple[str, ...]
    weight: float | Callable[[int], float]
    is_mean: bool
    per_sample_mean: bool
    is_random: bool = False
    is_sum: bool = False  # whether the losses of parts of a batch add up without scaling
    reads_values: bool = False
    metrics: tuple[str, ...] = ()

    def run(self, batch: Any, *outputs: Any) -> tuple[Any, tuple[Any, ...]]:
        """The loss, and the values of the metrics."""
        returned = self.loss(batch, *outputs)
        return returned if self.metrics else (returned, ())


OpCode = LayersCode | LossCode
