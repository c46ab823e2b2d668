"""Progress of the messages and collectives of a group, and detection of ranks that have died.

Callers submit jobs. The submitting thread advances them as far as it can; a thread that waits for a job advances all
jobs meanwhile; when no thread waits, a background thread does. No thread blocks on one job while another could advance.

On a GPU, "staged" and "read" mean: enqueued on a stream. A stream waits for another rank's signal only once that rank
has enqueued the signal on its own stream. So no stream ever waits for work that is not enqueued yet: in whatever order
operations are called, however the hardware maps streams to its few queues, and whenever the driver synchronizes all
streams (to load a kernel, to free memory).

A rank that waits for one that has died or left fails within a fraction of a second, with all of its pending jobs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from spindle.run.ipc.collectives import Collectives, Steps
from spindle.run.ipc.job import Job
from spindle.run.ipc.memory_backend import CudaMemoryBackend, HostMemoryBackend, MemoryBackend, Segments
from spindle.run.ipc.messages import Messages
from spindle.run.ipc.shm_control import CLOSED, FAILED, FREED, LEFT, WAITERS, ShmControl

_CHECK_S = 0.2  # interval of checks whether awaited ranks are alive
_LEAVE_S = 10.0  # limit for other ranks to unmap this rank's memory


class Transport:
    """One rank's end of a group. Public methods may be called by any thread."""

    def __init__(self, control: ShmControl, names: Sequence[str], timeout_s: float) -> None:
        self._control, self._names, self._timeout_s = control, names, timeout_s
        self._segments = Segments(control)
        self.messages = Messages(control, self._segments, names)
        self.collectives = Collectives(control, self._segments, names)
        self._advance_lock = threading.Lock()  # held by the thread that advances jobs
        self._entered: list[tuple[MemoryBackend, Any]] = []
        self._next_check_s = 0.0
        self._num_started = self._num_ended = 0
        self._callbacks: deque[Callable[[], None]] = deque()
        self._state_lock = threading.Lock()  # held briefly; guards the attributes below
        self._submitted: deque[tuple[Job, Callable[[], None]]] = deque()
        self._backends: dict[str, MemoryBackend] = {}
        self._num_waiters = 0
        self._error: RuntimeError | None = None
        self._leaving = False
        self._thread: threading.Thread | None = None

    def start(self, name: str, tensors: list[torch.Tensor], steps: Callable[[Job], Steps]) -> Job:
        """Start a collective over tensors of one device."""
        job = self._job(name, tensors)
        self._submit(job, lambda: self.collectives.add(job, steps(job)))
        return job

    def start_message(self, is_receive: bool, tensor: torch.Tensor, peer: int, tag: int) -> Job:
        if not 0 <= peer < self._control.size or peer == self._control.rank:
            raise ValueError(
                f"rank {self._control.rank} of {self._control.size} cannot exchange messages with rank {peer}"
            )
        job = self._job("recv" if is_receive else "send", [tensor])
        add = self.messages.receive if is_receive else self.messages.send
        self._submit(job, lambda: add(job, peer, tag))
        return job

    def finish(self, job: Job, limit_s: float | None) -> bool:
        """Wait for a job, advancing all jobs meanwhile. Returns whether it is done."""
        if job.is_done():
            return True
        end_s = None if limit_s is None else time.monotonic() + limit_s
        # Waiters are counted before the doorbell is read: the background thread then keeps out of the way, and a peer
        # that rings from here on wakes a waiter.
        self._count_waiters(1)
        try:
            while True:
                # Read the doorbell before looking at jobs: if a peer rings while they are advanced, the value differs
                # from `seen` and `sleep` returns at once. The other way round a ring could be lost.
                seen = self._control.doorbell()
                with self._advance_lock:
                    self._step(num_other_waiters=self._num_waiters - 1)
                self._run_callbacks()
                remaining_s = _CHECK_S if end_s is None else min(_CHECK_S, end_s - time.monotonic())
                if job.is_done() or remaining_s < 0:
                    return job.is_done()
                self._control.sleep(seen, remaining_s, as_waiter=True)
        finally:
            self._count_waiters(-1)
            if self._num_started > self._num_ended:
                self._control.ring(self._control.rank)  # the background thread takes over

    def leave(self) -> None:
        """Finish what other ranks still read from this rank, and end the background thread."""
        with self._state_lock:
            self._leaving, thread = True, self._thread
        if thread is None:
            self._close()
        else:
            self._control.ring(self._control.rank)
            thread.join()

    def _job(self, name: str, tensors: list[torch.Tensor]) -> Job:
        devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        if len(devices) > 1:
            raise ValueError(f"{name}: tensors on several devices ({', '.join(sorted(map(str, devices)))})")
        wake = partial(self._control.ring, self._control.rank)
        return Job(name, tensors, self._backend(devices.pop()), self._timeout_s, self._on_done, wake)

    def _on_done(self, callbacks: list[Callable[[], None]]) -> None:
        self._num_ended += 1
        self._callbacks.extend(callbacks)

    def _backend(self, device: torch.device) -> MemoryBackend:
        with self._state_lock:
            if device.type not in self._backends:
                self._backends[device.type] = (
                    HostMemoryBackend() if device.type == "cpu" else CudaMemoryBackend(self._control, device)
                )
            return self._backends[device.type]

    def _submit(self, job: Job, add: Callable[[], None]) -> None:
        with self._state_lock:
            if self._leaving:
                raise RuntimeError(str(self._error or "this process has left the group"))
            self._submitted.append((job, add))
            self._num_started += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spindle transport", daemon=True)
                self._thread.start()
        # Advance here if no other thread does: most sends can be staged right away, and waking a thread takes longer.
        if self._advance_lock.acquire(blocking=False):
            try:
                self._step(num_other_waiters=self._num_waiters)
            finally:
                self._advance_lock.release()
            self._run_callbacks()
        else:
            self._control.ring(self._control.rank)  # the thread that advances jobs looks again

    def _count_waiters(self, more: int) -> None:
        with self._state_lock:
            self._num_waiters += more
            self._control.words[self._control.row(self._control.rank) + WAITERS] = self._num_waiters

    # Advancing jobs. Called by the thread that holds `_advance_lock`.

    def _run(self) -> None:
        """The loop of the background thread."""
        while True:
            seen = self._control.doorbell()
            if not self._num_waiters:
                with self._advance_lock:
                    self._step(num_other_waiters=self._num_waiters)
                    leaving = self._leaving and not (self._error is None and self._is_needed())
                self._run_callbacks()
                if leaving:
                    break
            self._control.sleep(seen, _CHECK_S, as_waiter=False)
        with self._advance_lock:
            self._fail_pending(str(self._error or "this process has left the group"))
            self._close()
        self._run_callbacks()

    def _step(self, num_other_waiters: int) -> None:
        """Advance all jobs, and wake other waiting threads if any job was finished or has failed."""
        if self._error is not None:
            return
        num_ended = self._num_ended
        try:
            self._advance()
            if time.monotonic() > self._next_check_s:
                self._check_peers()
                self._next_check_s = time.monotonic() + _CHECK_S
        except BaseException as error:  # fail pending jobs, which would otherwise never finish
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
            self._fail_pending(str(self._error))
            if not isinstance(error, Exception):
                raise
        finally:
            for backend, before in reversed(self._entered):
                backend.leave(before)
            self._entered.clear()
            if num_other_waiters and self._num_ended > num_ended:
                self._control.ring(self._control.rank)

    def _enter(self) -> None:
        """Make this thread use all memory backends that exist by now: a job may be the first of its backend."""
        for backend in tuple(self._backends.values()):
            if all(backend is not known for known, _ in self._entered):
                self._entered.append((backend, backend.enter()))

    def _advance(self) -> None:
        while True:
            with self._state_lock:
                while self._submitted:
                    self._submitted.popleft()[1]()
            self._enter()
            # `|`, not `or`: both get a turn in each round, so that neither starves the other.
            while self.collectives.advance() | self.messages.advance():
                pass
            if not self._submitted:
                return

    def _run_callbacks(self) -> None:
        """Run callbacks of finished jobs, without holding `_advance_lock`, because they may start new jobs."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            callback()

    def _jobs(self) -> Iterator[Job]:
        return chain(self.collectives.jobs(), self.messages.jobs())

    def _is_computing(self) -> bool:
        return any(backend.is_busy() for backend in tuple(self._backends.values()))

    def _is_needed(self) -> bool:
        """Whether other ranks still need this one for what it has started with them."""
        return (
            self._is_computing()
            or self.collectives.waits_for_device
            or bool(self.collectives.waited_for())
            or any(map(self._is_reachable, self.messages.readers()))
        )

    # Detection of ranks that are gone.

    def _is_reachable(self, rank: int) -> bool:
        return not self._control.is_closed(rank) and self._control.is_alive(rank)

    def _waited_for(self) -> set[int]:
        return self.collectives.waited_for() | self.messages.waited_for()

    def _check_peers(self) -> None:
        """Unmap memory that its owner has freed. Raise an error if an awaited rank has left, has died, or is late."""
        control = self._control
        # Ask peers to unmap what this rank has freed: memory is only returned once nobody maps it.
        if any(backend.has_freed() for backend in tuple(self._backends.values())):
            control.words[control.row(control.rank) + FREED] += 1
        waited, computing = self._waited_for(), self._is_computing()
        if not (waited or computing):
            self._segments.release()  # synchronizes the stream, which must not wait for a dead rank
            return
        # Enqueued work may wait for the signal of a rank that died before its GPU got there.
        cut_off = set(filter(control.is_cut_off, range(control.size)))
        lost_ranks = {rank for rank in waited if not self._is_reachable(rank)} | (cut_off if computing else set())
        if lost_ranks:
            self._advance()  # a rank may have done its part between our last step and its end
            lost_ranks &= self._waited_for() | cut_off
        for rank in cut_off:
            control.release_waiters_of(rank)
        if lost_ranks:
            first = min(cut_off or lost_ranks)  # the others may have left because of it
            what = "has ended" if first in cut_off else "has left the group"
            raise RuntimeError(f"{self._names[first]} (process {control.pid(first)}) {what}")
        now_s = time.monotonic()
        for job in self._jobs():
            if now_s > job.deadline_s:
                awaited = ", ".join(self._names[rank] for rank in sorted(self._waited_for()))
                raise RuntimeError(f"{job.name} timed out after {self._timeout_s:g} s, waiting for {awaited}")

    def _fail_pending(self, why: str) -> None:
        """Fail all pending jobs; later ones are refused."""
        with self._state_lock:
            self._leaving = True
            jobs = [job for job, _ in self._submitted]
            self._submitted.clear()
        for job in chain(jobs, self._jobs()):
            if not job.is_done():
                job.finish(RuntimeError(why))

    def _close(self) -> None:
        """Unmap other ranks' memory, then free this rank's once they have unmapped it.

        Other ranks may have yet to map host memory that they are to read, and GPU memory disappears with this process,
        so this waits for them. After an error it is unknown what the GPU still does: its memory then stays until the
        process ends.
        """
        control = self._control
        host, gpu = self._backends.get("cpu"), self._backends.get("cuda")
        assert gpu is None or isinstance(gpu, CudaMemoryBackend)
        try:
            if gpu is not None and self._error is None:
                gpu.enter()
                gpu.release()
            self._segments.clear()
            control.words[control.row(control.rank) + CLOSED] = LEFT if self._error is None else FAILED
            control.ring_all()
            others_left = self._error is None and self._backends and self._wait_for_others_to_leave()
            if host is not None:
                host.close()
            if gpu is not None and others_left:
                gpu.close()
        finally:
            control.close()

    def _wait_for_others_to_leave(self) -> bool:
        """Wait until all other ranks have left, up to a limit. Returns whether they have."""
        end_s = time.monotonic() + _LEAVE_S
        peers = [rank for rank in range(self._control.size) if rank != self._control.rank]
        while any(map(self._is_reachable, peers)):
            if time.monotonic() > end_s:
                return False
            seen = self._control.doorbell()
            if any(map(self._is_reachable, peers)):
                self._control.sleep(seen, _CHECK_S, as_waiter=False)
        return True
