"""Words that the processes of a group share: who has got how far. Knows neither torch nor what the numbers mean.

One row for each rank, which that rank alone writes; everybody reads all rows. A process that has nothing to do sleeps
on its doorbell (a futex), so that waiting costs nothing and takes no lock of Python's.

The memory is a `memfd`, opened by the others through `/proc`: it has no name that could be left behind. What is
written first is seen first on x86-64, so a word that announces others is written after them. Where a rank writes a word
and then reads another's, to know whether it must wake that one, it takes a `fence` in between. Other processors would
need more fences than Python has.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import select
import sys
import threading
import time
import uuid
from contextlib import suppress
from typing import Any, Protocol

# A row, in words of 64 bits. Counts only grow; the entries of a ring stand at their number modulo its length.
DOORBELL = 0
SIGNAL = 1  # how far the rank's GPU has got; the GPU writes it
PID = 2
CLOSED = 3  # whether the rank has left the group:
LEFT, FAILED = 1, 2  # in order, or after an error
DRIVERS = 4  # threads that wait for an operation, and carry out what there is to do meanwhile
ROUND = 5  # rounds of collectives that the rank has staged its part of,
ROUND_MEANINGS = 6  # what it takes the last two for,
ROUND_SIGNALS = 8  # when its GPU has staged them,
ROUND_PLACES = 10  # and where it left its part in memory of its own: bytes of that memory or 0, offset, number, handle
HANDLE_WORDS = 8
PLACE_WORDS = 3 + HANDLE_WORDS
FREED = ROUND_PLACES + 2 * PLACE_WORDS  # how often it has found that such memory is gone
SEGMENTS = FREED + 1  # staging memory of the rank: its size, written last, and where it is
NUM_SEGMENTS = 16
SEGMENT_WORDS = 1 + HANDLE_WORDS
PAIRS = SEGMENTS + NUM_SEGMENTS * SEGMENT_WORDS  # what the rank says to each other one:
POSTED = 0  # receives that it has posted there,
TAKEN = 1  # receives of the other's that it has noted,
SENT = 2  # chunks that it has staged for the other,
ACKNOWLEDGED = 3  # chunks of the other's that it has copied,
WAITING = 4  # and whether it waits for any of these from the other
RING = 64
POST_WORDS, CHUNK_WORDS = 2, 6
POSTS = 5  # tag, bytes
CHUNKS = POSTS + RING * POST_WORDS  # number of the post, segment, offset, bytes, bytes of the whole, signal
ACKNOWLEDGEMENTS = CHUNKS + RING * CHUNK_WORDS  # signals
PAIR_WORDS = ACKNOWLEDGEMENTS + RING

GONE = 1 << 62  # a signal of a rank that will send no more: beyond all others
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 9, 10  # x86-64; both with a choice of whom to wake
_DRIVER, _THREAD = 1, 2  # who sleeps on a doorbell
_ALL = 0x7FFFFFFF


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


class Board:
    """The shared words of one group, from one rank's side: `words`, in rows that begin at `row(rank)`."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        check_host()
        self.rank, self.size = rank, size
        self._row_words = PAIRS + size * PAIR_WORDS
        self.num_bytes = -(-8 * self._row_words * size // mmap.PAGESIZE) * mmap.PAGESIZE
        file = None
        if rank == 0:
            file, memory, name = make_memory(self.num_bytes)
            store.set("board", f"{os.getpid()} {file} {name}")
        else:
            pid, other, name = store.get("board").decode().split()
            memory = open_memory(int(pid), int(other), self.num_bytes, name)
        self.words = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._count = itertools.count()
        self._lock = threading.Lock()
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
        self.words[self.row(rank) + PID] = os.getpid()
        self._meet(timeout_s)
        if file is not None:
            os.close(file)
        self._watched = {one: _watched(self.pid(one)) for one in range(size) if one != rank}

    def _meet(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while missing := [rank for rank in range(self.size) if not self.pid(rank)]:
            if time.monotonic() > end_s:
                raise RuntimeError(f"ranks {missing} of this group did not join within {timeout_s:g} s")
            time.sleep(0.001)

    def row(self, rank: int) -> int:
        return rank * self._row_words

    def pair(self, rank: int, other: int) -> int:
        """Where a rank says what concerns another one."""
        return rank * self._row_words + PAIRS + other * PAIR_WORDS

    def segment(self, rank: int, number: int) -> int:
        return rank * self._row_words + SEGMENTS + number * SEGMENT_WORDS

    def pid(self, rank: int) -> int:
        return self.words[self.row(rank) + PID]

    def is_closed(self, rank: int) -> bool:
        return bool(self.words[self.row(rank) + CLOSED])

    def is_cut_off(self, rank: int) -> bool:
        """Whether a rank has ended without having left in order: its GPU may not have done what it announced."""
        return self.words[self.row(rank) + CLOSED] != LEFT and not self.is_alive(rank)

    def signal_offset(self, rank: int) -> int:
        """Where in the board's memory a rank's signal stands, in bytes."""
        return 8 * (self.row(rank) + SIGNAL)

    def doorbell(self) -> int:
        return self.words[self.row(self.rank) + DOORBELL]

    def ring(self, rank: int) -> None:
        """Wakes a rank. Every ringing writes a word of its own, so that none can be taken for an earlier one."""
        row = self.row(rank)
        self.words[row + DOORBELL] = (self.rank + 1) << 22 | (next(self._count) & 0x3FFFFF)
        self.fence()
        whom = _DRIVER if self.words[row + DRIVERS] else _THREAD
        self._futex(rank, _FUTEX_WAKE, _ALL, None, whom)

    def fence(self) -> None:
        """What this thread wrote before is seen by all before it reads what comes after: so does a lock on x86-64."""
        with self._lock:
            pass

    def ring_all(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self.ring(rank)

    def sleep(self, seen: int, seconds: float, *, as_driver: bool) -> None:
        """Until somebody rings, unless somebody has since the doorbell read `seen`; no longer than so many seconds."""
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        limit = (ctypes.c_long * 2)(*divmod(end_ns, 1_000_000_000))
        self._futex(self.rank, _FUTEX_WAIT, seen, limit, _DRIVER if as_driver else _THREAD)

    def _futex(self, rank: int, operation: int, value: int, limit: Any, whom: int) -> None:
        self._libc.syscall(_SYS_FUTEX, self.address + 8 * self.row(rank), operation, value, limit, None, whom)

    def is_alive(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        watched = self._watched.get(rank)
        if watched is None:
            return False
        waiting = select.poll()
        waiting.register(watched, select.POLLIN)
        return not waiting.poll(0)

    def give_up_on(self, rank: int) -> None:
        """Lets everything that waits for a signal of a dead rank go on."""
        self.words[self.row(rank) + SIGNAL] = GONE

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
