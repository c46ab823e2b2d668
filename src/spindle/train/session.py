"""What a Trainer keeps from plan to plan: variants of its tasks, a plan for them, the optimizer's state.

When a batch takes a new variant of its task, or a module was frozen, thawed or switched, the tasks are traced, profiled
and planned again; weights and optimizer state are kept. When a task ends, or a known one comes back, only a new plan is
made, and parameters are sent straight from the ranks that held them to those that will.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from spindle.run import World
from spindle.train.agreement import compare, module_items, option_items, version_items
from spindle.train.buffers import gather_buffers, share_buffers
from spindle.train.feed import Batch, Feed
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.preparation import (
    Options,
    ProfiledWorkload,
    RankRuntime,
    mode_of,
    prepare,
    trace_and_profile,
    without,
)
from spindle.train.progress import Progress
from spindle.train.task import ModuleHandle, TaskDefinition
from spindle.train.task_variants import TaskVariants


class TrainSession:
    """One rank's; all ranks do the same with theirs."""

    def __init__(self, options: Options, world: World, notices: list[str]) -> None:
        self.options, self.world, self.notices = options, world, notices
        self.variants = TaskVariants(options.tasks)
        self.known: ProfiledWorkload | None = None
        self._all_known: ProfiledWorkload | None = None  # with the tasks that have ended since
        self.runtime: RankRuntime | None = None
        self.handles: dict[str, ModuleHandle] = {}  # of all modules that were met
        self.is_away = False  # whether weights are
        self.checked: set[str] = (
            set()
        )  # variants whose losses were put together from parts, and compared with the whole
        self.given: Counter[str] = Counter()  # batches of each task, in all fits
        self._state: OptimizerState | None = None

    def notifier(self, shown: Progress) -> Callable[[str], None]:
        """Tells something once."""

        def notify(text: str) -> None:
            if text not in self.notices:
                self.notices.append(text)
                shown.note(text)

        return notify

    def trace_and_profile(self, feeds: Mapping[str, Feed], shown: Progress) -> ProfiledWorkload:
        """What is known of the tasks, found out where it is not, or no longer so."""
        items = version_items() | option_items(self.options)
        if self._all_known is not None:
            items |= module_items(self._all_known.bound.handles)
        compare(self.world, items)
        if self._is_switched():
            self._start_anew("modules were frozen, thawed or switched since", shown)
        if self.known is None:
            for task, feed in feeds.items():
                if not self.variants.names_of(task):
                    batch = feed.example()
                    self.variants.add(task, self.variants.key_of(task, batch), batch)
            self.known = trace_and_profile(self.options, self.variants, self.world, shown, self.notifier(shown))
            self._all_known = self.known
            self.handles |= self.known.bound.handles
        return self.known

    def plan(self, known: ProfiledWorkload, shown: Progress) -> RankRuntime:
        """The plan, made where there is none."""
        if self.runtime is None:
            self.runtime = prepare(known, self.options, self.world, shown, self.notifier(shown), self._examples())
        return self.runtime

    def _examples(self) -> dict[str, object]:
        return {variant.name: variant.example for variant in self.variants}

    def scatter_parameters(self, runtime: RankRuntime) -> None:
        """Parameters to the ranks that hold them, and an optimizer over what this rank has."""
        self.is_away = True
        runtime.weights.scatter_parameters()
        if runtime.shards is not None:
            runtime.shards.attach()
        share_buffers(runtime.bound, self.world)
        if runtime.update is None:
            runtime.make_update(self._state)
            self._state = None

    def gather_parameters(self, runtime: RankRuntime) -> None:
        """Every rank has all parameters and buffers again."""
        if runtime.shards is not None:
            runtime.shards.settle()
        runtime.weights.gather_parameters()
        gather_buffers(runtime, self.world)
        share_buffers(runtime.bound, self.world)
        self.is_away = False

    def set_tasks(self, tasks: Sequence[TaskDefinition], shown: Progress) -> None:
        """From now on these tasks are trained. Weights must be at home."""
        self.forget_plan()
        self._take_tasks(tasks, shown)

    def change_tasks(self, tasks: Sequence[TaskDefinition], feeds: Mapping[str, Feed], shown: Progress) -> RankRuntime:
        """From now on these tasks are trained, by a new plan. Weights are away, and away afterwards."""
        old = self.runtime
        assert old is not None
        old.close()
        self.checked -= self.variants.take_tasks(tasks)
        if not self._is_known():
            self.gather_parameters(old)
            self.set_tasks(tasks, shown)
            new = self.plan(self.trace_and_profile(feeds, shown), shown)
            self.scatter_parameters(new)
            return new
        if old.shards is not None:
            old.shards.release()
        self.world.forget_groups()
        with old.weights.in_shape():
            self._take_tasks(tasks, shown)
            assert self.known is not None
            new = prepare(self.known, self.options, self.world, shown, self.notifier(shown), self._examples())
        gather_buffers(old, self.world)
        share_buffers(old.bound, self.world)
        for parameter in old.weights.parameters:
            parameter.grad = None
        new.weights.take_over(old.weights)
        if new.shards is not None:
            new.shards.attach()
        assert old.update is not None
        new.make_update(old.update.state())
        self.runtime = new
        if self.world.device.type == "cuda":
            del old
            gc.collect()  # graphs of the old plan hold memory of their device
            torch.cuda.empty_cache()
        return new

    def _take_tasks(self, tasks: Sequence[TaskDefinition], shown: Progress) -> None:
        """What is known of these tasks, as far as it can be had from what is known of others."""
        if tuple(tasks) != self.options.tasks:
            self._drop_given("the tasks are others", shown)
        self.options.tasks = tuple(tasks)
        self.checked -= self.variants.take_tasks(tasks)
        known = self._all_known
        if known is None or not self._is_known():
            self.known = self._all_known = None
        else:
            ended = known.bound.tasks.keys() - {variant.name for variant in self.variants}
            self.known = without(known, ended, self.options.name) if ended else known

    def _is_known(self) -> bool:
        """Whether what was found out has all tasks that are trained now."""
        if self._all_known is None or self._is_switched():
            return False
        names = [variant.name for variant in self.variants]
        return all(map(self.variants.names_of, self.variants.tasks)) and set(names) <= set(self._all_known.bound.tasks)

    def _is_switched(self) -> bool:
        """Whether modules were frozen, thawed or switched since the tasks were found out."""
        return self._all_known is not None and self._all_known.mode != mode_of(self._all_known.bound)

    def take_new_variant(self, task: str, key: int, batch: Batch, shown: Progress) -> None:
        """Add a variant that a batch takes for the first time; the next plan has it. Rank 0 must hold all weights."""
        self.variants.add(task, key, batch)
        self._start_anew("a batch takes a new variant of its task", shown)

    def forget_plan(self, *, keep_optimizer: bool = True) -> None:
        """The plan goes; the optimizer's state stays, unless it is to start anew."""
        if not keep_optimizer:
            self._state = None
        if self.runtime is None:
            return
        self.runtime.close()
        if keep_optimizer and self.runtime.update is not None:
            self._state = self.runtime.update.state(to_host=True)
        if self.runtime.shards is not None:
            self.runtime.shards.release()
        for parameter in self.runtime.weights.parameters:
            parameter.grad = None
        self.runtime = None
        gc.collect()  # what the plan held on its device
        self.world.forget_groups()

    def _start_anew(self, reason: str, shown: Progress) -> None:
        self.forget_plan()
        self.known = self._all_known = None
        self._drop_given(reason, shown)

    def _drop_given(self, reason: str, shown: Progress) -> None:
        for what in ("plan", "profile"):
            if getattr(self.options, what) is not None:
                setattr(self.options, what, None)
                self.notifier(shown)(f"the given {what} is used no longer: {reason}")
