"""Reshard the state of the user's optimizer from the ranks of one plan to those of the next.

An optimizer keeps, for each parameter, tensors of the parameter's shape, which are sharded as it is, and other values
(the number of steps), which are the same for all its slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spindle.program import Sharding, Slice, keep_unused
from spindle.run import TensorSpec, World, reshard
from spindle.train.grad_scaler import ScaleState

State = Mapping[str, Any]  # the optimizer state of one parameter


@dataclass(frozen=True, slots=True)
class LRSchedulerState:
    """The `state_dict` of a rank's scheduler, and the parameters of the groups that it belongs to; None if nothing in
    it belongs to a group."""

    groups: tuple[tuple[str, ...], ...] | None
    state: Mapping[str, Any]

    @property
    def of_any_groups(self) -> LRSchedulerState | None:
        """What a `ReduceLROnPlateau` knows of the metric, which is the same for all groups. None for other schedulers,
        which are made again and stepped forward."""
        if "num_bad_epochs" not in self.state:
            return None
        values = {key: value for key, value in self.state.items() if isinstance(value, int | float | str)}
        return LRSchedulerState(None, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """One rank's share of the optimizer's state, by parameter name.

    `sharding` says which rank has which slices; it is the same on all ranks. `states` are those of this rank.
    `settings` are the group settings of parameters, `old_settings` those of parameters that are not trained now.
    """

    num_steps: int = 0
    sharding: Sharding = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    old_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lr_schedulers: Mapping[str, LRSchedulerState] = field(default_factory=dict)  # of this rank; in a sweep, by trial
    loss_scale: ScaleState | None = None


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """Metadata of a tensor in a parameter's state, for other ranks. `shape` is None if it is the shape of the
    parameter's slice."""

    dtype: torch.dtype
    is_on_host: bool
    shape: tuple[int, ...] | None


def reshard_state(world: World, state: OptimizerState, sharding: Sharding) -> OptimizerState:
    """Move this rank's share of the state to another sharding. All ranks must call this; each receives what it lacks
    from one that has it.

    The state of parameters that are not in `sharding` stays with one rank, on the host.
    """
    described = {name: _describe(state.sharding[name][world.rank], values) for name, values in state.states.items()}
    metrics = {trial: scheduler.of_any_groups for trial, scheduler in state.lr_schedulers.items()}
    row = described, state.settings, state.num_steps, state.loss_scale, metrics
    table = world.broadcast_object(world.gather_objects(row))
    latest = max(table, key=lambda row: row[2])  # a rank without parameters has not counted its steps
    descriptions = [row[0] for row in table]
    # Ranks whose optimizer has no state yet (for a parameter without gradients so far) have nothing to send.
    old = {
        name: {rank: part for rank, part in slices.items() if name in descriptions[rank]}
        for name, slices in state.sharding.items()
    }
    old = {name: slices for name, slices in old.items() if slices}
    new = keep_unused({name: sharding[name] for name in sharding if name in old}, old)

    # Each tensor of a state is moved separately: it is sharded like its parameter, or whole on all ranks that have a
    # slice.
    old_tensors: dict[str, Mapping[int, Slice]] = {}
    new_tensors: dict[str, Mapping[int, Slice]] = {}
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, TensorSpec] = {}
    places: dict[str, tuple[str, str]] = {}
    states: dict[str, dict[str, Any]] = {name: {} for name in new if world.rank in new[name]}
    for name, slices in new.items():
        for key, entry in descriptions[min(old[name])][name].items():
            if not isinstance(entry, _TensorEntry):
                if name in states:
                    states[name][key] = entry
                continue
            path = f"{name}:{key}"
            places[path] = (name, key)
            specs[path] = TensorSpec(entry.dtype, torch.device("cpu") if entry.is_on_host else world.device)
            old_tensors[path], new_tensors[path] = old[name], slices
            if entry.shape is not None:
                whole = Slice.whole(entry.shape)
                old_tensors[path], new_tensors[path] = dict.fromkeys(old[name], whole), dict.fromkeys(slices, whole)
            if name in state.states:
                tensors[path] = state.states[name][key]
    for path, tensor in reshard(world, old_tensors, new_tensors, tensors, specs):
        name, key = places[path]
        if tensor is not None:
            states[name][key] = tensor if name in sharding else tensor.cpu()
    return OptimizerState(
        num_steps=latest[2],
        sharding=new,
        states=states,
        settings={name: group for row in table for name, group in row[1].items()},
        old_settings=state.old_settings,
        # A rank that has trained no parameters until now takes over what the others know of the metric.
        lr_schedulers={
            **{trial: known for row in table for trial, known in row[4].items() if known is not None},
            **state.lr_schedulers,
        },
        loss_scale=latest[3],
    )


def on_host(state: State) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _describe(part: Slice, state: State) -> dict[str, Any]:
    """A state with the dtypes and shapes of its tensors in place of the tensors."""
    # For a zero-dimensional parameter, tensors in its state count as plain numbers, like its step count.
    sharded_shape = part.shape or None
    return {
        key: _TensorEntry(
            value.dtype, value.device.type == "cpu", None if tuple(value.shape) == sharded_shape else tuple(value.shape)
        )
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }
