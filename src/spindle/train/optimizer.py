"""The user's optimizer over what one rank holds: made, stepped with all that belongs to it, carried to another plan.

Gradients are clipped by their norm over all ranks before the step; the schedule moves on after it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spindle.errors import TrainingError
from spindle.run import World
from spindle.run.weights import Shard

Named = tuple[str, nn.Parameter]
MakeOptimizer = Callable[[list[Named]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateState:
    """What an optimizer keeps, by the name of the parameter: it does not depend on who holds what."""

    num_steps: int = 0
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the parameter's group


class Update:
    """A rank's part of the optimizer's step."""

    def __init__(
        self,
        make: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        clip_norm: float | None,
        named: Sequence[Named],
        counted: Sequence[nn.Parameter],
        ranks: tuple[int, ...],
        world: World,
        state: UpdateState,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        """`named` are the parameters that this rank trains, `counted` those whose gradients it counts for all `ranks`
        that hold any; `shards` what it has of those that a tensor group splits."""
        self._shards = shards or {}
        self._clip_norm, self._named, self._counted, self._world = clip_norm, list(named), counted, world
        self._ranks = ranks
        if clip_norm is not None and len(ranks) > 1:
            world.group("norm", ranks)
        self.optimizer = optimizer_of(make, named)
        if self._shards and isinstance(self.optimizer, (torch.optim.Adafactor, torch.optim.Muon)):
            raise TrainingError(
                f"{type(self.optimizer).__name__} updates all entries of a parameter together, but tensor groups split "
                f"{next(iter(self._shards))!r} and others; use another optimizer, or tensor degree 1 "
                "(Trainer(tensor_degrees={...: 1}))"
            )
        self.scheduler = None
        self._num_steps, self._parked = state.num_steps, state
        if self.optimizer is not None and make_scheduler is not None:
            self.scheduler = _scheduler_of(make_scheduler, self.optimizer, state.num_steps)
        if self.optimizer is not None and state.settings:
            self._take(self.optimizer, state)

    def step(self) -> None:
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._num_steps += 1

    def _clip(self, limit: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` in one process: every parameter counts once, whoever holds it."""
        gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        square = get_total_norm(gradients).to(self._world.device, torch.float64).square().reshape(1)
        self._world.add_up(square, "norm", self._ranks)
        clip_grads_with_norm_([parameter for _, parameter in self._named], limit, square.sqrt().reshape(()))

    def _take(self, optimizer: torch.optim.Optimizer, state: UpdateState) -> None:
        names = {id(parameter): name for name, parameter in self._named}
        written = optimizer.state_dict()
        places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        written["state"] = {
            place: self._cut(names[id(parameter)], parameter, state.states[names[id(parameter)]])
            for place, parameter in enumerate(places)
            if names[id(parameter)] in state.states
        }
        for group, entry in zip(optimizer.param_groups, written["param_groups"], strict=True):
            known = [names[id(parameter)] for parameter in group["params"] if names[id(parameter)] in state.settings]
            if known:
                entry.update(state.settings[known[0]])
        optimizer.load_state_dict(written)

    def _cut(self, name: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state, as far as it belongs to what this rank has of the parameter."""
        shard = self._shards.get(name)
        return {
            key: shard.of(value) if shard is not None and _is_like(value, parameter) else value
            for key, value in state.items()
        }

    def gathered(self) -> UpdateState:
        """What the optimizers of all ranks keep, on all ranks, in the host's memory."""
        names = {id(parameter): name for name, parameter in self._named}
        counted = {id(parameter) for parameter in self._counted}
        states: dict[str, tuple[Shard | None, dict[str, Any]]] = {}
        settings = {}
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for parameter in group["params"]:
                if id(parameter) in counted:
                    name = names[id(parameter)]
                    settings[name] = {key: value for key, value in group.items() if key != "params"}
                    if self.optimizer is not None and parameter in self.optimizer.state:
                        states[name] = (self._shards.get(name), _on_host(self.optimizer.state[parameter]))
        parts = self._world.broadcast_object(self._world.gather_objects((states, settings)))
        # What is frozen now keeps what it had, for when it is thawed.
        every, each = dict(self._parked.states), dict(self._parked.settings)
        every.update(_joined([more for more, _ in parts]))
        for _, settled in parts:
            each.update(settled)
        return UpdateState(num_steps=self._num_steps, states=every, settings=each)


def optimizer_of(make: MakeOptimizer, named: Sequence[Named]) -> torch.optim.Optimizer | None:
    """The user's optimizer over what this rank holds and trains; none where that is nothing."""
    if not named:
        return None
    optimizer = make(list(named))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainingError(f"Trainer(optimizer=...) must return a torch optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise TrainingError(
            f"{type(optimizer).__name__} updates all parameters together, but each rank holds only some; use an "
            "optimizer that updates each parameter by itself (SGD, Adam, AdamW, ...)"
        )
    mine = {id(parameter) for _, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in mine:
                raise TrainingError(
                    "Trainer(optimizer=...) made an optimizer of parameters that were not given to it; use the "
                    "names and parameters of its argument: each rank holds only some"
                )
    return optimizer


def _scheduler_of(
    make: MakeScheduler, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    scheduler = make(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        raise TrainingError(
            f"Trainer(scheduler=...) must return a scheduler that is stepped without a measure, got "
            f"{type(scheduler).__name__}; set the groups' learning rates yourself in fit(on_step=...)"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer stepped before: another one did
        for _ in range(num_steps):
            scheduler.step()
    return scheduler


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a part of an optimizer's state has an entry for each of its parameter's."""
    return isinstance(value, torch.Tensor) and value.dim() == parameter.dim() > 0


def _joined(states: Sequence[Mapping[str, tuple[Shard | None, dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """States by parameter, from those of its shards."""
    found: dict[str, list[tuple[Shard | None, dict[str, Any]]]] = {}
    for one in states:
        for name, entry in one.items():
            found.setdefault(name, []).append(entry)
    joined = {}
    for name, entries in found.items():
        shard, state = entries[0]
        if shard is not None:
            parts = [part for _, part in sorted(entries, key=lambda entry: entry[0].place if entry[0] else 0)]
            state = {
                key: torch.cat([part[key] for part in parts], dim=shard.dim)
                if isinstance(value, torch.Tensor) and value.dim() > shard.dim
                else value
                for key, value in state.items()
            }
        joined[name] = state
    return joined


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
