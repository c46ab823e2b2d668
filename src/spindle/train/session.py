"""What a Trainer keeps from plan to plan: variants of its tasks, a plan for them, the optimizer's state.

When a batch takes a new variant of its task, or a module was frozen, thawed or switched, the tasks are traced, profiled
and planned again; weights and optimizer state are kept. When a task ends, or a known one comes back, only a new plan is
made, and parameters are sent straight from the ranks that held them to those that will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from spindle.errors import TrainingError
from spindle.launch.capture import Capture
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.run import World
from spindle.train.agreement import compare, config_items, module_items, version_items
from spindle.train.analyze import mode_of
from spindle.train.buffers import gather_buffers, share_buffers
from spindle.train.callbacks import Callbacks
from spindle.train.config import TrainConfig
from spindle.train.ema import averaged_weights
from spindle.train.feed import Batch, Feed, LoaderPosition
from spindle.train.garbage import collect_all
from spindle.train.optimizer import Update
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.plan import plan_workload
from spindle.train.profiling import ProfiledWorkload, trace_and_profile
from spindle.train.progress import Progress
from spindle.train.record import named_parameters, root_handles
from spindle.train.runtime import RankRuntime, StateFor, make_runtime, make_update
from spindle.train.task import ModuleHandle
from spindle.train.task_variants import TaskVariants

if TYPE_CHECKING:
    from spindle.train.resume import ResumedTensors
    from spindle.train.saving import Saver

NEW_VARIANT = "a batch takes a new variant of its task"


class TrainSession:
    """The state of one rank's training; all ranks do the same with theirs."""

    def __init__(self, config: TrainConfig, world: World, notices: list[str], capture: Capture | None) -> None:
        self.config, self.world, self.notices, self.capture = config, world, notices, capture
        self.callbacks = Callbacks(config.callbacks, world.rank)
        self.variants = TaskVariants(config.tasks)
        self.profiled: ProfiledWorkload | None = None
        self._all_profiled: ProfiledWorkload | None = None  # with the tasks that have ended since
        self.runtime: RankRuntime | None = None
        self.update: Update | None = None  # the optimizer under the current plan, once parameters were scattered
        self.handles: dict[str, ModuleHandle] = {}  # of all modules that were called so far
        self.is_scattered = False  # whether parameters are with the ranks that hold them
        self.checked: set[str] = set()  # task variants whose split loss was compared with the whole one
        self.num_batches: Counter[str] = Counter()  # of each task, in all fits
        self.step = 0  # how many steps are done
        self.num_fits = 0  # that were begun
        self.first_step = 0  # of the last of these
        self.loader_positions: dict[str, LoaderPosition] = {}  # of a restored state, where loaders go on
        self.loader_facts: dict[str, dict[str, Any]] = {}  # what was saved of the loaders that these are of
        # Of the step that a restored state stops before: the tasks that it has, and those that were known then.
        self.next_step_tasks: tuple[frozenset[str], frozenset[str]] | None = None
        self.absent_tasks: frozenset[str] = frozenset()  # of the script, which had ended in the restored state
        self.saver: Saver | None = None
        self.saved: ResumedTensors | None = None  # of the checkpoint that was resumed from
        self.saved_plan: Plan | None = None  # for the first plan after that
        self.saved_profile: Profile | None = None
        self._optimizer_state: OptimizerState | StateFor | None = None  # for the next optimizer, where there is none

    def notifier(self, progress: Progress) -> Callable[[str], None]:
        """A function that shows a text the first time it is given it."""

        def notify(text: str) -> None:
            if text not in self.notices:
                self.notices.append(text)
                progress.note(text)

        return notify

    def trace_and_profile(self, feeds: Mapping[str, Feed], progress: Progress) -> ProfiledWorkload:
        """The tasks, traced and profiled where they are not yet, or where modules were switched since."""
        items = version_items() | config_items(self.config)
        if self._all_profiled is not None:
            items |= module_items(self._all_profiled.workload.bound.handles)
        compare(self.world, items)
        if self._is_switched():
            self._start_anew("modules were frozen, thawed or switched since", progress)
        if self.profiled is None:
            examples = {task: feed.example() for task, feed in feeds.items() if not self.variants.names_of(task)}
            for task, batch in examples.items():
                self.variants.add(task, self.variants.key_of(task, batch), batch)
            definitions = [variant.definition for variant in self.variants]
            self.profiled = self._all_profiled = trace_and_profile(
                definitions,
                self._examples(),
                self.config,
                self.world,
                progress,
                self.notifier(progress),
                self.capture,
                self.saved_profile,
            )
            self.handles |= self.profiled.workload.bound.handles
        return self.profiled

    def plan(self, profiled: ProfiledWorkload, progress: Progress) -> RankRuntime:
        """The runtime of the current plan, made where there is none."""
        if self.runtime is None:
            self.runtime = self._planned(profiled, progress)
        return self.runtime

    def _planned(self, profiled: ProfiledWorkload, progress: Progress) -> RankRuntime:
        workload, config, world = profiled.workload, self.config, self.world
        plan, self.saved_plan = self.saved_plan, None
        if plan is not None and self._applies(plan, profiled):
            config = replace(config, planning=replace(config.planning, plan=plan))
        planned = plan_workload(workload, profiled.profile, config, world, progress, self.notifier(progress))
        self.callbacks.call("on_plan", planned.plan)
        return make_runtime(workload, planned, config, world, self._examples())

    def _applies(self, plan: Plan, profiled: ProfiledWorkload) -> bool:
        """Whether the saved plan holds here: for the same graph and ranks, with the saved profile."""
        graph = profiled.workload.graph
        return (
            not self.config.planning.is_pipelined
            and (plan.num_devices, plan.fingerprint) == (self.world.size, graph.fingerprint)
            and self.saved_profile is not None
            and profiled.profile == replace(self.saved_profile, graph=graph)
        )

    def _examples(self) -> dict[str, Any]:
        return {variant.name: variant.example for variant in self.variants}

    def scatter_parameters(self, runtime: RankRuntime) -> None:
        """Send parameters to the ranks that hold them, and make an optimizer over what this rank has."""
        self.is_scattered = True
        runtime.weights.scatter_parameters()
        if self.saved is not None:
            self.saved.load(runtime.weights, root_handles(self.handles), self.world.rank)
        if runtime.shards is not None:
            runtime.shards.attach()
        share_buffers(runtime.workload.bound, self.world)
        if self.update is None:
            self.update = make_update(runtime, self.config, self.world, self._optimizer_state)
            self._optimizer_state = None

    def gather_parameters(self, runtime: RankRuntime) -> None:
        """Give every rank all parameters and buffers again."""
        if self.update is not None:
            self.update.settle_copies()
        if runtime.shards is not None:
            runtime.shards.settle()
        runtime.weights.gather_parameters()
        gather_buffers(runtime, self.world)
        share_buffers(runtime.workload.bound, self.world)
        self.is_scattered = False

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Inside, during a fit, every rank has all parameters; afterwards they are back with the ranks that hold
        them."""
        assert self.runtime is not None
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self.gather_parameters(self.runtime)
        yield
        self.scatter_parameters(self.runtime)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, parameters hold their averages (EMA). Every rank must hold all weights."""
        decay = self.config.ema
        if decay is None:
            raise TrainingError("ema=True: there is no average of the weights; give the Trainer ema=0.999, for example")
        state = self.optimizer_state() if self.update is None else self.update.state()
        with averaged_weights(self.world, state, named_parameters(self.handles), decay):
            yield

    def set_config(self, config: TrainConfig, progress: Progress, *, keep_optimizer: bool = True) -> None:
        """Train by this configuration from the next fit on. Every rank must hold all weights."""
        self.forget_plan(keep_optimizer=keep_optimizer)
        if config.tasks == self.config.tasks:
            self.config = config
        else:
            self._adopt(config, progress)

    def change_config(self, config: TrainConfig, feeds: Mapping[str, Feed], progress: Progress) -> RankRuntime:
        """Train by this configuration from the next step on, with a new plan. Parameters are scattered before and
        after."""
        old, update = self.runtime, self.update
        assert old is not None
        assert update is not None
        old.steps.close()
        update.settle_copies()
        self.checked -= self.variants.set_tasks(config.tasks)
        if not self._is_known():
            self.gather_parameters(old)
            self.forget_plan()
            self._adopt(config, progress)
            new = self.plan(self.trace_and_profile(feeds, progress), progress)
            self.scatter_parameters(new)
            return new
        if old.shards is not None:
            old.shards.release()
        self.world.forget_groups()
        with old.weights.in_shape():
            self._adopt(config, progress)
            assert self.profiled is not None
            new = self._planned(self.profiled, progress)
        gather_buffers(old, self.world)
        share_buffers(old.workload.bound, self.world)
        for parameter in old.weights.parameters:
            parameter.grad = None
        new.weights.take_over(old.weights)
        if new.shards is not None:
            new.shards.attach()
        self.update = make_update(new, self.config, self.world, update.state())
        self.runtime = new
        return new

    def _adopt(self, config: TrainConfig, progress: Progress) -> None:
        """Take a configuration, with what is known of its tasks from earlier ones."""
        previous, self.config = self.config, config
        if config.tasks != previous.tasks:
            self.config = self.without_given_plan(config, "the set of tasks changed", progress)
        self.checked -= self.variants.set_tasks(config.tasks)
        profiled = self._all_profiled
        if profiled is None or not self._is_known():
            self.profiled = self._all_profiled = None
            return
        ended = profiled.workload.bound.tasks.keys() - {variant.name for variant in self.variants}
        self.profiled = profiled.without_tasks(ended, config.name) if ended else profiled

    def _is_known(self) -> bool:
        """Whether all tasks that are trained now are traced and profiled."""
        if self._all_profiled is None or self._is_switched():
            return False
        names = {variant.name for variant in self.variants}
        known = self._all_profiled.workload.bound.tasks.keys()
        return all(map(self.variants.names_of, self.variants.tasks)) and names <= known

    def _is_switched(self) -> bool:
        """Whether modules were frozen, thawed or switched since the tasks were traced."""
        if self._all_profiled is None:
            return False
        return self._all_profiled.workload.mode != mode_of(self._all_profiled.workload.bound)

    def take_new_variant(self, task: str, key: int, batch: Batch, progress: Progress) -> None:
        """Add a variant that a batch takes for the first time; the next plan has it. Rank 0 must hold all weights."""
        self.variants.add(task, key, batch)
        self._start_anew(NEW_VARIANT, progress)

    def forget_plan(self, *, keep_optimizer: bool = True) -> None:
        """Drop the plan; the optimizer's state stays, unless it is to start anew."""
        if not keep_optimizer:
            self._optimizer_state = None
        if self.runtime is None:
            return
        self.runtime.steps.close()
        if keep_optimizer and self.update is not None:
            self._optimizer_state = self.update.state(to_host=True)
        self.update = None
        if self.runtime.shards is not None:
            self.runtime.shards.release()
        for parameter in self.runtime.weights.parameters:
            parameter.grad = None
        self.runtime = None
        collect_all()  # what the plan held on its device
        self.world.forget_groups()

    def optimizer_state(self) -> OptimizerState:
        """This rank's share of the optimizer's state."""
        if self.update is not None:
            return self.update.state(to_host=True)
        state = self._optimizer_state
        return state({}) if callable(state) else state or OptimizerState()

    def restore_optimizer_state(self, state: OptimizerState | StateFor) -> None:
        """Have the next optimizer go on from this state, whatever its plan, or from what a function of its sharding
        reads."""
        assert self.update is None
        self._optimizer_state = state

    def _start_anew(self, reason: str, progress: Progress) -> None:
        self.forget_plan()
        self.profiled = self._all_profiled = None
        self.config = self.without_given_plan(self.config, reason, progress)

    def without_given_plan(self, config: TrainConfig, reason: str, progress: Progress) -> TrainConfig:
        """The configuration without a plan and profile that the user gave for other tasks or modules. A function stays:
        it makes new ones."""
        planning = config.planning
        if planning.plan is not None:
            self.notifier(progress)(f"the given plan no longer applies: {reason}")
            planning = replace(planning, plan=None)
        if planning.profile is not None and not callable(planning.profile):
            self.notifier(progress)(f"the given profile no longer applies: {reason}")
            planning = replace(planning, profile=None)
        return replace(config, planning=planning)
