"""Who carries out the messages and collectives of a group, and notices when others are gone.

Callers hand in jobs. Each of them does at once what can be done at once; whoever waits for a job does, while waiting,
what there is to do; when nobody waits, a thread does it. Nobody waits for one job while another could go on.

On a GPU, "staged" and "read" mean: put on a stream. A stream waits for another rank's mark only when that rank has
already put the mark on its own stream. So whatever order operations are called in, however the hardware folds streams
into its few queues, and whenever the driver waits for all streams (to load a kernel, to free memory), no stream waits
for work that is still to come.

A rank that waits for one that has ended or left fails within a fraction of a second, with everything it has pending.
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
from spindle.run.ipc.shm_control import CLOSED, DRIVERS, FAILED, FREED, LEFT, Board

_LOOK_S = 0.2  # how often we look whether those we wait for are still there
_LEAVE_S = 10.0  # how long we wait for others to let go of our memory


class Transport:
    """One rank's part of a group. Public methods are for callers in any thread."""

    def __init__(self, board: Board, names: Sequence[str], timeout_s: float) -> None:
        self._board, self._names, self._timeout_s = board, names, timeout_s
        self._segments = Segments(board)
        self.messages = Messages(board, self._segments, names)
        self.collectives = Collectives(board, self._segments, names)
        self._work = threading.Lock()  # held by whoever is doing what there is to do
        self._entered: list[tuple[MemoryBackend, Any]] = []
        self._look_s = 0.0
        self._num_started = self._num_ended = 0
        self._to_call: deque[Callable[[], None]] = deque()
        self._state = threading.Lock()  # held for a moment, for what follows
        self._submitted: deque[tuple[Job, Callable[[], None]]] = deque()
        self._media: dict[str, MemoryBackend] = {}
        self._num_drivers = 0
        self._error: RuntimeError | None = None
        self._leaving = False
        self._thread: threading.Thread | None = None

    def start(self, name: str, tensors: list[torch.Tensor], steps: Callable[[Job], Steps]) -> Job:
        """Starts a collective over these tensors, all of one device."""
        job = self._job(name, tensors)
        self._submit(job, lambda: self.collectives.add(job, steps(job)))
        return job

    def start_message(self, is_receive: bool, tensor: torch.Tensor, peer: int, tag: int) -> Job:
        if not 0 <= peer < self._board.size or peer == self._board.rank:
            raise ValueError(f"rank {self._board.rank} of {self._board.size} cannot exchange messages with rank {peer}")
        job = self._job("recv" if is_receive else "send", [tensor])
        add = self.messages.receive if is_receive else self.messages.send
        self._submit(job, lambda: add(job, peer, tag))
        return job

    def finish(self, job: Job, limit_s: float | None) -> bool:
        """Waits for a job, doing what there is to do; whether it is over."""
        if job.is_over():
            return True
        end_s = None if limit_s is None else time.monotonic() + limit_s
        self._count_drivers(1)
        try:
            while True:
                seen = self._board.doorbell()
                with self._work:
                    self._step(num_others=self._num_drivers - 1)
                self._call()
                left_s = _LOOK_S if end_s is None else min(_LOOK_S, end_s - time.monotonic())
                if job.is_over() or left_s < 0:
                    return job.is_over()
                self._board.sleep(seen, left_s, as_driver=True)
        finally:
            self._count_drivers(-1)
            if self._num_started > self._num_ended:
                self._board.ring(self._board.rank)  # the thread, to take over

    def leave(self) -> None:
        """Finishes what others still read from us, and ends the thread."""
        with self._state:
            self._leaving, thread = True, self._thread
        if thread is None:
            self._close()
        else:
            self._board.ring(self._board.rank)
            thread.join()

    def _job(self, name: str, tensors: list[torch.Tensor]) -> Job:
        devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        if len(devices) > 1:
            raise ValueError(f"{name}: tensors on several devices ({', '.join(sorted(map(str, devices)))})")
        wake = partial(self._board.ring, self._board.rank)
        return Job(name, tensors, self._medium(devices.pop()), self._timeout_s, self._note_end, wake)

    def _note_end(self, callbacks: list[Callable[[], None]]) -> None:
        self._num_ended += 1
        self._to_call.extend(callbacks)

    def _medium(self, device: torch.device) -> MemoryBackend:
        with self._state:
            if device.type not in self._media:
                self._media[device.type] = (
                    HostMemoryBackend() if device.type == "cpu" else CudaMemoryBackend(self._board, device)
                )
            return self._media[device.type]

    def _submit(self, job: Job, add: Callable[[], None]) -> None:
        with self._state:
            if self._leaving:
                raise RuntimeError(str(self._error or "this process has left the group"))
            self._submitted.append((job, add))
            self._num_started += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spindle transport", daemon=True)
                self._thread.start()
        if self._work.acquire(blocking=False):
            try:
                self._step(num_others=self._num_drivers)
            finally:
                self._work.release()
            self._call()
        else:
            self._board.ring(self._board.rank)  # whoever is at it will look again

    def _count_drivers(self, more: int) -> None:
        with self._state:
            self._num_drivers += more
            self._board.words[self._board.row(self._board.rank) + DRIVERS] = self._num_drivers

    # What there is to do. Called by whoever holds `_work`.

    def _run(self) -> None:
        """The thread's life."""
        while True:
            seen = self._board.doorbell()
            if not self._num_drivers:
                with self._work:
                    self._step(num_others=self._num_drivers)
                    leaving = self._leaving and not (self._error is None and self._is_needed())
                self._call()
                if leaving:
                    break
            self._board.sleep(seen, _LOOK_S, as_driver=False)
        with self._work:
            self._drop(str(self._error or "this process has left the group"))
            self._close()
        self._call()

    def _step(self, num_others: int) -> None:
        """Does what can be done now; wakes others who wait if anything came to its end, in good or in bad."""
        if self._error is not None:
            return
        num_ended = self._num_ended
        try:
            self._advance()
            if time.monotonic() > self._look_s:
                self._look()
                self._look_s = time.monotonic() + _LOOK_S
        except BaseException as error:  # nobody else would ever finish what is pending
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
            self._drop(str(self._error))
            if not isinstance(error, Exception):
                raise
        finally:
            for medium, before in reversed(self._entered):
                medium.leave(before)
            self._entered.clear()
            if num_others and self._num_ended > num_ended:
                self._board.ring(self._board.rank)

    def _enter(self) -> None:
        """This thread uses all media that there are by now: a job may be the first of its medium."""
        for medium in tuple(self._media.values()):
            if all(medium is not known for known, _ in self._entered):
                self._entered.append((medium, medium.enter()))

    def _advance(self) -> None:
        while True:
            with self._state:
                while self._submitted:
                    self._submitted.popleft()[1]()
            self._enter()
            while self.collectives.advance() | self.messages.advance():
                pass
            if not self._submitted:
                return

    def _call(self) -> None:
        """Calls whom a job's end concerns; not in the middle of anything, because they may start new jobs."""
        while self._to_call:
            try:
                callback = self._to_call.popleft()
            except IndexError:  # another thread was faster
                return
            callback()

    def _jobs(self) -> Iterator[Job]:
        return chain(self.collectives.jobs(), self.messages.jobs())

    def _is_computing(self) -> bool:
        return any(medium.is_busy() for medium in tuple(self._media.values()))

    def _is_needed(self) -> bool:
        """Whether others still need us for what we have started with them."""
        return (
            self._is_computing()
            or self.collectives.is_held
            or bool(self.collectives.waited_for())
            or any(map(self._is_there, self.messages.readers()))
        )

    # When others are gone.

    def _is_there(self, rank: int) -> bool:
        return not self._board.is_closed(rank) and self._board.is_alive(rank)

    def _waited_for(self) -> set[int]:
        return self.collectives.waited_for() | self.messages.waited_for()

    def _look(self) -> None:
        """Lets go of memory that its owner has freed. Fails if somebody we wait for has left, has ended, or is late."""
        board = self._board
        if any(medium.has_freed() for medium in tuple(self._media.values())):
            board.words[board.row(board.rank) + FREED] += 1
        waited, computing = self._waited_for(), self._is_computing()
        if not (waited or computing):
            self._segments.release()  # which waits for the stream: nothing on it may wait for a rank that is gone
            return
        # What is on a stream may wait for the mark of a rank that ended before its GPU got there.
        cut_off = set(filter(board.is_cut_off, range(board.size)))
        gone = {rank for rank in waited if not self._is_there(rank)} | (cut_off if computing else set())
        if gone:
            self._advance()  # it may have done its part between our last step and its end
            gone &= self._waited_for() | cut_off
        for rank in cut_off:
            board.give_up_on(rank)
        if gone:
            first = min(cut_off or gone)  # others may have left because of it
            how = "has ended" if first in cut_off else "has left the group"
            raise RuntimeError(f"{self._names[first]} (process {board.pid(first)}) {how}")
        now_s = time.monotonic()
        for job in self._jobs():
            if now_s > job.deadline_s:
                others = ", ".join(self._names[rank] for rank in sorted(self._waited_for()))
                raise RuntimeError(f"{job.name} timed out after {self._timeout_s:g} s, waiting for {others}")

    def _drop(self, why: str) -> None:
        """Ends everything that is pending; what comes later is refused."""
        with self._state:
            self._leaving = True
            jobs = [job for job, _ in self._submitted]
            self._submitted.clear()
        for job in chain(jobs, self._jobs()):
            if not job.is_over():
                job.finish(RuntimeError(why))

    def _close(self) -> None:
        """Lets go of what is others', then of what is ours once they have let go of it.

        Others may be still to map memory of the host that they are to read from, and memory of a GPU goes with us, so
        we wait for them. After an error nobody knows what the GPU still does: then it stays until the process ends.
        """
        board = self._board
        host, gpu = self._media.get("cpu"), self._media.get("cuda")
        assert gpu is None or isinstance(gpu, CudaMemoryBackend)
        try:
            if gpu is not None and self._error is None:
                gpu.enter()
                gpu.release()
            self._segments.forget()
            board.words[board.row(board.rank) + CLOSED] = LEFT if self._error is None else FAILED
            board.ring_all()
            have_left = self._error is None and self._media and self._have_others_left()
            if host is not None:
                host.close()
            if gpu is not None and have_left:
                gpu.close()
        finally:
            board.close()

    def _have_others_left(self) -> bool:
        """Waits for it, but not for ever."""
        end_s = time.monotonic() + _LEAVE_S
        others = [rank for rank in range(self._board.size) if rank != self._board.rank]
        while any(map(self._is_there, others)):
            if time.monotonic() > end_s:
                return False
            seen = self._board.doorbell()
            if any(map(self._is_there, others)):
                self._board.sleep(seen, _LOOK_S, as_driver=False)
        return True
