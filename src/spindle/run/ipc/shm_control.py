"""Control words of a group in shared memory: the progress of every rank. Knows neither torch nor what the words mean.

Each rank has a row that it alone writes and all ranks read. A process without work sleeps on its doorbell, a futex, so
that waiting takes no CPU time and no GIL.

The memory is a `memfd` that the other ranks open through `/proc`: it has no name that could be left behind. On x86-64
stores become visible in order, so a word that announces others is written after them. A rank that writes a word and
then reads another rank's word, to know whether to wake it, needs a `fence` in between. Other processors would need
fences that Python does not have.
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

# The layout of a row, in 64-bit words. Counts only grow; entry n of a ring is at n modulo its length.
DOORBELL = 0
SIGNAL = 1  # the last signal of the rank; its GPU writes it
PID = 2
CLOSED = 3  # whether the rank has left the group:
LEFT, FAILED = 1, 2  # by a shutdown, or after an error
WAITERS = 4  # threads that wait for an operation, and carry out operations meanwhile
ROUND = 5  # rounds of collectives for which the rank has staged its part,
ROUND_DIGESTS = 6  # for the last two of them: a digest of the operation,
ROUND_SIGNALS = 8  # the signal behind staging,
ROUND_PLACES = 10  # and, for a part that is read in place: bytes of the allocation (else 0), offset, number, handle
HANDLE_WORDS = 8
PLACE_WORDS = 3 + HANDLE_WORDS
FREED = ROUND_PLACES + 2 * PLACE_WORDS  # how often such memory was freed
SEGMENTS = FREED + 1  # staging memory of the rank: its size, written last, and its handle
NUM_SEGMENTS = 16
SEGMENT_WORDS = 1 + HANDLE_WORDS
PAIRS = SEGMENTS + NUM_SEGMENTS * SEGMENT_WORDS  # by peer:
POSTED = 0  # receives that the rank has posted,
TAKEN = 1  # receives of the peer that it has read,
SENT = 2  # chunks that it has staged for the peer,
ACKNOWLEDGED = 3  # chunks of the peer that it has copied,
WAITING = 4  # and whether it waits for any of these from the peer
RING = 64
POST_WORDS, CHUNK_WORDS = 2, 6
POSTS = 5  # tag, bytes
CHUNKS = POSTS + RING * POST_WORDS  # number of the post, segment, offset, bytes, bytes of the whole, signal
ACKNOWLEDGEMENTS = CHUNKS + RING * CHUNK_WORDS  # signals
PAIR_WORDS = ACKNOWLEDGEMENTS + RING

GONE = 1 << 62  # the signal of a rank that has died: greater than all others
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 9, 10  # x86-64; FUTEX_WAIT_BITSET and FUTEX_WAKE_BITSET
_WAITER, _THREAD = 1, 2  # bits: which thread sleeps on a doorbell
_ALL = 0x7FFFFFFF


class Store(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def check_host() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise RuntimeError(
            f"processes share memory in this way on Linux on x86-64 only, not on {sys.platform} on "
            f"{platform.machine()}; use gloo or nccl"
        )


def make_memory(num_bytes: int) -> tuple[int, mmap.mmap, str]:
    """Allocate memory that other processes can open: its file descriptor, its bytes, and a name unique on this host."""
    name = f"spindle-{uuid.uuid4().hex}"
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    return file, mmap.mmap(file, num_bytes), name


def open_memory(pid: int, file: int, num_bytes: int, name: str | None = None) -> mmap.mmap:
    """Map the memory behind another process's file descriptor, after checking its name if that is known."""
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


class ShmControl:
    """The control words of one group as one rank sees them: `words`, in rows that begin at `row(rank)`."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        check_host()
        self.rank, self.size = rank, size
        self._row_words = PAIRS + size * PAIR_WORDS
        self.num_bytes = -(-8 * self._row_words * size // mmap.PAGESIZE) * mmap.PAGESIZE
        file = None
        if rank == 0:
            file, memory, name = make_memory(self.num_bytes)
            store.set("control", f"{os.getpid()} {file} {name}")
        else:
            pid, descriptor, name = store.get("control").decode().split()
            memory = open_memory(int(pid), int(descriptor), self.num_bytes, name)
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
        self._rendezvous(timeout_s)
        if file is not None:
            os.close(file)
        self._pidfds = {peer: _open_pidfd(self.pid(peer)) for peer in range(size) if peer != rank}

    def _rendezvous(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while missing := [rank for rank in range(self.size) if not self.pid(rank)]:
            if time.monotonic() > end_s:
                raise RuntimeError(f"ranks {missing} of this group did not join within {timeout_s:g} s")
            time.sleep(0.001)

    def row(self, rank: int) -> int:
        return rank * self._row_words

    def pair(self, rank: int, peer: int) -> int:
        """The index at which a rank's words for a peer begin."""
        return rank * self._row_words + PAIRS + peer * PAIR_WORDS

    def segment(self, rank: int, number: int) -> int:
        return rank * self._row_words + SEGMENTS + number * SEGMENT_WORDS

    def pid(self, rank: int) -> int:
        return self.words[self.row(rank) + PID]

    def is_closed(self, rank: int) -> bool:
        return bool(self.words[self.row(rank) + CLOSED])

    def is_cut_off(self, rank: int) -> bool:
        """Whether a rank has died without a shutdown: its GPU may not have done what it announced."""
        return self.words[self.row(rank) + CLOSED] != LEFT and not self.is_alive(rank)

    def signal_offset(self, rank: int) -> int:
        """The byte offset of a rank's signal in the shared memory."""
        return 8 * (self.row(rank) + SIGNAL)

    def doorbell(self) -> int:
        return self.words[self.row(self.rank) + DOORBELL]

    def ring(self, rank: int) -> None:
        """Wake a rank. Every ring writes a new value, so that none is mistaken for an earlier one."""
        row = self.row(rank)
        self.words[row + DOORBELL] = (self.rank + 1) << 22 | (next(self._count) & 0x3FFFFF)
        self.fence()
        bitset = _WAITER if self.words[row + WAITERS] else _THREAD
        self._futex(rank, _FUTEX_WAKE, _ALL, None, bitset)

    def fence(self) -> None:
        """Make earlier stores of this thread visible before its later loads; taking a lock does that on x86-64."""
        with self._lock:
            pass

    def ring_all(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self.ring(rank)

    def sleep(self, seen: int, seconds: float, *, as_waiter: bool) -> None:
        """Futex-wait until the doorbell value differs from `seen`, at most for some seconds."""
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        limit = (ctypes.c_long * 2)(*divmod(end_ns, 1_000_000_000))
        self._futex(self.rank, _FUTEX_WAIT, seen, limit, _WAITER if as_waiter else _THREAD)

    def _futex(self, rank: int, operation: int, value: int, limit: Any, bitset: int) -> None:
        self._libc.syscall(_SYS_FUTEX, self.address + 8 * self.row(rank), operation, value, limit, None, bitset)

    def is_alive(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        pidfd = self._pidfds.get(rank)
        if pidfd is None:
            return False
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)

    def release_waiters_of(self, rank: int) -> None:
        """Release everything that waits for a signal of a dead rank."""
        self.words[self.row(rank) + SIGNAL] = GONE

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            if pidfd is not None:
                with suppress(OSError):
                    os.close(pidfd)
        self._pidfds.clear()


def _open_pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable once a process has ended; None if it already has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
