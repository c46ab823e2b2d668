"""What ranks report of a step, one or two steps later: a row of numbers from each rank, which together make a record.

A row travels with a batch header. Its numbers were copied to the host asynchronously, and are read when a GPU has
finished the step, so that they cost no synchronization beyond that of the losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle.plan import Plan
from spindle.train.callbacks import StepRecord

NO_RATE = math.nan  # stands for the learning rate of a group if a rank holds no parameter of it
NO_SQUARE = -1.0  # stands for the squared norm of a rank without gradients, or if the norm is not computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportColumns:
    """The columns of a report row under one plan: a loss per task; a total and a count per metric; a learning rate per
    group; a squared gradient norm per trial; then the loss scale, whether the step was skipped, the time since the fit
    began, and the peak memory."""

    tasks: tuple[str, ...]
    metrics: tuple[str, ...] = ()  # by `task/name`
    lr_groups: tuple[str, ...] = ()
    trials: tuple[str, ...] = ("",)  # in a sweep: each has a gradient norm of its own

    def __len__(self) -> int:
        return len(self.tasks) + 2 * len(self.metrics) + len(self.lr_groups) + len(self.trials) + 4

    def read(self, rows: Sequence[Sequence[float]]) -> StepReport:
        """Combine the rows of all ranks into the report of a step."""
        columns = list(zip(*rows, strict=True))
        first = 0

        def take(count: int) -> list[tuple[float, ...]]:
            nonlocal first
            first += count
            return columns[first - count : first]

        losses = {name: sum(parts) for name, parts in zip(self.tasks, take(len(self.tasks)), strict=True)}
        totals = [sum(parts) for parts in take(2 * len(self.metrics))]
        rates = dict(zip(self.lr_groups, map(_first_known, take(len(self.lr_groups))), strict=True))
        norms = dict(zip(self.trials, map(_norm, take(len(self.trials))), strict=True))
        known = [norm for norm in norms.values() if norm is not None]
        scales, found_infs, ends_s, peaks = take(4)
        return StepReport(
            losses=losses,
            metrics={
                name: total / count
                for name, total, count in zip(self.metrics, totals[::2], totals[1::2], strict=True)
                if count
            },
            learning_rates={name: rate for name, rate in rates.items() if rate is not None},
            grad_norm=math.hypot(*known) if known else None,
            grad_norms={trial: norm for trial, norm in norms.items() if trial and norm is not None},
            loss_scale=_first_known(scales),
            skipped=any(found_infs),
            end_s=max(ends_s),
            peak_bytes=int(max(peaks)) or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The numbers of a step, combined over all ranks. `end_s` is when the last rank finished it, since the fit
    began."""

    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    learning_rates: Mapping[str, float]
    grad_norm: float | None
    grad_norms: Mapping[str, float]
    loss_scale: float | None
    skipped: bool
    end_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """What is known of a step when it is launched. `at_peak_s` is how long its FLOPs would take at the devices'
    peak."""

    step: int
    weights: Mapping[str, float]  # weights of the losses, by task of the step
    num_samples: int
    num_tokens: int
    plan: Plan
    predicted_s: float | None
    at_peak_s: float | None

    def record(self, report: StepReport, step_s: float, idle: float | None) -> StepRecord:
        """The record of this step. Only the losses and metrics of the step's own tasks have a meaning."""
        losses = {name: loss for name, loss in report.losses.items() if name in self.weights}
        return StepRecord(
            step=self.step,
            losses=losses,
            loss=sum(self.weights[name] * loss for name, loss in losses.items()),
            metrics=report.metrics,
            learning_rates=report.learning_rates,
            grad_norm=report.grad_norm,
            grad_norms=report.grad_norms,
            loss_scale=report.loss_scale,
            skipped=report.skipped,
            step_s=step_s,
            predicted_s=self.predicted_s,
            samples_per_s=self.num_samples / step_s,
            tokens_per_s=self.num_tokens / step_s if self.num_tokens else None,
            mfu=None if self.at_peak_s is None else self.at_peak_s / step_s,
            idle=idle,
            peak_bytes=report.peak_bytes,
            plan=self.plan,
        )


def _first_known(rates: Sequence[float]) -> float | None:
    return next((rate for rate in rates if not math.isnan(rate)), None)


def _norm(squares: Sequence[float]) -> float | None:
    known = [square for square in squares if square != NO_SQUARE]
    return math.sqrt(sum(known)) if known else None
