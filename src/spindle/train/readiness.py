"""What is a Trainer ready for? Ways through its tasks, a plan for them, and the optimizer's state from plan to plan.

When a batch takes a way that was not met before, or a module was frozen, thawed or switched, the tasks are found out
and planned anew; weights and the optimizer's state go on. When a task ends, or one that is known comes back, nothing
has to be found out: there is a new plan, and parameters go straight from where they were to where they are to be.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from spindle.run import World
from spindle.train.agreement import compare, module_items, option_items, version_items
from spindle.train.buffers import buffers_home, share_buffers
from spindle.train.feed import Batch, Feed
from spindle.train.optimizer import UpdateState
from spindle.train.preparation import Known, Options, Prepared, find_out, mode_of, prepare, without
from spindle.train.progress import Progress
from spindle.train.task import ModuleHandle, TaskDefinition
from spindle.train.ways import Ways


class Readiness:
    """One rank's; all ranks do the same with theirs."""

    def __init__(self, options: Options, world: World, notices: list[str]) -> None:
        self.options, self.world, self.notices = options, world, notices
        self.ways = Ways(options.tasks)
        self.known: Known | None = None
        self._all_known: Known | None = None  # with the tasks that have ended since
        self.prepared: Prepared | None = None
        self.handles: dict[str, ModuleHandle] = {}  # of all modules that were met
        self.is_away = False  # whether weights are
        self.checked: set[str] = set()  # ways whose losses were put together from parts, and compared with the whole
        self.given: Counter[str] = Counter()  # batches of each task, in all fits
        self._state = UpdateState()

    def notifier(self, shown: Progress) -> Callable[[str], None]:
        """Tells something once."""

        def notify(text: str) -> None:
            if text not in self.notices:
                self.notices.append(text)
                shown.note(text)

        return notify

    def find_out(self, feeds: Mapping[str, Feed], shown: Progress) -> Known:
        """What is known of the tasks, found out where it is not, or no longer so."""
        items = version_items() | option_items(self.options)
        if self._all_known is not None:
            items |= module_items(self._all_known.bound.handles)
        compare(self.world, items)
        if self._is_switched():
            self._start_anew("modules were frozen, thawed or switched since", shown)
        if self.known is None:
            for task, feed in feeds.items():
                if not self.ways.names_of(task):
                    batch = feed.example()
                    self.ways.add(task, self.ways.key_of(task, batch), batch)
            self.known = find_out(self.options, self.ways, self.world, shown, self.notifier(shown))
            self._all_known = self.known
            self.handles |= self.known.bound.handles
        return self.known

    def plan(self, known: Known, shown: Progress) -> Prepared:
        """The plan, made where there is none."""
        if self.prepared is None:
            self.prepared = prepare(known, self.options, self.world, shown, self.notifier(shown), self._examples())
        return self.prepared

    def _examples(self) -> dict[str, object]:
        return {way.name: way.example for way in self.ways}

    def send_out(self, prepared: Prepared) -> None:
        """Parameters to the ranks that hold them, and an optimizer over what this rank has."""
        self.is_away = True
        prepared.weights.send_out()
        if prepared.shards is not None:
            prepared.shards.take_in()
        share_buffers(prepared.bound, self.world)
        if prepared.update is None:
            prepared.make_update(lambda parts: self._state)

    def bring_home(self, prepared: Prepared) -> None:
        """Every rank has all parameters and buffers again."""
        if prepared.shards is not None:
            prepared.shards.settle()
        prepared.weights.bring_home()
        buffers_home(prepared, self.world)
        share_buffers(prepared.bound, self.world)
        self.is_away = False

    def set_tasks(self, tasks: Sequence[TaskDefinition], shown: Progress) -> None:
        """From now on these tasks are trained. Weights must be at home."""
        self.forget_plan()
        self._take_tasks(tasks, shown)

    def change_tasks(self, tasks: Sequence[TaskDefinition], feeds: Mapping[str, Feed], shown: Progress) -> Prepared:
        """From now on these tasks are trained, by a new plan. Weights are away, and away afterwards."""
        old = self.prepared
        assert old is not None
        old.close()
        self.checked -= self.ways.take_tasks(tasks)
        if not self._is_known():
            self.bring_home(old)
            self.set_tasks(tasks, shown)
            new = self.plan(self.find_out(feeds, shown), shown)
            self.send_out(new)
            return new
        if old.shards is not None:
            old.shards.let_go()
        self.world.forget_groups()
        with old.weights.in_shape():
            self._take_tasks(tasks, shown)
            assert self.known is not None
            new = prepare(self.known, self.options, self.world, shown, self.notifier(shown), self._examples())
        buffers_home(old, self.world)
        share_buffers(old.bound, self.world)
        for parameter in old.weights.parameters:
            parameter.grad = None
        new.weights.take_over(old.weights)
        if new.shards is not None:
            new.shards.take_in()
        assert old.update is not None
        new.make_update(old.update.handed_over)
        self.prepared = new
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
        self.checked -= self.ways.take_tasks(tasks)
        known = self._all_known
        if known is None or not self._is_known():
            self.known = self._all_known = None
        else:
            ended = known.bound.tasks.keys() - {way.name for way in self.ways}
            self.known = without(known, ended, self.options.name) if ended else known

    def _is_known(self) -> bool:
        """Whether what was found out has all tasks that are trained now."""
        if self._all_known is None or self._is_switched():
            return False
        names = [way.name for way in self.ways]
        return all(map(self.ways.names_of, self.ways.tasks)) and set(names) <= set(self._all_known.bound.tasks)

    def _is_switched(self) -> bool:
        """Whether modules were frozen, thawed or switched since the tasks were found out."""
        return self._all_known is not None and self._all_known.mode != mode_of(self._all_known.bound)

    def take_new_way(self, task: str, key: int, batch: Batch, shown: Progress) -> None:
        """A batch takes a way that was not met before; the next plan has it. Weights must be at home."""
        self.ways.add(task, key, batch)
        self._start_anew("a batch takes another way than those before", shown)

    def forget_plan(self, *, keep_optimizer: bool = True) -> None:
        """The plan goes; the optimizer's state stays, unless it is to start anew."""
        if not keep_optimizer:
            self._state = UpdateState()
        if self.prepared is None:
            return
        self.prepared.close()
        if keep_optimizer and self.prepared.update is not None:
            self._state = self.prepared.update.gathered()
        if self.prepared.shards is not None:
            self.prepared.shards.let_go()
        for parameter in self.prepared.weights.parameters:
            parameter.grad = None
        self.prepared = None
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
