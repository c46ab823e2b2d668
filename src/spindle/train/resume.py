"""Resume a restarted script from its newest checkpoint that is complete and undamaged.

Before the first fit rank 0 chooses the checkpoint, and all ranks check its bytes. A fit that had ended when the
checkpoint was saved returns at once. In the one that had not, state is restored before tasks are traced, parameters
once they are scattered, and the optimizer's state when the optimizer is made: each rank reads what it holds under its
own plan.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from spindle.artifact import artifact_from_json, from_json
from spindle.checkpoint import (
    PLAN,
    PROFILE,
    SavedCheckpoint,
    SavedGroup,
    claim,
    folder_name,
    folder_of_step,
    open_checkpoint,
    remove_unfinished,
    steps_in,
)
from spindle.data import random_state, restored_random_state, set_random_state
from spindle.display import count_of
from spindle.errors import CheckpointError, SpindleError, WorkloadError
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.program import Sharding, Slice
from spindle.run import Weights, World
from spindle.train.checkpoint_content import SCHEDULER, has_same_profile, planning_text, whole_shape
from spindle.train.config import Checkpoints, TrainConfig
from spindle.train.feed import LoaderPosition
from spindle.train.grad_scaler import ScaleState
from spindle.train.optimizer_reshard import LRSchedulerState, OptimizerState
from spindle.train.plain_json import from_plain
from spindle.train.plan import SavedPlanning, with_serial_lanes
from spindle.train.record import Handles, handles_of, record_all, root_handles
from spindle.train.result import FitResult, result_without_steps
from spindle.train.samples import by_number
from spindle.train.saving import Saver, memory_folder
from spindle.train.session import TrainSession
from spindle.train.task import registered

T = TypeVar("T")
_SHARED_S = 5.0  # seconds until other hosts see a new file
# What restoring a value may raise that Spindle has not saved.
_NOT_SAVED = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, OverflowError)


def resume(session: TrainSession, loaders: Mapping[str, Any], steps: int) -> FitResult | None:
    """Prepare a fit of `steps` steps, some of which an earlier run may have done. Returns a result if all are done. All
    ranks must call it."""
    number, checkpoints = session.num_fits, session.config.checkpoints
    session.num_fits += 1
    session.first_step = session.step
    if checkpoints is None or session.capture is not None:
        return None
    notify = session.notify
    if session.saver is None:
        session.saver = Saver(session, checkpoints, session.config.planning)
        session.saver.attempt = claim_folder(Path(checkpoints.folder), session.world)
        newest = newest_checkpoint(checkpoints, session.world, session.warn, session.saver.damaged)
        if newest is not None:
            session.saved = ResumedTensors(newest)
            session.saver.resume_from(newest.folder.parent, newest.state.step)
    saved = session.saved
    if saved is None or number > saved.checkpoint.state.fit:
        return None
    state = saved.checkpoint.state
    handles = _with_saved_modules(_handles(session, loaders), saved, notify)
    num_done = state.step - state.first_step
    is_over = number < state.fit or state.was_stopped or steps <= num_done
    if number == state.fit:
        _restore(session, saved, handles, is_over=is_over)
        session.step, session.first_step = state.step, state.step if is_over else state.first_step
    if is_over:
        saved.load_modules(handles)
        if number < state.fit:
            saved.forget_loaded()  # The script's changes between fits happen before the state is restored.
        notify(f"fit {number + 1} had ended in the checkpoint of step {state.step}: its steps are not trained again")
        plan, profile = saved.plan, saved.profile
        if plan.num_lanes > 1:
            profile = with_serial_lanes(profile)
        return result_without_steps(session.world.rank, plan, profile, session.notices)
    notify(
        f"resumed from {saved.checkpoint.folder}: {count_of(num_done, 'step')} of {steps} in this fit are done"
        + ("" if state.num_ranks == session.world.size else f" (saved by {count_of(state.num_ranks, 'rank')})")
    )
    return None


def _handles(session: TrainSession, loaders: Mapping[str, Any]) -> Handles:
    """The modules of all tasks of the script, with composites as a whole. For tasks whose modules depend on their
    batches, those that the first batch reaches."""
    if session.handles:
        return root_handles(session.handles)
    tasks = session.config.tasks
    try:
        return root_handles(handles_of(record_all(tasks)))
    except WorkloadError:
        outside = random_state()
        examples = {task.name: _first_batch(loaders.get(task.name), task.batch_size) for task in tasks}
        set_random_state(outside)
        reached = record_all([task for task in tasks if examples[task.name] is not None], examples)
        return root_handles(handles_of(reached))


def _with_saved_modules(handles: Handles, saved: ResumedTensors, notify: Callable[[str], None]) -> Handles:
    """The handles, with those of saved modules that the first batches of this script do not reach."""
    not_reached = {name: registered(name) for name in saved.checkpoint.state.modules if name not in handles}
    for name in (name for name, handle in not_reached.items() if handle is None):
        notify(
            f"module {name!r} is in {saved.checkpoint.folder}, and no task has called it yet: until a batch reaches "
            "it, it has the weights that the script gave it"
        )
    return {**handles, **{name: handle for name, handle in not_reached.items() if handle is not None}}


def _first_batch(loader: Any, batch_size: int) -> Any:
    """A loader's first batch; None for a loader that could not yield it again."""
    loader = by_number(loader)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        return default_collate([loader[number] for number in range(batch_size)])
    return None if loader is None or isinstance(loader, Iterator) else next(iter(loader), None)


