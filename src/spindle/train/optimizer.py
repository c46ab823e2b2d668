"""The user's optimizer over what one rank holds: made, stepped with all that belongs to it, carried to another plan.

Gradients are clipped by their norm over all ranks before the step; the schedule moves on after it. Where a rank updates
a slice of a parameter, its optimizer knows that slice as a parameter.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spindle.errors import TrainingError
from spindle.program import Sharding
from spindle.run import World
from spindle.train.optimizer_reshard import LRSchedulerState, OptimizerState, on_host, reshard_state

Named = tuple[str, nn.Parameter]
MakeOptimizer = Callable[[list[Named]], torch.optim.Optimizer]
MakeLRScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Update:
    """A rank's part of the optimizer's step."""

    def __init__(
        self,
        make: MakeOptimizer,
        make_scheduler: MakeLRScheduler | None,
        max_grad_norm: float | None,
        named: Sequence[Named],
        counted: Sequence[nn.Parameter],
        sharding: Sharding,
        ranks: tuple[int, ...],
        world: World,
        state: OptimizerState | None,
    ) -> None:
        """`named` are the parameters that this rank trains, `counted` those whose gradients it counts for all `ranks`
        that hold any, and `sharding` what every rank trains of each. `state` is what an earlier plan's left."""
        self._max_grad_norm, self._named, self._counted, self._world = max_grad_norm, list(named), counted, world
        self.sharding, self._ranks = sharding, ranks
        self._copied: torch.cuda.Event | None = None  # of parameters and state, for a checkpoint
        if max_grad_norm is not None and len(ranks) > 1:
            world.group("norm", ranks)
        self.optimizer = optimizer_of(make, named)
        self.scheduler = None
        state = OptimizerState() if state is None else reshard_state(world, state, sharding)
        self._num_steps = state.num_steps
        if self.optimizer is not None and make_scheduler is not None:
            self.scheduler = scheduler_of(make_scheduler, self.optimizer, state.num_steps)
            saved = state.lr_scheduler
            if saved is not None and saved.groups in (None, self._groups()):  # other groups have other rates
                self.scheduler.load_state_dict(dict(saved.state))
        if self.optimizer is not None and (state.settings or state.old_settings):
            self._load(self.optimizer, state)
        # Frozen parameters keep their state for when they are trained again.
        settings = {**state.old_settings, **state.settings}
        self._frozen = OptimizerState(
            sharding={name: slices for name, slices in state.sharding.items() if name not in sharding},
            states={name: values for name, values in state.states.items() if name not in sharding},
            old_settings={name: group for name, group in settings.items() if name not in sharding},
        )

    def wait_for(self, copied: torch.cuda.Event | None) -> None:
        """Have the next step wait until what it overwrites is copied."""
        self._copied = copied

    def settle_copies(self) -> None:
        """Wait for such a copy, before parameters and state move."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def step(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self._num_steps += 1

    def step_scheduler(self, metric: float) -> None:
        """Step a scheduler that takes a metric."""
        if self.scheduler is None and self.optimizer is None:
            return  # this rank trains no parameters
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            raise TrainingError(
                "step_lr_scheduler(): Trainer(lr_scheduler=...) made no ReduceLROnPlateau; other schedulers step by "
                "themselves after every step"
            )
        self.scheduler.step(metric)

    def _clip(self, limit: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` in one process: every parameter counts once, whoever holds it."""
        if self._world.rank not in self._ranks:
            return
        gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        square = get_total_norm(gradients).to(self._world.device, torch.float64).square().reshape(1)
        self._world.all_reduce(square, "norm", self._ranks)
        clip_grads_with_norm_([parameter for _, parameter in self._named], limit, square.sqrt().reshape(()))

    def _load(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        names = {id(parameter): name for name, parameter in self._named}
        loaded = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        loaded["state"] = {
            index: dict(state.states[names[id(parameter)]])
            for index, parameter in enumerate(parameters)
            if names[id(parameter)] in state.states
        }
        for group, entry in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
            members = [names[id(parameter)] for parameter in group["params"]]
            # Settings of a parameter that was frozen are from before; a scheduler has set the present ones.
            known = [state.settings[name] for name in members if name in state.settings]
            if self.scheduler is None:
                known += [state.old_settings[name] for name in members if name in state.old_settings]
            for key, value in known[0].items() if known else ():
                is_tensor = isinstance(entry.get(key), torch.Tensor)
                entry[key] = torch.full_like(entry[key], value) if is_tensor else value
        optimizer.load_state_dict(loaded)

    def state(self, *, to_host: bool = False) -> OptimizerState:
        """This rank's share of the state, for the optimizer of another plan."""
        values = self.optimizer.state if self.optimizer is not None else {}
        states = {name: values[parameter] for name, parameter in self._named if parameter in values}
        scheduler = self.scheduler
        return OptimizerState(
            num_steps=self._num_steps,
            sharding={**self._frozen.sharding, **self.sharding},
            states=dict(self._frozen.states)
            | {name: on_host(state) if to_host else state for name, state in states.items()},
            settings=self._settings(),
            old_settings=self._frozen.old_settings,
            lr_scheduler=None if scheduler is None else LRSchedulerState(self._groups(), scheduler.state_dict()),
        )

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each group."""
        names = {id(parameter): name for name, parameter in self._named}
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return tuple(tuple(names[id(parameter)] for parameter in group["params"]) for group in groups)

    def group_settings(self) -> dict[str, dict[str, Any]]:
        """The optimizer's class and what groups say of the parameters that this rank trains, by name."""
        return {} if self.optimizer is None else group_settings(self.optimizer, self._named)

    def _settings(self) -> dict[str, dict[str, Any]]:
        """What groups say of the parameters that this rank counts; numbers in tensors (a learning rate) as numbers."""
        names = {id(parameter): name for name, parameter in self._named}
        counted = {id(parameter) for parameter in self._counted}
        return {
            names[id(parameter)]: {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in settings_of(group).items()
            }
            for group in (self.optimizer.param_groups if self.optimizer is not None else ())
            for parameter in group["params"]
            if id(parameter) in counted
        }


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of all its parameters; which ones these are differs from rank to rank."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def group_settings(optimizer: torch.optim.Optimizer, named: Sequence[Named]) -> dict[str, dict[str, Any]]:
    """The class of an optimizer and what its groups say, by the names of their parameters; those of a group share one
    dict."""
    names = {id(parameter): name for name, parameter in named}
    settings: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        shared = {**settings_of(group), "optimizer": type(optimizer)}
        settings |= {names[id(parameter)]: shared for parameter in group["params"]}
    return settings


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


def scheduler_of(
    make: MakeLRScheduler, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The user's scheduler of an optimizer, after so many steps."""
    scheduler = make(optimizer)
    if not hasattr(scheduler, "step"):
        raise TrainingError(f"Trainer(lr_scheduler=...) must return a scheduler, got {type(scheduler).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        return scheduler  # which steps with a metric
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer stepped before: another one did
        for _ in range(num_steps):
            scheduler.step()
    return scheduler
