"""The thread of a group: carries out its messages and collectives, and notices when others are gone.

Callers hand in jobs; everything else happens on the thread, which never waits for one job while another could go on.
On a GPU, "staged" and "read" mean: put on a stream. A stream waits for another rank's mark only when that rank has
already put the mark on its own stream. So whatever order operations are called in, and however the hardware folds
streams into its few queues, no stream waits for work that comes later.

A rank that waits for one that has ended or left fails within a fraction of a second, with everything it has pending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from spindle.run.board import Board
from spindle.run.collectives import Collectives, Steps
from spindle.run.job import Job
from spindle.run.medium import CudaMedium, HostMedium, Medium, Segments
from spindle.run.messages import Messages

_LOOK_S = 0.1  # how often we look whether those we wait for are still there
_IDLE_S = 3600.0
_LEAVE_S = 10.0  # how long we wait for others to let go of our memory


class Transport:
    """What a group's thread knows. `start`, `start_message` and `leave` are for callers in any thread."""

    def __init__(self, board: Board, names: Sequence[str], timeout_s: float) -> None:
        self._board, self._names, self._timeout_s = board, names, timeout_s
        segments = Segments(board)
        self.messages, self.collectives = Messages(board, segments, names), Collectives(board, segments, names)
        self._media: dict[str, Medium] = {}
        self._entered: set[int] = set()
        self._submitted: deque[tuple[Job, Callable[[], None]]] = deque()
        self._error: RuntimeError | None = None
        self._leaving = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # for what callers and the thread both change: the six above

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

    def leave(self) -> None:
        """Finishes what others still read from us, and ends the thread."""
        with self._lock:
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
        return Job(name, tensors, self._medium(devices.pop()), self._timeout_s)

    def _medium(self, device: torch.device) -> Medium:
        with self._lock:
            if device.type not in self._media:
                self._media[device.type] = HostMedium() if device.type == "cpu" else CudaMedium(self._board, device)
            return self._media[device.type]

    def _submit(self, job: Job, add: Callable[[], None]) -> None:
        with self._lock:
            if self._leaving:
                raise RuntimeError(str(self._error or "this process has left the group"))
            self._submitted.append((job, add))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spindle transport", daemon=True)
                self._thread.start()
        self._board.ring(self._board.rank)

    # The thread.

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._work()
        except BaseException as error:  # nobody else would ever finish what is pending
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
        self._drop(str(self._error or "this process has left the group"))
        self._close()

    def _work(self) -> None:
        look_s = 0.0
        while True:
            seen = self._board.doorbell()
            leaving = self._take()
            self._advance()
            computing = self._is_computing()
            if leaving and not computing and not self._holds_others():
                return
            busy = computing or leaving or next(self._jobs(), None) is not None
            self._board.sleep(seen, _LOOK_S if busy else _IDLE_S)
            if busy and time.monotonic() > look_s:
                self._look()
                look_s = time.monotonic() + _LOOK_S

    def _take(self) -> bool:
        """Takes in what callers have started; whether we are to leave."""
        with self._lock:
            entries, leaving = list(self._submitted), self._leaving
            self._submitted.clear()
        for job, add in entries:
            if job.medium.number not in self._entered:
                self._entered.add(job.medium.number)
                job.medium.enter_thread()
            add()
        return leaving

    def _advance(self) -> None:
        """Does all that can be done without waiting."""
        while self.collectives.advance() | self.messages.advance():
            pass

    def _jobs(self) -> Iterator[Job]:
        return chain(self.collectives.jobs(), self.messages.jobs())

    def _is_computing(self) -> bool:
        return any(medium.is_busy() for medium in tuple(self._media.values()))

    def _holds_others(self) -> bool:
        """Whether others still need us for what we have started with them."""
        return bool(self.collectives.waited_for()) or any(map(self._is_there, self.messages.readers()))

    # When others are gone.

    def _is_there(self, rank: int) -> bool:
        return not self._board.closed[rank] and self._board.is_alive(rank)

    def _waited_for(self) -> set[int]:
        return self.collectives.waited_for() | self.messages.waited_for()

    def _look(self) -> None:
        """Fails if somebody we wait for has ended or left, or we have waited too long."""
        board = self._board
        # What is on a stream may wait for the mark of a rank that ended before its GPU got there.
        cut_off = {rank for rank in range(board.size) if not (board.closed[rank] or board.is_alive(rank))}
        gone = {rank for rank in self._waited_for() if not self._is_there(rank)}
        if self._is_computing():
            gone |= cut_off
        if gone:
            self._advance()  # it may have done its part between our last step and its end
            gone &= self._waited_for() | cut_off
        for rank in cut_off:
            board.give_up_on(rank)
        if gone:
            first = min(cut_off or gone)  # others may have left because of it
            how = "has ended" if first in cut_off else "has left the group"
            raise RuntimeError(f"{self._names[first]} (process {int(board.pids[first])}) {how}")
        now_s = time.monotonic()
        for job in self._jobs():
            if now_s > job.deadline_s:
                others = ", ".join(self._names[rank] for rank in sorted(self._waited_for()))
                raise RuntimeError(f"{job.name} timed out after {self._timeout_s:g} s, waiting for {others}")

    def _drop(self, why: str) -> None:
        """Ends everything that is pending; what comes later is refused."""
        with self._lock:
            self._leaving = True
            jobs = [job for job, _ in self._submitted]
            self._submitted.clear()
        for job in chain(jobs, self._jobs()):
            if not job.is_over():
                job.finish(RuntimeError(why))

    def _close(self) -> None:
        """Lets go of what is others', then of what is ours once they have let go of it.

        After an error nobody knows what a GPU still does: its memory stays until the process ends.
        """
        board = self._board
        media = [medium for kind, medium in self._media.items() if kind == "cpu" or self._error is None]
        try:
            for medium in media:
                medium.let_go()
            board.closed[board.rank] = 1
            board.ring_all()
            if "cuda" in self._media and self._error is None:
                self._wait_for_others()
            for medium in media:
                medium.close()
        finally:
            board.close()

    def _wait_for_others(self) -> None:
        end_s = time.monotonic() + _LEAVE_S
        others = [rank for rank in range(self._board.size) if rank != self._board.rank]
        while time.monotonic() < end_s:
            seen = self._board.doorbell()
            if not any(map(self._is_there, others)):
                return
            self._board.sleep(seen, _LOOK_S)
