"""The user's optimizer over the parameters that one rank holds: its creation, its step with clipping and schedule, its
state.

Gradients are clipped by their norm over all ranks before the step; the scheduler steps after it. Where a rank updates a
slice of a parameter, its optimizer sees that slice as a parameter.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spindle.errors import CheckpointError, TrainingError
from spindle.program import Sharding
from spindle.run import HostCopy, World
from spindle.train.ema import WeightAverage, without_average
from spindle.train.grad_scaler import LossScale, step_unless
from spindle.train.optimizer_reshard import LRSchedulerState, OptimizerState, on_host, reshard_state
from spindle.train.step_report import NO_RATE, NO_SQUARE

Named = tuple[str, nn.Parameter]
MakeOptimizer = Callable[[list[Named]], torch.optim.Optimizer]
# For each parameter group: its name, and the names of its parameters.
NamedGroups = tuple[tuple[str, frozenset[str]], ...]
MakeLRScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """How parameters are updated: all parameters, or those of one `trial` of a sweep."""

    trial: str = ""
    optimizer: MakeOptimizer
    lr_scheduler: MakeLRScheduler | None = None
    max_grad_norm: float | None = None


class OptimizerUpdate:
    """A rank's part of the step of one optimizer."""

    def __init__(
        self,
        options: UpdateOptions,
        named: Sequence[Named],
        counted: Sequence[nn.Parameter],
        sharding: Sharding,
        ranks: tuple[int, ...],
        world: World,
        state: OptimizerState | None,
        ema: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        scaled_ranks: tuple[int, ...] = (),
        lr_groups: NamedGroups | None = None,
        reports_norm: bool = False,
    ) -> None:
        """`named` are the parameters that this rank trains; `counted` those whose gradients it counts in the norm over
        all `ranks`; `sharding` says what every rank trains of each parameter.

        `state` is the state of an earlier plan's optimizer. `ema` is the decay of an average of the weights.
        `grad_scaler` has the settings of a loss scale, which is the same on `scaled_ranks`, the ranks that run a step.
        `lr_groups` are the groups of all ranks; by default, those of this rank. With `reports_norm`, the gradient norm
        is computed even if gradients are not clipped.
        """
        self.trial, self._max_grad_norm = options.trial, options.max_grad_norm
        self._named, self._counted, self._world = list(named), counted, world
        self._names = {id(parameter): name for name, parameter in named}
        self.sharding, self._ranks = sharding, ranks
        self._copied: torch.cuda.Event | None = None  # a running copy of parameters and state, for a checkpoint
        self._reducing_ranks = ranks if grad_scaler is None else scaled_ranks
        if (self._max_grad_norm is not None or grad_scaler is not None) and len(self._reducing_ranks) > 1:
            world.group("norm", self._reducing_ranks)
        self.optimizer = optimizer_of(options.optimizer, named)
        self.scheduler = None
        state = OptimizerState() if state is None else reshard_state(world, state, sharding)
        self._num_steps = state.num_steps
        self.loss_scale = None if grad_scaler is None else LossScale(grad_scaler, world.device, state.loss_scale)
        self.average = None if ema is None else WeightAverage(ema, self._named, state.states, state.num_steps)
        self._reports_norm = reports_norm
        if lr_groups is None:
            lr_groups = () if self.optimizer is None else named_groups(self.optimizer, self._named)
        self.lr_groups = tuple(name for name, _ in lr_groups)
        updated = frozenset[str]().union(*(names for _, names in lr_groups))
        # Parameters with gradients that the user's function left out; unknown if there are no groups.
        self.left_out = [name for name in sharding if name not in updated] if lr_groups else []
        # For each group of all ranks: its position in this rank's optimizer; none if the rank has no parameter of it.
        local = {name: place for place, names in enumerate(self._groups()) for name in names}
        self._lr_places = [next((local[name] for name in names if name in local), None) for _, names in lr_groups]
        self.read_report = self._start_report(None, None)  # learning rates in the last step
        if self.optimizer is not None and options.lr_scheduler is not None:
            self.scheduler = scheduler_of(options.lr_scheduler, self.optimizer, state.num_steps)
            saved = state.lr_schedulers.get(self.trial)
            # A state from other groups has other learning rates.
            if saved is not None and saved.groups not in (None, self._groups()):
                saved = saved.of_any_groups
            if saved is not None:
                self.scheduler.load_state_dict(dict(saved.state))
        if self.optimizer is not None and (state.settings or state.old_settings):
            self._load(self.optimizer, state)
        # Frozen parameters keep their state until they are trained again.
        settings = {**state.old_settings, **state.settings}
        self._frozen = OptimizerState(
            sharding={name: slices for name, slices in state.sharding.items() if name not in sharding},
            states={name: values for name, values in state.states.items() if name not in sharding},
            old_settings={name: group for name, group in settings.items() if name not in sharding},
        )

    def wait_for(self, copied: torch.cuda.Event | None) -> None:
        """Let the next step wait until the tensors that it overwrites have been copied."""
        self._copied = copied

    def settle_copies(self) -> None:
        """Wait for that copy, before parameters and state are moved."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def step(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None
        found_inf = None
        if self.loss_scale is not None:
            gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
            found_inf = self.loss_scale.unscale(gradients)
        square = self._clip_gradients(found_inf)
        self.read_report = self._start_report(square, found_inf)
        if self.optimizer is not None:
            if found_inf is None:
                self.optimizer.step()
            else:
                step_unless(self.optimizer, found_inf)
        if self.loss_scale is not None and found_inf is not None:
            self.loss_scale.update(found_inf)
        if self.average is not None:
            self.average.update()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self._num_steps += 1

    def step_scheduler(self, metric: float) -> None:
        """Step a scheduler that takes a metric (`ReduceLROnPlateau`)."""
        if self.scheduler is None and self.optimizer is None:
            return  # this rank trains no parameters
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            raise TrainingError(
                "step_lr_scheduler(): Trainer(lr_scheduler=...) made no ReduceLROnPlateau; other schedulers step by "
                "themselves after every step"
            )
        self.scheduler.step(metric)

    def _clip_gradients(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Clip gradients like `torch.nn.utils.clip_grad_norm_` in one process: every parameter counts once, however
        many ranks hold it.

        Also all-reduces `found_inf`. Returns this rank's part of the squared norm, if the norm is reported.
        """
        limit, device = self._max_grad_norm, self._world.device
        if self._world.rank not in self._reducing_ranks:
            return None
        square = None
        if self._world.rank in self._ranks and (limit is not None or self._reports_norm):
            # Squared norms are summed on each rank over the parameters that it counts, then over ranks.
            gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
            square = get_total_norm(gradients).to(device, torch.float64).square()
        if limit is None and found_inf is None:
            return square
        # one all-reduce for both
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([zero if square is None else square, zero if found_inf is None else found_inf.double()])
        self._world.all_reduce(sums, "norm", self._reducing_ranks)
        if found_inf is not None:
            found_inf.copy_(sums[1].clamp(max=1.0))  # fused optimizers compare it with 1
        if limit is not None:
            clip_grads_with_norm_([parameter for _, parameter in self._named], limit, sums[0].sqrt())
        return square if self._reports_norm else None

    def _start_report(self, square: torch.Tensor | None, found_inf: torch.Tensor | None) -> Callable[[], list[float]]:
        """A function that returns the learning rate of each group in this step, this rank's part of the squared
        gradient norm, the loss scale, and whether the step is skipped. It waits for the GPU if these are computed
        there."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = [NO_RATE if place is None else groups[place].get("lr", NO_RATE) for place in self._lr_places]
        values: list[Any] = [*rates, NO_SQUARE if square is None else square]
        scale = None if self.loss_scale is None or found_inf is None else self.loss_scale.scale
        values += [NO_RATE, 0.0] if scale is None else [scale, found_inf]
        places = [place for place, value in enumerate(values) if _is_enabled(value, self._world.device)]
        if not places:
            return lambda: [float(value) for value in values]
        copy = HostCopy(torch.stack([values[place].detach().double().reshape(()) for place in places]))

        def read() -> list[float]:
            copied = dict(zip(places, copy.tolist(), strict=True))
            return [copied[place] if place in copied else float(value) for place, value in enumerate(values)]

        return read

    def _load(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        names = self._names
        loaded = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        loaded["state"] = {
            index: values
            for index, parameter in enumerate(parameters)
            if (values := without_average(state.states.get(names[id(parameter)], {})))
        }
        for group, entry in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
            members = [names[id(parameter)] for parameter in group["params"]]
            # The saved settings of a parameter that was frozen are outdated; a scheduler has set the current ones.
            known = [state.settings[name] for name in members if name in state.settings]
            if self.scheduler is None:
                known += [state.old_settings[name] for name in members if name in state.old_settings]
            for key, value in known[0].items() if known else ():
                if key in entry and not _is_same_kind(value, entry[key]):
                    raise CheckpointError(
                        f"the optimizer's {key} is {value!r} in the saved state, and {entry[key]!r} in this script: "
                        "not a value of the same kind; is the checkpoint damaged?"
                    )
                is_tensor = isinstance(entry.get(key), torch.Tensor)
                entry[key] = torch.full_like(entry[key], value) if is_tensor else value
            _refuse_missing_state(entry, [loaded["state"].get(index) for index in entry["params"]])
        optimizer.load_state_dict(loaded)
        # Torch has converted it to the dtypes of parameters, also what the optimizer keeps in another one.
        for index, values in loaded["state"].items():
            state_of = optimizer.state[parameters[index]]
            for key, value in values.items():
                present = state_of.get(key)
                if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
                    state_of[key] = present if present.dtype == value.dtype else value.to(present.device)

    def state(self, *, to_host: bool = False) -> OptimizerState:
        """This rank's share of the state, for the optimizer of another plan."""
        values = self.optimizer.state if self.optimizer is not None else {}
        averages = {} if self.average is None else self.average.states(self._num_steps)
        states = {
            name: {**values.get(parameter, {}), **averages.get(name, {})}
            for name, parameter in self._named
            if parameter in values or name in averages
        }
        scheduler = self.scheduler
        return OptimizerState(
            num_steps=self._num_steps,
            sharding={**self._frozen.sharding, **self.sharding},
            states=dict(self._frozen.states)
            | {name: on_host(state) if to_host else state for name, state in states.items()},
            settings=self._settings(),
            old_settings=self._frozen.old_settings,
            lr_schedulers={}
            if scheduler is None
            else {self.trial: LRSchedulerState(self._groups(), scheduler.state_dict())},
            loss_scale=None if self.loss_scale is None else self.loss_scale.state(),
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that it keeps from step to step, other than parameters and gradients."""
        if self.average is not None:
            yield from self.average.tensors
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return tuple(tuple(self._names[id(parameter)] for parameter in group["params"]) for group in groups)

    def group_settings(self) -> dict[str, dict[str, Any]]:
        """The optimizer's class, and the group settings of the parameters that this rank trains, by name."""
        return {} if self.optimizer is None else group_settings(self.optimizer, self._named)

    def _settings(self) -> dict[str, dict[str, Any]]:
        """The group settings of the parameters that this rank counts. Tensors with one element (a learning rate) become
        numbers."""
        counted = {id(parameter) for parameter in self._counted}
        return {
            self._names[id(parameter)]: {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in settings_of(group).items()
            }
            for group in (self.optimizer.param_groups if self.optimizer is not None else ())
            for parameter in group["params"]
            if id(parameter) in counted
        }


def _is_enabled(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


# The entries that torch's optimizers keep for each parameter while a setting is on.
_STATE_OF_SETTING = (("amsgrad", "max_exp_avg_sq"), ("centered", "grad_avg"))


def _refuse_missing_state(group: Mapping[str, Any], states: Sequence[Mapping[str, Any] | None]) -> None:
    for setting, key in _STATE_OF_SETTING:
        if group.get(setting) and any(state and key not in state for state in states):
            raise CheckpointError(
                f"the optimizer's {setting} is on in the saved state, which has no {key} of its parameters; is the "
                "checkpoint damaged?"
            )


def _is_same_kind(saved: Any, current: Any) -> bool:
    """Whether a saved setting has the same kind of value as the optimizer's own. A setting of None may become
    anything."""
    if current is None or saved is None:
        return True
    if isinstance(current, bool) or isinstance(saved, bool):
        return type(saved) is type(current)
    if isinstance(current, int | float | torch.Tensor):
        return isinstance(saved, int | float | torch.Tensor)
    if isinstance(current, tuple | list):
        is_listed = isinstance(saved, tuple | list) and len(saved) == len(current)
        return is_listed and all(map(_is_same_kind, saved, current))
    return isinstance(saved, type(current))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group without its parameters, which differ from rank to rank."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def named_groups(optimizer: torch.optim.Optimizer, named: Sequence[Named]) -> NamedGroups:
    """The groups of an optimizer by their `name` entry or their number, with the names of their parameters."""
    names = {id(parameter): name for name, parameter in named}
    return tuple(
        (str(group.get("name", number)), frozenset(names[id(parameter)] for parameter in group["params"]))
        for number, group in enumerate(optimizer.param_groups)
    )


def group_settings(optimizer: torch.optim.Optimizer, named: Sequence[Named]) -> dict[str, dict[str, Any]]:
    """The class of an optimizer, and its group settings by parameter name. Parameters of a group share one dict."""
    names = {id(parameter): name for name, parameter in named}
    settings: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        shared = {**settings_of(group), "optimizer": type(optimizer)}
        settings |= {names[id(parameter)]: shared for parameter in group["params"]}
    return settings


def optimizer_of(make: MakeOptimizer, named: Sequence[Named]) -> torch.optim.Optimizer | None:
    """Make the user's optimizer of the parameters that this rank trains. None if it trains none."""
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
    own_ids = {id(parameter) for _, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own_ids:
                raise TrainingError(
                    "Trainer(optimizer=...) made an optimizer of parameters that were not given to it; use the "
                    "names and parameters of its argument: each rank holds only some"
                )
    return optimizer


def scheduler_of(
    make: MakeLRScheduler, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the user's scheduler of an optimizer, after `num_steps` steps."""
    scheduler = make(optimizer)
    if not hasattr(scheduler, "step"):
        raise TrainingError(f"Trainer(lr_scheduler=...) must return a scheduler, got {type(scheduler).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        return scheduler  # which steps it takes with a metric is unknown
    with warnings.catch_warnings():
        # Torch warns that the optimizer was not stepped before; that of an earlier plan was.
        warnings.simplefilter("ignore")
        for _ in range(num_steps):
            scheduler.step()
    return scheduler
