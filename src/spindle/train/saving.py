"""Save checkpoints while training: each rank copies its tensors between two steps, and a thread writes them.

All ranks copy after the same step, each what it writes. A thread writes the copies while training goes on. A column of
the batch headers says whose part is written; then a thread of rank 0 joins the parts and renames the folder. No thread
communicates with other ranks. One checkpoint is written at a time; those in memory (`memory_checkpoints`) do not wait
for those on disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spindle.artifact import artifact_text, to_json
from spindle.checkpoint import (
    PLAN,
    PROFILE,
    SavedGroup,
    SavedLoader,
    SavedState,
    finish,
    folder_name,
    partial_folder,
    prune,
    steps_in,
    write_part,
    writers_of,
)
from spindle.data import random_state
from spindle.display import num_bytes as _text
from spindle.errors import CheckpointError, SupersededError, TrainingError
from spindle.launch import recorder, variables
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.program import Box, Sharding, Slice
from spindle.run import Copied, Staging, box_view
from spindle.train.config import Checkpoints, Planning, TrainConfig
from spindle.train.memory_checkpoints import MemoryCheckpoints
from spindle.train.optimizer import Update
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.plain_json import to_plain
from spindle.train.record import parameter_names, root_handles
from spindle.train.runtime import buffer_owners
from spindle.train.session import TrainSession

REQUESTED, ENDING = 1, 2  # in the header: a checkpoint was asked for; the job is to end after one
_ROOM = 2.2  # of a checkpoint's size: the last one in memory is removed once the next is complete
_STATE_SIZE = 3  # elements written for an element of a trained parameter: Adam's two moments, too


@dataclass(frozen=True, slots=True)
class _Written:
    """A box that this rank writes."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class _Staged:
    """What this rank writes, copied: name, shape, box and dtype of each box, its bytes, and what is no tensor."""

    boxes: tuple[tuple[str, tuple[int, ...], Box, torch.dtype], ...]
    copied: Copied
    optimizer: OptimizerState
    data: Mapping[str, SavedLoader]


