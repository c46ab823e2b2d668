"""Words that the processes of a group share: who has got how far. Knows neither torch nor what the numbers mean.

One row for each rank, which that rank alone writes; everybody reads all rows. A process that has nothing to do sleeps
on its doorbell (a futex), so that waiting costs nothing and takes no lock of Python's.

The memory is a `memfd`, opened by the others through `/proc`: it has no name that could be left behind. What is
written first is seen first on x86-64, so a word that announces others is written after them; other processors would
need fences, which Python does not have.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import select
import sys
import time
import uuid
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

RING = 64  # messages on their way from one rank to another
NUM_SEGMENTS = 16  # of staging memory that a rank may own
HANDLE_WORDS = 8  # what says where a segment is
GONE = 1 << 62  # a signal of a rank that will send no more: beyond all others
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # x86-64


class Store(Protocol):
    """What we need of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def check_host() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise RuntimeError(
            f"processes share memory in this way on Linux on x86-64 only, not on {sys.platform} on "
            f"{platform.machine()}; use gloo or nccl"
        )


def make_memory(num_bytes: int) -> tuple[int, mmap.mmap, str]:
    """New memory that other processes can open: its file, its bytes, and its name among all of this host."""
    name = f"spindle-{uuid.uuid4().hex}"
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    return file, mmap.mmap(file, num_bytes), name


def open_memory(pid: int, file: int, num_bytes: int, name: str | None = None) -> mmap.mmap:
    """The memory behind another process's file. The name, where it is known, shows that it is the one we mean."""
    path = f"/proc/{pid}/fd/{file}"
    try:
        if name is not None and name not in os.readlink(path):
            raise FileNotFoundError(path)
        opened = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"the memory of process {pid} cannot be opened ({error}); all ranks must run on one host, under one user, "
            "and see each other in /proc"
        ) from error
    try:
        return mmap.mmap(opened, num_bytes)
    finally:
        os.close(opened)


def _row(size: int) -> np.dtype[Any]:
    """What one rank says. Counts only grow; entries of a ring stand at their number modulo the ring's length."""
    segment = np.dtype([("num_bytes", "i8"), ("handle", "i8", (HANDLE_WORDS,))])  # num_bytes is written last
    pair = np.dtype(
        [
            ("posted", "i8"),  # receives posted to that rank
            ("taken", "i8"),  # of its receives, those noted here
            ("sent", "i8"),  # chunks staged for that rank
            ("acknowledged", "i8"),  # of its chunks, those copied
            ("posts", "i8", (RING, 2)),  # tag, bytes
            ("chunks", "i8", (RING, 6)),  # post, segment, offset, bytes, bytes of the whole, signal
            ("acknowledgements", "i8", (RING,)),  # signals
        ]
    )
    return np.dtype(
        [
            ("doorbell", "i8"),
            ("signal", "i8"),  # how far a GPU has got; a GPU writes it
            ("pid", "i8"),
            ("closed", "i8"),
            ("round", "i8"),  # rounds of collectives that this rank has staged its part of
            ("meanings", "i8", (2,)),  # what it thinks they are, even and odd ones
            ("signals", "i8", (2,)),
            ("padding", "i8", (7,)),  # to a whole number of cache lines
            ("segments", segment, (NUM_SEGMENTS,)),
            ("pairs", pair, (size,)),
        ]
    )


class Board:
    """The shared words of one group, from one rank's side."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        check_host()
        self.rank, self.size = rank, size
        row = _row(size)
        num_bytes = -(-row.itemsize * size // mmap.PAGESIZE) * mmap.PAGESIZE
        file = None
        if rank == 0:
            file, self._memory, name = make_memory(num_bytes)
            store.set("board", f"{os.getpid()} {file} {name}")
        else:
            pid, other, name = store.get("board").decode().split()
            self._memory = open_memory(int(pid), int(other), num_bytes, name)
        self.rows: Any = np.frombuffer(self._memory, dtype=row, count=size)
        self.address, self.num_bytes, self._row_bytes = self.rows.ctypes.data, num_bytes, row.itemsize
        self.rounds, self.closed = self.rows["round"], self.rows["closed"]
        self.meanings, self.signals = self.rows["meanings"], self.rows["signals"]
        self.segments, self.pairs, self.pids = self.rows["segments"], self.rows["pairs"], self.rows["pid"]
        self._doorbells = self.rows["doorbell"]
        self._count = itertools.count()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
        ]
        self.pids[rank] = os.getpid()
        self._meet(timeout_s)
        if file is not None:
            os.close(file)
        self._watched = {one: _watched(int(self.pids[one])) for one in range(size) if one != rank}

    def _meet(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not self.pids.all():
            if time.monotonic() > end_s:
                missing = np.flatnonzero(self.pids == 0).tolist()
                raise RuntimeError(f"ranks {missing} of this group did not join within {timeout_s:g} s")
            time.sleep(0.001)

    def signal_offset(self, rank: int) -> int:
        """Where in the board's memory a rank's signal stands, in bytes."""
        return rank * self._row_bytes + 8

    def doorbell(self) -> int:
        return int(self._doorbells[self.rank]) & 0xFFFFFFFF

    def ring(self, rank: int) -> None:
        """Wakes a rank. Every ringing writes a word of its own, so that none can be taken for an earlier one."""
        self._doorbells[rank] = (self.rank + 1) << 22 | (next(self._count) & 0x3FFFFF)
        self._futex(rank, _FUTEX_WAKE, 1, None)

    def ring_all(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self.ring(rank)

    def sleep(self, seen: int, seconds: float) -> None:
        """Until somebody rings, unless somebody has since the doorbell read `seen`; no longer than so many seconds."""
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        self._futex(self.rank, _FUTEX_WAIT, seen, limit)

    def _futex(self, rank: int, operation: int, value: int, limit: Any) -> None:
        self._libc.syscall(_SYS_FUTEX, self.address + rank * self._row_bytes, operation, value, limit, None, 0)

    def is_alive(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        watched = self._watched[rank]
        if watched is None:
            return False
        waiting = select.poll()
        waiting.register(watched, select.POLLIN)
        return not waiting.poll(0)

    def give_up_on(self, rank: int) -> None:
        """Lets everything that waits for a signal of a dead rank go on."""
        self.rows["signal"][rank] = GONE

    def close(self) -> None:
        for watched in self._watched.values():
            if watched is not None:
                with suppress(OSError):
                    os.close(watched)
        self._watched.clear()


def _watched(pid: int) -> int | None:
    """A file that can be read once a process has ended; None if it already has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
