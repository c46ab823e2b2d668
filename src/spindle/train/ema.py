"""An exponential moving average (EMA) of the weights: each rank averages what it updates, so it is sharded like the
optimizer's state, and is resharded and saved with it.

As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, updated after every step: the average
starts with the weights after the first step. Averages of 16-bit weights are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spindle.program import Slice
from spindle.run import TensorSpec, World, reshard
from spindle.train.optimizer_reshard import OptimizerState, State

AVERAGE, AVERAGED_STEPS = "spindle.ema", "spindle.ema_steps"  # entries in a parameter's optimizer state


class WeightAverage:
    """The moving averages of the parameters that this rank updates."""

    def __init__(
        self, decay: float, named: Sequence[tuple[str, nn.Parameter]], states: Mapping[str, State], num_steps: int
    ) -> None:
        """`states` are the averages from an earlier plan; `num_steps` steps have run."""
        self._decay, self._named = decay, list(named)
        self._averages: list[torch.Tensor] = []
        for name, parameter in self._named if num_steps else ():
            state = states.get(name, {})
            average = state.get(AVERAGE) if AVERAGED_STEPS in state else None
            if average is None:  # It was frozen, or no task used it, so it has not changed meanwhile.
                average = _as_average(parameter)
            else:
                average = average.to(parameter.device)
                move_towards(average, parameter, decay, num_steps - state[AVERAGED_STEPS])
            self._averages.append(average)

    def update(self) -> None:
        """Add the weights after another step to the averages."""
        parameters = [_as_average(parameter, copies=False) for _, parameter in self._named]
        if not self._averages:
            self._averages = [parameter.clone() for parameter in parameters]
        else:
            torch._foreach_lerp_(self._averages, parameters, 1 - self._decay)

    def states(self, num_steps: int) -> dict[str, dict[str, Any]]:
        """The entries that a checkpoint keeps in the optimizer state of each parameter, after `num_steps` steps."""
        names = [name for name, _ in self._named] if self._averages else []
        return {
            name: {AVERAGE: average, AVERAGED_STEPS: num_steps}
            for name, average in zip(names, self._averages, strict=True)
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._averages


def without_average(state: State) -> dict[str, Any]:
    """A parameter's optimizer state without its average."""
    return {key: value for key, value in state.items() if key not in (AVERAGE, AVERAGED_STEPS)}


def move_towards(average: torch.Tensor, parameter: torch.Tensor, decay: float, num_steps: int) -> None:
    """Update the average of a parameter for steps in which it did not change."""
    if num_steps:
        average.lerp_(parameter.detach().to(average), 1 - decay**num_steps)


def _as_average(parameter: torch.Tensor, *, copies: bool = True) -> torch.Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=copies)


@contextmanager
def averaged_weights(
    world: World, state: OptimizerState, parameters: Mapping[str, nn.Parameter], decay: float
) -> Iterator[None]:
    """A context in which parameters hold their averages. Every rank must hold all `parameters`, and its share of the
    optimizer state. All ranks must call this."""
    weights = {name: parameters[name].data for name in parameters}
    try:
        for name, average, num_steps in _gather_averages(world, state, parameters):
            move_towards(average, weights[name], decay, num_steps)
            parameters[name].data = average.to(weights[name])
        yield
    finally:
        for name, weight in weights.items():
            parameters[name].data = weight


def _gather_averages(
    world: World, state: OptimizerState, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """The whole average of each parameter that has one, and the number of steps for which it was not updated."""
    own_slices = {
        name: (values[AVERAGE].dtype, values[AVERAGED_STEPS])
        for name, values in state.states.items()
        if AVERAGE in values and name in parameters
    }
    tables = world.broadcast_object(world.gather_objects((own_slices, state.num_steps)))
    last_step = max(num_steps for _, num_steps in tables)
    described = {name: entry for table, _ in tables for name, entry in table.items()}
    old = {
        name: {rank: part for rank, part in state.sharding[name].items() if name in tables[rank][0]}
        for name in described
    }
    wholes = {name: Slice.whole(parameters[name].shape) for name in described}
    everywhere = {name: dict.fromkeys(range(world.size), whole) for name, whole in wholes.items()}
    tensors = {name: state.states[name][AVERAGE].to(world.device) for name in own_slices}
    specs = {name: TensorSpec(dtype, world.device) for name, (dtype, _) in described.items()}
    for name, average in reshard(world, old, everywhere, tensors, specs):
        assert average is not None
        if name in tensors and average is tensors[name]:  # a copy, because training continues to change it
            average = average.clone()
        yield name, average, last_step - described[name][1]
