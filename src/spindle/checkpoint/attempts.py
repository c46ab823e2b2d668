"""Which start of a job may commit checkpoints: only the newest one.

A scheduler that loses contact with a job starts it again, perhaps on other hosts, and cannot know whether the first
start has ended. It numbers the starts of a job, from 1, in SPINDLE_ATTEMPT. The number is a fencing token: a start
records it in the folder of the checkpoints before it looks for one to resume from, and compares it before it renames a
checkpoint to its final name. A start without a number goes on with the one that is recorded.
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
    """Record this attempt as the newest of a folder, and return its number; 0 where attempts are not numbered. An
    attempt that is older than the recorded one is refused."""
    text = environment.get(variables.ATTEMPT, "")
    if not text:
        return newest_attempt(folder)
    if not (text.isascii() and text.isdigit() and 0 < int(text[: _DIGITS + 1]) < 10**_DIGITS):
        raise InputError(f"expected a whole number from 1 in {variables.ATTEMPT}, got {text!r}")
    # Written in place: a client of NFS sees new bytes when it opens a file, but may look up an old name for seconds.
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
    """The newest attempt that was recorded in a folder; 0 if there is none."""
    try:
        return _parsed((folder / FILE).read_bytes(), folder)
    except FileNotFoundError:
        return 0


def check_newest(folder: Path, attempt: int, newest: int | None = None) -> None:
    """Refuse an attempt that is not the newest of a folder."""
    newest = newest_attempt(folder) if newest is None else newest
    if newest > attempt:
        raise SupersededError(
            f"{folder}: attempt {newest} of this job saves its checkpoints there, this is attempt {attempt}; it ends, "
            "and saves nothing"
        )


def _parsed(content: bytes, folder: Path) -> int:
    text = content.strip()
    if not text:  # created, not written yet
        return 0
    if not text.isdigit() or len(text) > _DIGITS:
        raise CheckpointError(f"{folder / FILE}: expected the number of an attempt, got {text[:40]!r}; remove the file")
    return int(text)
