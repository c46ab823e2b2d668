"""Save checkpoints while training: each rank copies its tensors between two steps, and a thread writes them.

All ranks copy after the same step, each what it writes. A thread writes the copies while training goes on. A column of
the batch headers says whose part is written; then a thread of rank 0 joins the parts and renames the folder. No thread
communicates with other ranks. One checkpoint is written at a time; those in memory (`memory_checkpoints`) do not wait
for those on disk.
"""

from __future__ import annotations

import os
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spindle.artifact import artifact_text
from spindle.checkpoint import (
    PLAN,
    PROFILE,
    SavedLoader,
    SavedState,
    finish,
    folder_name,
    partial_folder,
    prune,
    steps_in,
    write_part,
)
from spindle.display import num_bytes as _text
from spindle.errors import CheckpointError, SupersededError
from spindle.launch import recorder, variables
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.program import Box
from spindle.run import StagedBytes, Staging
from spindle.train.checkpoint_content import CheckpointContent, WrittenBox
from spindle.train.config import Checkpoints, Planning
from spindle.train.memory_checkpoints import MemoryCheckpoints
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.session import TrainSession
from spindle.train.update import Update

REQUESTED, ENDING = 1, 2  # in the header: a checkpoint was requested, or the job is to end after one
# Memory needed relative to a checkpoint's size, because the previous one is removed only when the next is complete.
_ROOM = 2.2


@dataclass(frozen=True, slots=True)
class _Staged:
    """A copy of what this rank writes: name, shape, box and dtype of each box, its bytes, and the non-tensor state."""

    boxes: tuple[tuple[str, tuple[int, ...], Box, torch.dtype], ...]
    copied: StagedBytes
    optimizer: OptimizerState
    data: Mapping[str, SavedLoader]


