"""The losses of a fit, step by step: summed over micro-steps on this rank, then over ranks, checked and reported.

A step's losses are read after later steps have been launched, so that a GPU does not run dry, and travel with the
header of a later step. Until then `LossHistory` remembers what is known of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from spindle.errors import TrainingError
from spindle.run import HostCopy
from spindle.train.callbacks import Callbacks
from spindle.train.progress import Progress
from spindle.train.step_report import LaunchedStep, StepReport

_LEAST_SCALE = 2.0**-20  # from where on it is not the scale that makes gradients overflow


class LossHistory:
    """Losses by step and task, from the first step of a fit on."""

    def __init__(self, first_step: int, progress: Progress, callbacks: Callbacks) -> None:
        self._first_step, self._progress, self._callbacks = first_step, progress, callbacks
        self._launched: deque[LaunchedStep] = deque()  # steps that are not reported yet
        self._end_s = 0.0  # of the last reported step, since the fit began
        self.by_step: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []  # by step, `task/name`

    @property
    def next_step(self) -> int:
        """The step that is reported next."""
        return self._first_step + len(self.by_step)

    def expect(self, launched: LaunchedStep) -> None:
        """A step was launched; it will be reported after those before it."""
        self._launched.append(launched)

    def report(self, report: StepReport, idle: float | None) -> None:
        """Check the losses of the next step, and report it. `idle` is the idle share of the last timed step."""
        record = self._launched.popleft().record(report, report.end_s - self._end_s, idle)
        self._end_s = report.end_s
        losses = dict(record.losses)
        for name, loss in losses.items():
            if not math.isfinite(loss) and not record.skipped:
                last = next((earlier[name] for earlier in reversed(self.by_step) if name in earlier), None)
                raise TrainingError(
                    f"task {name!r}: its loss is {loss} in step {record.step}"
                    + (f" (before that: {last:.6g})" if last is not None else "")
                    + "; look at its learning rate, its data and what it divides by"
                )
        if record.skipped and record.loss_scale is not None and record.loss_scale < _LEAST_SCALE:
            raise TrainingError(
                f"step {record.step}: gradients are not finite however small the loss scale, which is "
                f"{record.loss_scale:.3g} by now; look at the learning rate, the data and what losses divide by"
            )
        self.by_step.append(losses)
        self.metrics.append(dict(record.metrics))
        self._progress.losses(losses)
        self._callbacks.call("on_step", record)


def loss_and_metric_sums(
    parts: Sequence[tuple[HostCopy, Mapping[int, str], Mapping[int, str]]],
    counts: Mapping[str, int],
    metrics: Sequence[str],
) -> list[float]:
    """This rank's part of each task's loss, a mean over the task's `counts` micro-steps; then total and count of each
    metric. `parts` are the values of the programs that a step ran, with the task of every position that has a loss, and
    the metric of every position that has its total, which its count follows. Waits for a GPU."""
    losses = dict.fromkeys(counts, 0.0)
    totals = {name: [0.0, 0.0] for name in metrics}
    for copy, tasks, metric_places in parts:
        values = copy.tolist()
        for position, task in tasks.items():
            losses[task] += values[position] / counts[task]
        for position, name in metric_places.items():
            totals[name][0] += values[position]
            totals[name][1] += values[position + 1]
    return [*losses.values(), *(number for pair in totals.values() for number in pair)]
