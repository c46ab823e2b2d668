"""Callbacks: a user's code that runs after planning, steps and evaluations, with their records.

All ranks make the same `StepRecord`s, from numbers that are exchanged with batch headers: one or two steps late,
without waiting for a GPU. A callback runs on every rank, unless it sets `rank_0_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spindle.errors import TrainingError
from spindle.plan import Plan
from spindle.train.result import FitResult

if TYPE_CHECKING:
    from spindle.train.trainer import Trainer

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a fit, the same on all ranks. A value is None where it is not known."""

    step: int
    losses: Mapping[str, float]  # by task of the step
    loss: float  # their sum, each with its task's weight
    metrics: Mapping[str, float]  # `task/name`: what tasks return with `spindle.result`
    learning_rates: Mapping[str, float]  # by the group's `name`, or its number in the optimizer
    grad_norm: float | None  # over all parameters, before clipping
    loss_scale: float | None  # with float16
    skipped: bool  # no update, because a gradient was not finite with this scale
    step_s: float  # until the last rank finished it
    predicted_s: float | None  # None if the step had other tasks or batch sizes than its plan
    samples_per_s: float
    tokens_per_s: float | None  # of tasks that count their tokens
    mfu: float | None  # model FLOPs utilization: of the GPUs' dense 16-bit peak
    idle: float | None  # share of device time, in the last step that was timed
    peak_bytes: int | None  # on a GPU or with a memory limit: the most that a rank has held in this fit
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The result of `Trainer.evaluate` after `step` steps, the same on all ranks."""

    step: int
    losses: Mapping[str, float]
    metrics: Mapping[str, float]  # `task/name`
    ema: bool = False  # of the average of the weights


class Callback:
    """Base class: override what you need. `self.trainer` is the Trainer that it was given to.

    Callbacks run on all ranks, and each rank has its own, so that they may call methods of the Trainer, which all ranks
    must call. One with `rank_0_only = True` runs on rank 0 alone, and must not call them. An error in a callback ends
    the job.
    """

    rank_0_only: bool = False
    trainer: Trainer

    def on_plan(self, plan: Plan) -> None:
        """A plan was made: before the first step, and whenever tasks or modules changed. It must not be modified."""

    def on_step(self, record: StepRecord) -> None:
        """The record of a step has arrived; one or two later steps were launched already."""

    def on_evaluate(self, record: EvaluationRecord) -> None:
        """`Trainer.evaluate` is done."""

    def on_end(self, result: FitResult | None) -> None:
        """A fit has ended; `result` is None if it failed."""


class _OnStepFunction(Callback):
    """The function `fit(on_step=...)` as a callback of this fit."""

    def __init__(self, function: OnStep) -> None:
        self._function = function

    def on_step(self, record: StepRecord) -> None:
        self._function(record.step, dict(record.losses))


class Callbacks:
    """The callbacks of a Trainer that run on this rank."""

    def __init__(self, callbacks: Sequence[Callback], rank: int) -> None:
        self._callbacks = [callback for callback in callbacks if rank == 0 or not callback.rank_0_only]
        self._of_fit: list[Callback] = []
        self._rank_0_only: Callback | None = None  # while it runs

    def start_fit(self, on_step: OnStep | None) -> None:
        """Also call this function, until the next fit."""
        self._of_fit = [] if on_step is None else [_OnStepFunction(on_step)]

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks, in their order."""
        for callback in (*self._callbacks, *self._of_fit):
            with self._marked(callback):
                getattr(callback, method)(*arguments)

    def fail(self, error: BaseException) -> None:
        """Call `on_end` of all callbacks after a failed fit; their own errors are added to its error as notes."""
        for callback in self._callbacks:
            try:
                with self._marked(callback):
                    callback.on_end(None)
            except Exception as further:
                error.add_note(f"then {type(callback).__name__}.on_end failed: {type(further).__name__}: {further}")

    @contextmanager
    def _marked(self, callback: Callback) -> Iterator[None]:
        self._rank_0_only = callback if callback.rank_0_only else None
        try:
            yield
        finally:
            self._rank_0_only = None

    def refuse_collective(self, call: str) -> None:
        """Refuse a method of the Trainer that all ranks must call, in a callback that only rank 0 runs."""
        if self._rank_0_only is not None:
            name = type(self._rank_0_only).__name__
            raise TrainingError(
                f"{call}: all ranks must call it, but the callback {name} runs on rank 0 only; leave out "
                f"{name}.rank_0_only = True, so that it runs on all ranks"
            )


def check_callbacks(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; give an instance of it" if isinstance(callback, type) else ""
            raise TrainingError(
                f"spindle.Trainer(callbacks=[...]): expected objects of classes derived from spindle.Callback, got "
                f"{callback!r}{hint}"
            )
