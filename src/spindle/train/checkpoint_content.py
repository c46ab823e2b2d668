"""What a checkpoint of a session contains: the boxes of tensors that this rank writes, and the non-tensor state."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spindle.artifact import artifact_text, to_json
from spindle.checkpoint import SavedGroup, SavedState, writers_of
from spindle.data import random_state
from spindle.errors import TrainingError
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.program import Box, Sharding, Slice
from spindle.run import box_view
from spindle.train.config import MakeProfile, Planning, TrainConfig
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.plain_json import to_plain
from spindle.train.record import parameter_names, root_handles
from spindle.train.runtime import buffer_owners
from spindle.train.session import TrainSession
from spindle.train.update import Update

SCHEDULER = "lr_scheduler"  # key of the non-tensor state; followed by the name of a sweep's trial
_STATE_SIZE = 3  # elements written per element of a trained parameter, including Adam's two moments


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box that this rank writes, and the tensor that has it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    is_buffer: bool = False


class CheckpointContent:
    """What this rank contributes to a checkpoint of a session."""

    def __init__(self, session: TrainSession, planning: Planning) -> None:
        self._session, self._world = session, session.world
        self._planning = planning_text(planning)
        # This rank's boxes under the current optimizer.
        self._writers: tuple[weakref.ref[Update], dict[str, list[Box]]] | None = None

    def boxes(self) -> tuple[list[WrittenBox], OptimizerState]:
        """The boxes that this rank writes, those of the largest elements first, and the optimizer's state."""
        assert self._session.update is not None
        optimizer = self._session.update.state()
        return sorted(self._boxes(optimizer), key=lambda written: -written.values.element_size()), optimizer

    def artifacts(self) -> tuple[Plan, Profile]:
        """The plan that is running, and the profile that it was made from."""
        session = self._session
        assert session.runtime is not None
        assert session.profiled is not None
        return session.runtime.planned.plan, session.profiled.profile

    def needed_steps(self) -> list[int]:
        """The step of the checkpoint that was resumed from, as long as some of it is not loaded yet."""
        saved = self._session.saved
        return [] if saved is None or not any(True for _ in saved.unloaded()) else [saved.checkpoint.state.step]

    def state(
        self,
        step: int,
        fit: int,
        first_step: int,
        config: TrainConfig,
        step_tasks: Collection[str] | None,
        *,
        was_stopped: bool = False,
    ) -> SavedState:
        """The non-tensor state that rank 0 knows. `step_tasks` are the tasks of the next step, whose batches were read
        before tasks were added or removed; None after the last step of a fit."""
        session, update = self._session, self._session.update
        assert update is not None
        handles, names, optimizer = root_handles(session.handles), self._names(), update.state()
        tasks = tuple(config.task_names)
        aliases, frozen, in_evaluation = {}, [], []
        for name, handle in handles.items():
            for path, parameter in handle.module.named_parameters(remove_duplicate=False):
                if names[id(parameter)] != f"{name}.{path}":
                    aliases[f"{name}.{path}"] = names[id(parameter)]
                elif not parameter.requires_grad:
                    frozen.append(f"{name}.{path}")
            in_evaluation += [f"{name}.{path}" for path, module in handle.module.named_modules() if not module.training]
        variants: dict[str, dict[str, str]] = {}
        for (task, key), variant in session.variants.names.items():
            variants.setdefault(task, {})[str(key)] = variant
        return SavedState(
            step=step,
            fit=fit,
            first_step=first_step,
            was_stopped=was_stopped,
            seed=config.seed,
            num_ranks=self._world.size,
            tasks=tasks,
            ended_tasks=tuple(name for name in session.variants.seen if name not in tasks),
            modules=tuple(handles),
            frozen=tuple(frozen),
            in_evaluation=tuple(in_evaluation),
            aliases=aliases,
            variants=variants,
            checked=tuple(sorted(session.checked)),
            data={},
            random_state=to_plain(random_state(), "the random state"),
            num_updates=optimizer.num_steps,
            optimizer_values={},
            groups=(),
            frozen_groups=_grouped_by_settings(optimizer.old_settings),
            planning=self._planning,
            extra={} if step_tasks is None else {"step_tasks": sorted(step_tasks)},
            written_s=time.time(),
        )

    def _names(self) -> dict[int, str]:
        """The name of each parameter, by id: the name that plans use, if it has one."""
        assert self._session.runtime is not None
        held = self._session.runtime.weights.held
        planned = {id(parameter): name for name, (parameter, _) in held.items()}
        return {**parameter_names(root_handles(self._session.handles)), **planned}

    def fragments(self, state: OptimizerState) -> dict[str, Any]:
        """The optimizer's non-tensor state on this rank, as JSON."""
        rank = self._world.rank
        values = {
            name: {
                key: to_plain(value, f"the optimizer's state {key!r} of parameter {name!r}")
                for key, value in entries.items()
                if not isinstance(value, torch.Tensor)
            }
            for name, entries in state.states.items()
            if rank == min(state.sharding[name])
        }
        extra: dict[str, Any] = {"num_updates": state.num_steps}
        for trial, scheduler in state.lr_schedulers.items():
            if (known := scheduler.of_any_groups) is not None:
                extra[f"{SCHEDULER}/{trial}" if trial else SCHEDULER] = dict(known.state)
        if state.loss_scale is not None:
            extra["loss_scale"] = to_json(state.loss_scale)
        return {"optimizer_values": values, "groups": _grouped_by_settings(state.settings), "extra": extra}

    def _boxes(self, state: OptimizerState) -> Iterator[WrittenBox]:
        """The boxes that this rank writes."""
        session, rank = self._session, self._world.rank
        runtime, update, names, handles = session.runtime, session.update, self._names(), root_handles(session.handles)
        assert runtime is not None
        assert update is not None
        held = runtime.weights.held
        named = {name: parameter for name, (parameter, _) in held.items()}
        weights = {name: slices for name, (_, slices) in held.items()}
        writers = self._writers_of(weights, named, state.sharding)
        if rank == 0:
            modules = [handle.module for handle in handles.values()]
            all_of = {names[id(parameter)]: parameter for module in modules for parameter in module.parameters()}
            for name, parameter in all_of.items():
                if name not in held:  # no task runs its layer now, so every rank has it
                    yield _whole(f"parameter/{name}", parameter.data)
        for name, parameter in named.items():
            for box in writers[name]:
                values = box_view(parameter.data, weights[name][rank], box)
                yield WrittenBox(f"parameter/{name}", whole_shape(weights[name]), box, values)
        for name, entries in state.states.items():
            slices = state.sharding[name]
            part, shape = slices[rank], whole_shape(slices)
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if tuple(value.shape) == part.shape and part.shape:
                    for box in writers[name if name in update.sharding else _frozen(name)]:
                        yield WrittenBox(f"optimizer/{name}/{key}", shape, box, box_view(value, part, box))
                elif rank == min(slices):
                    yield _whole(f"optimizer/{name}/{key}", value)
        owners = buffer_owners(runtime)
        for handle in handles.values():
            persistent = handle.module.state_dict(keep_vars=True).keys()
            for path, buffer in handle.module.named_buffers():
                if owners.get(id(buffer), 0) == rank and buffer.numel():
                    kind = "buffer" if path in persistent else "nonpersistent_buffer"
                    yield _whole(f"{kind}/{handle.name}.{path}", buffer, is_buffer=True)
        yield from self._unloaded_boxes()

    def _writers_of(
        self, weights: Sharding, named: Mapping[str, torch.Tensor], states: Sharding
    ) -> dict[str, list[Box]]:
        """The boxes of each parameter that this rank writes, with its optimizer state. The state of a parameter that is
        not trained now has a name of its own, because other ranks may have it."""
        update, rank = self._session.update, self._world.rank
        assert update is not None
        known = self._writers
        if known is None or known[0]() is not update or not known[1].keys() >= weights.keys():
            sizes = {name: parameter.element_size() for name, parameter in named.items()}
            trained = update.sharding
            # With a sharded optimizer, each rank writes the part that it updates, so nothing waits for an all-gather.
            frozen = {_frozen(name): slices for name, slices in states.items() if name not in trained}

            def element_bytes(name: str) -> int:
                return sizes.get(name, 4) * (_STATE_SIZE if name in trained else 1)

            writers = writers_of({**weights, **trained, **frozen}, element_bytes)
            own_boxes = {name: [box for box, writer in boxes if writer == rank] for name, boxes in writers.items()}
            self._writers = known = weakref.ref(update), own_boxes
        return known[1]

    def _unloaded_boxes(self) -> Iterator[WrittenBox]:
        """Tensors of the resumed checkpoint that belong to modules which were not called yet."""
        saved = self._session.saved
        for number, (name, tensor) in enumerate(saved.unloaded() if saved is not None else ()):
            if number % self._world.size == self._world.rank:
                yield _whole(name, tensor())


