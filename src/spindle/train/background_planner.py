"""A process that searches plans of coming steps while rank 0 trains."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from spindle.errors import TrainingError
from spindle.planners import Answer, Job, read_frame, write_frame
from spindle.program import Program

_LONGEST_S = 600.0  # for a first plan; a process that takes longer hangs


class BackgroundPlanner:
    """Plan steps in another process. `best` returns the best program so far, and waits only while there is none."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        # The package that is running, wherever it is from; not the script, which would begin to train.
        command = f"import sys; sys.path.insert(0, {root!r}); from spindle.planners.pipeline.worker import main; main()"
        self._process = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answers: dict[int, Answer] = {}
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, job: Job) -> None:
        """Queue a step to plan."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, job)
        except OSError as error:
            raise TrainingError("the process that plans steps has ended") from error

    def best(self, number: int) -> tuple[Program, bool]:
        """The best program of a job so far, and whether its search is over."""
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self._process.poll() is not None, _LONGEST_S)
            answer = self._answers.get(number)
        if answer is None:
            raise TrainingError(f"there is no plan of a step: the process that plans {self._state()}")
        if answer.program is None:
            assert answer.error is not None
            raise answer.error
        return answer.program, answer.is_final

    def keep(self, numbers: Collection[int]) -> None:
        """Drop the answers to all other jobs."""
        with self._news:
            self._answers = {number: answer for number, answer in self._answers.items() if number in numbers}

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _state(self) -> str:
        code = self._process.poll()
        return f"did not answer in {_LONGEST_S:g} s" if code is None else f"has ended (exit code {code})"

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            with contextlib.suppress(ValueError):  # closed under us
                answer = read_frame(self._process.stdout)
                with self._news:
                    if answer is not None:
                        earlier = self._answers.get(answer.number)
                        if earlier is None or answer.program is not None:  # a later failure does not undo a plan
                            self._answers[answer.number] = answer
                    self._news.notify_all()
                if answer is not None:
                    continue
            return
