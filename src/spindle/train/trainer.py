"""The Trainer: plans once, then runs the plan step after step. Every rank runs the same script."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spindle.errors import TrainingError, WorkloadError
from spindle.launch import WorkloadCapture, active_capture, is_debugging
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.report import STEPS
from spindle.run import World, join_world
from spindle.train.agreement import compare
from spindle.train.callbacks import Callback, EvaluationRecord, OnStep
from spindle.train.config import Checkpoints, MakePlan, Planning, TrainConfig
from spindle.train.evaluation import evaluate, state_dict, whole_weights
from spindle.train.feeds import make_feed, make_feeds, shared_random_state
from spindle.train.loop import Loop
from spindle.train.optimizer import MakeLRScheduler, MakeOptimizer
from spindle.train.result import FitResult
from spindle.train.resume import resume
from spindle.train.sampling import SamplingWeight, check_sampling_weights
from spindle.train.session import TrainSession
from spindle.train.state import TrainState, restore_state, take_state
from spindle.train.task import TaskDefinition
from spindle.train.writers import JSONLines


class Trainer:
    """Trains several tasks in one step on all processes of the job.

    `optimizer` is called on each rank with the names (`module.path`) and parameters that it holds, and returns a torch
    optimizer of them, with any parameter groups; `lr_scheduler` is called with that optimizer, and stepped after it.
    With several ranks both are called once before that with all parameters on `meta`, to check that ranks agree.

    A step averages the gradients of `gradient_accumulation_steps` batches of each task, and clips them by their global
    norm to `max_grad_norm`. Layers and losses run under `torch.autocast` with this dtype; with torch.float16, losses
    are scaled as by torch's GradScaler, with the settings of `grad_scaler` if given. With `sampling_weights`, a step
    has `tasks_per_step` of the tasks, drawn by these weights, which may be functions of the step.

    `planning` configures how steps are planned (see `spindle.Planning`). With `checkpoints`, the state is saved
    regularly, and a restarted script resumes from it (see `spindle.Checkpoints`). `seed` seeds random layers, data
    order and planner. On a GPU, steps whose batches have the same shapes are captured as CUDA graphs and
    replayed (`cuda_graphs`): the same numbers, without the side effects of Python code in a module. `callbacks` are
    told of plans, steps, evaluations and the end of fits (see `spindle.Callback`). `ema` is the decay of an exponential
    moving average of the weights, for `evaluate(ema=True)` and `state_dict(ema=True)`. With `run_folder`, rank 0 writes
    there what `spindle report` shows: workload, profile, plan, program, a line for each step, and timelines of the
    predicted step and some measured ones; and every rank a trace of torch.profiler of each of `profiler_steps`.
    """

    def __init__(
        self,
        tasks: Sequence[TaskDefinition],
        *,
        optimizer: MakeOptimizer,
        lr_scheduler: MakeLRScheduler | None = None,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        autocast: torch.dtype | None = None,
        sampling_weights: Mapping[str, SamplingWeight] | None = None,
        tasks_per_step: int = 1,
        planning: Planning | None = None,
        checkpoints: Checkpoints | None = None,
        seed: int = 0,
        name: str = "training",
        cuda_graphs: bool = True,
        callbacks: Sequence[Callback] = (),
        ema: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        run_folder: Path | str | None = None,
        profiler_steps: Collection[int] = (),
    ) -> None:
        if run_folder is not None:
            callbacks = (*callbacks, JSONLines(Path(run_folder) / STEPS))
        config = TrainConfig(
            tasks=tuple(tasks),
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_grad_norm=max_grad_norm,
            gradient_accumulation_steps=gradient_accumulation_steps,
            autocast=autocast,
            sampling_weights=sampling_weights,
            tasks_per_step=tasks_per_step,
            planning=Planning() if planning is None else planning,
            checkpoints=checkpoints,
            seed=seed,
            name=name,
            cuda_graphs=cuda_graphs,
            callbacks=tuple(callbacks),
            ema=ema,
            grad_scaler=grad_scaler,
            run_folder=None if run_folder is None else Path(run_folder),
            profiler_steps=frozenset(profiler_steps),
        )
        if sampling_weights is not None:
            check_sampling_weights(sampling_weights, config.task_names, tasks_per_step)
        self.world: World = join_world()
        self.notices: list[str] = []
        self._loop: Loop | None = None  # while there is a fit
        self._has_new_modules = True  # weights may differ between ranks
        self._session = TrainSession(config, self.world, self.notices, active_capture())
        for callback in callbacks:
            callback.trainer = self

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def plan(self) -> Plan | None:
        """The current plan, once there is one."""
        return self._session.runtime.planned.plan if self._session.runtime else None

    @property
    def profile(self) -> Profile | None:
        """The measured profile, once there is one."""
        return self._session.profiled.profile if self._session.profiled else None

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Weights and buffers of all modules, `module.path` by name, the same on every rank. With `ema`, the averages
        of the weights.

        They load into plain PyTorch: `nn.ModuleDict({"vision": vision.module, ...}).load_state_dict(...)`. During a fit
        (in its `on_step`, on all ranks) they are copies, as of the last step that was started.
        """
        with self._whole_weights(ema):
            state = state_dict(self._session)
            return state if self._loop is None else {name: value.clone() for name, value in state.items()}

    def train_state(self) -> TrainState:
        """The state of the training without its weights: step, data positions, random numbers, learning-rate schedule,
        sampling and optimizer. All ranks must call it, between fits or in a fit's `on_step`."""
        session, loop = self._session, self._loop
        if loop is None:
            return take_state(session, session.step, session.num_batches, {})
        num_trained, loaders = loop.data_positions()
        num_batches = {name: session.num_batches[name] + count for name, count in num_trained.items()}
        return take_state(session, loop.next_step, {**session.num_batches, **num_batches}, loaders)

    def load_train_state(self, state: TrainState) -> None:
        """Continue from a state with the next fit, as the training that it was taken from would. Load weights into the
        modules first, at least on rank 0. A Trainer that has already trained raises an error."""
        self._compare_call("load_train_state")
        restore_state(self._session, state)
        self._session.step = state.step

    def fit(
        self,
        loaders: Mapping[str, Any],
        *,
        steps: int,
        drop_last: bool = True,
        progress: bool = True,
        on_step: OnStep | None = None,
    ) -> FitResult:
        """Train for `steps` steps. Afterwards the user's own modules hold the trained weights.

        `loaders` has for each task an iterable of batches, the same on every rank, or a map-style dataset, of which
        each rank reads the samples that it needs, in an order given by the seed (where the dataset has a method
        `get_fields(number, names)`, it is asked for just the fields that a rank needs). `on_step(step, losses)` is
        called on every rank as losses become known, one or two steps late: a shorthand for a callback of this fit with
        an `on_step`. If modules were frozen, unfrozen or switched since the last fit, steps are planned anew. With
        `Trainer(checkpoints=...)`, `steps` includes those that an earlier run has done; `on_step` is not called for
        them, and they are not in the result.
        """
        if steps < 1:
            raise TrainingError(f"fit(steps={steps}): must be at least 1")
        self._compare_call("fit")
        self._refuse_scattered_weights()
        callbacks = self._session.callbacks
        callbacks.start_fit(on_step)
        try:
            with self._session.showing_progress(progress):
                result = self._fit(loaders, steps, drop_last)
        except BaseException as error:
            callbacks.fail(error)
            raise
        callbacks.call("on_end", result)
        if self._session.run_folder is not None:
            self._session.run_folder.write_result(result)
        return result

    def _fit(self, loaders: Mapping[str, Any], steps: int, drop_last: bool) -> FitResult:
        session = self._session
        session.fit_steps = steps
        result = resume(session, loaders, steps)
        if result is not None:  # all of its steps are in a checkpoint
            return result
        feeds = make_feeds(session, loaders, drop_last=drop_last)
        try:
            try:
                self._loop = Loop(session, feeds, partial(make_feed, session, drop_last=drop_last), session.step)
            except WorkloadError as error:  # its message names the line of the user's code
                if not is_debugging():
                    error.__traceback__ = None
                raise
            result = self._loop.run(session.first_step + steps - session.step)
            session.step = self._loop.next_step
            self._has_new_modules = False
            return result
        finally:
            self._loop = None
            if session.runtime is not None:
                session.runtime.steps.close()
            for feed in feeds.values():  # including tasks that have joined
                feed.close()

    def stop(self) -> None:
        """End the current fit early, from its `on_step`: on all ranks, once the next step is done, even if only some
        ranks call it. Its result has the steps that ran."""
        if self._loop is None:
            raise TrainingError("stop(): there is no fit to end; call it in fit(on_step=...)")
        self._loop.stop()

    def save(self) -> None:
        """Save a checkpoint after the next step, from a fit's `on_step`: on all ranks, even if only some call it."""
        if self._loop is None or self._session.saver is None:
            raise TrainingError(
                "save(): call it in fit(on_step=...), with Trainer(checkpoints=spindle.Checkpoints(...))"
            )
        self._session.saver.is_requested = True

    def step_lr_scheduler(self, metric: float) -> None:
        """Step a `ReduceLROnPlateau` with a metric, such as a loss of `evaluate`: on all ranks, in a fit's `on_step` or
        between fits."""
        self._session.callbacks.refuse_collective("step_lr_scheduler")
        compare(self.world, {"the metric of step_lr_scheduler(...)": repr(float(metric))})
        if self._session.update is None:
            raise TrainingError("step_lr_scheduler(): there is no learning-rate scheduler before the first step")
        self._session.update.step_scheduler(metric)

    def prepare(self, loaders: Mapping[str, Any], *, progress: bool = True) -> Profile:
        """Record the tasks and measure their layers, as the first `fit` would, without training.

        The first batch of each loader is read.
        """
        self._compare_call("prepare")
        with self._session.showing_progress(progress):
            return self._session.trace_and_profile(make_feeds(self._session, loaders, drop_last=True)).profile

    def replan(
        self,
        *,
        planner: str | MakePlan | None = None,
        plan: Plan | Path | str | None = None,
        tensor_parallel_degrees: Mapping[str, int] | None = None,
        keep_optimizer: bool = True,
    ) -> None:
        """Use a new plan in the next `fit`: a given one, another planner's, or one with other tensor-parallel degrees.
        The optimizer's state is kept unless `keep_optimizer=False`.

        Called during a fit (in its `on_step`, on all ranks), it gives the next step a new plan: call it after modules
        were frozen or unfrozen there.
        """
        config = self._config_to_change("replan")
        planning = replace(config.planning, plan=plan)
        if planner is not None:
            planning = replace(planning, planner=planner)
        if tensor_parallel_degrees is not None:
            planning = replace(planning, tensor_parallel_degrees=tensor_parallel_degrees)
        if self._loop is not None and not keep_optimizer:
            raise TrainingError("replan(keep_optimizer=False): the optimizer cannot be reset during fit()")
        self._change("replan", replace(config, planning=planning), keep_optimizer=keep_optimizer)

    def remove_task(self, name: str) -> None:
        """End a task: from the next step on, if this is called during a fit (in its `on_step`, on all ranks), else from
        the next fit on. The other tasks are planned anew. Modules that no task uses any more keep their weights."""
        call = f"remove_task({name!r})"
        config = self._config_to_change(call)
        remaining = tuple(task for task in config.tasks if task.name != name)
        if len(remaining) == len(config.tasks):
            raise TrainingError(f"{call}: there is no such task (tasks: {', '.join(config.task_names)})")
        if not remaining:
            raise TrainingError(f"{call}: cannot remove the only remaining task")
        weights = config.sampling_weights
        if weights is not None:
            weights = {task: weight for task, weight in weights.items() if task != name}
        self._change(call, replace(config, tasks=remaining, sampling_weights=weights))

    def add_task(
        self, task: TaskDefinition, loader: Any = None, *, sampling_weight: SamplingWeight | None = None
    ) -> None:
        """Add a task, or one that was removed: from the next fit on, or, during a fit (in its `on_step`, on all ranks),
        in which it needs its loader, from the next step but one on. `sampling_weight` requires `sampling_weights`.

        A task that this Trainer has trained before is planned at once; a new one is measured first.
        """
        if not isinstance(task, TaskDefinition):
            raise WorkloadError(f"add_task({task!r}): expected a task; write @spindle.task(batch_size=...) above it")
        call = f"add_task({task.name!r})"
        config = self._config_to_change(call)
        if task.name in config.task_names:
            raise WorkloadError(f"add_task: there is a task {task.name!r} already; give it another name")
        if self._loop is not None and loader is None:
            raise TrainingError(f"{call}: it needs a loader during fit()")
        weights = config.sampling_weights
        if (sampling_weight is None) != (weights is None):
            raise TrainingError(f"{call}: sampling_weight= requires Trainer(sampling_weights=...), and vice versa")
        if weights is not None and sampling_weight is not None:
            weights = {**weights, task.name: sampling_weight}
        self._has_new_modules = True
        config = replace(config, tasks=(*config.tasks, task), sampling_weights=weights)
        self._change(call, config, {task.name: loader})

    def evaluate(self, loaders: Mapping[str, Any], *, steps: int | None = None, ema: bool = False) -> dict[str, float]:
        """The mean loss of each task that has a loader here, over one epoch of it or `steps` of its batches; and its
        metrics (`spindle.result`), as `task/name`.

        Modules are in evaluation mode meanwhile. A `spindle.mean` is total over count of all batches; other losses are
        averaged over batches, each weighted by its number of samples. During a fit (in its `on_step`, on all ranks) the
        weights are those after the last step that was started. With `ema`, averages of the weights are evaluated.
        """
        if isinstance(self._session.capture, WorkloadCapture):  # modules have no weights to evaluate
            return dict.fromkeys(loaders, math.nan)
        self._compare_call("evaluate")
        with self._whole_weights(ema):
            means = evaluate(
                self._session.config,
                loaders,
                steps,
                shared_random_state(self.world),
                self.world,
                share_weights=self.world.size > 1 and self._has_new_modules and self._loop is None,
            )
        step = self._session.step if self._loop is None else self._loop.next_step
        losses = {name: means[name] for name in loaders}
        metrics = {name: value for name, value in means.items() if name not in losses}
        record = EvaluationRecord(step=step, losses=losses, metrics=metrics, ema=ema)
        self._session.callbacks.call("on_evaluate", record)
        return means

    def _config_to_change(self, call: str) -> TrainConfig:
        """The configuration that a call changes: that of the next step, or of the next fit."""
        if self._loop is not None:
            return self._loop.next_config
        self._compare_call(call)
        return self._session.config

    def _change(
        self, call: str, config: TrainConfig, loaders: Mapping[str, Any] | None = None, *, keep_optimizer: bool = True
    ) -> None:
        """Train by this configuration from the next step or fit on."""
        if self._loop is None:
            self._session.set_config(config, keep_optimizer=keep_optimizer)
        else:
            self._loop.change(call, config, loaders)

    def _whole_weights(self, ema: bool) -> AbstractContextManager[None]:
        """A context in which every rank has all weights, or their averages."""
        self._session.callbacks.refuse_collective("a method of the Trainer that needs all weights")
        if self._loop is None:
            self._refuse_scattered_weights()
        return whole_weights(self._session, ema=ema, is_fitting=self._loop is not None)

    def _refuse_scattered_weights(self) -> None:
        if self.world.size > 1 and self._session.is_scattered:
            raise TrainingError(
                "an earlier fit() failed, so the weights are still sharded across ranks; create a new Trainer from "
                "modules with loaded weights"
            )

    def _compare_call(self, call: str) -> None:
        """Check that all ranks call the same method of the Trainer, before anything in it communicates."""
        self._session.callbacks.refuse_collective(call)
        compare(self.world, {"the Trainer method called": call})
