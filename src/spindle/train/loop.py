"""The training loop: read batches a step ahead, exchange their headers, run the plan, report losses.

In each step ranks exchange one small header, a step ahead: the samples, shapes and variant of each task's next batches,
and their parts of the losses of an earlier step. A step has one micro-step for each batch that gradients are
accumulated from.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch

from spindle.launch.activity import LOADING, ON_STEP, recorder
from spindle.run import Budget, Gathering, HostCopy, copied_to, limit_gpu_memory, on_device
from spindle.train.agreement import compare, config_items, module_items
from spindle.train.config import TrainConfig
from spindle.train.feed import Batch, Feed, LoaderPosition, MakeFeed
from spindle.train.garbage import collect_all, frozen_objects
from spindle.train.header import (
    BatchHeader,
    Table,
    check_changes,
    header_row,
    idle_in,
    is_stopped,
    read_batch_headers,
    reports_in,
    saves_in,
    written_in,
)
from spindle.train.loss_history import LossHistory, loss_and_metric_sums
from spindle.train.plain_json import to_plain
from spindle.train.progress import Progress
from spindle.train.result import FitResult
from spindle.train.runtime import resident_tensors
from spindle.train.samples import SampleFeed
from spindle.train.sampling import tasks_in_step
from spindle.train.saving import ENDING, REQUESTED
from spindle.train.session import NEW_VARIANT, TrainSession
from spindle.train.signals import NoticedSignals, noticed_signals
from spindle.train.step_forecast import StepForecast
from spindle.train.step_report import ReportColumns
from spindle.train.steps import StepRun, microbatches_of
from spindle.train.timing import StepTimes

ReadReport = Callable[[], list[float]]  # this rank's row of a step's report; waits for the step
StepHeaders = list[dict[str, BatchHeader]]  # by micro-step and task
StepBatches = list[dict[str, Batch]]  # by micro-step and task: those that this rank reads
_SEARCH_SHARE = 0.5  # of a step's time, for which the next is planned
# How many steps lie between a step and the header that carries its losses. Reading them waits for a GPU, which should
# not run dry meanwhile.
_LOSSES_BEHIND = {"cpu": 1, "cuda": 2}


class Loop:
    """Trains for some steps; `feeds` are new with each loop."""

    def __init__(
        self,
        session: TrainSession,
        feeds: dict[str, Feed],
        make_feed: MakeFeed,
        progress: Progress,
    ) -> None:
        self._session, self._feeds, self._progress = session, feeds, progress
        self._losses: LossHistory
        self._columns: ReportColumns
        self._make_feed, self._world = make_feed, session.world
        self._requested: tuple[TrainConfig, dict[str, Any]] | None = None  # with loaders of tasks that join
        self._is_stopping = False  # whether this rank wants the fit to end
        self._signals: NoticedSignals | None = None
        self._calls: list[str] = []  # methods of the Trainer that requested changes
        self._num_applied = 0  # of these
        self._runtime = session.plan(session.trace_and_profile(feeds, progress), progress)
        self._num_asked = dict.fromkeys(self._names, 0)  # batches of each task that any rank has asked for
        self._num_read_ahead: dict[str, int] = {}  # of these, for the step that is about to run
        self._next_step = 0
        self._times = StepTimes(self._world)
        limit = self._config.planning.memory_limit_bytes
        self._budget = Budget(limit) if limit is not None and self._world.device.type == "cpu" else None

    @property
    def _config(self) -> TrainConfig:
        return self._session.config

    @property
    def _names(self) -> list[str]:
        return self._config.task_names

    @property
    def next_config(self) -> TrainConfig:
        """The configuration of the next step."""
        return self._config if self._requested is None else self._requested[0]

    @property
    def next_step(self) -> int:
        """The step that is about to run when losses are reported."""
        return self._next_step

    def position(self, names: Collection[str] | None = None) -> tuple[int, dict[str, int], dict[str, LoaderPosition]]:
        """The step that is about to run when losses are reported, the batches of each task that this fit has trained
        on, and where the loaders of all tasks, or of some, are read for that step."""
        trained = {name: count - self._num_read_ahead.get(name, 0) for name, count in self._num_asked.items()}
        positions = {name: self._feeds[name].position(trained[name]) for name in (trained if names is None else names)}
        return self._next_step, trained, positions

    def change(self, call: str, config: TrainConfig, loaders: Mapping[str, Any] | None = None) -> None:
        """Train the next step by this configuration, with a new plan. `call` is the user's call that requests it;
        `loaders` are those of tasks that join."""
        self._calls.append(call)
        joining = {} if self._requested is None else self._requested[1]
        self._requested = config, {**joining, **(loaders or {})}

    def stop(self) -> None:
        """End the fit on all ranks, after the step that runs when they have heard of it: the next one."""
        self._is_stopping = True

    def run(self, first: int, steps: int) -> FitResult:
        """Train for so many steps from step `first` on, or until a rank wants to stop."""
        world = self._world
        compare(world, {"fit(steps=...)": f"{steps} steps from step {first} on"})
        self._losses = LossHistory(first, self._progress, self._session.callbacks)
        self._session.scatter_parameters(self._runtime)
        self._start_plan()
        if world.device.type == "cuda":
            limit_gpu_memory(self._config.planning.memory_limit_bytes, world.device)
            self._free_gpu_memory()
            torch.cuda.reset_peak_memory_stats(world.device)
        self._times.start(steps)
        with frozen_objects(), noticed_signals() if self._session.saver is not None else nullcontext() as self._signals:
            self._run_steps(first, steps)
        return self._finish()

    def _run_steps(self, first: int, steps: int) -> None:
        world, progress = self._world, self._progress
        planned_steps = steps
        batches = self._read(first)
        gathering = self._start_header(batches, None)
        unsent: deque[ReadReport] = deque()  # of the last steps, which a GPU may still be at
        carries_report = False  # the header in flight
        num_before = first - self._session.first_step  # steps of this fit that an earlier run did
        progress.training(num_before + steps)
        recorder.begin(first)
        for number in range(steps):
            begin_s = time.perf_counter()
            step = self._next_step = first + number
            table = self._table(gathering, step)
            if carries_report:
                self._report(table)
            if is_stopped(table):
                self._leave_out_read_ahead()
                gathering, steps = self._start_header(self._no_batches, None), number
                break
            headers = read_batch_headers(table, self._names, self._config.gradient_accumulation_steps, step)
            self._times.read_busy_share(step - _LOSSES_BEHIND[world.device.type])
            is_saving = self._is_saving(table, step)
            self._add_new_variants(headers, batches, unsent)
            # Also where a checkpoint is skipped: what `on_step` changes must not depend on how fast a disk is.
            if self._requested is not None or is_saving or self._is_checkpoint_due(step):
                self._report_unsent(unsent)
            if self._requested is not None:
                self._apply_change(headers, batches)
            if is_saving:
                self._save(step, saves_in(table), {task for row in headers for task in row})
            current = batches
            if number + 1 < steps:
                with recorder.doing(LOADING):
                    batches = self._read(step + 1)
                carries_report = len(unsent) >= _LOSSES_BEHIND[world.device.type]
                gathering = self._start_header(batches, unsent.popleft()() if carries_report else None)
                if self._runtime.steps.plans_ahead:
                    self._plan_ahead(self._table(gathering, step), batches, step + 1)
            else:  # of no batches: a rank that has just requested a change waits for the others' headers
                gathering = self._start_header(self._no_batches, None)
                self._num_read_ahead = {}
            unsent.append(self._step(step, headers, current))
            trained = [header for row in headers for header in row.values()]
            num_samples = sum(header.num_rows for header in trained)
            step_s = self._times.end_step(time.perf_counter() - begin_s, num_samples)
            progress.step(
                num_before + number + 1,
                step_s,
                samples=num_samples,
                tokens=sum(header.tokens for header in trained),
                idle=idle_in(table),
            )
            recorder.step_done(step + 1)
        recorder.pause()
        self._next_step = first + steps
        self._table(gathering, first + steps)
        self._report_unsent(unsent)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        self._save_last(was_stopped=steps < planned_steps)

    def _finish(self) -> FitResult:
        """Gather what the ranks hold, and take changes that were requested with the last losses."""
        world, session = self._world, self._session
        notify = session.notifier(self._progress)
        for name, reason in self._runtime.steps.main.without_graph.items():
            notify(f"{name} runs without a CUDA graph: {reason}")
        peak_bytes = self._peak_bytes
        compare(world, self._call_items())
        session.gather_parameters(self._runtime)
        session.num_batches.update(self._num_asked)
        if self._requested is not None:
            session.set_config(self._requested[0], self._progress)
        planned, main = self._runtime.planned, self._runtime.steps.main
        result = self._times.result(planned.program, planned.profile, self._losses, session.notices, peak_bytes)
        return replace(result, num_captured_slots=main.num_captured, slots_without_cuda_graph=dict(main.without_graph))

    def _saves(self) -> tuple[int, int]:
        """What this rank wants to be saved, and which checkpoint it has written."""
        saver = self._session.saver
        if saver is None:
            return 0, 0
        is_ending = self._signals is not None and self._signals.first is not None
        return ENDING if is_ending else REQUESTED if saver.is_requested else 0, saver.written

    def _is_checkpoint_due(self, step: int) -> bool:
        saver = self._session.saver
        return saver is not None and (saver.is_due(step) or saver.is_due_in_memory(step))

    def _is_saving(self, table: Table, step: int) -> bool:
        """Whether a checkpoint is saved before this step, on all ranks."""
        saver, notify = self._session.saver, self._session.notifier(self._progress)
        if saver is None:
            return False
        is_free, wanted = saver.advance(written_in(table), notify), saves_in(table)
        is_due = bool(wanted) or self._is_checkpoint_due(step)
        if saver.is_saved(step, on_disk=bool(wanted)) or not is_due:
            return wanted == ENDING
        if not is_free and (wanted == ENDING or saver.is_in_memory):
            recorder.pause()  # a disk may take its time
            saver.wait(notify)
            is_free = True
        if not is_free:
            saver.is_requested = False
            self._progress.note(f"no checkpoint of step {step}: that of step {saver.last_step} is still being written")
        return is_free

    def _save(
        self, step: int, wanted: int, step_tasks: Collection[str] | None = None, *, was_stopped: bool = False
    ) -> None:
        """Save the state before this step, which has these tasks: in memory, unless it falls due on disk or is
        `wanted`. ENDING ends the job, once it is written."""
        saver, session, notify = self._session.saver, self._session, self._session.notifier(self._progress)
        assert saver is not None
        is_ending = wanted == ENDING
        if is_ending or was_stopped:
            recorder.pause()  # a disk may take its time
            saver.wait(notify)
        on_disk = bool(wanted) or saver.is_due(step)
        if not saver.is_saved(step, on_disk=on_disk):
            saver.save(
                step,
                lambda: saver.state(
                    step,
                    session.num_fits - 1,
                    session.first_step,
                    self.next_config,
                    step_tasks,
                    was_stopped=was_stopped,
                ),
                self._data_positions(),
                notify,
                in_memory=not on_disk,
            )
        if is_ending:
            self._end_job(step, is_saved=saver.wait(notify))

    def _end_job(self, step: int, *, is_saved: bool) -> NoReturn:
        name = "a signal" if self._signals is None or self._signals.first is None else self._signals.first.name
        self._progress.note(f"stopped by {name} after {step} steps, which are {'' if is_saved else 'not '}saved")
        raise SystemExit(128 + signal.SIGTERM)

    def _save_last(self, *, was_stopped: bool) -> None:
        """Save the state after the last step of the fit, and wait until it is written. End the job if a rank was
        signalled."""
        saver, notify = self._session.saver, self._session.notifier(self._progress)
        if saver is not None:
            saver.wait(notify)
            self._save(self._next_step, REQUESTED, was_stopped=was_stopped)
            is_saved = saver.wait(notify)
            # A signal that no header of this fit has carried.
            rows = self._world.start_all_gather(torch.tensor([self._saves()[0]], dtype=torch.float64)).wait()
            if any(int(row.item()) == ENDING for row in rows):
                self._end_job(self._next_step, is_saved=is_saved)

    def _data_positions(self) -> dict[str, Any]:
        """The positions of loaders that this rank reads, in JSON."""
        names = [name for name in self._names if self._reads(name)]
        _, num_trained, positions = self.position(names)
        counts = self._session.num_batches + Counter(num_trained)
        ended: dict[str, Any] = {
            name: {"num_batches": count, "position": None, "facts": {}} for name, count in counts.items()
        }
        return ended | {
            name: {
                "num_batches": counts[name],
                "position": to_plain(positions[name].values(), f"the position of the loader of task {name!r}"),
                "facts": self._feeds[name].facts,
            }
            for name in names
        }

    def _free_gpu_memory(self) -> None:
        """Free what tracing left, or the graphs of a plan that is no longer referred to."""
        if self._world.device.type == "cuda":
            collect_all()
            torch.cuda.empty_cache()

    def _start_plan(self) -> None:
        """Count weights, and what optimizer and gradients keep, against the memory limit; and find what step records
        need to know of the plan."""
        update = self._session.update
        assert update is not None
        if self._budget is not None:
            self._budget.adopt(resident_tensors(self._runtime, update))
        self._columns = ReportColumns(
            tasks=tuple(self._names), metrics=self._metric_names(), lr_groups=update.lr_groups
        )
        self._forecast = StepForecast(self._runtime, self._config, self._world.device)

    def _metric_names(self) -> tuple[str, ...]:
        """`task/name` of the metrics of all tasks, whichever variants have them."""
        task_of = {variant.name: variant.task for variant in self._session.variants}
        metrics = self._runtime.steps.main.metrics
        return tuple(dict.fromkeys(f"{task_of[variant]}/{name}" for variant, name in metrics))

    @property
    def _peak_bytes(self) -> int:
        """The most that this rank has held in this fit; 0 where that is not counted."""
        if self._budget is not None:
            return self._budget.peak_bytes
        if self._world.device.type != "cuda":
            return 0
        # The statistic alone: `max_memory_allocated` flattens all of them, which takes longer.
        peak: int = torch.cuda.memory_stats_as_nested_dict(self._world.device)["allocated_bytes"]["all"]["peak"]
        return peak

    def _report(self, table: Table) -> None:
        """Report the step whose numbers these headers carry."""
        with recorder.doing(ON_STEP):
            self._losses.report(self._columns.read(reports_in(table, len(self._columns))), idle_in(table))

    def _report_unsent(self, unsent: deque[ReadReport]) -> None:
        """Exchange and report the numbers of steps that have no header to travel with."""
        while unsent:
            gathering = self._start_header(self._no_batches, unsent.popleft()())
            self._report(self._table(gathering, self._losses.next_step))

    @property
    def _no_batches(self) -> StepBatches:
        return [{}] * self._config.gradient_accumulation_steps

    def _start_header(self, batches: StepBatches, report: Sequence[float] | None) -> Gathering:
        num_changes, busy_share = len(self._calls), self._times.busy_share
        if report is None:
            report = [0.0] * len(self._columns)
        saves, written = self._saves()
        row = header_row(self._names, batches, report, num_changes, self._is_stopping, busy_share, saves, written)
        return self._world.start_all_gather(row)

    def _table(self, gathering: Gathering, step: int) -> Table:
        """The headers of all ranks."""
        table = [row.tolist() for row in gathering.wait()]
        check_changes(table, self._calls, step)
        return table

    def _call_items(self) -> dict[str, Any]:
        return {"what was called during fit()": ", ".join(self._calls[self._num_applied :]) or "nothing"}

    def _apply_change(self, headers: StepHeaders, batches: StepBatches) -> None:
        """Tasks end and join before a step whose batches are read: a task that joins has none yet."""
        assert self._requested is not None
        recorder.pause()
        (config, loaders), self._requested = self._requested, None
        begin_s = time.perf_counter()
        items = self._call_items() | config_items(config)
        with self._runtime.weights.in_shape():
            items |= module_items(self._session.handles)  # which may have been frozen or switched
        compare(self._world, {**items, "the tasks with new loaders": sorted(loaders)})
        self._num_applied = len(self._calls)
        ended = {name for name in self._feeds if name not in config.task_names or name in loaders}
        for name in ended:
            self._feeds.pop(name).close()
            self._num_read_ahead.pop(name, None)
            # What was read for this step is not trained on; a dataset that comes back begins with it.
            self._session.num_batches[name] += self._num_asked.pop(name) - sum(name in row for row in headers)
        for task in config.tasks:
            if task.name not in self._feeds:
                self._feeds[task.name] = self._make_feed(task, loaders[task.name], self._progress)
                self._num_asked[task.name] = 0
        self._runtime = self._session.change_config(config, self._feeds, self._progress)
        self._free_gpu_memory()
        self._times.forget()
        headers[:] = [{name: header for name, header in row.items() if name not in ended} for row in headers]
        batches[:] = [{name: batch for name, batch in row.items() if name not in ended} for row in batches]
        self._share_batches(headers, batches)
        self._start_plan()
        self._times.changes_s.append(time.perf_counter() - begin_s)

    def _read(self, step: int) -> StepBatches:
        """The next batches that this rank needs."""
        config, variants, recording = self._config, self._session.variants, self._runtime.weights.in_shape
        num_tasks = min(config.tasks_per_step, len(self._names))
        sampled = tasks_in_step(config.sampling_weights, self._names, num_tasks, config.seed, step)
        resumed, self._session.next_step_tasks = self._session.next_step_tasks, None
        if resumed is not None:  # the first step, as it was read before the state was saved
            step_tasks, known = resumed
            sampled = [name for name in self._names if name in (step_tasks if name in known else sampled)]
        tasks = [name for name in sampled if self._reads(name)]
        micro_steps = []
        for micro_step in range(config.gradient_accumulation_steps):
            batches = {name: self._fetch(name, self._num_asked[name] + micro_step) for name in tasks}
            micro_steps.append(
                {
                    name: replace(batch, variant=variants.key_of(name, batch, recording))
                    for name, batch in batches.items()
                }
            )
        self._num_read_ahead = dict.fromkeys(sampled, config.gradient_accumulation_steps)
        for name in sampled:
            self._num_asked[name] += config.gradient_accumulation_steps
        return micro_steps

    def _leave_out_read_ahead(self) -> None:
        """The step that was read for does not run: its batches come again in the next fit."""
        for name, count in self._num_read_ahead.items():
            self._num_asked[name] -= count
        self._num_read_ahead = {}

    def _reads(self, task: str) -> bool:
        """Whether this rank needs batches of a task, in whichever variant."""
        return self._runtime.steps.reads(self._session.variants.names_of(task))

    def _fetch(self, task: str, number: int) -> Batch:
        """A task's batch of this number: what this rank needs of it, where it can be read in parts.

        A loss that is still to be checked needs all of it, and so does a task that may take several variants.
        """
        feed, variant = self._feeds[task], self._session.variants.only(task)
        if not isinstance(feed, SampleFeed):
            return feed.at(number)
        if variant is None or variant.name not in self._session.checked or not feed.divides:
            return feed.at(number, None)
        return feed.at(number, self._runtime.steps.needs(variant.name))

    def _add_new_variants(self, headers: StepHeaders, batches: StepBatches, unsent: deque[ReadReport]) -> None:
        """Make a new plan when a batch takes a variant for the first time."""
        session = self._session
        is_new = False
        for number, row in enumerate(headers):
            for task, header in row.items():
                if session.variants.get(task, header.variant) is None:
                    if not is_new:
                        self._report_unsent(unsent)  # with the columns of the plan that they ran under
                        recorder.pause()
                        session.gather_parameters(self._runtime)
                        is_new = True
                    batch = self._broadcast_batch(batches[number].get(task), header.reader)
                    session.take_new_variant(task, header.variant, batch, self._progress)
        if is_new:
            if self._requested is not None:
                config, loaders = self._requested
                self._requested = session.without_given_plan(config, NEW_VARIANT, self._progress), loaders
            self._times.forget(keep_watched=True)
            self._runtime = session.plan(session.trace_and_profile(self._feeds, self._progress), self._progress)
            self._free_gpu_memory()
            session.scatter_parameters(self._runtime)
            self._start_plan()
            self._share_batches(headers, batches)

    def _share_batches(self, headers: StepHeaders, batches: StepBatches) -> None:
        """Ranks that read a task from now on get the batches that are already read; parts are other ones now."""
        for number, row in enumerate(headers):
            for task, header in row.items():
                if isinstance(self._feeds[task], SampleFeed):
                    if self._reads(task):
                        position = self._num_asked[task] - len(headers) + number
                        batches[number][task] = replace(self._fetch(task, position), variant=header.variant)
                else:
                    batch = self._broadcast_batch(batches[number].get(task), header.reader)
                    batches[number].setdefault(task, batch)

    def _broadcast_batch(self, batch: Batch | None, source: int) -> Batch:
        """One rank's batch, on all ranks; through the host, because another rank has another device."""
        if batch is not None and self._world.rank == source:
            batch = replace(batch, nest=on_device(batch.nest, torch.device("cpu")))
        result: Batch = self._world.broadcast_object(batch, source)
        return result

    def _plan_ahead(self, table: Table, batches: StepBatches, step: int) -> None:
        """Have the next step planned while this one runs, unless it needs another plan altogether."""
        num_micro_steps = self._config.gradient_accumulation_steps
        headers = read_batch_headers(table, self._names, num_micro_steps, step)
        variants = self._session.variants
        if self._requested is not None or any(
            variants.get(task, header.variant) is None for row in headers for task, header in row.items()
        ):
            return
        last_s = self._times.last_step_s
        time_limit_s = None if last_s is None else _SEARCH_SHARE * last_s
        self._runtime.steps.plan_ahead(
            microbatches_of(headers, self._session.variants), num_micro_steps, batches, time_limit_s
        )

    def _step(self, step: int, headers: StepHeaders, batches: StepBatches) -> ReadReport:
        """Run a step. Returns this rank's row of its report; losses are means over the task's micro-steps."""
        world, checked, update = self._world, self._session.checked, self._session.update
        assert update is not None
        parts: list[tuple[HostCopy, dict[int, str], dict[int, str]]] = []  # with what the step had at each position
        runs: list[StepRun] = []
        microbatches = microbatches_of(headers, self._session.variants)
        for number, run in enumerate(self._runtime.steps.runs(microbatches, len(headers), batches)):
            variants = {microbatch.variant for microbatch in run.microbatches.values()}
            read = {
                name: batches[microbatch.micro_step][microbatch.task]
                for name, microbatch in run.microbatches.items()
                if microbatch.task in batches[microbatch.micro_step]
            }
            is_timed = number == 0 and run.is_as_planned and self._times.is_timed(step)
            if is_timed:
                world.synchronize()  # a timeline needs a common start, as the simulator has
            with self._budget or nullcontext():
                losses, watch = run.executor.step(
                    step,
                    {name: copied_to(world.device, batch.nest) for name, batch in read.items()},
                    {name: microbatch.header.signature for name, microbatch in run.microbatches.items()},
                    update,
                    micro_step=run.micro_step,
                    held={name: batch.held for name, batch in read.items() if batch.held is not None},
                    cuts=run.cuts,
                    loss_scale=None if update.loss_scale is None else update.loss_scale.scale,
                    check_losses=run.checks_losses and not checked.issuperset(variants),
                    timed=is_timed,
                )
            if run.checks_losses:
                checked.update(variants)
            if run.is_as_planned:
                self._times.compare_compute(watch, run.executor.program, run.profile)
            if is_timed:
                self._times.keep(step, watch, run.executor.program, run.profile)
            tasks = run.profile.graph.tasks
            positions = {tasks.index(name): microbatch.task for name, microbatch in run.microbatches.items()}
            metrics = {
                len(tasks) + 2 * number: f"{run.microbatches[name].task}/{metric}"
                for number, (name, metric) in enumerate(run.executor.metrics)
                if name in run.microbatches
            }
            parts.append((losses, positions, metrics))
            runs.append(run)
        counts = {name: sum(name in row for row in headers) for name in self._names}
        self._losses.expect(self._forecast.launched(step, headers, runs))
        position, columns = self._times.num_steps, self._columns
        read_update = update.read_report

        def read_report() -> list[float]:
            peak_bytes = self._peak_bytes if self._config.callbacks else 0
            sums = loss_and_metric_sums(parts, counts, columns.metrics)
            return [*sums, *read_update(), self._times.end_s(position), peak_bytes]

        return read_report