# Choosing the checkpoint


def newest_checkpoint(
    checkpoints: Checkpoints, world: World, notify: Callable[[str], None], damaged: set[Path]
) -> SavedCheckpoint | None:
    """The newest complete and undamaged checkpoint of a folder; None if there is none at all.

    Newer ones that are not are added to `damaged`. All ranks must call it; each checks a share of the bytes.
    """
    folder = Path(checkpoints.folder)
    memory = memory_folder(checkpoints)
    if memory is not None and world.rank == 0:
        memory.mkdir(exist_ok=True)
        remove_unfinished(memory)
    folders = [each for each in (memory, folder) if each is not None]
    steps = sorted((step, number) for number, each in enumerate(folders) for step in steps_in(each))
    problems: list[str] = []
    for step, number in reversed(world.broadcast_object(steps)):
        problem, checkpoint = "", None
        try:
            checkpoint = open_checkpoint(folder_of_step(folders[number], step))
            checkpoint.check(world.rank, world.size)
        except (SpindleError, OSError) as error:
            problem = str(error)
        # the first problem that any rank has found
        problem = next(filter(None, world.broadcast_object(world.gather_objects(problem))), "")
        if not problem:
            return checkpoint
        problems.append(problem)
        damaged.add(folders[number] / folder_name(step))
        notify(f"{problem}; trying an older checkpoint")
    if problems:
        raise CheckpointError(
            f"{folder}: none of its {count_of(len(problems), 'checkpoint')} can be read. {problems[0]}. Move them away "
            "to start from scratch"
        )
    return None


def claim_folder(folder: Path, world: World) -> int:
    """Create the folder, remove what an earlier run has left unfinished, and return the number of this attempt.

    Refuses a folder that not all ranks see, or that another job or a newer attempt of this job uses. All ranks must
    call it.
    """
    problem, token, attempt = "", "", 0
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            attempt = claim(folder)
            _lock(folder, attempt)
            remove_unfinished(folder)
            token = f".shared-{secrets.token_hex(8)}"
            (folder / token).touch()
        except SpindleError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{folder}: cannot be written ({error.strerror})"
    problem, token, attempt = world.broadcast_object((problem, token, attempt))
    if problem:
        raise CheckpointError(problem)
    sees = world.broadcast_object(world.gather_objects(_sees_file(folder / token)))
    if world.rank == 0:
        (folder / token).unlink(missing_ok=True)
    blind = [rank for rank, sees_it in enumerate(sees) if not sees_it]
    if blind:
        raise CheckpointError(
            f"{folder.absolute()}: rank {blind[0]} does not see what rank 0 writes there; "
            "Checkpoints(...) needs a folder that all hosts share"
        )
    return int(attempt)


