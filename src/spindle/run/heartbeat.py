"""A heartbeat between ranks where `spindle launch` does not watch them: under torchrun, Slurm or mpirun.

    every second, each rank:  adds 1 to the counter of its host in the store
                              checks the process of the next rank of this host (/proc)
                              reads the counter of the next host
    stopped, gone, or a counter that did not change, for 12 iterations ──▶ PeerLostError, and this process ends
    every 5 s, each rank:     records its activity in the store; rank 0 reads all of them
    no rank makes progress (`launch.activity`) ──▶ those that hang end with a TrainingError, the others as above

A rank that is stopped, or whose host is gone, closes no connection: the others would wait for it until a timeout of
minutes. Each rank watches the next rank of its host, and each host the next host, in rings, so the store gets a few
requests per rank and second; when one rank ends, torchrun ends the rest. A rank that leaves announces it, and its
watcher moves on to the next.

A rank that holds the GIL (it pickles gigabytes) cannot send a heartbeat, but is alive: its process is not stopped,
which the ranks of its host can see, and these send the host's heartbeat meanwhile. A host with a single rank has none
to do so: it may be silent five times as long. Without /proc, each rank counts as a host.

Time is counted in iterations of the loop, not by a clock, so that a job that is stopped and continued as a whole (a
paused container) goes on. A second thread watches the first, which blocks where the store's own process is stopped.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from spindle.errors import PeerLostError, SpindleError, TrainingError
from spindle.launch import end_by_error, variables
from spindle.launch.activity import (
    RECORD_S,
    Activity,
    HangDetector,
    SlownessDetector,
    hung_limit_s,
    parse_activity,
    recorder,
)

LIMIT_VARIABLE = "SPINDLE_HEARTBEAT_S"  # 0: no heartbeat
LIMIT_S = 12.0
INTERVAL_S = 1.0
_SINGLE_RANK_FACTOR = 5  # a host with a single rank may be silent for longer, because that rank may hold the GIL
_GOODBYE = 1 << 40  # value in the counter of a host: one of its ranks has left
_UNKNOWN = "unknown"
_RECORD_EVERY = round(RECORD_S / INTERVAL_S)  # iterations between two records of activity
_HUNG, _HUNG_GRACE = "hung", _RECORD_EVERY + 3  # iterations that ranks which hang have to report first
_LEAVE_S = 2 * INTERVAL_S  # in which ranks learn that rank 0 leaves, which may hold the store


def start_heartbeat() -> None:
    """Start the heartbeat of the default process group, unless `spindle launch` watches the ranks.

    Does nothing if it has been started for this group. The heartbeat of a destroyed group ends.
    """
    limit_s = float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
    if variables.ACTIVITY in os.environ or limit_s <= 0 or dist.get_world_size() == 1:
        return
    group, running = dist.group.WORLD, _running()
    if running and running[0].group is group:
        return
    try:
        # a client of its own, because requests of one client block each other
        default: Any = dist.distributed_c10d._get_default_store()
        store = default.clone()
    except (AttributeError, RuntimeError):  # the group has no store, or one that cannot be cloned
        return
    for old in running:
        old.leave()
    running[:] = [Heartbeat(group, store, dist.get_rank(), dist.get_world_size(), limit_s)]
    running[0].start()


@cache
def _running() -> list[Heartbeat]:
    """The heartbeat of this process, if there is one."""
    return []


class Heartbeat:
    """Sends one rank's heartbeat, and watches the next rank of its host and the next host."""

    def __init__(
        self,
        group: object,  # to recognise the group until this rank leaves
        store: Any,  # the store of the group; nothing else may use this client
        rank: int,
        size: int,
        limit_s: float = LIMIT_S,
        *,
        interval_s: float = INTERVAL_S,
        end: Callable[[SpindleError], object] = end_by_error,
        process: str | None = None,  # the identity of this process, if not its own (tests)
        activity: Callable[[], Activity] = recorder.activity,
    ) -> None:
        self.group: object | None = group
        self._store = cast(Any, dist.distributed_c10d.PrefixStore("spindle heartbeat", store))
        self._rank, self._peers = rank, [(rank + step) % size for step in range(1, size)]
        self._limit, self._interval_s, self._end = round(limit_s / interval_s), interval_s, end
        self._process = _this_process() if process is None else process
        self._host = _host_of(self._process)
        self._processes: dict[int, str] = {}  # processes of the peers, once all have started
        self._next_ranks: list[int] = []  # ranks of this host that have not left
        self._next_hosts: list[tuple[str, list[int]]] = []  # hosts with their ranks
        self._leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._beats = 0  # how many heartbeats of this rank the store has answered
        self._stopped = 0  # iterations in which the watched rank was stopped or gone
        self._last, self._silent = 0, 0  # of the watched host: its counter, and the iterations without a change
        self._store_left = rank == 0
        self._activity, self._hangs = activity, HangDetector(size, hung_limit_s())
        self._size, self._iterations, self._slow = size, 0, SlownessDetector()

    def start(self) -> None:
        self._store.set(f"process {self._rank}", self._process)
        self._threads = [
            threading.Thread(target=run, name="heartbeat", daemon=True) for run in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.leave)

    def leave(self) -> None:
        """Announce that this rank leaves, so that its end is not taken for a failure. May be called several times."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        atexit.unregister(self.leave)
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            self._store.add(f"left {self._rank}", 1)
            self._store.add(f"beats of {self._host}", _GOODBYE)
            if self._rank == 0:  # the store may live in the process of rank 0
                end_s = time.monotonic() + _LEAVE_S
                while not all(map(self._has_left, self._peers)) and time.monotonic() < end_s:
                    time.sleep(0.02)
        # Python ends a daemon thread that returns from a request to the store during interpreter shutdown in a way that
        # aborts the process.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LEAVE_S)
        self.group = None  # the client ends with its last reference

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.add(f"left {rank}", 0))

    def _beat(self) -> None:
        while not self._leaving.wait(self._interval_s):
            try:
                self._store.add(f"beats of {self._host}", 1)
                if not self._store_left:
                    self._store_left = self._has_left(0)
                if self._processes or self._discover_peers():
                    self._check_next_rank()
                    self._check_next_host()
                    self._iterations += 1
                    if self._iterations % _RECORD_EVERY == 0:
                        self._record_activity()
            except RuntimeError as error:
                if not (self._leaving.is_set() or self._store_left):
                    first_line = str(error).splitlines()[0]
                    self._end(PeerLostError(f"the store of the process group, on rank 0's host, is gone: {first_line}"))
                return
            self._beats += 1

    def _discover_peers(self) -> bool:
        """Whether all ranks have started. Then determines which of them this rank watches."""
        keys = [f"process {peer}" for peer in self._peers]
        if not self._store.check(keys):
            return False
        # A FileStore gets one value at a time.
        texts = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
        self._processes = {peer: text.decode() for peer, text in zip(self._peers, texts, strict=True)}
        hosts: dict[str, list[int]] = {}
        for peer, text in self._processes.items():
            hosts.setdefault(_host_of(text), []).append(peer)
        self._next_ranks = hosts.pop(self._host, [])
        # All ranks of a host watch the same host: the one whose lowest rank comes next in the ring.
        first = min([self._rank, *self._next_ranks])
        self._next_hosts = sorted(hosts.items(), key=lambda host: (min(host[1]) < first, min(host[1])))
        return True

    def _check_next_rank(self) -> None:
        if not self._next_ranks:
            return
        peer = self._next_ranks[0]
        if self._has_left(peer):
            del self._next_ranks[0]
            self._stopped = 0
            return
        self._stopped = self._stopped + 1 if _is_stopped(self._processes[peer]) else 0
        if self._stopped >= self._limit:
            with suppress(OSError):
                _continue_process(self._processes[peer])
            self._end_for_lost(f"rank {peer} has", self._limit)

    def _check_next_host(self) -> None:
        if not self._next_hosts:
            return
        host, ranks = self._next_hosts[0]
        count = self._store.add(f"beats of {host}", 0)
        # the counter says how many ranks have left, not which
        limit = self._limit if len(ranks) - count // _GOODBYE > 1 else _SINGLE_RANK_FACTOR * self._limit
        if count >= len(ranks) * _GOODBYE:
            del self._next_hosts[0]
            self._last = self._silent = 0
        elif count != self._last:
            self._last, self._silent = count, 0
        else:
            self._silent += 1
            if self._silent >= limit:
                several = f"the host of ranks {', '.join(map(str, sorted(ranks)))} has"
                self._end_for_lost(several if len(ranks) > 1 else f"rank {ranks[0]} has", limit)

    def _record_activity(self) -> None:
        """Record this rank's activity. On rank 0, look for ranks that hang, and end the process if there are any."""
        self._store.set(f"activity {self._rank}", json.dumps(asdict(self._activity())))
        keys = [f"activity {rank}" for rank in range(self._size)]
        if self._rank == 0 and self._store.check(keys):
            texts = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            parsed = [parse_activity(text.decode()) for text in texts]
            activities = {rank: activity for rank, activity in enumerate(parsed) if activity is not None}
            for notice in self._slow.notices(activities):
                print(f"note: {notice}", file=sys.stderr)
            if hung := self._hangs.hung(activities, _RECORD_EVERY * self._interval_s):
                self._store.set(_HUNG, json.dumps(hung))
        if self._store.check([_HUNG]):
            hung = {int(rank): text for rank, text in json.loads(self._store.get(_HUNG)).items()}
            if self._rank in hung:
                self._end(TrainingError(f"rank {self._rank} {hung[self._rank]}"))
            self._leaving.wait(_HUNG_GRACE * self._interval_s)
            self._end(PeerLostError(f"rank {min(hung)} {hung[min(hung)]}"))

    def _end_for_lost(self, who: str, iterations: int) -> None:
        self._end(PeerLostError(f"{who} not answered for {iterations * self._interval_s:.0f} s"))

    def _watch(self) -> None:
        """End this process if the store does not answer."""
        last, silent = -1, 0
        while not self._leaving.wait(self._interval_s):
            silent = silent + 1 if self._beats == last else 0
            last = self._beats
            if silent >= self._limit and not self._store_left:
                where = "the store of the process group, on rank 0's host,"
                self._end(PeerLostError(f"{where} has not answered for {self._limit * self._interval_s:.0f} s"))
                return


