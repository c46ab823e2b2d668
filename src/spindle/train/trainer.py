"""The Trainer: plans once, then runs the plan step after step. Every rank runs the same script."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spindle.errors import TrainingError, WorkloadError
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.run import World, join_world
from spindle.train.feed import Feed, draw, random_state
from spindle.train.loop import Loop, OnStep
from spindle.train.optimizer import MakeOptimizer
from spindle.train.preparation import Known, Options, Prepared, find_out, mode_of, prepare
from spindle.train.progress import Progress
from spindle.train.record import handles_of, record_all
from spindle.train.result import FitResult
from spindle.train.task import TaskDefinition


class Trainer:
    """Trains several tasks in one step on all processes there are.

    `optimizer` is called on each rank with the names and parameters that it holds, and returns a torch optimizer of
    them. `plan` is a plan to run (a Plan, or the file of one); without it `planner` makes one, from measurements of
    this machine, or from a `profile` (a Profile, or the file that `spindle profile` wrote). `seed` is for random layers
    and for the planner. On a GPU, steps whose batches have the same shapes are captured in `cuda_graphs` and replayed:
    the same numbers, without what Python code in a module does beside.
    """

    def __init__(
        self,
        tasks: Sequence[TaskDefinition],
        *,
        optimizer: MakeOptimizer,
        planner: str = "wavefront",
        plan: Plan | Path | str | None = None,
        profile: Profile | Path | str | None = None,
        seed: int = 0,
        name: str = "training",
        cuda_graphs: bool = True,
    ) -> None:
        if not tasks:
            raise WorkloadError("spindle.Trainer needs at least one task")
        for one in tasks:
            if not isinstance(one, TaskDefinition):
                raise WorkloadError(
                    f"spindle.Trainer([...]): expected tasks, got {one!r}; write @spindle.task(batch_size=...) above it"
                )
        names = [one.name for one in tasks]
        for task_name in names:
            if names.count(task_name) > 1:
                raise WorkloadError(
                    f"two tasks are called {task_name!r}; give one another name, @spindle.task(name=...)"
                )
        self._options = Options(
            tasks=tuple(tasks),
            make_optimizer=optimizer,
            planner=planner,
            plan=plan,
            profile=profile,
            seed=seed,
            name=name,
            cuda_graphs=cuda_graphs,
        )
        self.world: World = join_world()
        self.notices: list[str] = []
        self._known: Known | None = None
        self._prepared: Prepared | None = None
        self._steps_done = 0
        self._same_way: set[tuple[str, int]] = set()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def plan(self) -> Plan | None:
        """The plan that is trained with, once there is one."""
        return self._prepared.plan if self._prepared else None

    @property
    def profile(self) -> Profile | None:
        """What was measured, once it was."""
        return self._known.profile if self._known else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of all modules, `module.path` by name, the same on every rank.

        They load into plain PyTorch: `nn.ModuleDict({"vision": vision, ...}).load_state_dict(...)`.
        """
        handles = self._known.bound.handles if self._known else handles_of(record_all(self._options.tasks))
        return {
            f"{name}.{path}": value
            for name, handle in handles.items()
            for path, value in handle.module.state_dict().items()
        }

    def fit(
        self,
        loaders: Mapping[str, Iterable[Any]],
        *,
        steps: int,
        drop_last: bool = True,
        progress: bool = True,
        on_step: OnStep | None = None,
    ) -> FitResult:
        """Trains for so many steps. Afterwards the user's own modules hold the trained weights.

        `loaders` has an iterable of batches for each task. `on_step(step, losses)` is called on every rank as losses
        become known, a step or two behind.
        """
        if steps < 1:
            raise TrainingError(f"fit(steps={steps}): must be at least 1")
        shown = Progress(enabled=progress and self.world.rank == 0)
        try:
            feeds = self._feeds(loaders, drop_last, shown)
            known = self._find_out(feeds, shown)
            if known.mode != mode_of(known.bound):
                raise TrainingError(
                    "modules were frozen, thawed or switched between train() and eval() since the first fit, which "
                    "planned for them as they were; make a new spindle.Trainer"
                )
            if self._prepared is None:
                self._prepared = prepare(known, self._options, self.world, shown)
            loop = Loop(self._prepared, self._options, self.world, feeds, shown, self.notices, on_step, self._same_way)
            result = loop.run(self._steps_done, steps)
            self._steps_done += steps
            return result
        finally:
            shown.close()

    def prepare(self, loaders: Mapping[str, Iterable[Any]], *, progress: bool = True) -> Profile:
        """Records the tasks and measures their layers, as the first `fit` would, without training.

        The first batch of each loader is looked at.
        """
        shown = Progress(enabled=progress and self.world.rank == 0)
        try:
            return self._find_out(self._feeds(loaders, True, shown), shown).profile
        finally:
            shown.close()

    def replan(self, *, planner: str | None = None, plan: Plan | Path | str | None = None) -> None:
        """The next `fit` goes on with another plan: a given one, or another planner's. The optimizer starts anew."""
        if planner is not None:
            self._options.planner = planner
        self._options.plan = plan
        if self._prepared is not None:
            for parameter in self._prepared.weights.parameters:
                parameter.grad = None
            self._prepared = None
            gc.collect()  # what the plan held on its device
            self.world.forget_groups()

    def _notify(self, shown: Progress, text: str) -> None:
        self.notices.append(text)
        shown.note(text)

    def _find_out(self, feeds: Mapping[str, Feed], shown: Progress) -> Known:
        """What is known of the tasks, found out the first time."""
        if self._known is None:
            examples = {name: feed.peek().nest for name, feed in feeds.items()}
            self._known = find_out(self._options, examples, self.world, shown, lambda text: self._notify(shown, text))
        return self._known

    def _feeds(self, loaders: Mapping[str, Iterable[Any]], drop_last: bool, shown: Progress) -> dict[str, Feed]:
        names = [one.name for one in self._options.tasks]
        missing, unknown = (
            [name for name in names if name not in loaders],
            [name for name in loaders if name not in names],
        )
        if missing or unknown:
            raise TrainingError(
                "fit needs one loader for each task: "
                + "; ".join(
                    [f"none for {name!r}" for name in missing]
                    + [f"{name!r} is no task (tasks: {', '.join(names)})" for name in unknown]
                )
            )
        state = self.world.broadcast_object(random_state())
        draw()
        several = self.world.size > 1
        return {
            one.name: Feed(
                one, loaders[one.name], drop_last, state, lambda text: self._notify(shown, text), compared=several
            )
            for one in self._options.tasks
        }
