"""A process that searches for plans of upcoming steps while rank 0 trains.

Its failures never cost a step: a process that ends or hangs is replaced, and rank 0 uses the natural order for a step
without an answer.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

from spindle.planners import Answer, Job, natural_answer, read_frame, write_frame
from spindle.program import Program

_PATIENCE_S = 60.0  # to answer with the natural order of a step; after that, the process counts as hung
_FIRST_PATIENCE_S = 120.0  # for the first answer of a new process, which may compile loops
_MOST_FAILURES = 3  # failures, after which all steps run in their natural order


class BackgroundPlanner:
    """Plans steps in another process. `best` returns the best program so far, and waits only while there is none."""

    def __init__(self, patience_s: float = _PATIENCE_S, first_patience_s: float = _FIRST_PATIENCE_S) -> None:
        self._patience_s, self._first_patience_s = patience_s, first_patience_s
        self._jobs: dict[int, Job] = {}  # jobs without a final answer
        self._answers: dict[int, Answer] = {}
        self._changed = threading.Condition()
        self._num_failures = 0
        self._process: _Process | None = _Process(self._take)

    def request_plan(self, job: Job) -> None:
        """Queue a step to plan."""
        self._jobs[job.number] = job
        if self._process is not None:
            self._process.send(job)

    def best(self, number: int) -> tuple[Program, bool]:
        """The best program of a job so far, and whether its search is over."""
        process = self._process
        if process is not None:
            patience_s = self._patience_s if process.has_answered else self._first_patience_s
            # Waits only for the first answer (the natural order), which a process sends at once.
            with self._changed:
                has_changed = self._changed.wait_for(lambda: number in self._answers or process.has_ended, patience_s)
            if process.has_ended or not has_changed:
                self._replace(process, "has ended" if process.has_ended else f"has not answered for {patience_s:g} s")
        answer = self._answers.get(number)
        if answer is None:
            answer = self._answers[number] = natural_answer(self._jobs[number])
        if answer.program is None:
            assert answer.error is not None
            raise answer.error
        return answer.program, answer.is_final or self._process is None

    def is_final(self, number: int) -> bool:
        """Whether the search for a job is over."""
        with self._changed:
            answer = self._answers.get(number)
        return answer is not None and answer.is_final and answer.program is not None

    def keep(self, numbers: Collection[int]) -> None:
        """Drop the answers to all other jobs."""
        with self._changed:
            self._answers = {number: answer for number, answer in self._answers.items() if number in numbers}
            self._jobs = {number: job for number, job in self._jobs.items() if number in numbers}

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _take(self, answer: Answer | None) -> None:
        """Take an answer, or None at the end of a process. Called by the reader thread of the process."""
        with self._changed:
            if answer is not None:
                self._num_failures = 0
                earlier = self._answers.get(answer.number)
                if earlier is None or answer.program is not None:  # a later failure does not undo a plan
                    self._answers[answer.number] = answer
                if answer.is_final:
                    self._jobs.pop(answer.number, None)
            self._changed.notify_all()

    def _replace(self, process: _Process, reason: str) -> None:
        """End a process that has failed, and start another for the jobs that are left."""
        process.close()
        self._num_failures += 1
        gives_up = self._num_failures >= _MOST_FAILURES
        then = "steps run in their natural order from now on" if gives_up else "it is started again"
        warnings.warn(f"the process that plans steps {reason}; {then}", stacklevel=3)
        self._process = None
        if not gives_up:
            self._process = _Process(self._take)
            for job in self._jobs.values():
                self._process.send(job)


class _Process:
    """One planning process, with a writer thread and a reader thread: it may hang, and pipes may be full."""

    def __init__(self, take: Callable[[Answer | None], None]) -> None:
        root = str(Path(__file__).resolve().parents[2])
        # Import the running package, wherever it is installed, and not the user's script, which would start training.
        # With -P, no module is imported from the current folder.
        command = f"import sys; sys.path.insert(0, {root!r}); from spindle.planners.pipeline.worker import main; main()"
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.has_answered = self.has_ended = False
        self._take = take
        self._unsent: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, job: Job) -> None:
        self._unsent.put(job)

    def close(self) -> None:
        """End the process, even one that is stopped."""
        self._popen.kill()
        self._popen.wait()
        self._unsent.put(None)
        for thread in self._threads:
            thread.join()
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # the process may have ended before everything was written
                stream.close()

    def _write(self) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, and the reader thread notices that
            while (job := self._unsent.get()) is not None:
                write_frame(self._popen.stdin, job)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with contextlib.suppress(Exception):  # an answer that cannot be read ends the process, too
            while (answer := read_frame(self._popen.stdout)) is not None:
                self.has_answered = True
                self._take(answer)
        self.has_ended = True
        self._take(None)