def _this_process() -> str:
    """The identity of this process among all others: host and boot, PID, and start time."""
    pid = os.getpid()
    started = _state_and_start(pid)[1]
    host = socket.gethostname()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # containers of one host have PIDs of their own
        host = f"{host}-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{namespace}"
    # a process whose start time is unknown cannot be checked, so it counts as a host of its own
    return f"{host if started != _UNKNOWN else f'{host}-{pid}'} {pid} {started}"


def _host_of(process: str) -> str:
    return process.split()[0]


def _is_stopped(process: str) -> bool:
    """Whether a process of this host is stopped (T, not traced t) or has ended."""
    _, pid, started = process.split()
    state, now = _state_and_start(int(pid))
    return state in "TZX" or now != started


def _continue_process(process: str) -> None:
    """Continue a stopped process of this host (SIGCONT), so that torchrun's SIGTERM reaches it. Otherwise torchrun
    waits 30 s before it kills it."""
    _, pid, started = process.split()
    if started == _state_and_start(int(pid))[1]:
        os.kill(int(pid), signal.SIGCONT)


def _state_and_start(pid: int) -> tuple[str, str]:
    """The state of a process, and its start time in clock ticks since boot."""
    with suppress(OSError, IndexError):
        # the name, in parentheses, may contain anything; the state comes after it
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return _UNKNOWN, _UNKNOWN
