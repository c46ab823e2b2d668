"""The losses of a fit, step by step: summed over micro-steps on this rank, then over ranks, checked and reported.

A step's losses are read after later steps have been launched, so that a GPU does not run dry, and travel with the
header of a later step. Until then `LossHistory` remembers which tasks the step had.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from spindle.errors import TrainingError
from spindle.run import Losses
from spindle.train.progress import Progress

OnStep = Callable[[int, dict[str, float]], None]


class LossHistory:
    """Losses by step and task, from the first step of a fit on."""

    def __init__(self, first_step: int, progress: Progress, on_step: OnStep | None) -> None:
        self._first_step, self._progress, self._on_step = first_step, progress, on_step
        self._tasks_of: deque[frozenset[str]] = deque()  # of the steps whose losses are not reported yet
        self.by_step: list[dict[str, float]] = []

    @property
    def next_step(self) -> int:
        """The step whose losses are reported next."""
        return self._first_step + len(self.by_step)

    def expect(self, tasks: frozenset[str]) -> None:
        """A step with these tasks runs; its losses will be reported after those of the steps before it."""
        self._tasks_of.append(tasks)

    def report(self, losses_of_tasks: Mapping[str, float]) -> None:
        """Check and report the losses of the next step, of which only those of its own tasks have a meaning."""
        tasks, step = self._tasks_of.popleft(), self.next_step
        losses = {name: loss for name, loss in losses_of_tasks.items() if name in tasks}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                last = next((earlier[name] for earlier in reversed(self.by_step) if name in earlier), None)
                raise TrainingError(
                    f"task {name!r}: its loss is {loss} in step {step}"
                    + (f" (before that: {last:.6g})" if last is not None else "")
                    + "; look at its learning rate, its data and what it divides by"
                )
        self.by_step.append(losses)
        self._progress.losses(losses)
        if self._on_step is not None:
            self._on_step(step, losses)


def mean_losses(parts: Sequence[tuple[Losses, Mapping[int, str]]], counts: Mapping[str, int]) -> list[float]:
    """This rank's part of each task's loss, a mean over the task's `counts` micro-steps. `parts` are the losses of the
    programs that a step ran, each with the task of every position that has a loss. Waits for a GPU."""
    sums = dict.fromkeys(counts, 0.0)
    for losses, tasks in parts:
        values = losses.tolist()
        for position, task in tasks.items():
            sums[task] += values[position] / counts[task]
    return list(sums.values())
