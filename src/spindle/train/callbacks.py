"""Callbacks: a user's code that runs after planning, steps and evaluations, with their records.

All ranks make the same `StepRecord`s, from numbers that are exchanged with batch headers: one or two steps late,
without waiting for a GPU. A callback runs on every rank, unless it sets `rank_0_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from spindle.errors import TrainingError
from spindle.plan import Plan
from spindle.run import fingerprint_of
from spindle.train.result import FitResult

if TYPE_CHECKING:
    from spindle.train.trainer import Trainer

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The numbers of one training step, the same on all ranks. A field is None if its value is not known."""

    step: int
    losses: Mapping[str, float]  # by task, of the tasks in the step
    loss: float  # the sum of the losses, weighted by the weights of the tasks
    metrics: Mapping[str, float]  # by `task/name`: what tasks return with `spindle.result`
    # By group: the group's `name`, or its number in the optimizer; `trial/group` in a sweep.
    learning_rates: Mapping[str, float]
    grad_norm: float | None  # over all parameters, before clipping
    loss_scale: float | None  # the loss scale, with float16
    skipped: bool  # whether the update was skipped because a gradient was not finite
    step_s: float  # until the last rank finished the step
    predicted_s: float | None  # as simulated; None if the step had other tasks or batch sizes than its plan
    samples_per_s: float
    tokens_per_s: float | None  # of tasks with `tokens=`
    mfu: float | None  # model FLOPs utilization, relative to the dense 16-bit peak of the GPUs
    idle: float | None  # idle share of device time, in the last step that was timed
    peak_bytes: int | None  # the most memory that any rank has held in this fit, on a GPU or with a memory limit
    plan: Plan
    grad_norms: Mapping[str, float] = field(default_factory=dict)  # in a sweep: by trial, before clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The result of `Trainer.evaluate` after `step` steps, the same on all ranks."""

    step: int
    losses: Mapping[str, float]
    metrics: Mapping[str, float]  # by `task/name`
    ema: bool = False  # whether the average of the weights was evaluated


class Callback:
    """Base class of callbacks: override the methods you need. `self.trainer` is the Trainer that it was given to.

    Callbacks run on all ranks with equal records, so they may call methods of the Trainer that all ranks must call. A
    callback with `rank_0_only = True` runs on rank 0 only, and must not call such methods. An error in a callback ends
    the job.
    """

    rank_0_only: bool = False
    trainer: Trainer

    def on_plan(self, plan: Plan) -> None:
        """Called when a plan was made: before the first step, and after tasks or modules have changed. Do not modify
        the plan."""

    def on_step(self, record: StepRecord) -> None:
        """Called with the record of each step, after one or two later steps have been launched."""

    def on_evaluate(self, record: EvaluationRecord) -> None:
        """Called after `Trainer.evaluate`."""

    def on_end(self, result: FitResult | None) -> None:
        """Called when a fit has ended. `result` is None if it failed."""


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
        self._seen: set[type[Callback]] = set()  # whose on_step has been called
        self.has_gathered = False  # since then, weights were gathered by the Trainer
        self._rank_0_only: Callback | None = None  # the method that is running, if any

    def start_fit(self, on_step: OnStep | None) -> None:
        """Also call `on_step` after each step, until the next fit."""
        self._of_fit = [] if on_step is None else [_OnStepFunction(on_step)]

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks, in the order in which they were given."""
        for callback in (*self._callbacks, *self._of_fit):
            with self._marked(callback):
                getattr(callback, method)(*arguments)

    def fail(self, error: BaseException) -> None:
        """Call `on_end` of all callbacks after a failed fit. Their own errors are added as notes to the error of the
        fit."""
        for callback in self._callbacks:
            try:
                with self._marked(callback):
                    callback.on_end(None)
            except Exception as further:
                error.add_note(f"then {type(callback).__name__}.on_end failed: {type(further).__name__}: {further}")

    def report(self, record: StepRecord, weights: Mapping[str, torch.Tensor], num_ranks: int) -> None:
        """Call `on_step` of all callbacks, which must not change weights: steps behind this one have begun."""
        for callback in (*self._callbacks, *self._of_fit):
            if type(callback).__module__.startswith("spindle.") and not isinstance(callback, _OnStepFunction):
                callback.on_step(record)
                continue
            # Values once, since that takes time; on several ranks, weights may be arriving from others.
            has_values = num_ranks == 1 and type(callback) not in self._seen
            self._seen.add(type(callback))
            self.has_gathered = False
            before = _identities(weights.values(), has_values)
            try:
                with self._marked(callback):
                    callback.on_step(record)
            except Exception as error:
                if any(not weight.numel() for weight in weights.values()):
                    error.add_note(
                        "in on_step; during a fit a rank has some of the weights, and others are empty: "
                        "trainer.state_dict() has copies of all"
                    )
                raise
            after = before if self.has_gathered else _identities(weights.values(), has_values)
            for name, identity, its_identity in zip(weights, before, after, strict=True):
                if identity != its_identity:
                    raise TrainingError(
                        f"on_step has changed the weight {name!r}, but it is called one or two steps late, and on "
                        "several ranks each has some of the weights: change weights between fits, limit them in a "
                        "forward (logit_scale.clamp(max=4.6).exp()), or hold what follows from other weights (a "
                        "momentum teacher) in buffers that a forward updates (docs/training.md)"
                    )

    @contextmanager
    def _marked(self, callback: Callback) -> Iterator[None]:
        self._rank_0_only = callback if callback.rank_0_only else None
        try:
            yield
        finally:
            self._rank_0_only = None

    def refuse_collective(self, call: str) -> None:
        """Refuse a method of the Trainer that all ranks must call, if the running callback runs on rank 0 only."""
        if self._rank_0_only is not None:
            name = type(self._rank_0_only).__name__
            raise TrainingError(
                f"{call}: all ranks must call it, but the callback {name} runs on rank 0 only; leave out "
                f"{name}.rank_0_only = True, so that it runs on all ranks"
            )


def _identities(weights: Collection[torch.Tensor], has_values: bool) -> list[tuple[int, ...]]:
    """For each weight, a tuple that differs once the weight was changed in place or got other memory."""
    if has_values:
        return [(weight._version, weight.data_ptr(), fingerprint_of(weight)) for weight in weights]
    return [(weight._version, weight.data_ptr()) for weight in weights]


def check_callbacks(callbacks: Any) -> None:
    if isinstance(callbacks, Callback):
        raise TrainingError(
            f"spindle.Trainer(callbacks=...): expected a list of callbacks, got one {type(callbacks).__name__}"
        )
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; give an instance of it" if isinstance(callback, type) else ""
            raise TrainingError(
                f"spindle.Trainer(callbacks=[...]): expected objects of classes derived from spindle.Callback, got "
                f"{callback!r}{hint}"
            )
        kind = type(callback)  # an attribute may have a function of the user's that the callback calls
        unknown = [name for name in dir(kind) if name.startswith("on_") and name not in hooks]
        unknown = [name for name in unknown if callable(getattr(kind, name))]
        if unknown:
            raise TrainingError(
                f"{type(callback).__name__}.{unknown[0]} would never be called: a spindle.Callback has "
                f"{', '.join(hooks)}"
            )
