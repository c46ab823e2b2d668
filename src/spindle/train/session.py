"""What a Trainer keeps from plan to plan: variants of its tasks, a plan for them, the optimizer's state.

When a batch takes a new variant of its task, or a module was frozen, unfrozen or switched, the tasks are traced,
profiled and planned again; weights and optimizer state are kept. When a task ends, or a known one comes back, only a
new plan is made, and parameters are sent straight from the ranks that held them to those that will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from spindle.errors import TrainingError
from spindle.launch import Capture
from spindle.run import World
from spindle.train.agreement import compare, config_items, module_items, version_items
from spindle.train.callbacks import Callbacks
from spindle.train.config import TrainConfig
from spindle.train.feed import Batch, Feed, LoaderPosition
from spindle.train.garbage import collect_all
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.plan import plan_workload, scheduled_planning
from spindle.train.profiling import ProfiledWorkload, report_workload, trace_and_profile
from spindle.train.progress import Progress
from spindle.train.record import Handles, record, root_handles
from spindle.train.recorded_lines import check_lines
from spindle.train.recording_notices import noticing
from spindle.train.run_folder import RunFolder
from spindle.train.runtime import RankRuntime, StateFor, gather_buffers, make_runtime, make_update, share_buffers
from spindle.train.task_variants import TaskVariants
from spindle.train.trace import describe_batch
from spindle.train.update import Update

if TYPE_CHECKING:
    from spindle.train.resume import ResumedTensors
    from spindle.train.saving import Saver

NEW_VARIANT = "a batch takes a new variant of its task"


class TrainSession:
    """The state of one rank's training. All ranks do the same with theirs."""

    def __init__(self, config: TrainConfig, world: World, notices: list[str], capture: Capture | None) -> None:
        self.config, self.world, self.notices, self.capture = config, world, notices, capture
        self.progress = Progress(enabled=False, silent=True)  # of the current fit
        self.callbacks = Callbacks(config.callbacks, world.rank)
        self.run_folder = RunFolder.of(config, world)
        self.variants = TaskVariants(config.tasks)
        self.profiled: ProfiledWorkload | None = None
        self._all_profiled: ProfiledWorkload | None = None  # the profiled tasks, including tasks that have ended
        self.runtime: RankRuntime | None = None
        self.update: Update | None = None  # the optimizer under the current plan, once parameters are scattered
        self.handles: Handles = {}  # handles of all modules that were called so far
        self.is_scattered = False  # whether each parameter is only on the ranks that hold it under the plan
        self.checked: set[str] = set()  # task variants whose split loss was compared with the whole loss
        self.num_batches: Counter[str] = Counter()  # how many batches of each task were trained, in all fits
        self.step = 0  # how many steps were trained
        self.num_fits = 0  # how many fits have begun
        self.first_step = 0  # the step with which the last fit began
        self.fit_steps: int | None = None  # how many steps the last fit was asked for
        self.loader_positions: dict[str, LoaderPosition] = {}  # where loaders continue, from a restored state
        self.loader_facts: dict[str, dict[str, Any]] = {}  # the properties that these loaders had
        # The tasks of the step after a restored state, and the tasks that were known at that time.
        self.next_step_tasks: tuple[frozenset[str], frozenset[str]] | None = None
        self.absent_tasks: frozenset[str] = frozenset()  # tasks of the script that had ended in the restored state
        self.saver: Saver | None = None
        self.saved: ResumedTensors | None = None  # the checkpoint that was resumed from
        # The plan and profile from a scheduler, or of the checkpoint.
        self.saved_planning = scheduled_planning(config.planning, world)
        # On rank 0, by micro-step and task: the batches on which placements are chosen.
        self.sample_step: list[dict[str, Batch]] = []
        self.extreme_steps: list[list[dict[str, Batch]]] = []  # with the extremes of a mix
        self._optimizer_state: OptimizerState | StateFor | None = None  # for the next optimizer, while there is none

    @contextmanager
    def showing_progress(self, enabled: bool) -> Iterator[None]:
        """A context in which rank 0 shows its progress, if enabled."""
        self.progress = Progress(enabled=enabled and self.world.rank == 0, silent=self.world.rank != 0)
        try:
            yield
        finally:
            self.progress.close()
            self.progress = Progress(enabled=False, silent=True)

    def notify(self, text: str) -> None:
        """Show a text, the first time that it is given."""
        if text not in self.notices:
            self.notices.append(text)
            self.progress.note(text)

    def warn(self, text: str) -> None:
        """Show a text, the first time that it is given, also with `fit(progress=False)`: something would be lost."""
        if text not in self.notices:
            self.notices.append(text)
            self.progress.warn(text)

    @property
    def current_runtime(self) -> RankRuntime:
        """The runtime of the current plan. There is one during a fit."""
        assert self.runtime is not None
        return self.runtime

    def trace_and_profile(self, feeds: Mapping[str, Feed]) -> ProfiledWorkload:
        """Trace and profile the tasks, unless that was done and no module was frozen, unfrozen or switched since."""
        items = version_items() | config_items(self.config)
        if self._all_profiled is not None:
            items |= module_items(self._all_profiled.workload.bound.handles)
        compare(self.world, items)
        if self._is_switched():
            self._forget_given_plan("modules were frozen, unfrozen or switched since")
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
                self.progress,
                self.notify,
                self.capture,
                self.saved_planning.profile,
                self.fit_steps,
            )
            self.handles |= self.profiled.workload.bound.handles
        return self.profiled

    def plan(self, feeds: Mapping[str, Feed]) -> None:
        """Make a plan for the tasks, unless there is one and no module was frozen, unfrozen or switched since."""
        profiled = self.trace_and_profile(feeds)
        if self.runtime is None:
            if self.config.planning.takes_parts and self.world.rank == 0:
                self.sample_step = self.sample_step or self._first_step_of(feeds)
                self.extreme_steps = self.extreme_steps or self._extreme_steps_of(feeds)
            self.runtime = self._make_plan(profiled)

    def check_recordings(self) -> None:
        """Record the tasks again, and raise an error if what their code reads from outside has changed."""
        assert self.profiled is not None
        traced = self.profiled.workload.bound.tasks
        for variant in self.variants:
            if variant.name in traced:
                with (
                    noticing(lambda text: None),
                    self.current_runtime.weights.in_shape(),
                    torch.random.fork_rng(devices=[]),
                ):
                    now = record(variant.definition, variant.example)
                check_lines(variant.name, traced[variant.name].recorded.lines, now.lines)

    def _first_step_of(self, feeds: Mapping[str, Feed]) -> list[dict[str, Batch]]:
        """The batches of the first step. They are read again when it runs."""
        numbers = range(self.config.gradient_accumulation_steps)
        return [self._with_variants({task: feed.peek(number) for task, feed in feeds.items()}) for number in numbers]

    def _extreme_steps_of(self, feeds: Mapping[str, Feed]) -> list[list[dict[str, Batch]]]:
        """The sample step with the batches of one task replaced by those of each of its `extreme_steps`."""
        num_remaining = self.first_step + (self.fit_steps or 0) - self.step
        return [
            [row | self._with_variants({task: batch}) for row, batch in zip(self.sample_step, batches, strict=True)]
            for task, feed in feeds.items()
            for batches in feed.extreme_steps(num_remaining)
        ]

    def _with_variants(self, row: Mapping[str, Batch]) -> dict[str, Batch]:
        return {task: replace(batch, variant=self.variants.key_of(task, batch)) for task, batch in row.items()}

    def _make_plan(self, profiled: ProfiledWorkload) -> RankRuntime:
        workload, config, world = profiled.workload, self.config, self.world
        config = self.saved_planning.applied_to(config, workload.graph, profiled.profile, world.size)
        self.saved_planning = replace(self.saved_planning, plan=None)  # the saved plan is only for the first plan
        examples = self._examples()
        sample_steps = [
            [
                {
                    variant.name: batch
                    for task, batch in row.items()
                    if (variant := self.variants.get(task, batch.variant))
                    and variant.name in workload.bound.tasks  # its task has not ended
                }
                for row in step
            ]
            for step in (self.sample_step, *self.extreme_steps)
        ]
        planned = plan_workload(
            workload, profiled.profile, config, world, self.progress, self.notify, examples, sample_steps
        )
        if self.run_folder is not None:
            self.run_folder.write_plan(planned, workload, is_new=self.step == 0, notices=self.notices)
        report_workload(workload.bound.workload, config, world)
        self.callbacks.call("on_plan", planned.plan)
        return make_runtime(workload, planned, config, world, examples)

    def _examples(self) -> dict[str, Any]:
        return {variant.name: variant.example for variant in self.variants}

    def scatter_parameters(self) -> None:
        """Send parameters to the ranks that hold them, and make an optimizer of those that this rank holds."""
        self.is_scattered, runtime = True, self.current_runtime
        runtime.weights.scatter_parameters()
        if self.saved is not None:
            self.saved.load(runtime.weights, root_handles(self.handles), self.world.rank)
        if runtime.shards is not None:
            runtime.shards.attach()
        share_buffers(runtime.workload.bound, self.world)
        if self.update is None:
            self.update = make_update(runtime, self.config, self.world, self._optimizer_state)
            self._optimizer_state = None
            if left_out := self.update.left_out:
                shown = ", ".join([*left_out[:3], "..."][: len(left_out)])
                self.notify(
                    f"the optimizer leaves out {len(left_out)} parameters that require gradients ({shown}): they are "
                    "not trained; requires_grad_(False) freezes them"
                )

    def gather_parameters(self) -> None:
        """Give every rank all parameters and buffers again."""
        runtime = self.current_runtime
        if self.update is not None:
            self.update.settle_copies()
        if runtime.shards is not None:
            runtime.shards.wait_all()
        runtime.weights.gather_parameters()
        gather_buffers(runtime, self.world)
        share_buffers(runtime.workload.bound, self.world)
        self.is_scattered = False

    def set_config(self, config: TrainConfig, *, keep_optimizer: bool = True) -> None:
        """Train with this configuration from the next fit on. Every rank must hold all weights."""
        self.forget_plan(keep_optimizer=keep_optimizer)
        if config.tasks == self.config.tasks:
            self.config = config
        else:
            self._set_config(config)

    def change_config(self, config: TrainConfig, feeds: Mapping[str, Feed]) -> None:
        """Train with this configuration from the next step on, under a new plan. Parameters are scattered before and
        after."""
        old, update = self.current_runtime, self.update
        assert update is not None
        old.steps.close()
        update.settle_copies()
        self.checked -= self.variants.set_tasks(config.tasks)
        if not self._is_known():  # a new task, or a switched module, is traced with whole weights
            self.gather_parameters()
            self.forget_plan()
            self._set_config(config)
            self.plan(feeds)
            self.scatter_parameters()
            return
        if old.shards is not None:
            old.shards.release()
        self.world.destroy_groups()
        # From here on, slices are sent directly from the ranks of the old plan to those of the new one.
        with old.weights.in_shape():
            self._set_config(config)
            assert self.profiled is not None
            new = self._make_plan(self.profiled)
        gather_buffers(old, self.world)
        share_buffers(old.workload.bound, self.world)
        old.drop_gradients()
        new.weights.take_over(old.weights)
        if new.shards is not None:
            new.shards.attach()
        self.update = make_update(new, self.config, self.world, update.state())
        self.runtime = new

    def _set_config(self, config: TrainConfig) -> None:
        """Use a configuration, keeping what is known of its tasks from earlier ones."""
        previous, self.config = self.config, config
        if config.tasks != previous.tasks:
            self.config = config.without_given_plan("the set of tasks changed", self.notify)
        self.checked -= self.variants.set_tasks(config.tasks)
        profiled = self._all_profiled
        if profiled is None or not self._is_known():
            self.profiled = self._all_profiled = None
            return
        ended = profiled.workload.bound.tasks.keys() - {variant.name for variant in self.variants}
        self.profiled = profiled.without_tasks(ended, config.name) if ended else profiled

    def _is_known(self) -> bool:
        """Whether all tasks of the configuration are traced and profiled."""
        if self._all_profiled is None or self._is_switched():
            return False
        names = {variant.name for variant in self.variants}
        known = self._all_profiled.workload.bound.tasks.keys()
        return all(map(self.variants.names_of, self.variants.tasks)) and names <= known

    def _is_switched(self) -> bool:
        return self._all_profiled is not None and self._all_profiled.workload.is_switched

    def take_new_variant(self, task: str, key: int, batch: Batch) -> None:
        """Add a variant that a batch takes for the first time. The next plan includes it. Rank 0 must hold all
        weights."""
        if self.config.is_sweep:
            raise TrainingError(
                f"trial {task!r}: a batch has other entries than the first ({describe_batch(batch.nest)}), or takes "
                "another branch of the task's code; the batches of a sweep must all have one form"
            )
        self.variants.add(task, key, batch)
        self._forget_given_plan(NEW_VARIANT)

    def forget_plan(self, *, keep_optimizer: bool = True) -> None:
        """Drop the plan, and without `keep_optimizer` also the optimizer's state."""
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
        self.runtime.drop_gradients()
        self.runtime = None
        collect_all()  # frees what the plan held on the device
        self.world.destroy_groups()

    def optimizer_state(self) -> OptimizerState:
        """This rank's share of the optimizer's state."""
        if self.update is not None:
            return self.update.state(to_host=True)
        state = self._optimizer_state
        return state({}) if callable(state) else state or OptimizerState()

    def restore_optimizer_state(self, state: OptimizerState | StateFor) -> None:
        """Let the next optimizer start from this state, or from what a function reads for its sharding."""
        assert self.update is None
        self._optimizer_state = state

    def _forget_given_plan(self, reason: str) -> None:
        self.forget_plan()
        self.profiled = self._all_profiled = None
        self.config = self.config.without_given_plan(reason, self.notify)
