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

# How many steps lie between a step and the header that carries its losses. Reading them waits for a GPU, which must not
# run idle meanwhile.
LOSSES_BEHIND = {"cpu": 1, "cuda": 2}
_LEAST_SCALE = 2.0**-20  # the loss scale below which gradients that are not finite are not due to the scale


class StepReports:
    """The numbers of steps, from their launch until they are reported, and all losses and metrics reported so far."""

    def __init__(
        self,
        session: TrainSession,
        first_step: int,
        times: StepTimes,
        memory: FitMemory,
        end_trial: Callable[[str], bool],
    ) -> None:
        """`end_trial` ends a trial of a sweep if its loss is not finite. It returns False for the only trial."""
        self._session, self._first_step, self._times, self._memory = session, first_step, times, memory
        self._end_trial = end_trial
        self._columns: ReportColumns
        self._forecast: StepForecast
        self._launched: deque[LaunchedStep] = deque()  # steps that are not reported yet
        # Functions that return this rank's rows of the last steps; they wait until a GPU has finished the step.
        self._unsent: deque[Callable[[], list[float]]] = deque()
        self._end_s = 0.0  # when the last reported step ended, in seconds since the fit began
        self.losses: list[dict[str, float]] = []  # by step and task
        self.metrics: list[dict[str, float]] = []  # by step and `task/name`

    def start_plan(self) -> None:
        """Start to report steps under a new plan. All steps of the last plan must be reported."""
        session, runtime, update = self._session, self._session.current_runtime, self._session.update
        assert update is not None
        assert not self._unsent
        task_of = {variant.name: variant.task for variant in session.variants}
        metrics = dict.fromkeys(f"{task_of[variant]}/{name}" for variant, name in runtime.steps.main.metrics)
        self._columns = ReportColumns(
            tasks=tuple(session.config.task_names),
            metrics=tuple(metrics),
            lr_groups=update.lr_groups,
            trials=update.trials,
        )
        self._forecast = StepForecast(runtime, session.config, session.world.device)

    @property
    def next_step(self) -> int:
        """The next step to report."""
        return self._first_step + len(self.losses)

    @property
    def is_due(self) -> bool:
        """Whether the next header should carry a report: whether as many steps are launched as a GPU should have
        queued."""
        return len(self._unsent) >= LOSSES_BEHIND[self._session.world.device.type]

    def next_row(self) -> list[float]:
        """This rank's row of the oldest step that was not sent yet. Waits for the step."""
        return self._unsent.popleft()()

    def remaining_rows(self) -> Iterator[list[float]]:
        """This rank's rows of all steps that were not sent yet."""
        while self._unsent:
            yield self.next_row()

    @property
    def no_row(self) -> list[float]:
        """The columns of a header without a report."""
        return [0.0] * len(self._columns)

    def launched(self, step: int, headers: StepHeaders, runs: Sequence[tuple[StepRun, HostCopy]]) -> None:
        """Remember a step that was just launched, with its runs and their losses and metrics."""
        session, update, times, memory = self._session, self._session.update, self._times, self._memory
        assert update is not None
        self._launched.append(self._forecast.launched(step, headers, [run for run, _ in runs]))
        counts = {name: sum(name in row for row in headers) for name in session.config.task_names}
        # Do not keep the runs: they would keep the executors of a pipeline's earlier steps alive.
        parts = [(losses, *_loss_and_metric_positions(run)) for run, losses in runs]
        number, metrics, read_update = times.num_steps, self._columns.metrics, update.read_report

        def read() -> list[float]:
            peak_bytes = memory.peak_bytes if session.config.callbacks else 0
            return [*loss_and_metric_sums(parts, counts, metrics), *read_update(), times.end_s(number), peak_bytes]

        self._unsent.append(read)

    def report(self, table: Table) -> None:
        """Report the step whose numbers the headers in `table` carry."""
        with recorder.doing(ON_STEP):
            self._report(self._columns.read(reports_in(table, len(self._columns))), idle_in(table))

    def _report(self, report: StepReport, idle: float | None) -> None:
        """Check the losses of the next step to report, and report it. `idle` is the idle share of the last timed
        step."""
        record = self._launched.popleft().record(report, report.end_s - self._end_s, idle)
        self._end_s = report.end_s
        losses = dict(record.losses)
        for name, loss in losses.items():
            if not math.isfinite(loss) and not record.skipped:
                last = next((earlier[name] for earlier in reversed(self.losses) if name in earlier), None)
                text = f"its loss is {loss} in step {record.step}"
                text += f" (before that: {last:.6g})" if last is not None else ""
                if not self._end_trial(name):
                    raise TrainingError(
                        f"task {name!r}: {text}; look at its learning rate, its data and what it divides by"
                    )
                if last is None or math.isfinite(last):  # one or two later steps are launched already
                    self._session.notify(f"trial {name!r} has ended, and the others go on: {text}")
        if record.skipped and record.loss_scale is not None and record.loss_scale < _LEAST_SCALE:
            raise TrainingError(
                f"step {record.step}: gradients are not finite however small the loss scale, which is "
                f"{record.loss_scale:.3g} by now; look at the learning rate, the data and what losses divide by"
            )
        self.losses.append(losses)
        self.metrics.append(dict(record.metrics))
        self._session.progress.losses(losses)
        session = self._session
        weights = {} if session.runtime is None else session.runtime.workload.bound.parameters
        session.callbacks.report(record, weights, session.world.size)


# A task, and the weight of its loss within the step if microbatches have different weights.
LossPlace = tuple[str, float | None]


def _loss_and_metric_positions(run: StepRun) -> tuple[dict[int, LossPlace], dict[int, str]]:
    """The positions of task losses and of metric totals (`task/name`) among the values of a run."""
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
    """This rank's part of each task's loss, then the total and count of each metric. Waits for a GPU.

    A loss is the mean over the task's `counts` micro-steps, weighted by their shares of the step if they have any.
    `parts` are the values of the programs that the step ran, each with the task of every position that holds a loss,
    and the metric of every position that holds a total; its count is at the next position.
    """
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
