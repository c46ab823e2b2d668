"""The training loop: read batches a step ahead, exchange their headers, run the plan, report losses.

In each step ranks exchange one small header, a step ahead: the samples, shapes and variant of each task's next batches,
and their parts of the losses of an earlier step. A step has one micro-step for each batch that gradients are
accumulated from.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.profile import Profile
from spindle.program import Program
from spindle.run import Losses, MicroStep, Watch, World
from spindle.run.budget import Budget, limit_gpu_memory
from spindle.run.measured_timeline import timeline_of
from spindle.run.pytrees import on_device
from spindle.run.shape_inference import Cuts
from spindle.run.world import Gathering, copied_to
from spindle.simulate import simulate
from spindle.train.agreement import compare, module_items, option_items, shape_items
from spindle.train.feed import Batch, Feed
from spindle.train.header import (
    BatchHeader,
    MicroSteps,
    Table,
    check_changes,
    header,
    idle_in,
    losses_in,
    read_batch_headers,
)
from spindle.train.microbatches import Key, task_of, variant_of, without_values
from spindle.train.preparation import RankRuntime
from spindle.train.progress import Progress
from spindle.train.result import FitResult
from spindle.train.samples import SampleFeed
from spindle.train.sampling import tasks_in_step
from spindle.train.session import TrainSession
from spindle.train.task import TaskDefinition

OnStep = Callable[[int, dict[str, float]], None]
ReadLosses = Callable[[], list[float]]  # waits for the step that they are of
_SAMPLED_STEPS = 9  # whose timelines are kept
_MOST_SHAPES = 10_000  # of batches, remembered
_SEARCHING = 0.5  # of a step: so long the next is planned
_WATCHED = frozenset(3 * 10**power for power in range(9))  # steps that are timed besides, to tell of idle time early
# How many steps lie between a step and the header that carries its losses. Reading them waits for a GPU, which must not
# stand still for it.
_LOSSES_BEHIND = {"cpu": 1, "cuda": 2}


class Loop:
    """Trains for some steps; `feeds` are new with each loop."""

    def __init__(
        self,
        session: TrainSession,
        feeds: dict[str, Feed],
        make_feed: Callable[[TaskDefinition, Any, Progress], Feed],
        shown: Progress,
        on_step: OnStep | None,
    ) -> None:
        self._session, self._feeds, self._shown, self._on_step = session, feeds, shown, on_step
        self._make_feed = make_feed
        self._options, self._world = session.options, session.world
        self._change: tuple[list[TaskDefinition], dict[str, Any]] | None = None
        self._calls: list[str] = []  # which asked for changes
        self._num_applied = 0  # of these
        self._runtime = session.plan(session.trace_and_profile(feeds, shown), shown)
        self._history: list[dict[str, float]] = []
        self._tasks_of: deque[frozenset[str]] = deque()  # of the steps whose losses are not reported yet
        self._asked = dict.fromkeys(self._names, 0)  # batches of each task, on whichever ranks
        self._kept: list[Watch] = []
        self._pipelined: list[tuple[Program, Profile]] = []  # of steps whose timelines are kept
        self._shapes: dict[tuple[str, int, int], Any] = {}
        self.changes_s: list[float] = []  # how long changes of tasks took
        self._watched: tuple[int, Watch] | None = None  # a timed step that a GPU may still be at
        self._busy = math.nan
        limit = self._options.memory_bytes
        self._budget = Budget(limit) if limit is not None and self._world.device.type == "cpu" else None

    @property
    def _names(self) -> list[str]:
        return self._options.names

    @property
    def coming_tasks(self) -> list[TaskDefinition]:
        """The tasks of the next step."""
        return list(self._options.tasks) if self._change is None else self._change[0]

    def change(self, call: str, tasks: Sequence[TaskDefinition], loaders: Mapping[str, Any] | None = None) -> None:
        """The next step has these tasks, those of them that join with loaders of theirs, and a new plan: this call asks
        for it."""
        self._calls.append(call)
        joining = {} if self._change is None else self._change[1]
        self._change = list(tasks), {**joining, **(loaders or {})}

    def run(self, first: int, steps: int) -> FitResult:
        world, shown = self._world, self._shown
        compare(world, {"fit(steps=...)": f"{steps} steps from step {first} on"})
        self._session.scatter_parameters(self._runtime)
        self._count_what_is_there()
        if world.device.type == "cuda":
            limit_gpu_memory(self._options.memory_bytes, world.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        sampled = _sampled(steps)
        step_s: list[float] = []
        micro_steps = self._read(first)
        gathering = self._start_header(micro_steps, None)
        unsent: deque[ReadLosses] = deque()  # of the last steps, which a GPU may still be at
        carries_losses = False  # the header in flight
        shown.training(steps)
        for number in range(steps):
            begin = time.perf_counter()
            table = self._table(gathering, first + number)
            if carries_losses:
                self._note(table, first)
            batch_headers = read_batch_headers(table, self._names, self._options.accumulate, first + number)
            if self._watched is not None and first + number - self._watched[0] > _LOSSES_BEHIND[world.device.type]:
                self._busy, self._watched = self._watched[1].busy_share(), None
            self._meet_variants(batch_headers, micro_steps)
            if self._change is not None:
                self._tell_last(unsent, first)
                self._apply(batch_headers, micro_steps)
                carries_losses = False
            current = micro_steps
            if number + 1 < steps:
                micro_steps = self._read(first + number + 1)
                carries_losses = len(unsent) >= _LOSSES_BEHIND[world.device.type]
                losses = unsent.popleft()() if carries_losses else None
                gathering = self._start_header(micro_steps, losses)
                if self._runtime.microbatches is not None:
                    self._plan_ahead(self._table(gathering, first + number), micro_steps, first + number + 1, step_s)
            else:  # of no batches: a rank that has just asked for a change waits for the others' headers
                gathering = self._start_header(self._no_turns, None)
            step = self._step if self._runtime.microbatches is None else self._pipelined_step
            unsent.append(step(first + number, batch_headers, current, is_sampled=number in sampled))
            step_s.append(time.perf_counter() - begin)
            batches = [one for micro_step in batch_headers for one in micro_step.values()]
            shown.step(
                number + 1,
                step_s[-1],
                samples=sum(batch.num_rows for batch in batches),
                tokens=sum(batch.tokens for batch in batches),
                idle=idle_in(table),
            )
        self._table(gathering, first + steps)
        self._tell_last(unsent, first)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        notify = self._session.notifier(shown)
        for name, reason in self._runtime.main.without_graph.items():
            notify(f"{name} runs without a CUDA graph: {reason}")
        peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
        if self._budget is not None:
            peak = self._budget.peak_bytes
        compare(world, self._call_items())
        self._session.gather_parameters(self._runtime)
        self._session.given.update(self._asked)
        if self._change is not None:  # requested in the callback of the last losses
            self._session.set_tasks(self._change[0], shown)
        return self._result(step_s, peak)

    def _count_what_is_there(self) -> None:
        """Weights, and what the optimizer and gradients keep, where memory is counted."""
        if self._budget is not None:
            self._budget.adopt(self._runtime.tensors())

    def _tell_last(self, unsent: deque[ReadLosses], first: int) -> None:
        """The losses of steps that have no header to travel with."""
        while unsent:
            losses = unsent.popleft()()
            gathering = self._start_header(self._no_turns, losses)
            self._note(self._table(gathering, first + len(self._history)), first)

    @property
    def _no_turns(self) -> MicroSteps:
        return [{}] * self._options.accumulate

    def _start_header(self, micro_steps: MicroSteps, losses: Sequence[float] | None) -> Gathering:
        return self._world.start_all_gather(header(self._names, micro_steps, losses, len(self._calls), self._busy))

    def _table(self, gathering: Gathering, step: int) -> Table:
        """The headers of all ranks."""
        table = [one.tolist() for one in gathering.wait()]
        check_changes(table, self._calls, step)
        return table

    def _call_items(self) -> dict[str, Any]:
        return {"what was called in the midst of the fit": ", ".join(self._calls[self._num_applied :]) or "nothing"}

    def _apply(self, batch_headers: list[dict[str, BatchHeader]], micro_steps: list[dict[str, Batch]]) -> None:
        """Tasks end and join before a step whose batches are read: one that joins has none yet."""
        assert self._change is not None
        (tasks, loaders), self._change = self._change, None
        begin_s = time.perf_counter()
        items = self._call_items() | option_items(replace(self._options, tasks=tuple(tasks)))
        with self._runtime.weights.in_shape():
            items |= module_items(self._session.handles)  # which may have been frozen or switched
        compare(self._world, {**items, "the tasks with new loaders": sorted(loaders)})
        self._num_applied = len(self._calls)
        names = {task.name for task in tasks}
        ended = {name for name in self._feeds if name not in names or name in loaders}
        for name in ended:
            self._feeds.pop(name).close()
            # What was read for this step is not trained on; a dataset that comes back begins with it.
            self._session.given[name] += self._asked.pop(name) - sum(name in batches for batches in batch_headers)
        for task in tasks:
            if task.name not in self._feeds:
                self._feeds[task.name] = self._make_feed(task, loaders[task.name], self._shown)
                self._asked[task.name] = 0
        self._runtime = self._session.change_tasks(tasks, self._feeds, self._shown)
        self._kept.clear()
        self._pipelined.clear()
        self._watched = None
        batch_headers[:] = [
            {name: one for name, one in batches.items() if name not in ended} for batches in batch_headers
        ]
        micro_steps[:] = [{name: one for name, one in batches.items() if name not in ended} for batches in micro_steps]
        self._share_batches(batch_headers, micro_steps)
        self._count_what_is_there()
        self.changes_s.append(time.perf_counter() - begin_s)

    def _read(self, step: int) -> list[dict[str, Batch]]:
        """The next batches that this rank needs, by micro-step and task."""
        options, variants, recording = self._options, self._session.variants, self._runtime.weights.in_shape
        most = min(options.tasks_per_step, len(self._names))
        on = tasks_in_step(options.sampling, self._names, most, options.seed, step)
        wanted = [name for name in on if self._reads(name)]
        micro_steps = []
        for micro_step in range(options.accumulate):
            batches = {name: self._fetch(name, self._asked[name] + micro_step) for name in wanted}
            micro_steps.append(
                {
                    name: replace(batch, variant=variants.key_of(name, batch, recording))
                    for name, batch in batches.items()
                }
            )
        for name in on:
            self._asked[name] += options.accumulate
        return micro_steps

    def _reads(self, task: str) -> bool:
        """Whether this rank needs batches of a task, in whichever variant. Which replica of a pipeline runs which
        microbatch is known when all are read."""
        microbatches = self._runtime.microbatches
        if microbatches is not None and microbatches.layout.num_replicas > 1:
            return True
        return not self._runtime.main.reads.isdisjoint(self._session.variants.names_of(task))

    def _fetch(self, task: str, number: int) -> Batch:
        """A task's batch of this number: what this rank needs of it, where it can be had in parts.

        A loss that is to be checked needs all of it, and so does a task whose ways are still open.
        """
        feed, variant = self._feeds[task], self._session.variants.only(task)
        if isinstance(feed, SampleFeed):
            is_partial = variant is not None and variant.name in self._session.checked and feed.divides
            return feed.at(number, self._runtime.needs(variant.name) if is_partial and variant is not None else None)
        return feed.at(number)

    def _meet_variants(self, batch_headers: list[dict[str, BatchHeader]], micro_steps: list[dict[str, Batch]]) -> None:
        """Make a new plan when a batch takes a variant for the first time."""
        session = self._session
        is_new = False
        for number, batches in enumerate(batch_headers):
            for task, one in batches.items():
                if session.variants.get(task, one.variant) is None:
                    if not is_new:
                        session.gather_parameters(self._runtime)
                        is_new = True
                    batch = self._broadcast_batch(micro_steps[number].get(task), one.reader)
                    session.take_new_variant(task, one.variant, batch, self._shown)
        if is_new:
            self._kept.clear()
            self._pipelined.clear()
            self._runtime = session.plan(session.trace_and_profile(self._feeds, self._shown), self._shown)
            session.scatter_parameters(self._runtime)
            self._count_what_is_there()
            self._share_batches(batch_headers, micro_steps)

    def _share_batches(self, batch_headers: list[dict[str, BatchHeader]], micro_steps: list[dict[str, Batch]]) -> None:
        """Ranks that read a task from now on get the batches that are already read; parts are other ones now."""
        for number, batches in enumerate(batch_headers):
            for task, one in batches.items():
                if isinstance(self._feeds[task], SampleFeed):
                    if self._reads(task):
                        place = self._asked[task] - len(batch_headers) + number
                        micro_steps[number][task] = replace(self._fetch(task, place), variant=one.variant)
                else:
                    batch = self._broadcast_batch(micro_steps[number].get(task), one.reader)
                    micro_steps[number].setdefault(task, batch)

    def _broadcast_batch(self, batch: Batch | None, source: int) -> Batch:
        """One rank's batch, on all ranks; through the host, because another rank has another device."""
        if batch is not None and self._world.rank == source:
            batch = replace(batch, nest=on_device(batch.nest, torch.device("cpu")))
        result: Batch = self._world.broadcast_object(batch, source)
        return result

    def _step(
        self,
        step: int,
        batch_headers: list[dict[str, BatchHeader]],
        micro_steps: list[dict[str, Batch]],
        *,
        is_sampled: bool,
    ) -> ReadLosses:
        """Run a step. Returns this rank's parts of the tasks' losses, each a mean over the task's micro-steps."""
        runtime, world, variants = self._runtime, self._world, self._session.variants
        parts: list[tuple[Losses, dict[int, int]]] = []  # by micro-step, with the positions of tasks in them
        counts = [sum(name in batches for batches in batch_headers) for name in self._names]
        used: frozenset[str] = frozenset()
        for number, (agreements, batches) in enumerate(zip(batch_headers, micro_steps, strict=True)):
            taken = {}
            for task, one in agreements.items():
                variant = variants.get(task, one.variant)
                assert variant is not None
                taken[task] = variant.name
            used |= frozenset(taken.values())
            executor = runtime.executor_for({taken[task]: one.num_rows for task, one in agreements.items()})
            is_watched = executor is runtime.main and number == 0
            is_timed = is_watched and (is_sampled or step in _WATCHED)
            if is_timed:
                world.synchronize()  # a timeline needs a common start, as the simulator has
            given = {
                taken[task]: copied_to(world.device, batch.nest) for task, batch in batches.items() if task in taken
            }
            with self._budget or nullcontext():
                losses, watch = executor.step(
                    step,
                    given,
                    {taken[task]: one.signature for task, one in agreements.items()},
                    runtime.update,
                    micro_step=MicroStep(number, len(batch_headers), used),
                    held={
                        taken[task]: one.held for task, one in batches.items() if task in taken and one.held is not None
                    },
                    check_losses=not self._session.checked.issuperset(taken.values()),
                    timed=is_timed,
                )
            self._session.checked.update(taken.values())
            if is_timed:
                self._watched = (step, watch)
            if is_timed and is_sampled:
                self._kept.append(watch)
            places = {
                position: runtime.graph.tasks.index(taken[name])
                for position, name in enumerate(self._names)
                if name in taken
            }
            parts.append((losses, places))
        self._tasks_of.append(frozenset(name for name, count in zip(self._names, counts, strict=True) if count))

        def read() -> list[float]:
            sums = [0.0] * len(counts)
            for losses, places in parts:
                values = losses.tolist()
                for position, place in places.items():
                    sums[position] += values[place] / counts[position]
            return sums

        return read

    def _plan_ahead(self, table: Table, micro_steps: list[dict[str, Batch]], step: int, step_s: list[float]) -> None:
        """The next step of a pipeline is planned while this one runs, unless it needs another plan altogether."""
        batch_headers = read_batch_headers(table, self._names, self._options.accumulate, step)
        if self._change is not None or any(
            self._session.variants.get(task, one.variant) is None
            for batches in batch_headers
            for task, one in batches.items()
        ):
            return
        key, counts, places = self._microbatches_of(batch_headers)
        assert self._runtime.microbatches is not None
        self._meet_shapes(places, batch_headers, micro_steps)
        if self._world.rank == 0 and key:
            time_limit_s = _SEARCHING * step_s[-1] if step_s else None
            profile = self._runtime.step_graph(key, counts).profile
            self._runtime.microbatches.ask(key, profile, time_limit_s)

    def _microbatches_of(
        self, batch_headers: list[dict[str, BatchHeader]]
    ) -> tuple[Key, dict[str, int], dict[str, tuple[str, int]]]:
        """What the micro-steps of a step hold, how many of them each variant's task takes part in, and the task and
        micro-step of each microbatch."""
        variants = self._session.variants
        key, counts, places = [], dict[str, int](), dict[str, tuple[str, int]]()
        for number, batches in enumerate(batch_headers):
            parts = []
            for task, one in batches.items():
                variant = variants.get(task, one.variant)
                assert variant is not None
                parts.append((variant.name, one.num_rows, one.signature))
                counts[variant.name] = len(batch_headers)
                places[task_of(variant.name, number)] = (task, number)
            key.append(tuple(parts))
        return tuple(key), counts, places

    def _pipelined_step(
        self,
        step: int,
        batch_headers: list[dict[str, BatchHeader]],
        micro_steps: list[dict[str, Batch]],
        *,
        is_sampled: bool,
    ) -> ReadLosses:
        """Run a step whose micro-steps are microbatches of a pipeline."""
        runtime, world = self._runtime, self._world
        microbatches = runtime.microbatches
        assert microbatches is not None
        key, counts, places = self._microbatches_of(batch_headers)
        shapes = self._meet_shapes(places, batch_headers, micro_steps)
        graph = runtime.step_graph(key, counts)
        program = world.broadcast_object(microbatches.program(key, graph.profile) if world.rank == 0 else None)
        executor = runtime.executor_of(graph, program)
        is_timed = is_sampled or step in _WATCHED
        if is_timed:
            world.synchronize()
        given = {
            name: copied_to(world.device, micro_steps[micro_step][task].nest)
            for name, (task, micro_step) in places.items()
            if task in micro_steps[micro_step]
        }
        with self._budget or nullcontext():
            losses, watch = executor.step(
                step,
                given,
                {name: batch_headers[micro_step][task].signature for name, (task, micro_step) in places.items()},
                runtime.update,
                cuts=microbatches.forms.of(graph.profile.graph, graph.code, shapes),
                timed=is_timed,
            )
        if is_timed:
            self._watched = (step, watch)
        if is_timed and is_sampled:
            self._kept.append(watch)
            self._pipelined.append((program, graph.profile))
        self._tasks_of.append(frozenset(task for task, _ in places.values()))
        tasks = graph.profile.graph.tasks
        numbers = [sum(name in batches for batches in batch_headers) for name in self._names]

        def read() -> list[float]:
            sums = [0.0] * len(self._names)
            for value, name in zip(losses.tolist(), tasks, strict=True):
                position = self._names.index(places[name][0])
                sums[position] += value / numbers[position]
            return sums

        return read

    def _meet_shapes(
        self,
        places: Mapping[str, tuple[str, int]],
        batch_headers: list[dict[str, BatchHeader]],
        micro_steps: list[dict[str, Batch]],
    ) -> dict[str, Any]:
        """The batches of microbatches, without values."""
        microbatches = self._runtime.microbatches
        assert microbatches is not None
        if len(self._shapes) > _MOST_SHAPES:  # on all ranks at once
            self._shapes.clear()
        shapes = {}
        new_cuts: dict[str, Cuts] = {}
        for name, (task, micro_step) in places.items():
            shapes[name] = self._shapes_of(task, batch_headers[micro_step][task], micro_steps[micro_step])
            cuts = microbatches.meet(variant_of(name), batch_headers[micro_step][task].signature, shapes[name])
            if cuts is not None:
                new_cuts[name] = cuts
        if new_cuts:
            compare(self._world, shape_items(new_cuts))
        return shapes

    def _shapes_of(self, task: str, batch_headers: BatchHeader, batches: Mapping[str, Batch]) -> Any:
        """A batch without values, which ranks that do not read it need to know what will cross to them."""
        key = (task, batch_headers.variant, batch_headers.signature)
        if key not in self._shapes:
            mine = without_values(batches[task].nest) if self._world.rank == batch_headers.reader else None
            self._shapes[key] = self._world.broadcast_object(mine, batch_headers.reader)
        return self._shapes[key]

    def _note(self, table: Table, first: int) -> None:
        """Losses have become known."""
        tasks = self._tasks_of.popleft()
        losses = {name: loss for name, loss in losses_in(table, self._names).items() if name in tasks}
        step = first + len(self._history)
        for name, loss in losses.items():
            if not math.isfinite(loss):
                before = next((one[name] for one in reversed(self._history) if name in one), None)
                raise TrainingError(
                    f"task {name!r}: its loss is {loss} in step {step}"
                    + (f" (before that: {before:.6g})" if before is not None else "")
                    + "; look at its learning rate, its data and what it divides by"
                )
        self._history.append(losses)
        self._shown.losses(losses)
        if self._on_step is not None:
            self._on_step(step, losses)

    def _result(self, step_s: list[float], peak_bytes: int) -> FitResult:
        """Everything that can be said about the run; timelines on rank 0 alone."""
        runtime: RankRuntime = self._runtime
        world = self._world
        spans = world.gather_objects([watch.spans() for watch in self._kept])
        measured = None
        steps = self._pipelined or [(runtime.program, runtime.profile)] * max(1, len(self._kept))
        program, profile = steps[-1]
        sampled_s: tuple[tuple[float, float], ...] = ()
        if world.rank == 0 and self._kept:
            timelines = [
                (timeline_of(one, step), one, its_profile)
                for step, (one, its_profile) in zip(zip(*spans, strict=True), steps, strict=True)
            ]
            typical = sorted(timelines, key=lambda one: one[0].makespan_ns)[len(timelines) // 2]
            measured, program, profile = typical
            sampled_s = tuple(
                (simulate(one, its_profile).makespan_s, timeline.makespan_s) for timeline, one, its_profile in timelines
            )
        return FitResult(
            rank=world.rank,
            losses=tuple(self._history),
            step_s=_of_all(step_s, world),
            plan=program.plan,
            program=program,
            graph=profile.graph,
            predicted=simulate(program, profile),
            measured=measured,
            peak_bytes=tuple(world.gather_objects(peak_bytes)) if peak_bytes else (),
            changes_s=tuple(self.changes_s),
            sampled_s=sampled_s,
            notices=tuple(self._session.notices),
            crowded=min(runtime.profile.host_rates, default=1.0) < 1,
        )


def _of_all(step_s: list[float], world: World) -> tuple[float, ...]:
    """How long steps took until the last rank was through. A rank with little to do may be a step or two ahead, so its
    own times are not those of the job."""
    ends = world.broadcast_object(world.gather_objects(list(accumulate(step_s))))
    last = [0.0, *(max(rank) for rank in zip(*ends, strict=True))]
    return tuple(end - begin for begin, end in pairwise(last))


def _sampled(steps: int) -> frozenset[int]:
    """Steps whose timelines are kept: a few, spread over the second half of the run; the first ones warm up."""
    count = min(_SAMPLED_STEPS, max(1, steps // 8))
    return frozenset(steps - 1 - (steps // 2) * number // count for number in range(count))
