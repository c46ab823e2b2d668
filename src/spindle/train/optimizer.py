"""The user's optimizer over what one rank holds: made, stepped with all that belongs to it, carried to another plan.

Gradients are clipped by their norm over all ranks before the step; the schedule moves on after it. Where a rank updates
a part of a parameter, its optimizer knows that part as a parameter; what goes to another plan is put together again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spindle.errors import TrainingError
from spindle.run import World
from spindle.train.optimizer_reshard import Described, Part, exchanged, joined, on_host, sizes_of

Named = tuple[str, nn.Parameter]
MakeOptimizer = Callable[[list[Named]], torch.optim.Optimizer]
MakeLRScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateState:
    """What an optimizer keeps, by the name of the parameter: `states`, which do not depend on who holds what, or
    `ready`, this rank's parts as they are to be. `kept` is what this rank has of parameters that nobody trains now."""

    num_steps: int = 0
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the parameter's group
    old_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of what nobody trains now
    lr_scheduler: Mapping[str, Any] | None = None  # its state_dict, of the first rank that has one
    ready: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kept: Mapping[str, tuple[Part, Mapping[str, Any]]] = field(default_factory=dict)


class Update:
    """A rank's part of the optimizer's step."""

    def __init__(
        self,
        make: MakeOptimizer,
        make_scheduler: MakeLRScheduler | None,
        max_grad_norm: float | None,
        named: Sequence[Named],
        counted: Sequence[nn.Parameter],
        parts: Mapping[str, Part],
        trained: Collection[str],
        ranks: tuple[int, ...],
        world: World,
        state: UpdateState,
    ) -> None:
        """`named` are the parameters that this rank trains, `counted` those whose gradients it counts for all `ranks`
        that hold any, `parts` what it has of each; `trained` are the names of what any rank trains."""
        self._parts = parts
        self._max_grad_norm, self._named, self._counted, self._world = max_grad_norm, list(named), counted, world
        self._ranks = ranks
        if max_grad_norm is not None and len(ranks) > 1:
            world.group("norm", ranks)
        self.optimizer = optimizer_of(make, named)
        self.scheduler = None
        self._num_steps = state.num_steps
        if self.optimizer is not None and make_scheduler is not None:
            self.scheduler = scheduler_of(make_scheduler, self.optimizer, state.num_steps)
            known = state.lr_scheduler
            if known is not None and len(known.get("_last_lr", ())) == len(self.optimizer.param_groups):
                self.scheduler.load_state_dict(dict(known))
        if self.optimizer is not None and (state.settings or state.old_settings):
            self._take(self.optimizer, state)
        # What is trained is the optimizers' matter from here on.
        left = {name: one for name, one in state.states.items() if name not in trained}
        settings = {**state.old_settings, **state.settings}
        old_settings = {name: one for name, one in settings.items() if name not in trained}
        self._parked = UpdateState(states=left, old_settings=old_settings, kept=state.kept)

    def step(self) -> None:
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._num_steps += 1

    def _clip(self, limit: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` in one process: every parameter counts once, whoever holds it."""
        gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        square = get_total_norm(gradients).to(self._world.device, torch.float64).square().reshape(1)
        self._world.all_reduce(square, "norm", self._ranks)
        clip_grads_with_norm_([parameter for _, parameter in self._named], limit, square.sqrt().reshape(()))

    def _take(self, optimizer: torch.optim.Optimizer, state: UpdateState) -> None:
        names = {id(parameter): name for name, parameter in self._named}
        written = optimizer.state_dict()
        places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        written["state"] = {}
        for place, parameter in enumerate(places):
            name = names[id(parameter)]
            if name in state.ready:
                written["state"][place] = dict(state.ready[name])
            elif name in state.states:
                written["state"][place] = self._parts[name].of(state.states[name])
        for group, entry in zip(optimizer.param_groups, written["param_groups"], strict=True):
            members = [names[id(parameter)] for parameter in group["params"]]
            # What was not trained for a while knows rates of that time; where there is a schedule, it has told its own.
            known = [state.settings[name] for name in members if name in state.settings]
            if self.scheduler is None:
                known += [state.old_settings[name] for name in members if name in state.old_settings]
            if known:
                entry.update(known[0])
        optimizer.load_state_dict(written)

    def gathered(self) -> UpdateState:
        """What the optimizers of all ranks keep, on all ranks, in the host's memory."""
        states = {name: (part, on_host(state)) for name, (part, state) in self._owned().items()}
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        mine = (states, self._settings(), self._num_steps, scheduler)
        table = self._world.broadcast_object(self._world.gather_objects(mine))
        # What is frozen now keeps what it had, for when it is thawed.
        every = dict(self._parked.states) | joined([row[0] for row in table])
        return UpdateState(
            num_steps=max(row[2] for row in table),  # a rank without a part in the plan has counted none
            states=every,
            settings={name: one for row in table for name, one in row[1].items()},
            old_settings=self._parked.old_settings,
            lr_scheduler=next((row[3] for row in table if row[3] is not None), None),
        )

    def handed_over(self, wanted: Mapping[str, Part]) -> UpdateState:
        """What this rank's next optimizer, over these parts of parameters, goes on with. All ranks ask; each gets what
        it does not have from one that does, and nothing travels that is not asked for."""
        world = self._world
        owned = self._owned(every_copy=True)
        mine = {name: (part, Described.of(part, state)) for name, (part, state) in owned.items()}
        table = world.broadcast_object(world.gather_objects((mine, dict(wanted), self._settings(), self._num_steps)))
        offers, wishes = [one[0] for one in table], [one[1] for one in table]
        asked = frozenset[str]().union(*wishes)
        # Where tensor groups have another size now, parts do not fit each other: the whole is put together first.
        held, meant = [{name: part for name, (part, _) in offer.items()} for offer in offers], wishes
        others = {name for name in asked if (sizes := sizes_of(held, name)) and sizes_of(meant, name) - sizes}
        counted = self._owned()
        whole = {name: (part, on_host(state)) for name, (part, state) in counted.items() if name in others}
        states = dict(self._parked.states)
        if others:
            states.update(joined(world.broadcast_object(world.gather_objects(whole))))
        ready = exchanged(world, offers, wishes, {name: state for name, (_, state) in owned.items()}, others)
        kept = {name: (part, on_host(state)) for name, (part, state) in counted.items() if name not in asked}
        return UpdateState(
            num_steps=max(one[3] for one in table),
            states=states,
            settings={name: one for _, _, settings, _ in table for name, one in settings.items()},
            old_settings=self._parked.old_settings,
            ready=ready,
            kept=kept,
        )

    def _owned(self, *, every_copy: bool = False) -> dict[str, tuple[Part, Mapping[str, Any]]]:
        """What this rank keeps; of copies that several keep, one rank's, or every one."""
        counted = {id(parameter) for parameter in self._counted}
        states = self.optimizer.state if self.optimizer is not None else {}
        return dict(self._parked.kept) | {
            name: (self._parts[name], states[parameter])
            for name, parameter in self._named
            if parameter in states and (every_copy or id(parameter) in counted)
        }

    def group_settings(self) -> dict[str, dict[str, Any]]:
        """The optimizer's class and what groups say of the parameters that this rank trains, by name."""
        return {} if self.optimizer is None else group_settings(self.optimizer, self._named)

    def _settings(self) -> dict[str, dict[str, Any]]:
        """What groups say of the parameters that this rank counts."""
        names = {id(parameter): name for name, parameter in self._named}
        counted = {id(parameter) for parameter in self._counted}
        return {
            names[id(parameter)]: settings_of(group)
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
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        raise TrainingError(
            f"Trainer(lr_scheduler=...) must return a scheduler that is stepped without a measure, got "
            f"{type(scheduler).__name__}; set the groups' learning rates yourself in fit(on_step=...)"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer stepped before: another one did
        for _ in range(num_steps):
            scheduler.step()
    return scheduler