class Saver:
    """One rank's part in saving a session, from fit to fit."""

    def __init__(self, session: TrainSession, checkpoints: Checkpoints, planning: Planning) -> None:
        self._session, self._world, self._checkpoints = session, session.world, checkpoints
        self._planning = planning_text(planning)
        self._staging = Staging(self._world.device)
        recorder.checkpoint_every = checkpoints.every
        recorder.checkpoints = str(Path(checkpoints.folder).absolute())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._folder = Path(checkpoints.folder)
        memory = memory_folder(checkpoints)
        self._memory: MemoryCheckpoints | None = None
        if memory is not None:
            barrier = self._world.barrier if checkpoints.memory_every == 1 else None
            self._memory = MemoryCheckpoints(memory, self._world.rank, Staging(self._world.device), barrier)
        self._has_room = False  # in memory, as far as is known
        self.attempt = 0  # of this job, by its scheduler's count; only the newest may commit checkpoints
        self._number = 0  # of checkpoints begun
        self._steps: dict[int, int] = {}  # their steps, by number
        self._writing: Future[None] | None = None
        self._finishing: Future[None] | None = None
        self._state: tuple[SavedState, Plan, Profile] | None = None  # of the one that is written, on rank 0
        # The optimizer whose settings are known to be plain values, while it lives.
        self._checked: weakref.ref[Update] | None = None
        self._is_noted = True  # whether the outcome of the last one was reported to the user
        # This rank's boxes, under an optimizer.
        self._writers: tuple[weakref.ref[Update], dict[str, list[Box]]] | None = None
        self.last_step = 0  # that was saved on disk, or resumed from
        self._last_memory_step = 0  # that was saved in memory, or resumed from
        self._is_on_disk = True  # whether the last step is
        self.damaged: set[Path] = set()  # checkpoints that could not be resumed from
        self.is_requested = False  # by the user, on this rank
        self.pauses: list[tuple[int, float]] = []  # bytes copied on this rank, and seconds that took

    # When.

    @property
    def written(self) -> int:
        """The number of the last checkpoint whose part this rank has written; negative if that failed. On rank 0 of
        the last that is complete."""
        future = self._finishing if self._world.rank == 0 else self._writing
        if future is None or not future.done():
            return max(0, self._number - 1)
        return -self._number if future.exception() is not None else self._number

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint after so many steps falls due by their number."""
        every = self._checkpoints.every
        return every is not None and step % every == 0 and step > self.last_step

    def is_due_in_memory(self, step: int) -> bool:
        """Whether one falls due that stays in memory."""
        every = self._checkpoints.memory_every
        is_due = every is not None and step % every == 0 and step > self._last_memory_step
        return self._memory is not None and is_due

    def is_saved(self, step: int, *, on_disk: bool) -> bool:
        """Whether the state after so many steps was saved on disk, or resumed from; with `on_disk`, whether not from
        memory."""
        return step == self.last_step and (not on_disk or self._is_on_disk)

    def resume_from(self, folder: Path, step: int) -> None:
        """Note that the training was resumed from a checkpoint of `folder`."""
        self.last_step = self._last_memory_step = step
        self._is_on_disk = folder == self._folder

    def advance(self, written: Sequence[int], notify: Callable[[str], None]) -> bool:
        """Advance the checkpoint that is being written, given `written` of all ranks. Returns whether it is finished,
        the same on all ranks."""
        if self._number == 0:
            return True
        is_written = all(abs(number) == self._number for number in written[1:])
        if self._world.rank == 0 and self._finishing is None and is_written and self._writing_is_done():
            self._start_finishing(written)
        is_over = abs(written[0]) == self._number
        if is_over and not self._is_noted:
            self._is_noted = True
            self._note_end(written[0] > 0, notify)
        return is_over

    def _writing_is_done(self) -> bool:
        return self._writing is not None and self._writing.done()

    def wait(self, notify: Callable[[str], None]) -> bool:
        """Wait until the checkpoint that is being written is over, on all ranks together. Returns whether it is
        complete."""
        if self._number == 0:
            return True
        while not self.advance(written := self._exchange(), notify):
            for future in (self._writing, self._finishing):
                if future is not None:
                    future.exception()  # waits
        return written[0] > 0

    def _exchange(self) -> list[int]:
        if self._writing is not None:
            self._writing.exception()
        rows = self._world.start_all_gather(torch.tensor([self.written], dtype=torch.float64)).wait()
        return [int(row.item()) for row in rows]

    def _note_end(self, is_complete: bool, notify: Callable[[str], None]) -> None:
        step = self._steps[self._number]
        if is_complete:
            return
        future = self._finishing if self._world.rank == 0 else self._writing
        error = future.exception() if future is not None else None
        if isinstance(error, SupersededError):
            raise error
        reason = f": {error}" if error is not None else ", on another rank"
        notify(f"the checkpoint of step {step} could not be written{reason}; training continues without it")

    # What.

    def save(
        self,
        step: int,
        state_of: Callable[[], SavedState],
        data: Mapping[str, SavedLoader],
    ) -> None:
        """Copy what this rank writes, and have it written. The last checkpoint must be over. `state_of` is called on
        rank 0; `data` are the positions of loaders that this rank reads."""
        begin_s = time.perf_counter()
        staged = self._stage(self._staging, *self._sorted_boxes(), data)
        self._number += 1
        self._steps[self._number] = self.last_step = step
        self._is_on_disk, self._is_noted, self.is_requested, self._finishing = True, False, False, None
        if self._world.rank == 0:
            self._state = state_of(), *self._artifacts()
        self._writing = self._thread.submit(self._write, partial_folder(self._folder, step, self.attempt), staged)
        self.pauses.append((len(staged.copied.memory), time.perf_counter() - begin_s))

    def save_in_memory(
        self,
        step: int,
        state_of: Callable[[], SavedState],
        data: Mapping[str, SavedLoader],
        notify: Callable[[str], None],
    ) -> None:
        """The same, for a checkpoint that stays in memory."""
        memory = self._memory
        assert memory is not None
        memory.wait(notify)
        boxes, optimizer = self._sorted_boxes()
        if not self._finds_room(memory.folder, boxes, notify):
            return
        staged = self._stage(memory.staging, boxes, optimizer, data)
        self._last_memory_step = step
        state = state_of() if self._world.rank == 0 else None
        plan, profile = self._artifacts()

        def join_parts() -> None:
            assert state is not None
            self._finish(memory.folder, state, plan, profile, keep=1)

        memory.save(step, lambda partial: self._write(partial, staged), join_parts, state, notify)

    def wait_in_memory(self, notify: Callable[[str], None]) -> None:
        if self._memory is not None:
            self._memory.wait(notify)

    def _artifacts(self) -> tuple[Plan, Profile]:
        session = self._session
        assert session.runtime is not None
        assert session.profiled is not None
        return session.runtime.planned.plan, session.profiled.profile

    def _sorted_boxes(self) -> tuple[list[_Written], OptimizerState]:
        """The boxes that this rank writes, those with large elements first."""
        assert self._session.update is not None
        optimizer = self._session.update.state()
        return sorted(self._boxes(optimizer), key=lambda written: -written.values.element_size()), optimizer

    def _stage(
        self,
        staging: Staging,
        boxes: Sequence[_Written],
        optimizer: OptimizerState,
        data: Mapping[str, SavedLoader],
    ) -> _Staged:
        """Copy what this rank writes, without the tensors themselves, whose memory a change of plan may free."""
        update = self._session.update
        assert update is not None
        copied = staging.copy(
            [written.values for written in boxes],
            {position for position, written in enumerate(boxes) if written.is_buffer},
        )
        update.wait_for(copied.event)
        if self._checked is None or self._checked() is not update:  # else in the thread
            self._checked = weakref.ref(update)
            self._fragments(optimizer)
        optimizer = replace(
            optimizer,
            states={
                name: {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)}
                for name, entries in optimizer.states.items()
            },
        )
        described = tuple((written.name, written.shape, written.box, written.values.dtype) for written in boxes)
        return _Staged(described, copied, optimizer, data)

    def _write(self, partial: Path, staged: _Staged) -> None:
        begin, described = 0, []
        for name, shape, box, dtype in staged.boxes:
            length = box.num_elements * dtype.itemsize
            described.append((name, str(dtype).removeprefix("torch."), shape, box, begin, length))
            begin += length
        try:
            fragments = {"data": dict(staged.data), **self._fragments(staged.optimizer)}
            write_part(partial, self._world.rank, staged.copied.wait(), described, fragments)
        except OSError as error:
            raise CheckpointError(f"{partial}: {error.strerror}") from error

    def _finds_room(self, folder: Path, boxes: Sequence[_Written], notify: Callable[[str], None]) -> bool:
        """Whether memory has room for checkpoints, as rank 0 finds it; else there are none from now on."""
        if not self._has_room:
            num_bytes = sum(written.values.numel() * written.values.element_size() for written in boxes)
            # What is there already is removed as new ones are written.
            present = sum(path.stat().st_size for path in folder.glob("*/*") if path.is_file())
            free = shutil.disk_usage(folder.parent).free + present
            rows = self._world.start_all_gather(torch.tensor([num_bytes, free], dtype=torch.float64)).wait()
            needed, free = _ROOM * sum(float(row[0]) for row in rows), int(rows[0][1])
            self._has_room = free >= needed
            if not self._has_room:
                self._memory = None
                notify(
                    f"no checkpoints in memory: they need {_text(needed)} there, and {_text(free)} are free; "
                    "checkpoints on disk continue"
                )
        return self._has_room

    def _start_finishing(self, written: Sequence[int]) -> None:
        assert self._state is not None
        folder, (state, plan, profile) = self._folder, self._state
        failed = [rank for rank, number in enumerate(written) if number < 0]
        own = self._writing.exception() if self._writing is not None else None

        def finish_or_fail() -> None:
            if own is not None or failed:
                shutil.rmtree(partial_folder(folder, state.step, self.attempt), ignore_errors=True)
                raise own or CheckpointError(f"rank {failed[0]} could not write its part")
            self._finish(folder, state, plan, profile, self._checkpoints.keep, self.attempt)

        self._finishing = self._thread.submit(finish_or_fail)

    def _finish(
        self, folder: Path, state: SavedState, plan: Plan, profile: Profile, keep: int | None, attempt: int = 0
    ) -> None:
        """Complete a checkpoint whose parts are written, and remove older ones."""
        try:
            artifacts = {PLAN: artifact_text("plan", plan), PROFILE: artifact_text("profile", profile)}
            self.damaged.discard(finish(folder, state, artifacts, attempt))
            damaged = [step for step in steps_in(folder) if folder / folder_name(step) in self.damaged]
            prune(folder, keep, self._needed_steps(), damaged)
        except OSError as error:
            raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(partial_folder(folder, state.step, attempt), ignore_errors=True)

    def _needed_steps(self) -> list[int]:
        """That of the checkpoint which was resumed from, while it has what is not loaded yet."""
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
        """The non-tensor state that rank 0 knows. `step_tasks` are those of the step that is about to run, which was
        read before tasks joined or ended; None after the last step of a fit."""
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
            frozen_groups=_grouped(optimizer.old_settings),
            planning=self._planning,
            extra={} if step_tasks is None else {"step_tasks": sorted(step_tasks)},
            written_s=time.time(),
        )

    def _names(self) -> dict[int, str]:
        """The name of each parameter, by id: as plans name it, where one has it."""
        assert self._session.runtime is not None
        held = self._session.runtime.weights.held
        planned = {id(parameter): name for name, (parameter, _) in held.items()}
        return {**parameter_names(root_handles(self._session.handles)), **planned}

    def _fragments(self, state: OptimizerState) -> dict[str, Any]:
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
        scheduler = {} if state.lr_scheduler is None else state.lr_scheduler.state
        if "num_bad_epochs" in scheduler:  # a ReduceLROnPlateau; others are recreated and stepped
            extra["lr_scheduler"] = {
                key: value for key, value in scheduler.items() if isinstance(value, int | float | str)
            }
        if state.loss_scale is not None:
            extra["loss_scale"] = to_json(state.loss_scale)
        return {"optimizer_values": values, "groups": _grouped(state.settings), "extra": extra}

    def _boxes(self, state: OptimizerState) -> Iterator[_Written]:
        """The boxes that this rank writes."""
        session, rank = self._session, self._world.rank
        runtime, update, names, handles = session.runtime, session.update, self._names(), root_handles(session.handles)
        assert runtime is not None
        assert update is not None
        held = runtime.weights.held
        named = {name: parameter for name, (parameter, _) in held.items()}
        weights = {name: slices for name, (_, slices) in held.items()}
        for handle in handles.values():
            for parameter in handle.module.parameters():
                name = names[id(parameter)]
                if name not in named:  # of a layer that no task runs now: every rank has it
                    named[name], weights[name] = parameter, {0: Slice.whole(parameter.shape)}
        writers = self._writers_of(weights, named, state.sharding)
        for name, parameter in named.items():
            for box in writers[name]:
                values = box_view(parameter.data, weights[name][rank], box)
                yield _Written(f"parameter/{name}", whole_shape(weights[name]), box, values)
        for name, entries in state.states.items():
            slices = state.sharding[name]
            part, shape = slices[rank], whole_shape(slices)
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if tuple(value.shape) == part.shape and part.shape:
                    for box in writers[name if name in update.sharding else _frozen(name)]:
                        yield _Written(f"optimizer/{name}/{key}", shape, box, box_view(value, part, box))
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
        """The boxes of each parameter that this rank writes, with the optimizer's state of them; under another name
        those of the state of a parameter that is not trained now, which other ranks may have."""
        update, rank = self._session.update, self._world.rank
        assert update is not None
        known = self._writers
        if known is None or known[0]() is not update or not known[1].keys() >= weights.keys():
            sizes = {name: parameter.element_size() for name, parameter in named.items()}
            trained = update.sharding
            # Of what a sharded optimizer updates, each rank writes its part: nothing waits for an all-gather.
            frozen = {_frozen(name): slices for name, slices in states.items() if name not in trained}

            def element_bytes(name: str) -> int:
                return sizes.get(name, 4) * (_STATE_SIZE if name in trained else 1)

            writers = writers_of({**weights, **trained, **frozen}, element_bytes)
            mine = {name: [box for box, writer in boxes if writer == rank] for name, boxes in writers.items()}
            self._writers = known = weakref.ref(update), mine
        return known[1]

    def _unloaded_boxes(self) -> Iterator[_Written]:
        """The tensors of the resumed checkpoint that belong to modules that were not called yet."""
        saved = self._session.saved
        for number, (name, tensor) in enumerate(saved.unloaded() if saved is not None else ()):
            if number % self._world.size == self._world.rank:
                yield _whole(name, tensor())


def memory_folder(checkpoints: Checkpoints) -> Path | None:
    """The folder of checkpoints in memory, if they are enabled and a launcher provides one."""
    folder = os.environ.get(variables.MEMORY)
    if folder is None or checkpoints.memory_every is None:
        return None
    return Path(folder) / f"checkpoints-{zlib.crc32(str(Path(checkpoints.folder).absolute()).encode())}"


def _frozen(name: str) -> str:
    return f"{name} (frozen)"


def _whole(name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> _Written:
    return _Written(name, tuple(tensor.shape), Slice.whole(tensor.shape).box, tensor, is_buffer)


def whole_shape(slices: Mapping[int, Slice]) -> tuple[int, ...]:
    """The shape of a tensor, of which slices have all elements."""
    ends = [
        [offset + length for offset, length in zip(part.box.offsets, part.box.lengths, strict=True)]
        for part in slices.values()
    ]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _grouped(settings: Mapping[str, Mapping[str, Any]]) -> tuple[SavedGroup, ...]:
    """Settings with the parameters that have them."""
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
    """The user's planning options as text: a saved plan is reused while they are the same."""
    planner = planning.planner if isinstance(planning.planner, str) else _name_of(planning.planner)
    return repr(
        (
            planner,
            None if planning.plan is None else _plan_text(planning.plan),
            sorted(planning.tensor_parallel_degrees.items()),
            planning.pipeline_parallel_degree,
            planning.shard_optimizer,
            planning.memory_limit_bytes,
            planning.lanes,
        )
    )


def _plan_text(plan: Plan | Path | str) -> str:
    """The text of a given plan; for a file its digest, because its contents may change."""
    if isinstance(plan, Plan) or (isinstance(plan, str) and "*" in plan):
        return str(plan)
    try:
        return hashlib.sha256(Path(plan).read_bytes()).hexdigest()
    except OSError:  # rank 0 alone needs the file
        return str(plan)


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