def _frozen(name: str) -> str:
    return f"{name} (frozen)"


def _whole(name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> WrittenBox:
    return WrittenBox(name, tuple(tensor.shape), Slice.whole(tensor.shape).box, tensor, is_buffer)


def whole_shape(slices: Mapping[int, Slice]) -> tuple[int, ...]:
    """The shape of a tensor whose slices together have all its elements."""
    ends = [
        [offset + length for offset, length in zip(part.box.offsets, part.box.lengths, strict=True)]
        for part in slices.values()
    ]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _grouped_by_settings(settings: Mapping[str, Mapping[str, Any]]) -> tuple[SavedGroup, ...]:
    """Settings, each with the parameters that have them."""
    groups: dict[str, SavedGroup] = {}
    for name, values in settings.items():
        plain = {
            key: to_plain(_plain_setting(name, key, value), f"the setting {key!r} of parameter {name!r}")
            for key, value in values.items()
        }
        known = groups.setdefault(repr(plain), SavedGroup(parameters=(), settings=plain))
        groups[repr(plain)] = replace(known, parameters=(*known.parameters, name))
    return tuple(groups.values())


def _plain_setting(name: str, key: str, value: Any) -> Any:
    entries = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(entry, bool | int | float | str | None) for entry in entries):
        raise TrainingError(
            f"the optimizer's setting {key!r} of parameter {name!r} is {value!r}: a checkpoint can hold numbers and "
            "strings"
        )
    return value


