"""Checkpoints in a folder of the launcher in memory, beside those on disk: a slow disk delays none of them.

All ranks of a launcher are on its host, so rank 0 sees their parts in the folder, and joins them without any
communication. The next one begins once this rank has written its part of the last; on rank 0, once that is complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from spindle.checkpoint import SavedState, has_part, partial_folder
from spindle.errors import CheckpointError
from spindle.run import Staging

_PARTS_S = 60.0  # the time limit in which all ranks must have written their parts
_POLL_S = 0.001
_FAILED = "rank-{rank}.failed"


class MemoryCheckpoints:
    """One rank's part in saving checkpoints to the host's memory.

    With a `barrier`, a step begins only when the checkpoint before it is complete, so that at most one step can be
    lost. The barrier also notices lost ranks sooner than a missing part does.
    """

    def __init__(self, folder: Path, rank: int, staging: Staging, barrier: Callable[[], None] | None) -> None:
        self.folder, self.staging = folder, staging
        self._rank, self._barrier = rank, barrier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-checkpoint")
        # The step of the last checkpoint, and the thread that writes it.
        self._saving: list[tuple[int, Future[None]]] = []

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        finish: Callable[[], None],
        state: SavedState | None,
        notify: Callable[[str], None],
    ) -> None:
        """Write this rank's part in a thread, with `write`. Rank 0, which has a `state`, then joins the parts with
        `finish`. The last checkpoint must be complete (`wait`)."""
        partial = partial_folder(self.folder, step)
        self._saving = [(step, self._thread.submit(self._write, partial, write))]
        if state is not None:
            self._saving.append((step, self._thread.submit(self._finish, partial, state.num_ranks, finish)))
        if self._barrier is not None:
            _, written = self._saving[0]
            written.exception()  # waits for all ranks
            self._barrier()
            self.wait(notify)

    def wait(self, notify: Callable[[str], None]) -> None:
        """Wait until this rank has written its part of the last checkpoint; on rank 0, until it is complete."""
        for step, future in self._saving:
            error = future.exception()
            if error is not None:
                notify(f"the checkpoint of step {step} in memory could not be written: {error}; training goes on")
                break
        self._saving = []

    def _write(self, partial: Path, write: Callable[[Path], None]) -> None:
        try:
            write(partial)
        except BaseException:
            with suppress(OSError):
                partial.mkdir(exist_ok=True)
                (partial / _FAILED.format(rank=self._rank)).touch()
            raise

    def _finish(self, partial: Path, num_ranks: int, finish: Callable[[], None]) -> None:
        try:
            end_s = time.monotonic() + _PARTS_S
            for rank in range(num_ranks):
                while not has_part(partial, rank):
                    if (partial / _FAILED.format(rank=rank)).exists():
                        raise CheckpointError(f"rank {rank} could not write its part")
                    if time.monotonic() > end_s:
                        raise CheckpointError(f"rank {rank} has not written its part in {_PARTS_S:.0f} s")
                    time.sleep(_POLL_S)
            finish()
        finally:
            shutil.rmtree(partial, ignore_errors=True)
