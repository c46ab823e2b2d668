"""Only the newest attempt of a job may commit checkpoints.

A scheduler that loses contact with a job starts it again, perhaps on other hosts, and cannot know whether the first
attempt has ended. It numbers the attempts of a job, from 1, in SPINDLE_ATTEMPT. The number is a fencing token: an
attempt records it in the folder of the checkpoints before it looks for one to resume from, and compares it before it
renames a checkpoint to its final name. An attempt without a number takes the recorded one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from spindle.errors import CheckpointError, InputError, SupersededError
from spindle.launch import variables

FILE = ".attempt"
_DIGITS = 18


def claim(folder: Path, environment: Mapping[str, str] = os.environ) -> int:
    """Record this attempt as the newest of a folder, and return its number; 0 if attempts are not numbered. Raises a
    SupersededError if a newer attempt is recorded."""
    text = environment.get(variables.ATTEMPT, "")
    if not text:
        return newest_attempt(folder)
    if not (text.isascii() and text.isdigit() and 0 < int(text[: _DIGITS + 1]) < 10**_DIGITS):
        raise InputError(f"expected a whole number from 1 in {variables.ATTEMPT}, got {text!r}")
    # Written in place, not renamed: an NFS client sees new bytes when it opens a file, but may cache an old name for
    # seconds.
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        check_newest(folder, int(text), _parsed(os.pread(descriptor, 64, 0), folder))
        os.pwrite(descriptor, f"{int(text):0{_DIGITS}}\n".encode(), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return int(text)


def newest_attempt(folder: Path) -> int:
    """The newest attempt that is recorded in a folder; 0 if there is none."""
    try:
        return _parsed((folder / FILE).read_bytes(), folder)
    except FileNotFoundError:
        return 0


def check_newest(folder: Path, attempt: int, newest: int | None = None) -> None:
    """Raise a SupersededError unless this attempt is the newest of the folder."""
    newest = newest_attempt(folder) if newest is None else newest
    if newest > attempt:
        raise SupersededError(
            f"{folder}: attempt {newest} of this job saves its checkpoints there, so this one, attempt {attempt}, ends "
            "without saving"
        )


def _parsed(content: bytes, folder: Path) -> int:
    text = content.strip()
    if not text:  # created, not written yet
        return 0
    if not text.isdigit() or len(text) > _DIGITS:
        raise CheckpointError(f"{folder / FILE}: expected the number of an attempt, got {text[:40]!r}; remove the file")
    return int(text)
