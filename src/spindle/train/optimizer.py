"""The user's optimizer over what one rank holds: made, stepped with all that belongs to it, carried to another plan.

Gradients are clipped by their norm over all ranks before the step; the schedule moves on after it. Where a rank updates
a part of a parameter, its optimizer knows that part as a parameter; what goes to another plan is put together again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spindle.errors import TrainingError
from spindle.run import World
from spindle.run.shards import Span
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


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank updates of a parameter: a shard of a tensor group, a span of what it holds, both, or all of it."""

    shard: Shard | None = None
    span: Span | None = None


class Update:
    """A rank's part of the optimizer's step."""

    def __init__(
        self,
        make: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        clip_norm: float | None,
        named: Sequence[Named],
        counted: Sequence[nn.Parameter],
        parts: Mapping[str, Part],
        ranks: tuple[int, ...],
        world: World,
        state: UpdateState,
    ) -> None:
        """`named` are the parameters that this rank trains, `counted` those whose gradients it counts for all `ranks`
        that hold any, `parts` what it has of those that it does not have as a whole."""
        self._parts = parts
        self._clip_norm, self._named, self._counted, self._world = clip_norm, list(named), counted, world
        self._ranks = ranks
        if clip_norm is not None and len(ranks) > 1:
            world.group("norm", ranks)
        self.optimizer = optimizer_of(make, named)
        split = [name for name, part in parts.items() if part.shard is not None]
        if split and isinstance(self.optimizer, (torch.optim.Adafactor, torch.optim.Muon)):
            raise TrainingError(
                f"{type(self.optimizer).__name__} updates all entries of a parameter together, but tensor groups split "
                f"{split[0]!r} and others; use another optimizer, or tensor degree 1 "
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
        part = self._parts.get(name, Part())
        if part.shard is not None:
            shard = part.shard
            state = {key: shard.of(value) if _is_like(value, parameter) else value for key, value in state.items()}
        return cut_state(state, part.span) if part.span is not None else dict(state)

    def gathered(self) -> UpdateState:
        """What the optimizers of all ranks keep, on all ranks, in the host's memory."""
        names = {id(parameter): name for name, parameter in self._named}
        counted = {id(parameter) for parameter in self._counted}
        states: dict[str, tuple[Part, dict[str, Any]]] = {}
        settings = {}
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for parameter in group["params"]:
                if id(parameter) in counted:
                    name = names[id(parameter)]
                    settings[name] = {key: value for key, value in group.items() if key != "params"}
                    if self.optimizer is not None and parameter in self.optimizer.state:
                        states[name] = (self._parts.get(name, Part()), _on_host(self.optimizer.state[parameter]))
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


def _joined(states: Sequence[Mapping[str, tuple[Part, dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """States by parameter, from those of its parts."""
    found: dict[str, dict[int, list[tuple[Part, dict[str, Any]]]]] = {}  # by name and place in a tensor group
    for one in states:
        for name, (part, state) in one.items():
            place = part.shard.place if part.shard is not None else 0
            found.setdefault(name, {}).setdefault(place, []).append((part, state))
    joined = {}
    for name, places in found.items():
        shards = []
        for _, entries in sorted(places.items()):
            spans = [(part.span, state) for part, state in entries if part.span is not None]
            shards.append(joined_state(spans) if spans else entries[0][1])
        state, (first, _) = shards[0], places[min(places)][0]
        if first.shard is not None:
            dim = first.shard.dim
            state = {
                key: torch.cat([one[key] for one in shards], dim=dim)
                if isinstance(value, torch.Tensor) and value.dim() > dim
                else value
                for key, value in state.items()
            }
        joined[name] = state
    return joined


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def cut_state(state: Mapping[str, Any], span: Span) -> dict[str, Any]:
    """What belongs to a part of a parameter of what its optimizer keeps; what is not by element belongs to all."""
    return {
        key: _cut(value, span) if isinstance(value, torch.Tensor) and value.shape == span.shape else value
        for key, value in state.items()
    }


def _cut(value: torch.Tensor, span: Span) -> torch.Tensor:
    return value.reshape(-1)[span.first : span.last].reshape(span.part_shape).clone()


def joined_state(parts: Sequence[tuple[Span, Mapping[str, Any]]]) -> dict[str, Any]:
    """What an optimizer keeps for a whole parameter, from what it keeps for all its parts."""
    in_order = sorted(parts, key=lambda entry: entry[0].first)
    whole = dict(in_order[0][1])
    for key in whole:
        values = [state.get(key) for _, state in in_order]
        tensors = [
            value
            for value, (span, _) in zip(values, in_order, strict=True)
            if isinstance(value, torch.Tensor) and value.shape == span.part_shape
        ]
        if len(tensors) == len(in_order):
            whole[key] = torch.cat([value.reshape(-1) for value in tensors]).reshape(in_order[0][0].shape)
    return whole


# Can parts be updated by themselves?

_TRIED_SIZE, _TRIED_STEPS, _TRIED_ERROR = 4, 2, 1e-6
_MOVED = "how far it moved"


def why_not_sharded(make: MakeOptimizer, named: Sequence[Named]) -> str | None:
    """Why parts of parameters cannot be updated by themselves; None where they can.

    The optimizer is tried on small parameters under the user's names, whole and in two parts. What it does to large
    ones alone (states of 8 bits, in blocks) is not found out.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, list[torch.Tensor]] = {}  # a value and gradients
    for name, parameter in named:
        shape = [min(size, _TRIED_SIZE) for size in parameter.shape]
        values = torch.randn((1 + _TRIED_STEPS, *shape), generator=generator, dtype=torch.float64)
        drawn[name] = list(values.to(parameter.device))
    parts: dict[str, list[tuple[Span, dict[str, Any]]]] = {}
    try:
        whole = _tried(make, drawn)
        for half in range(2):
            spans = {name: _half(tuple(values[0].shape), half) for name, values in drawn.items()}
            cut = {
                name: [_cut(one, spans[name]) for one in values]
                for name, values in drawn.items()
                if spans[name].first < spans[name].last
            }
            for name, kept in _tried(make, cut).items():
                parts.setdefault(name, []).append((spans[name], kept))
    except Exception as error:
        return f"trying that out failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    for name, some in parts.items():
        joined = joined_state(some)
        if joined.keys() != whole[name].keys() or not all(_agree(joined[key], whole[name][key]) for key in joined):
            return f"it does not update each element of {name} by itself"
    return None


def _half(shape: tuple[int, ...], half: int) -> Span:
    size = prod(shape)
    return Span(size * half // 2, size * (half + 1) // 2, shape)


def _tried(make: MakeOptimizer, drawn: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """How far parameters moved in some steps, and what the optimizer keeps for them."""
    named = [(name, nn.Parameter(values[0].clone())) for name, values in drawn.items()]
    optimizer = optimizer_of(make, named)
    if optimizer is None:
        return {}
    for step in range(_TRIED_STEPS):
        for name, parameter in named:
            parameter.grad = drawn[name][1 + step].clone()
        optimizer.step()
    return {name: {_MOVED: one.detach() - drawn[name][0], **optimizer.state.get(one, {})} for name, one in named}


def _agree(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    return bool((one.double() - other.double()).abs().max() <= _TRIED_ERROR * other.double().abs().max())