class Saver:
    """One rank's part in saving a session. It lives from fit to fit."""

    def __init__(self, session: TrainSession, checkpoints: Checkpoints, planning: Planning) -> None:
        self._session, self._world, self._checkpoints = session, session.world, checkpoints
        self.content = CheckpointContent(session, planning)
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
        self._has_room = False  # whether memory has room for checkpoints, as far as is known
        self.attempt = 0  # the number of this attempt of the job; only the newest attempt may commit checkpoints
        self._number = 0  # how many checkpoints were begun
        self._steps: dict[int, int] = {}  # the step of each checkpoint, by its number
        self._writing: Future[None] | None = None
        self._finishing: Future[None] | None = None
        # The state of the checkpoint that is being written, on rank 0.
        self._state: tuple[SavedState, Plan, Profile] | None = None
        # The optimizer whose settings were found to be plain values.
        self._checked: weakref.ref[Update] | None = None
        self._is_noted = True  # whether the user was told how the last checkpoint ended
        self.last_step = 0  # the last step that was saved on disk, or resumed from
        self._last_memory_step = 0  # the last step that was saved in memory, or resumed from
        self._is_on_disk = True  # whether the last step was saved on disk, not only in memory
        self.damaged: set[Path] = set()  # checkpoints that could not be read when resuming
        self.is_requested = False  # whether the user has requested a checkpoint on this rank
        self.pauses: list[tuple[int, float]] = []  # bytes that this rank has copied, and the seconds that took

    # When to save

    @property
    def written(self) -> int:
        """The number of the last checkpoint whose part this rank has written; negative if that failed. On rank 0, of
        the last one that is complete."""
        future = self._finishing if self._world.rank == 0 else self._writing
        if future is None or not future.done():
            return max(0, self._number - 1)
        return -self._number if future.exception() is not None else self._number

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this many steps."""
        every = self._checkpoints.every
        return every is not None and step % every == 0 and step > self.last_step

    def is_due_in_memory(self, step: int) -> bool:
        """Whether a checkpoint in memory is due after this many steps."""
        every = self._checkpoints.memory_every
        is_due = every is not None and step % every == 0 and step > self._last_memory_step
        return self._memory is not None and is_due

    def is_saved(self, step: int, *, on_disk: bool) -> bool:
        """Whether the state after this many steps was saved or resumed from; with `on_disk`, only on disk."""
        return step == self.last_step and (not on_disk or self._is_on_disk)

    def resume_from(self, folder: Path, step: int) -> None:
        """Note that the training was resumed from a checkpoint of `folder`."""
        self.last_step = self._last_memory_step = step
        self._is_on_disk = folder == self._folder

    def advance(self, written: Sequence[int], notify: Callable[[str], None]) -> bool:
        """Advance the checkpoint that is being written. `written` is from all ranks. Returns whether it is finished,
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
        """Wait on all ranks together until the checkpoint that is being written has ended. Returns whether it is
        complete."""
        if self._number == 0:
            return True
        while not self.advance(written := self._exchange(), notify):
            for future in (self._writing, self._finishing):
                if future is not None:
                    future.exception()  # waits for all ranks
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

    # What to save

    def save(
        self,
        step: int,
        state_of: Callable[[], SavedState],
        data: Mapping[str, SavedLoader],
    ) -> None:
        """Copy what this rank writes, and start to write it. The last checkpoint must have ended. `state_of` is called
        on rank 0. `data` are the positions of the loaders that this rank reads."""
        begin_s = time.perf_counter()
        staged = self._stage(self._staging, *self.content.boxes(), data)
        self._number += 1
        self._steps[self._number] = self.last_step = step
        self._is_on_disk, self._is_noted, self.is_requested, self._finishing = True, False, False, None
        if self._world.rank == 0:
            self._state = state_of(), *self.content.artifacts()
        self._writing = self._thread.submit(self._write, partial_folder(self._folder, step, self.attempt), staged)
        self.pauses.append((len(staged.copied.memory), time.perf_counter() - begin_s))

    def save_in_memory(
        self,
        step: int,
        state_of: Callable[[], SavedState],
        data: Mapping[str, SavedLoader],
        notify: Callable[[str], None],
    ) -> None:
        """Like `save`, for a checkpoint that stays in memory."""
        memory = self._memory
        assert memory is not None
        memory.wait(notify)
        boxes, optimizer = self.content.boxes()
        if not self._finds_room(memory.folder, boxes, notify):
            return
        staged = self._stage(memory.staging, boxes, optimizer, data)
        self._last_memory_step = step
        state = state_of() if self._world.rank == 0 else None
        plan, profile = self.content.artifacts()

        def join_parts() -> None:
            assert state is not None
            self._finish(memory.folder, state, plan, profile, keep=1)

        memory.save(step, lambda partial: self._write(partial, staged), join_parts, state, notify)

    def wait_in_memory(self, notify: Callable[[str], None]) -> None:
        if self._memory is not None:
            self._memory.wait(notify)

    def _stage(
        self,
        staging: Staging,
        boxes: Sequence[WrittenBox],
        optimizer: OptimizerState,
        data: Mapping[str, SavedLoader],
    ) -> _Staged:
        """Copy what this rank writes. Keeps no reference to the tensors, whose memory a change of plan may free."""
        update = self._session.update
        assert update is not None
        copied = staging.copy(
            [written.values for written in boxes],
            {position for position, written in enumerate(boxes) if written.is_buffer},
        )
        update.wait_for(copied.event)
        if self._checked is None or self._checked() is not update:  # otherwise the thread waits
            self._checked = weakref.ref(update)
            self.content.fragments(optimizer)
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
            fragments = {"data": dict(staged.data), **self.content.fragments(staged.optimizer)}
            write_part(partial, self._world.rank, staged.copied.wait(), described, fragments)
        except OSError as error:
            raise CheckpointError(f"{partial}: {error.strerror}") from error

    def _finds_room(self, folder: Path, boxes: Sequence[WrittenBox], notify: Callable[[str], None]) -> bool:
        """Whether memory has room for checkpoints, decided by rank 0. If not, none are saved there from now on."""
        if not self._has_room:
            num_bytes = sum(written.values.numel() * written.values.element_size() for written in boxes)
            # existing checkpoints are removed when new ones are written
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
            prune(folder, keep, self.content.needed_steps(), damaged)
        except OSError as error:
            raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(partial_folder(folder, state.step, attempt), ignore_errors=True)


def memory_folder(checkpoints: Checkpoints) -> Path | None:
    """The folder of checkpoints in memory, if they are enabled and the launcher provides one."""
    folder = os.environ.get(variables.MEMORY)
    if folder is None or checkpoints.memory_every is None:
        return None
    return Path(folder) / f"checkpoints-{zlib.crc32(str(Path(checkpoints.folder).absolute()).encode())}"
