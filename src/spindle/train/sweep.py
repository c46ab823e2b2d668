"""A trial of a sweep: a task with an optimizer of its own. All trials of a sweep read the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spindle.errors import TrainingError
from spindle.train.optimizer import MakeLRScheduler, MakeOptimizer
from spindle.train.task import TaskDefinition


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial of a sweep. `Trainer([Trial(...), Trial(...)])` trains several tasks on the same batches, each with its
    own `optimizer`, `lr_scheduler` and `max_grad_norm`, which are arguments of the Trainer otherwise.

    Each trial trains as it would alone. Trials may share frozen modules: a call of a frozen module on the same input is
    computed once per step for all of them.
    """

    task: TaskDefinition
    optimizer: MakeOptimizer
    lr_scheduler: MakeLRScheduler | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.task, TaskDefinition):
            raise TrainingError(
                f"spindle.Trial({self.task!r}, ...): expected a task; write @spindle.task(batch_size=...) above it"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise TrainingError(f"spindle.Trial(max_grad_norm={self.max_grad_norm}): must be above 0")

    @property
    def name(self) -> str:
        return self.task.name


def check_same_data(trials: Sequence[Trial]) -> None:
    """Refuse trials whose tasks cannot read the same batches."""
    first = trials[0].task
    for trial in trials:
        for what in ("batch_size", "items"):
            expected, got = getattr(first, what), getattr(trial.task, what)
            if got != expected:
                raise TrainingError(
                    f"trials read the same batches: {trial.name!r} has {what}={got!r}, {first.name!r} {expected!r}; "
                    "give all tasks of a sweep the same"
                )


def loaders_of_trials(names: Sequence[str], loaders: Any, where: str) -> dict[str, Any]:
    """The loader of each trial, if the user gave one for all of them, or the same one by trial."""
    if not isinstance(loaders, Mapping):
        return dict.fromkeys(names, loaders)
    different = {id(loader) for loader in loaders.values()}
    if len(different) > 1:
        raise TrainingError(
            f"{where}: trials read the same batches, got {len(different)} loaders for {', '.join(loaders)}; give one, "
            f"{where.partition('(')[0]}(loader, ...), or train tasks with data of their own without spindle.Trial"
        )
    return dict(loaders)
