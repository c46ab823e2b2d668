"""Before which steps a checkpoint is saved, the same on all ranks, and the end of a job that was signalled.

Every rank's batch header says whether it wants a checkpoint, and which one it has written. All ranks decide from the
same headers, so they all decide the same.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from spindle.checkpoint import SavedState
from spindle.launch import recorder
from spindle.train.batch_source import BatchSource
from spindle.train.config import TrainConfig
from spindle.train.header import Table, saves_in, written_in
from spindle.train.saving import ENDING, REQUESTED
from spindle.train.session import TrainSession
from spindle.train.signals import NoticedSignals, noticed_signals


class SavePoints:
    """Decides when the checkpoints of a fit are saved. Without `Trainer(checkpoints=...)`, there are none."""

    def __init__(self, session: TrainSession, source: BatchSource) -> None:
        self._session, self._saver, self._source = session, session.saver, source
        self._signals: NoticedSignals | None = None
        self._is_on_disk = False  # whether the checkpoint that is due now goes to disk, not only to memory

    @contextmanager
    def noticing_signals(self) -> Iterator[None]:
        """A context in which a signal to end takes effect between two steps, after a checkpoint is saved."""
        if self._saver is None:
            yield
            return
        with noticed_signals() as self._signals:
            yield

    def header(self) -> tuple[int, int]:
        """What this rank requests to be saved, and which checkpoint it has written."""
        if self._saver is None:
            return 0, 0
        is_ending = self._signals is not None and self._signals.first is not None
        return ENDING if is_ending else REQUESTED if self._saver.is_requested else 0, self._saver.written

    def falls_due(self, step: int) -> bool:
        """Whether a checkpoint is due before this step, even if it is skipped in the end."""
        saver = self._saver
        return saver is not None and (saver.is_due(step) or saver.is_due_in_memory(step))

    def is_saving(self, table: Table, step: int) -> bool:
        """Whether all ranks save a checkpoint before this step."""
        saver, warn = self._saver, self._session.warn
        if saver is None:
            return False
        is_free, wanted = saver.advance(written_in(table), warn), saves_in(table)
        is_wanted = bool(wanted) and not saver.is_saved(step, on_disk=True)
        self._is_on_disk = wanted == ENDING or (is_free and (is_wanted or saver.is_due(step)))
        if not self._is_on_disk and (is_wanted or saver.is_due(step)):
            saver.is_requested = False
            self._session.progress.note(
                f"no checkpoint of step {step}: that of step {saver.last_step} is still being written"
            )
        return self._is_on_disk or saver.is_due_in_memory(step)

    def save(
        self,
        step: int,
        wanted: int,
        config: TrainConfig,
        step_tasks: Collection[str] | None = None,
        *,
        was_stopped: bool = False,
    ) -> None:
        """Save the state before this step, if a checkpoint is due: to memory, to disk unless that is busy, or both.

        `wanted` forces a checkpoint on disk; ENDING also ends the job once it is written. `config` and `step_tasks` are
        those of the step, and None after the last step.
        """
        saver, session, warn = self._saver, self._session, self._session.warn
        assert saver is not None
        is_ending = wanted == ENDING
        if is_ending or was_stopped:
            recorder.pause()  # writing to disk may take longer than the limit for hung ranks
            saver.wait(warn)

        def state() -> SavedState:
            fit, first_step = session.num_fits - 1, session.first_step
            return saver.content.state(step, fit, first_step, config, step_tasks, was_stopped=was_stopped)

        if saver.is_due_in_memory(step) and not is_ending:
            saver.save_in_memory(step, state, self._source.saved_positions(), warn)
        if self._is_on_disk and not saver.is_saved(step, on_disk=bool(wanted)):
            saver.save(step, state, self._source.saved_positions())
        if is_ending:
            self._end_job(step, is_saved=saver.wait(warn))

    def save_last(self, step: int, config: TrainConfig, *, was_stopped: bool) -> None:
        """Save the state after the last step of the fit, and wait until it is written. End the job if a rank has
        received a signal."""
        saver, warn = self._saver, self._session.warn
        if saver is None:
            return
        saver.wait(warn)
        self._is_on_disk = True
        self.save(step, REQUESTED, config, was_stopped=was_stopped)
        saver.wait_in_memory(warn)
        is_saved = saver.wait(warn)
        # a signal that arrived after the last header of this fit
        rows = self._session.world.start_all_gather(torch.tensor([self.header()[0]], dtype=torch.float64)).wait()
        if any(int(row.item()) == ENDING for row in rows):
            self._end_job(step, is_saved=is_saved)

    def _end_job(self, step: int, *, is_saved: bool) -> NoReturn:
        name = "a signal" if self._signals is None or self._signals.first is None else self._signals.first.name
        progress = self._session.progress
        show = progress.note if is_saved else progress.warn
        show(f"stopped by {name} after {step} steps, which are {'' if is_saved else 'not '}saved")
        raise SystemExit(128 + signal.SIGTERM)
