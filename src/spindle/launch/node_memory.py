"""Memory of a node that outlives the ranks and the agent of a job's attempt, for checkpoints of the next one.

    /dev/shm/spindle-memory-<user>/<job>-<attempt>

Each attempt has a folder of its own, locked by its agent. The next attempt on the node renames it once that agent has
ended; ranks that outlive their agent for a moment then write to a path that nobody reads. Folders of earlier attempts
are removed, because other nodes may have newer checkpoints. The next agent also removes folders that are older than an
hour.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spindle.launch.folders import locked

SHARED_MEMORY = Path("/dev/shm")
_MAX_AGE_S = 3600.0


@contextmanager
def node_memory(job: str, attempt: int) -> Iterator[Path | None]:
    """The folder of an attempt, with the files of the previous attempt; locked inside the context. None if there is no
    memory for it.

    `job` identifies it on this host. The folder stays until `remove_memory` removes it.
    """
    folder = None
    with suppress(OSError):
        folder = _take_over(job, attempt)
    if folder is None:
        yield None
        return
    with locked(folder) as is_own:
        yield folder if is_own else None


def remove_memory(folder: Path | None) -> None:
    """Remove an attempt's folder: its checkpoint is on disk, or it needs none."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def keep_memory(folder: Path | None) -> None:
    """Leave an attempt's folder to the next one, for an hour from now."""
    with suppress(OSError):
        if folder is not None:
            os.utime(folder)


def _take_over(job: str, attempt: int) -> Path | None:
    parent = SHARED_MEMORY / f"spindle-memory-{os.getuid()}"
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return None  # of another user, who chose this name
    name = hashlib.sha256(job.encode()).hexdigest()[:24]
    own = parent / f"{name}-{attempt}"
    previous = parent / f"{name}-{attempt - 1}"
    with suppress(FileNotFoundError), locked(previous) as has_ended:
        if has_ended:
            previous.rename(own)
    own.mkdir(mode=0o700, exist_ok=True)
    for other in parent.iterdir():
        with suppress(OSError):
            is_stale = other.name.startswith(f"{name}-") or time.time() - other.stat().st_mtime > _MAX_AGE_S
            if other != own and is_stale:
                with locked(other) as is_free:
                    if is_free:
                        shutil.rmtree(other, ignore_errors=True)
    return own
