"""Variants of a task: a batch without a modality uses different modules than one with it.

A task is recorded once for each form of its batches (which entries there are, which are None or have no rows) and each
outcome of its branches on shapes. Each variant is planned like a task of its own; in a step a task takes one of them.
So a module that a batch does not pass through gets no gradient from it, as in one process, and no rank waits for a
transfer that does not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from spindle.errors import TrainingError
from spindle.run import digest
from spindle.train.feed import Batch, form_of_batch
from spindle.train.record import record
from spindle.train.task import TaskDefinition
from spindle.train.trace import describe_batch

_MOST_VARIANTS = 16


@dataclass(frozen=True, slots=True)
class TaskVariant:
    """One variant of a task: the task under a name of its own, and the first batch that took it."""

    task: str
    definition: TaskDefinition
    example: Any

    @property
    def name(self) -> str:
        return self.definition.name


class TaskVariants:
    """All task variants seen so far, by task and key, the same on all ranks. A key has 48 bits."""

    def __init__(self, tasks: Sequence[TaskDefinition]) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._seen = dict(self._tasks)  # tasks by name, including tasks that were trained before
        self._variants: dict[tuple[str, int], TaskVariant] = {}
        self._names: dict[tuple[str, int], str] = {}  # names of variants, because random layers are seeded by them
        self._keys: dict[tuple[str, int], int] = {}  # keys by task and signature
        # By task and structure of the batch: whether the task branches on shapes.
        self._branching: dict[tuple[str, str], bool] = {}

    def __iter__(self) -> Iterator[TaskVariant]:
        """The variants of the tasks that are trained now."""
        return (variant for variant in self._variants.values() if variant.task in self._tasks)

    def set_tasks(self, tasks: Sequence[TaskDefinition]) -> set[str]:
        """Train these tasks from now on.

        Variants of a task that was trained before are still known, unless its definition has changed. Returns the names
        of dropped variants.
        """
        replaced = {task.name for task in tasks if self._seen.get(task.name, task) is not task}
        dropped = {variant.name for variant in self._variants.values() if variant.task in replaced}
        self._variants = {key: variant for key, variant in self._variants.items() if key[0] not in replaced}
        self._names = {key: name for key, name in self._names.items() if key[0] not in replaced}
        self._keys = {key: value for key, value in self._keys.items() if key[0] not in replaced}
        self._branching = {key: value for key, value in self._branching.items() if key[0] not in replaced}
        self._tasks = {task.name: task for task in tasks}
        self._seen |= self._tasks
        return dropped

    @property
    def tasks(self) -> list[str]:
        return list(self._tasks)

    @property
    def seen(self) -> list[str]:
        """All tasks seen so far, including tasks that have ended."""
        return list(self._seen)

    def get(self, task: str, key: int) -> TaskVariant | None:
        return self._variants.get((task, key))

    def key_of(
        self, task: str, batch: Batch, recording: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> int:
        """The key of the variant that a batch takes; 0 for a batch without samples.

        Batches of equal shapes take the same variant. If the task must be recorded to find out, this happens inside
        `recording`.
        """
        if batch.num_rows == 0:
            return 0
        if batch.held is not None:  # only batches of a task with a single variant are read in parts
            return next(key for name, key in self._variants if name == task)
        variant_key = self._keys.get((task, batch.signature))
        if variant_key is None:
            form = form_of_batch(batch.nest)
            decisions: tuple[int, ...] = ()
            if self._branching.get((task, form), True):
                with recording():
                    decisions = record(replace(self._tasks[task], batch_size=batch.num_rows), batch.nest).decisions
                self._branching[task, form] = bool(decisions)
            variant_key = self._keys[task, batch.signature] = digest(repr((form, decisions)))
        return variant_key

    def add(self, task: str, key: int, batch: Batch) -> None:
        """Add a variant with the first batch that takes it."""
        count = sum(variant.task == task for variant in self._variants.values())
        if count == _MOST_VARIANTS:
            raise TrainingError(
                f"task {task!r}: its batches take more than {_MOST_VARIANTS} variants, the last "
                f"({describe_batch(batch.nest)}); each is planned: let batches have fewer forms, pad them alike, or "
                "move branches into a module"
            )
        number = sum(name == task for name, _ in self._names)
        name = self._names.setdefault((task, key), task if number == 0 else f"{task}.{number + 1}")
        definition = replace(self._tasks[task], name=name, batch_size=batch.num_rows)
        self._variants[task, key] = TaskVariant(task, definition, batch.nest)

    @property
    def names(self) -> dict[tuple[str, int], str]:
        """The name of each variant, by task and key."""
        return dict(self._names)

    def restore_names(self, names: Mapping[tuple[str, int], str]) -> None:
        """Give variants, when they are added, the names that they had in an earlier run."""
        self._names = dict(names)

    def only(self, task: str) -> TaskVariant | None:
        """The only variant of a task, if batches of all shapes seen so far take the same one."""
        variants = [variant for variant in self._variants.values() if variant.task == task]
        branches = any(branches_here for (name, _), branches_here in self._branching.items() if name == task)
        return variants[0] if len(variants) == 1 and not branches else None

    def names_of(self, task: str) -> list[str]:
        return [variant.name for variant in self._variants.values() if variant.task == task]
