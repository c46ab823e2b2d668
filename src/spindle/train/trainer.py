"""The Trainer: makes a plan, then runs it step after step. Every rank runs the same script."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from spindle.errors import TrainingError, WorkloadError
from spindle.launch import WorkloadCapture, active_capture, is_debugging
from spindle.launch.activity import HUNG_ON_STEP_S
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.report import STEPS
from spindle.run import World, join_world
from spindle.train.agreement import compare
from spindle.train.callbacks import Callback, EvaluationRecord, OnStep, check_callbacks
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
from spindle.train.sweep import Trial, loaders_of_trials
from spindle.train.task import TaskDefinition
from spindle.train.writers import JSONLines

# In a fit, ranks call methods in `on_step` of the same step, one perhaps later than others, but before it counts as
# hung.
_LONE_CALL_S = 0.9 * HUNG_ON_STEP_S


class Trainer:
    """Trains several tasks in one step, on all processes of the job.

    `optimizer` is called on each rank with the names (`module.path`) and parameters that this rank holds. It returns a
    torch optimizer of them, with any parameter groups. `lr_scheduler` is called with that optimizer, and stepped after
    it. With several ranks, both are first called once with all parameters on `meta`, to check that ranks agree.

    A step averages the gradients of `gradient_accumulation_steps` batches of each task, and clips them to a global norm
    of `max_grad_norm`. Layers and losses run under `torch.autocast` with the dtype `autocast`. With torch.float16,
    losses are scaled as by torch's GradScaler, with the settings of `grad_scaler` if one is given. With
    `sampling_weights`, a step has `tasks_per_step` of the tasks, drawn by these weights, which may be functions of the
    step.

    Instead of tasks, `tasks` may be trials (see `spindle.Trial`): a sweep, in which each trial has an optimizer of its
    own and all of them read the same batches.

    `planning` configures how steps are planned (see `spindle.Planning`). With `checkpoints`, the state is saved
    regularly, and a restarted script resumes from it (see `spindle.Checkpoints`). `seed` seeds random layers, data
    order and planner. `callbacks` are called with plans, steps, evaluations and results (see `spindle.Callback`). `ema`
    is the decay of an exponential moving average of the weights, for `evaluate(ema=True)` and `state_dict(ema=True)`.

    On a GPU, steps whose batches have the same shapes are captured as CUDA graphs and replayed (`cuda_graphs`). The
    numbers are the same, but side effects of Python code in a module do not happen in replays.

    With `run_folder`, rank 0 writes what `spindle report` shows: workload, profile, plan, program, a line per step, and
    timelines of the predicted step and of some measured ones. In addition, every rank writes a torch.profiler trace of
    each of the `profiler_steps`.
    """

    def __init__(
        self,
        tasks: Sequence[TaskDefinition] | Sequence[Trial],
        *,
        optimizer: MakeOptimizer | None = None,
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
        if isinstance(tasks, TaskDefinition | Trial):
            raise TrainingError("spindle.Trainer(...): expected a list of tasks, spindle.Trainer([task], ...)")
        check_callbacks(callbacks)
        if run_folder is not None:
            callbacks = (*callbacks, JSONLines(Path(run_folder) / STEPS))
        trials = tuple(trial for trial in tasks if isinstance(trial, Trial))
        if trials and len(trials) < len(tasks):
            raise TrainingError(
                "spindle.Trainer([...]): expected either tasks or spindle.Trial(task, optimizer), got both; give each "
                "task an optimizer of its own, or the Trainer one for all"
            )
        config = TrainConfig(
            tasks=tuple(task.task if isinstance(task, Trial) else task for task in tasks),
            trials=trials,
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
        self._has_new_modules = True  # whether weights may differ between ranks
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
        """The weights and buffers of all modules by name (`module.path`), the same on every rank; with `ema`, the
        averages of the weights.

        They load into plain PyTorch: `nn.ModuleDict({"vision": vision.module, ...}).load_state_dict(...)`. During a
        fit, call this in `on_step` on all ranks; it then returns copies, as of the last step that was started.
        """
        self._session.callbacks.refuse_collective("state_dict")
        if self._loop is not None:
            self._rendezvous("state_dict")
        with self._whole_weights(ema):
            state = state_dict(self._session)
            return state if self._loop is None else {name: value.clone() for name, value in state.items()}

    def train_state(self) -> TrainState:
        """The state of the training without its weights: step, data positions, random numbers, learning-rate schedule,
        sampling and optimizer. All ranks must call it, between fits or in `on_step`."""
        session, loop = self._session, self._loop
        if loop is None:
            return take_state(session, session.step, session.num_batches, {})
        num_trained, loaders = loop.data_positions()
        num_batches = {name: session.num_batches[name] + count for name, count in num_trained.items()}
        return take_state(session, loop.next_step, {**session.num_batches, **num_batches}, loaders)

    def load_train_state(self, state: TrainState) -> None:
        """Continue from a saved state with the next fit, with the same results as the training that it was taken from.

        Load weights into the modules first, at least on rank 0. Raises an error if this Trainer has already trained.
        """
        self._compare_call("load_train_state")
        restore_state(self._session, state)
        self._session.step = state.step

    def fit(
        self,
        loaders: Any,
        *,
        steps: int,
        drop_last: bool = True,
        progress: bool = True,
        on_step: OnStep | None = None,
    ) -> FitResult:
        """Train for `steps` steps. Afterwards the user's own modules hold the trained weights.

        `loaders` has, for each task, an iterable of batches that is the same on every rank; or a map-style dataset, of
        which each rank reads the samples that it needs, in an order given by the seed. If the dataset has a method
        `get_fields(number, names)`, it is asked only for the fields that a rank needs. In a sweep, `loaders` is the one
        loader of all trials.

        `on_step(step, losses)` is called on every rank when the losses of a step are known, one or two steps later. It
        is short for a callback with an `on_step`, for this fit only.

        If modules were frozen, unfrozen or switched since the last fit, a new plan is made. With
        `Trainer(checkpoints=...)`, `steps` includes steps that an earlier run has done; `on_step` is not called for
        them, and they are not in the result.
        """
        if not isinstance(steps, SupportsIndex) or operator.index(steps) < 1:  # an integer of numpy is one, too
            raise TrainingError(f"fit(steps={steps}): must be a whole number, at least 1")
        steps = operator.index(steps)
        self._compare_call("fit")
        self._refuse_scattered_weights()
        loaders = self._by_task(loaders, "fit")
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
        if session.run_folder is not None and session.capture is None:
            session.run_folder.make()
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
            for feed in feeds.values():  # including tasks that were added
                feed.close()

    def stop(self) -> None:
        """End the current fit early: on all ranks, after the next step, even if only some ranks call this. Call it in
        `on_step`. The result has the steps that have run."""
        if self._loop is None:
            raise TrainingError("stop(): there is no fit to end; call it in fit(on_step=...)")
        self._loop.stop()

    def save(self) -> None:
        """Save a checkpoint after the next step: on all ranks, even if only some ranks call this. Call it in
        `on_step`."""
        if self._loop is None or self._session.saver is None:
            raise TrainingError(
                "save(): call it in fit(on_step=...), with Trainer(checkpoints=spindle.Checkpoints(...))"
            )
        self._session.saver.is_requested = True

    def step_lr_scheduler(self, metric: float, *, trial: str = "") -> None:
        """Step a `ReduceLROnPlateau` with a metric, such as a loss from `evaluate`. Call it on all ranks, in `on_step`
        or between fits. In a sweep, it steps the scheduler of `trial`."""
        self._session.callbacks.refuse_collective("step_lr_scheduler")
        self._rendezvous("step_lr_scheduler")
        compare(self.world, {"the metric of step_lr_scheduler(...)": f"{float(metric)!r} {trial}"})
        if self._session.update is None:
            raise TrainingError("step_lr_scheduler(): there is no learning-rate scheduler before the first step")
        self._session.update.step_scheduler(metric, trial)

    def prepare(self, loaders: Any, *, progress: bool = True) -> Profile:
        """Record the tasks and measure their layers, as the first `fit` would, without training. Reads the first batch
        of each loader."""
        self._compare_call("prepare")
        loaders = self._by_task(loaders, "prepare")
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
        """Use a new plan in the next `fit`: a given one, one by another planner, or one with other tensor-parallel
        degrees.

        The optimizer's state is kept unless `keep_optimizer=False`. During a fit, call this in `on_step` on all ranks:
        the next step then has a new plan. Do so after freezing or unfreezing modules there.
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
        """End a task, or a trial of a sweep.

        During a fit (in `on_step`, on all ranks), the task ends before the next step; otherwise before the next fit. A
        new plan is made for the other tasks. Modules that no task uses any more keep their weights.
        """
        call = f"remove_task({name!r})"
        config = self._config_to_change(call)
        remaining = tuple(task for task in config.tasks if task.name != name)
        if len(remaining) == len(config.tasks) and any(trial.name == name for trial in config.trials):
            return  # it has already ended, perhaps because its loss was not finite
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
        """Add a task, or a task that was removed.

        During a fit (in `on_step`, on all ranks), it needs its loader and joins the step after the next one; otherwise
        it joins the next fit. `sampling_weight` requires `sampling_weights`. A task that this Trainer has trained
        before is planned at once; a new one is measured first.
        """
        if self._session.config.is_sweep:
            raise TrainingError("add_task(...): the trials of a sweep begin together; give all of them to the Trainer")
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

    def evaluate(self, loaders: Any, *, steps: int | None = None, ema: bool = False) -> dict[str, float]:
        """The mean loss of each task that has a loader here, and its metrics (`spindle.result`) as `task/name`.

        Evaluates one epoch of each loader, or `steps` batches of it, with modules in evaluation mode. In a sweep, one
        loader may stand for those of all trials. A `spindle.mean` is total over count of all batches; other losses are
        averaged over batches, weighted by their numbers of samples.

        During a fit (in `on_step`, on all ranks), the weights are those after the last step that was started. With
        `ema`, averages of the weights are evaluated.
        """
        if self._session.config.is_sweep and not isinstance(loaders, Mapping):
            loaders = dict.fromkeys(self._session.config.task_names, loaders)
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

    def _by_task(self, loaders: Any, call: str) -> dict[str, Any]:
        """The loaders by task. In a sweep, all trials have the same one."""
        config = self._session.config
        if config.is_sweep:
            return loaders_of_trials(config.task_names, loaders, f"{call}(...)")
        if not isinstance(loaders, Mapping):
            raise TrainingError(
                f"{call}({type(loaders).__name__}): expected a loader for each task, "
                f"{call}({{{config.task_names[0]!r}: loader}}, ...)"
            )
        return dict(loaders)

    def _config_to_change(self, call: str) -> TrainConfig:
        """The configuration that a call changes: that of the next step, or that of the next fit."""
        if self._loop is not None:
            return self._loop.next_config
        self._compare_call(call)
        return self._session.config

    def _change(
        self, call: str, config: TrainConfig, loaders: Mapping[str, Any] | None = None, *, keep_optimizer: bool = True
    ) -> None:
        """Train with this configuration from the next step or fit on."""
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
        """Check that all ranks call the same method of the Trainer, before it communicates."""
        self._session.callbacks.refuse_collective(call)
        self._rendezvous(call)
        compare(self.world, {"the Trainer method called": call})

    def _rendezvous(self, call: str) -> None:
        """Wait for the other ranks. Between fits, they may take as long as they want."""
        limit_s = None if self._loop is None else _LONE_CALL_S
        self.world.rendezvous(f"Trainer.{call}", self._session.notify, limit_s)
