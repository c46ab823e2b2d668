"""The losses of a fit, step by step: summed over micro-steps on this rank, then over ranks, checked and reported.

A step's losses are read after later steps have been launched, so that a GPU does not run idle, and are sent with the
header of a later step. Until then `StepReports` remembers the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from spindle.errors import TrainingError
from spindle.launch import ON_STEP, recorder
from spindle.run import HostCopy
from spindle.train.batch_source import StepHeaders
from spindle.train.header import Table, idle_in, reports_in
from spindle.train.memory import FitMemory
from spindle.train.session import TrainSession
from spindle.train.step_forecast import StepForecast
from spindle.train.step_report import LaunchedStep, ReportColumns, StepReport
from spindle.train.steps import StepRun
from spindle.train.timing import StepTimes

# How many steps lie between a step and the header that carries its losses. Reading them waits for a GPU, which should
# not run idle meanwhile.
LOSSES_BEHIND = {"cpu": 1, "cuda": 2}
_LEAST_SCALE = 2.0**-20  # below it, overflowing gradients are not due to the scale


class StepReports:
    """Numbers of steps from their launch until they are reported, and the losses and metrics reported so far."""

    def __init__(self, session: TrainSession, first_step: int, times: StepTimes, memory: FitMemory) -> None:
        self._session, self._first_step, self._times, self._memory = session, first_step, times, memory
        self._columns: ReportColumns
        self._forecast: StepForecast
        self._launched: deque[LaunchedStep] = deque()  # steps that are not reported yet
        # This rank's rows of the last steps; reading one waits until a GPU has finished its step.
        self._unsent: deque[Callable[[], list[float]]] = deque()
        self._end_s = 0.0  # of the last reported step, since the fit began
        self.losses: list[dict[str, float]] = []  # by step and task
        self.metrics: list[dict[str, float]] = []  # by step, `task/name`

    def start_plan(self) -> None:
        """Start reports under a new plan. Steps of the last plan must be reported."""
        session, runtime, update = self._session, self._session.current_runtime, self._session.update
        assert update is not None
        assert not self._unsent
        task_of = {variant.name: variant.task for variant in session.variants}
        metrics = dict.fromkeys(f"{task_of[variant]}/{name}" for variant, name in runtime.steps.main.metrics)
        self._columns = ReportColumns(
            tasks=tuple(session.config.task_names), metrics=tuple(metrics), lr_groups=update.lr_groups
        )
        self._forecast = StepForecast(runtime, session.config, session.world.device)

    @property
    def next_step(self) -> int:
        """The step that is reported next."""
        return self._first_step + len(self.losses)

    @property
    def is_due(self) -> bool:
        """Whether the next header should carry a report: as many steps are launched as a GPU should have ahead."""
        return len(self._unsent) >= LOSSES_BEHIND[self._session.world.device.type]

    def next_row(self) -> list[float]:
        """This rank's row of the oldest step that is not sent yet. Waits for the step."""
        return self._unsent.popleft()()

    def remaining_rows(self) -> Iterator[list[float]]:
        """This rank's rows of all steps that are not sent yet."""
        while self._unsent:
            yield self.next_row()

    @property
    def no_row(self) -> list[float]:
        """The columns of a header that carries no report."""
        return [0.0] * len(self._columns)

    def launched(self, step: int, headers: StepHeaders, runs: Sequence[tuple[StepRun, HostCopy]]) -> None:
        """Expect the numbers of a step that was just launched, in these runs, each with its losses and metrics."""
        session, update, times, memory = self._session, self._session.update, self._times, self._memory
        assert update is not None
        self._launched.append(self._forecast.launched(step, headers, [run for run, _ in runs]))
        counts = {name: sum(name in row for row in headers) for name in session.config.task_names}
        # Without the runs themselves, which would keep the executors of a pipeline's earlier steps alive.
        parts = [(losses, *_places(run)) for run, losses in runs]
        number, metrics, read_update = times.num_steps, self._columns.metrics, update.read_report

        def read() -> list[float]:
            peak_bytes = memory.peak_bytes if session.config.callbacks else 0
            return [*loss_and_metric_sums(parts, counts, metrics), *read_update(), times.end_s(number), peak_bytes]

        self._unsent.append(read)

    def report(self, table: Table) -> None:
        """Report the step whose numbers these headers carry."""
        with recorder.doing(ON_STEP):
            self._report(self._columns.read(reports_in(table, len(self._columns))), idle_in(table))

    def _report(self, report: StepReport, idle: float | None) -> None:
        """Check the losses of the next step, and report it. `idle` is the idle share of the last timed step."""
        record = self._launched.popleft().record(report, report.end_s - self._end_s, idle)
        self._end_s = report.end_s
        losses = dict(record.losses)
        for name, loss in losses.items():
            if not math.isfinite(loss) and not record.skipped:
                last = next((earlier[name] for earlier in reversed(self.losses) if name in earlier), None)
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
        self.losses.append(losses)
        self.metrics.append(dict(record.metrics))
        self._session.progress.losses(losses)
        self._session.callbacks.call("on_step", record)


LossPlace = tuple[str, float | None]  # a task, and the share of its loss in the step's, where not all count alike


def _places(run: StepRun) -> tuple[dict[int, LossPlace], dict[int, str]]:
    """Where a run has the losses of tasks among its values, and the totals of metrics (`task/name`)."""
    tasks = run.profile.graph.tasks
    losses = {
        tasks.index(name): (microbatch.task, run.shares.get(name)) for name, microbatch in run.microbatches.items()
    }
    metrics = {
        len(tasks) + 2 * number: f"{run.microbatches[name].task}/{metric}"
        for number, (name, metric) in enumerate(run.executor.metrics)
        if name in run.microbatches
    }
    return losses, metrics


def loss_and_metric_sums(
    parts: Sequence[tuple[HostCopy, Mapping[int, LossPlace], Mapping[int, str]]],
    counts: Mapping[str, int],
    metrics: Sequence[str],
) -> list[float]:
    """This rank's part of each task's loss, a mean over the task's `counts` micro-steps, weighed by their shares of the
    step where they have one; then total and count of each
    metric. `parts` are the values of the programs that a step ran, with the task of every position that has a loss, and
    the metric of every position that has its total, which its count follows. Waits for a GPU."""
    losses = dict.fromkeys(counts, 0.0)
    totals = {name: [0.0, 0.0] for name in metrics}
    for copy, tasks, metric_places in parts:
        values = copy.tolist()
        for position, (task, share) in tasks.items():
            losses[task] += values[position] * (1 / counts[task] if share is None else share)
        for position, name in metric_places.items():
            totals[name][0] += values[position]
            totals[name][1] += values[position + 1]
    return [*losses.values(), *(number for pair in totals.values() for number in pair)]
