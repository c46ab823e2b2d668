"""Private folders of a launcher: locked while it runs, and removed at its end, or by the next launcher if it was
killed."""

from __future__ import annotations

import atexit
import fcntl
import getpass
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spindle.errors import InputError

PREFIX = "spindle-launch-"
_SHARED_MEMORY = Path("/dev/shm")
_SETTLED_S = 60.0  # seconds; a younger folder may be about to be locked


@contextmanager
def private_folder(*, in_memory: bool = False) -> Iterator[Path]:
    """A folder that only this user can enter; with `in_memory` in /dev/shm, if there is one. Removes folders of
    launchers that were killed."""
    has_memory = in_memory and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    parent = _SHARED_MEMORY if has_memory else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise InputError(
            f"cannot create a temporary folder ({error.strerror}); set TMPDIR to one that is writable"
        ) from error
    try:
        with locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder. Yields whether that worked. The lock is released when this process ends, even by SIGKILL."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True
    finally:
        os.close(descriptor)


def avoid_foreign_inductor_cache() -> None:
    """Give torch's compiler a new cache folder if its default one belongs to another user, whose code it would run, or
    is not a folder. Torch imports the compiler for fake tensors."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    if variable in os.environ:
        return
    with suppress(OSError, KeyError, ImportError):  # a user without a name has no such folder
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        status = (Path(tempfile.gettempdir()) / f"torchinductor_{user}").lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            folder = tempfile.mkdtemp(prefix="spindle-inductor-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            os.environ[variable] = folder


def _remove_abandoned(parent: Path) -> None:
    with suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                status = folder.lstat()
                is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                if not is_own or time.time() - status.st_mtime < _SETTLED_S:
                    continue
                with locked(folder) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(folder, ignore_errors=True)
