"""A heartbeat between ranks that no launcher of ours watches: under torchrun, Slurm or mpirun.

    every second, each rank:  add 1 to its own counter in the store ──▶ read the counter of the next rank
                              that counter stood still for 12 of our seconds ──▶ PeerLostError, and this process ends

A rank that is stopped, or whose host is gone, closes no connection: the others would wait for it until a timeout of
minutes. Each rank watches the next one, in a ring, so the store has a few requests per rank and second; when one rank
ends, torchrun ends the rest. A rank that leaves adds a goodbye to its counter, and its watcher goes on to the next.

Time is counted in turns of our own loop, not by a clock, so that a job that is stopped and continued as a whole (a
container that is paused) goes on. A second thread watches the first, which waits without end where the store's own
process is stopped. Left out: a rank whose threads run while its main thread waits for something that never comes.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spindle.errors import PeerLostError
from spindle.launch.failure import FOLDER_VARIABLE, end_by_error

LIMIT_VARIABLE = "SPINDLE_HEARTBEAT_S"  # 0: no heartbeat
LIMIT_S = 12.0  # a rank may hold Python's lock for seconds
INTERVAL_S = 1.0
_GOODBYE = 1 << 40  # in a counter: its rank has left
_UNKNOWN = "unknown"
_LEAVE_S = 2 * INTERVAL_S  # in which ranks learn that the one with the store leaves


def start_heartbeat() -> None:
    """Starts the heartbeat of the default process group, unless `spindle launch` watches the ranks.

    Does nothing where this group has one already. The heartbeat of a group that is gone ends.
    """
    limit_s = float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
    if FOLDER_VARIABLE in os.environ or limit_s <= 0 or dist.get_world_size() == 1:
        return
    group, running = dist.group.WORLD, _running()
    if running and running[0].group is group:
        return
    try:
        # A client of its own: while one waits for an answer, nobody else can use it.
        default: Any = dist.distributed_c10d._get_default_store()
        store = default.clone()
    except (AttributeError, RuntimeError):  # a group without a store, or with one that cannot be cloned
        return
    for old in running:
        old.leave()
    running[:] = [Heartbeat(group, store, dist.get_rank(), dist.get_world_size(), limit_s)]
    running[0].start()


@cache
def _running() -> list[Heartbeat]:
    """The heartbeat of this process, if it has one."""
    return []


class Heartbeat:
    """One rank's counter, and the watch over the next rank's."""

    def __init__(
        self,
        group: object,
        store: Any,  # of the group; nobody else may use this object
        rank: int,
        size: int,
        limit_s: float = LIMIT_S,
        *,
        interval_s: float = INTERVAL_S,
        end: Callable[[PeerLostError], object] = end_by_error,
    ) -> None:
        self.group, self._store = group, dist.distributed_c10d.PrefixStore("spindle heartbeat", store)
        self._rank, self._peers = rank, [(rank + step) % size for step in range(1, size)]
        self._limit, self._interval_s, self._end = round(limit_s / interval_s), interval_s, end
        self._leaving = threading.Event()
        self._beats = 0  # of this rank, that the store has answered
        self._last, self._silent = 0, 0  # of the rank that is watched: its counter, and turns without a change
        self._host_left = rank == 0

    def start(self) -> None:
        self._store.set(f"process {self._rank}", _this_process())
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name="heartbeat", daemon=True).start()
        atexit.register(self.leave)

    def leave(self) -> None:
        """Says goodbye, so that nobody takes the end of this rank for a failure. Further calls do nothing."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        atexit.unregister(self.leave)
        with suppress(RuntimeError):  # the store is gone, and with it everyone who would read this
            self._store.add(str(self._rank), _GOODBYE)
            if self._rank == 0:  # whose process may hold the store
                end_s = time.monotonic() + _LEAVE_S
                while not self._all_left() and time.monotonic() < end_s:
                    time.sleep(0.02)

    def _all_left(self) -> bool:
        return all(self._store.add(str(peer), 0) >= _GOODBYE for peer in self._peers)

    def _beat(self) -> None:
        while not self._leaving.wait(self._interval_s):
            try:
                self._store.add(str(self._rank), 1)
                self._look()
            except RuntimeError as error:
                if not (self._leaving.is_set() or self._host_left):
                    first_line = str(error).splitlines()[0]
                    self._end(PeerLostError(f"the store of the process group, on rank 0's host, is gone: {first_line}"))
                return
            self._beats += 1

    def _look(self) -> None:
        """Reads the counter of the rank that is watched, and whether rank 0 has left."""
        if not self._host_left:
            self._host_left = self._store.add("0", 0) >= _GOODBYE
        if not self._peers:
            return
        peer = self._peers[0]
        count = self._store.add(str(peer), 0)
        if count >= _GOODBYE:
            del self._peers[0]
            self._last = self._silent = 0
        elif count != self._last:
            self._last, self._silent = count, 0
        elif count:  # else it has not begun
            self._silent += 1
            if self._silent >= self._limit:
                with suppress(RuntimeError, ValueError, OSError):
                    _continue_process(self._store.get(f"process {peer}").decode())
                self._end(PeerLostError(f"rank {peer} has not answered for {self._limit * self._interval_s:.0f} s"))

    def _watch(self) -> None:
        """Ends this process when the store does not answer."""
        last, silent = -1, 0
        while not self._leaving.wait(self._interval_s):
            silent = silent + 1 if self._beats == last else 0
            last = self._beats
            if silent >= self._limit and not self._host_left:
                where = "the store of the process group, on rank 0's host,"
                self._end(PeerLostError(f"{where} has not answered for {self._limit * self._interval_s:.0f} s"))
                return


def _this_process() -> str:
    """What tells this process from all others: its host since when it runs, its number, and its start."""
    pid = os.getpid()
    return f"{_host()} {pid} {_started(pid)}"


def _continue_process(text: str) -> None:
    """Continues a stopped process of this host (SIGCONT), so that the SIGTERM by which torchrun ends it reaches it.

    Otherwise torchrun waits 30 s before it kills it.
    """
    host, pid, started = text.split()
    if host == _host() and started == _started(int(pid)) != _UNKNOWN:
        os.kill(int(pid), signal.SIGCONT)


def _host() -> str:
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # containers of one host number their processes each for itself
        return f"{socket.gethostname()}-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{namespace}"
    return socket.gethostname()


def _started(pid: int) -> str:
    """When a process was started, in ticks since its host was."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return _UNKNOWN
