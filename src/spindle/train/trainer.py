"""The Trainer: plans once, then runs the plan step after step. Every rank runs the same script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spindle.errors import TrainingError, WorkloadError
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.run import World, join_world
from spindle.train.agreement import compare
from spindle.train.evaluation import evaluate
from spindle.train.feed import Feed, draw, random_state
from spindle.train.loop import Loop, OnStep
from spindle.train.microbatches import refuse_unfit
from spindle.train.optimizer import MakeOptimizer, MakeScheduler
from spindle.train.preparation import PIPELINE, Options
from spindle.train.progress import Progress
from spindle.train.record import handles_of, record_all
from spindle.train.result import FitResult
from spindle.train.samples import sample_feed
from spindle.train.sampling import Share, check_sampling
from spindle.train.session import TrainSession
from spindle.train.task import TaskDefinition
from spindle.workload import workload_request


class Trainer:
    """Trains several tasks in one step on all processes there are.

    `optimizer` is called on each rank with the names (`module.path`) and parameters that it holds, and returns a torch
    optimizer of them, with what groups it likes; `scheduler` is called with that optimizer, and stepped after it. With
    several ranks both are called once before that with all parameters on `meta`, to see that ranks agree.
    Gradients of `accumulate` batches of each task are averaged before a step, and clipped by their global norm to
    `clip_norm`. Layers and losses run under an `autocast` to that type (torch.bfloat16). With `sampling`, a step has
    `tasks_per_step` of the tasks, drawn by these weights, which may be functions of the step.

    `plan` is a plan to run (a Plan, or the file of one); without it `planner` makes one, from measurements of
    this machine, or from a `profile` (a Profile, or the file that `spindle profile` wrote). `seed` is for random layers
    and for the planner. On a GPU, steps whose batches have the same shapes are captured in `cuda_graphs` and replayed:
    the same numbers, without what Python code in a module does beside.

    `tensor_degrees` fixes how many devices share each layer of the modules that it names (`{"language": 4}`), which is
    the planner's choice otherwise. With `shard_optimizer`, the ranks that hold a parameter each keep the optimizer's
    state of a part of it: `optimizer` is then called with these parts, which have as many dimensions as the parameter.
    The planner does so when memory is short, unless this is True or False. An optimizer that does not update each
    element by itself is not sharded.

    With `planner="pipeline"`, layers are spread over `pipeline_ranks` ranks (all of them, unless given; more of them
    are replicas) and the `accumulate` batches of a step are the microbatches of one pipeline. What they hold may differ
    from step to step: the order of a step's passes is searched for it, in a process of its own, while the step before
    runs.

    Each rank may hold `memory_bytes` of tensors: plans keep to it, and a step that does not ends with an error. Without
    a GPU this is counted operation by operation, which takes time.
    """

    def __init__(
        self,
        tasks: Sequence[TaskDefinition],
        *,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        sampling: Mapping[str, Share] | None = None,
        tasks_per_step: int = 1,
        planner: str = "wavefront",
        plan: Plan | Path | str | None = None,
        profile: Profile | Path | str | None = None,
        seed: int = 0,
        name: str = "training",
        cuda_graphs: bool = True,
        shard_optimizer: bool | None = None,
        tensor_degrees: Mapping[str, int] | None = None,
        memory_bytes: int | None = None,
        pipeline_ranks: int | None = None,
    ) -> None:
        if not tasks:
            raise WorkloadError("spindle.Trainer needs at least one task")
        for task in tasks:
            if not isinstance(task, TaskDefinition):
                raise WorkloadError(
                    f"spindle.Trainer([...]): expected tasks, got {task!r}; "
                    "write @spindle.task(batch_size=...) above it"
                )
        names = [task.name for task in tasks]
        for task_name in names:
            if names.count(task_name) > 1:
                raise WorkloadError(
                    f"two tasks are called {task_name!r}; give one another name, @spindle.task(name=...)"
                )
        if accumulate < 1:
            raise TrainingError(f"spindle.Trainer(accumulate={accumulate}): must be at least 1")
        if clip_norm is not None and not clip_norm > 0:
            raise TrainingError(f"spindle.Trainer(clip_norm={clip_norm}): must be above 0")
        if autocast not in (None, torch.bfloat16):
            raise TrainingError(
                f"spindle.Trainer(autocast={autocast}): expected torch.bfloat16; other types need losses to be scaled"
            )
        if sampling is not None:
            check_sampling(sampling, names, tasks_per_step)
        if planner == PIPELINE:
            refuse_unfit(shard_optimizer, tensor_degrees)
        elif pipeline_ranks is not None:
            raise TrainingError(f'spindle.Trainer(pipeline_ranks={pipeline_ranks}): goes with planner="{PIPELINE}"')
        options = Options(
            tasks=tuple(tasks),
            make_optimizer=optimizer,
            make_scheduler=scheduler,
            clip_norm=clip_norm,
            accumulate=accumulate,
            autocast=autocast,
            sampling=sampling,
            tasks_per_step=tasks_per_step,
            planner=planner,
            plan=plan,
            profile=profile,
            seed=seed,
            name=name,
            cuda_graphs=cuda_graphs,
            shard_optimizer=shard_optimizer,
            tensor_degrees=tensor_degrees,
            memory_bytes=memory_bytes,
            pipeline_ranks=pipeline_ranks,
        )
        self.world: World = join_world()
        self.notices: list[str] = []
        self._options, self._steps_done = options, 0
        self._loop: Loop | None = None  # while there is a fit
        self._has_new_modules = True  # which may have other weights on each rank
        self._session = TrainSession(options, self.world, self.notices)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def plan(self) -> Plan | None:
        """The plan that is trained with, once there is one."""
        return self._session.runtime.plan if self._session.runtime else None

    @property
    def profile(self) -> Profile | None:
        """What was measured, once it was."""
        return self._session.known.profile if self._session.known else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of all modules, `module.path` by name, the same on every rank.

        They load into plain PyTorch: `nn.ModuleDict({"vision": vision, ...}).load_state_dict(...)`.
        """
        self._refuse_spread_weights()
        handles = self._session.handles or handles_of(record_all(self._options.tasks))
        return {
            f"{name}.{path}": value
            for name, handle in handles.items()
            for path, value in handle.module.state_dict().items()
        }

    def fit(
        self,
        loaders: Mapping[str, Any],
        *,
        steps: int,
        drop_last: bool = True,
        progress: bool = True,
        on_step: OnStep | None = None,
    ) -> FitResult:
        """Trains for so many steps. Afterwards the user's own modules hold the trained weights.

        `loaders` has for each task an iterable of batches, the same on every rank, or a map-style dataset, of which
        each rank fetches the samples that it needs (`get_fields(number, names)` of a dataset, where it has one, is
        asked for just the entries that it needs), in an order that the seed gives. `on_step(step, losses)` is called on
        every rank as losses become known, a step or two behind. Modules that were frozen, thawed or switched since the
        last fit are found out and planned anew.
        """
        if steps < 1:
            raise TrainingError(f"fit(steps={steps}): must be at least 1")
        self._compare_call("fit")
        self._refuse_spread_weights()
        shown = Progress(enabled=progress and self.world.rank == 0)
        feeds: dict[str, Feed] = {}
        try:
            feeds = self._feeds(loaders, drop_last, shown)
            self._loop = Loop(self._session, feeds, partial(self._feed, drop_last=drop_last), shown, on_step)
            result = self._loop.run(self._steps_done, steps)
            self._steps_done += steps
            self._has_new_modules = False
            return result
        finally:
            self._loop = None
            if self._session.runtime is not None:
                self._session.runtime.close()
            for feed in feeds.values():
                feed.close()
            shown.close()

    def prepare(self, loaders: Mapping[str, Any], *, progress: bool = True) -> Profile:
        """Records the tasks and measures their layers, as the first `fit` would, without training.

        The first batch of each loader is looked at.
        """
        self._compare_call("prepare")
        shown = Progress(enabled=progress and self.world.rank == 0)
        try:
            return self._session.trace_and_profile(self._feeds(loaders, True, shown), shown).profile
        finally:
            shown.close()

    def replan(
        self,
        *,
        planner: str | None = None,
        plan: Plan | Path | str | None = None,
        keep_optimizer: bool = True,
        tensor_degrees: Mapping[str, int] | None = None,
    ) -> None:
        """The next `fit` goes on with another plan: a given one, another planner's, or one with other tensor degrees.
        The optimizer goes on, too, or starts anew.

        In the midst of a fit (in its `on_step`, on all ranks) the next step has a new plan: this is how modules are
        frozen and thawed there.
        """
        if self._loop is None:
            self._compare_call("replan")
        if planner is not None:
            self._options.planner = planner
        if tensor_degrees is not None:
            self._options.tensor_degrees = tensor_degrees
        self._options.plan = plan
        if self._loop is None:
            self._session.forget_plan(keep_optimizer=keep_optimizer)
        elif not keep_optimizer:
            raise TrainingError("replan(keep_optimizer=False): in the midst of a fit the optimizer goes on")
        else:
            self._loop.change("replan", self._loop.coming_tasks)

    def remove_task(self, name: str) -> None:
        """A task ends: from the next step on, if this is called in a fit (in its `on_step`, on all ranks), else from
        the next fit on. The others are planned anew. What no task uses any more stays as it is."""
        if self._loop is None:
            self._compare_call(f"remove_task({name!r})")
        tasks = self._tasks_now()
        left = [task for task in tasks if task.name != name]
        if len(left) == len(tasks):
            known = ", ".join(task.name for task in tasks)
            raise TrainingError(f"remove_task({name!r}): there is no such task (tasks: {known})")
        if not left:
            raise TrainingError(f"remove_task({name!r}): it is the last one")
        if self._options.sampling is not None:
            self._options.sampling = {one: share for one, share in self._options.sampling.items() if one != name}
        self._take_tasks(f"remove_task({name!r})", left, {})

    def add_task(self, task: TaskDefinition, loader: Any = None, *, share: Share | None = None) -> None:
        """A task joins, or comes back: from the next fit on, or, in a fit (in its `on_step`, on all ranks), in which it
        needs its loader, from the next step but one on. With `sampling`, `share` is its weight.

        One that this Trainer has trained before is planned at once; another one is measured first.
        """
        if not isinstance(task, TaskDefinition):
            raise WorkloadError(f"add_task({task!r}): expected a task; write @spindle.task(batch_size=...) above it")
        if self._loop is None:
            self._compare_call(f"add_task({task.name!r})")
        tasks = self._tasks_now()
        if task.name in [task.name for task in tasks]:
            raise WorkloadError(f"add_task: there is a task {task.name!r} already; give it another name")
        if self._loop is not None and loader is None:
            raise TrainingError(f"add_task({task.name!r}): in the midst of a fit it needs a loader")
        if (share is None) != (self._options.sampling is None):
            raise TrainingError(f"add_task({task.name!r}): share= goes with Trainer(sampling=...)")
        if self._options.sampling is not None and share is not None:
            self._options.sampling = {**self._options.sampling, task.name: share}
        self._has_new_modules = True
        self._take_tasks(f"add_task({task.name!r})", [*tasks, task], {task.name: loader})

    def _refuse_spread_weights(self) -> None:
        if self.world.size > 1 and self._session.is_away:
            raise TrainingError(
                "a fit of this Trainer ended by an error: its weights are spread over the ranks; make a new Trainer "
                "of modules with weights from a file"
            )

    def _tasks_now(self) -> list[TaskDefinition]:
        return list(self._options.tasks) if self._loop is None else self._loop.coming_tasks

    def _take_tasks(self, call: str, tasks: list[TaskDefinition], loaders: dict[str, Any]) -> None:
        if self._loop is None:
            self._session.set_tasks(tasks, Progress(enabled=False))
        else:
            self._loop.change(call, tasks, loaders)

    def _compare_call(self, call: str) -> None:
        """All ranks call the same method of the Trainer, before anything in it communicates."""
        compare(self.world, {"the Trainer's method that is called": call})

    def evaluate(self, loaders: Mapping[str, Any], *, steps: int | None = None) -> dict[str, float]:
        """The mean loss of each task that has a loader here, over one epoch of it or so many of its batches.

        Modules are in evaluation mode meanwhile. A `spindle.mean` is total over count of all batches; other losses are
        averaged over batches, each counting as many times as it has samples.
        """
        if workload_request() is not None:  # nobody trains here, and modules have no weights
            return dict.fromkeys(loaders, math.nan)
        self._compare_call("evaluate")
        self._refuse_spread_weights()
        return evaluate(
            self._options,
            loaders,
            steps,
            self._random_state(),
            self.world,
            share_weights=self.world.size > 1 and self._has_new_modules,
        )

    def _feeds(self, loaders: Mapping[str, Any], drop_last: bool, shown: Progress) -> dict[str, Feed]:
        names = [task.name for task in self._options.tasks]
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
        state = self._random_state()
        return {
            task.name: self._feed(task, loaders[task.name], shown, drop_last=drop_last, state=state)
            for task in self._options.tasks
        }

    def _random_state(self) -> Any:
        """Rank 0's, from which loaders draw their order; what comes later draws something else."""
        state = self.world.broadcast_object(random_state())
        draw()
        return state

    def _feed(
        self, definition: TaskDefinition, loader: Any, shown: Progress, *, drop_last: bool, state: Any = None
    ) -> Feed:
        shared: dict[str, Any] = {
            "definition": definition,
            "drop_last": drop_last,
            "state": self._random_state() if state is None else state,
            "notify": self._session.notifier(shown),
            "compared": self.world.size > 1,
        }
        given = self._session.given[definition.name]
        of_samples = sample_feed(loader, self._options.seed, given, **shared)
        if of_samples is None:
            return Feed(loader=loader, **shared)
        of_samples.num_again = self._options.accumulate
        return of_samples