def planning_text(planning: Planning) -> str:
    """The user's planning options as text. A saved plan is reused if they are the same."""
    options = (
        planning.planner if isinstance(planning.planner, str) else _name_of(planning.planner),
        None if planning.plan is None else _text_of(planning.plan),
        sorted(planning.tensor_parallel_degrees.items()),
        planning.pipeline_parallel_degree,
        planning.shard_optimizer,
        planning.memory_limit_bytes,
        planning.lanes,
        planning.quotas,
        sorted(planning.sequence_parallel_degrees.items()),
    )
    given_profile = "" if planning.profile is None else f"{_PROFILE}{_text_of(planning.profile)}"
    return f"{options!r}{given_profile}"


def has_same_profile(first: str, second: str) -> bool:
    """Whether two texts of planning options give the same profile, or none."""
    return first.partition(_PROFILE)[2] == second.partition(_PROFILE)[2]


_PROFILE = "; profile "  # in the text of planning options: a given profile follows


def _text_of(given: Plan | Profile | MakeProfile | Path | str) -> str:
    """A given plan or profile as text: a digest of its contents, because those of a file may change; the name of a
    function; a plan's own text."""
    if callable(given):
        return _name_of(given)
    if isinstance(given, Plan | Profile):
        return hashlib.sha256(artifact_text(type(given).__name__.lower(), given).encode()).hexdigest()
    if isinstance(given, str) and "*" in given:
        return given
    try:
        return hashlib.sha256(Path(given).read_bytes()).hexdigest()
    except OSError:  # only rank 0 needs the file
        return str(given)


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