def _sees_file(path: Path) -> bool:
    end_s = time.monotonic() + _SHARED_S
    while not path.exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def _lock(folder: Path, attempt: int) -> None:
    """Hold a lock on a folder until this process ends. Child processes do not inherit it.

    Each attempt locks a byte of its own, so that a newer one does not wait until an older one has ended.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, attempt)
    except (BlockingIOError, PermissionError) as error:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another running job saves its checkpoints there") from error
    except OSError:  # the file system does not support locks
        os.close(descriptor)


# Restoring the state


def _restore(session: TrainSession, saved: ResumedTensors, handles: Handles, *, is_over: bool) -> None:
    """Restore the saved state of a session, before its tasks are traced."""
    state, where = saved.checkpoint.state, str(saved.checkpoint.folder)
    config = _restored_config(session.config, saved)
    if config.tasks != session.config.tasks:
        session.set_config(config)
    session.absent_tasks = frozenset(state.ended_tasks) - set(config.task_names)
    for task, loader in state.data.items():
        session.num_batches[task] = loader.num_batches
        if not is_over and loader.position is not None:
            session.loader_positions[task] = _loader_position(loader.position, f"{where}: task {task!r}")
        session.loader_facts[task] = loader.facts
    if not is_over and "step_tasks" in state.extra:
        step_tasks = from_json(tuple[str, ...], state.extra["step_tasks"], f"{where}: step_tasks")
        session.next_step_tasks = frozenset(step_tasks), frozenset(state.tasks)
    session.variants.restore_names(
        {(task, int(key)): name for task, keys in state.variants.items() for key, name in keys.items()}
    )
    session.checked |= set(state.checked)
    session.handles = {**handles, **session.handles}  # includes modules of tasks that have ended
    frozen, in_evaluation = set(state.frozen), set(state.in_evaluation)
    for name, handle in handles.items():
        if name in state.modules:
            for path, parameter in handle.module.named_parameters():
                full = f"{name}.{path}"
                parameter.requires_grad_(state.aliases.get(full, full) not in frozen)
            for path, module in handle.module.named_modules():
                module.training = f"{name}.{path}" not in in_evaluation
    session.restore_optimizer_state(partial(saved.optimizer_state, session.world))
    if session.saved_planning.plan is None:  # a plan from a scheduler was made for the current ranks
        session.saved_planning = _saved_planning(session, saved, config)
    try:
        set_random_state(from_plain(state.random_state, where))
    except _NOT_SAVED as error:
        raise CheckpointError(f"{where}: its random state cannot be restored ({error})") from error


def _saved_planning(session: TrainSession, saved: ResumedTensors, config: TrainConfig) -> SavedPlanning:
    """The plan and the profile of a checkpoint, if they still apply."""
    state = saved.checkpoint.state
    planning = planning_text(config.planning)
    # Rank 0 decides: other ranks may not see the files of a given plan and profile.
    is_plan_reused, is_profile_reused = session.world.broadcast_object(
        (state.planning == planning, has_same_profile(state.planning, planning))
    )
    return SavedPlanning(
        plan=saved.plan if is_plan_reused else None, profile=saved.profile if is_profile_reused else None
    )


def _loader_position(saved: Any, where: str) -> LoaderPosition:
    try:
        position = LoaderPosition(**from_plain(saved, where))
        with restored_random_state():
            for state in (position.random_state, position.now):
                if state is not None:
                    set_random_state(state)
        own = [] if position.generator is None else [position.generator]
        for generator in (*own, *position.sampler_generators):
            torch.Generator().set_state(generator)
        if type(position.num_read) is not int or position.num_read < 0:
            raise ValueError(f"num_read={position.num_read!r}")
        if position.rows is not None and position.rows.keys() != {"axes", "with_rows"}:
            raise ValueError(f"rows={position.rows!r}")
    except _NOT_SAVED as error:
        raise CheckpointError(f"{where}: the position of its loader cannot be restored ({error})") from error
    return position


def _restored_config(config: TrainConfig, saved: ResumedTensors) -> TrainConfig:
    """The tasks that were trained, in their order, then new ones; without tasks that had ended."""
    state, tasks = saved.checkpoint.state, {task.name: task for task in config.tasks}
    missing = [name for name in state.tasks if name not in tasks]
    if missing:
        raise CheckpointError(
            f"{saved.checkpoint.folder}: it is of a training with the task {missing[0]!r}, which this script does not "
            f"have (its tasks: {', '.join(tasks)}); give it to the Trainer, and end it with remove_task"
        )
    if state.seed != config.seed:
        raise CheckpointError(
            f"{saved.checkpoint.folder}: it is from a training with seed={state.seed}, but this one has "
            f"seed={config.seed}, which gives a different order of data"
        )
    names = [*state.tasks, *(name for name in tasks if name not in (*state.tasks, *state.ended_tasks))]
    weights = config.sampling_weights
    if weights is not None:
        weights = {name: weight for name, weight in weights.items() if name in names}
    return replace(config, tasks=tuple(tasks[name] for name in names), sampling_weights=weights)


class ResumedTensors:
    """The tensors of the checkpoint from which training was resumed, until all of them are loaded."""

    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._loaded: set[str] = set()

    @property
    def plan(self) -> Plan:
        return self._artifact(PLAN, "plan", Plan)

    @property
    def profile(self) -> Profile:
        return self._artifact(PROFILE, "profile", Profile)

    def _artifact(self, file: str, kind: str, value_kind: type[T]) -> T:
        where = self.checkpoint.folder / file
        data = self.checkpoint.artifact(file)
        if data is None:
            raise CheckpointError(f"{where}: is missing")
        return artifact_from_json(data, str(where), kind, value_kind)

    def read(self, name: str, part: Slice) -> torch.Tensor:
        """Read a slice of a tensor, on the host."""
        stored = self.checkpoint.tensors[name]
        values = torch.empty(part.num_elements, dtype=getattr(torch, stored.dtype))
        bytes_of = values.view(torch.uint8).numpy()
        for begin, box in part.boxes():
            numbers = self.checkpoint.read(name, box).reshape(-1)
            size = numbers.itemsize
            bytes_of[begin * size : (begin + len(numbers)) * size] = numbers.view("u1")
        return values.reshape(part.shape)

    # Parameters and buffers

    def load(self, weights: Weights, handles: Handles, rank: int) -> None:
        """Load those parameters that this rank holds and has not loaded yet, and buffers. New modules keep their
        values."""
        held = {id(parameter): slices for parameter, slices in weights.held.values()}
        shapes = {key: whole_shape(slices) for key, slices in held.items()}
        for name, parameter in self._matches(handles, shapes):
            slices = held.get(id(parameter))
            shape = self.checkpoint.tensors[name].shape
            part = Slice.whole(shape) if slices is None else slices.get(rank)
            if part is not None:
                parameter.data.copy_(self.read(name, part))
        self._load_buffers(handles)

    def load_modules(self, handles: Handles) -> None:
        """Load all parameters and buffers of modules, whole."""
        for name, parameter in self._matches(handles, {}):
            parameter.data.copy_(self.read(name, Slice.whole(self.checkpoint.tensors[name].shape)))
        self._load_buffers(handles)

    def forget_loaded(self) -> None:
        """Let everything be loaded again."""
        self._loaded.clear()

    def _matches(self, handles: Handles, shapes: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of modules that are not loaded yet, each with its tensor. They count as loaded from now on.
        `shapes` are the shapes of scattered parameters, by id."""
        state, tensors = self.checkpoint.state, self.checkpoint.tensors
        for module, handle in handles.items():
            for path, parameter in handle.module.named_parameters(remove_duplicate=False):
                full = f"{module}.{path}"
                name = f"parameter/{state.aliases.get(full, full)}"
                if name in self._loaded or (module not in state.modules and name not in tensors):
                    continue
                shape = shapes.get(id(parameter), tuple(parameter.shape))
                if name not in tensors:
                    if 0 in shape:
                        continue
                    raise CheckpointError(
                        f"{self.checkpoint.folder}: it has no parameter {full!r} of module {module!r}"
                    )
                stored, dtype = tensors[name], str(parameter.dtype).removeprefix("torch.")
                if (stored.shape, stored.dtype) != (shape, dtype):
                    raise CheckpointError(
                        f"{self.checkpoint.folder}: parameter {full!r} was saved as {stored.dtype} "
                        f"{list(stored.shape)}, here it is {dtype} {list(shape)}"
                    )
                self._loaded.add(name)
                yield name, parameter

    def _load_buffers(self, handles: Handles) -> None:
        for module, handle in handles.items():
            for path, buffer in handle.module.named_buffers():
                for kind in ("buffer", "nonpersistent_buffer"):
                    name = f"{kind}/{module}.{path}"
                    stored = self.checkpoint.tensors.get(name)
                    if stored is None or name in self._loaded:
                        continue
                    self._loaded.add(name)
                    if stored.shape == tuple(buffer.shape):
                        buffer.copy_(self.read(name, Slice.whole(stored.shape)))
                    elif kind == "buffer":  # other buffers are caches, whose length follows the longest sequence so far
                        raise CheckpointError(
                            f"{self.checkpoint.folder}: buffer {f'{module}.{path}'!r} was saved with the shape "
                            f"{list(stored.shape)}, here it has {list(buffer.shape)}"
                        )

    def unloaded(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Parameters and buffers that no module has loaded, each with a function that reads it."""
        for name, stored in self.checkpoint.tensors.items():
            if name.startswith(("parameter/", "buffer/", "nonpersistent_buffer/")) and name not in self._loaded:
                yield name, lambda name=name, shape=stored.shape: self.read(name, Slice.whole(shape))  # type: ignore[misc]

    # The optimizer

    def optimizer_state(self, world: World, sharding: Sharding) -> OptimizerState:
        """A rank's share of the optimizer's state under a sharding. The state of other parameters stays with one rank
        each, on the host."""
        state, tensors = self.checkpoint.state, self.checkpoint.tensors
        where = str(self.checkpoint.folder)
        current = {state.aliases.get(name, name): name for name in sharding}  # by the name under which they were saved
        keys: dict[str, list[str]] = {name: [] for name in state.optimizer_values}
        for path in tensors:
            if path.startswith("optimizer/"):
                name, _, key = path.removeprefix("optimizer/").rpartition("/")
                keys.setdefault(name, []).append(key)
        shares: dict[str, Mapping[int, Slice]] = {}
        states: dict[str, dict[str, Any]] = {}
        for number, (saved_name, its_keys) in enumerate(sorted(keys.items())):
            parameter = tensors.get(f"parameter/{saved_name}")
            if parameter is None:
                continue
            name = current.get(saved_name, saved_name)
            whole = {number % world.size: Slice.whole(parameter.shape)}
            shares[name] = sharding.get(name, whole)
            part = shares[name].get(world.rank)
            if part is None:
                continue
            values = {
                key: from_plain(value, where) for key, value in state.optimizer_values.get(saved_name, {}).items()
            }
            for key in its_keys:
                path = f"optimizer/{saved_name}/{key}"
                is_sharded = tensors[path].shape == parameter.shape and bool(parameter.shape)
                tensor = self.read(path, part if is_sharded else Slice.whole(tensors[path].shape))
                values[key] = tensor.to(world.device) if is_sharded and name in sharding else tensor
            states[name] = values
        scale = state.extra.get("loss_scale")
        return OptimizerState(
            num_steps=state.num_updates,
            sharding=shares,
            states=states,
            settings=self._settings(state.groups, current),
            old_settings=self._settings(state.frozen_groups, current),
            lr_schedulers={
                name.removeprefix(SCHEDULER).removeprefix("/"): LRSchedulerState(None, values)
                for name, values in state.extra.items()
                if name.partition("/")[0] == SCHEDULER
            },
            loss_scale=None if scale is None else from_json(ScaleState, scale, where),
        )

    def _settings(self, groups: tuple[SavedGroup, ...], current: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        where = str(self.checkpoint.folder)
        settings: dict[str, dict[str, Any]] = {}
        for group in groups:
            values = {key: from_plain(value, where) for key, value in group.settings.items()}
            settings |= {current.get(name, name): values for name in group.parameters}
        return settings
