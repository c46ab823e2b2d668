"""The training loop: read batches a step ahead, exchange their headers, run the plan, report losses.

    BatchSource ── batches ─▶ headers, exchanged a step ahead ─▶ Steps.runs ─▶ Executor.step ─▶ StepReports ─▶ callbacks

In each step ranks exchange one small header, a step ahead: the samples, shapes and variant of each task's next batches,
and their parts of the losses of an earlier step. A step has one micro-step for each batch that gradients are
accumulated from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from spindle.data import WHOLE
from spindle.display import seconds
from spindle.launch import LOADING, recorder
from spindle.run import HostCopy, PendingGather, to_device
from spindle.train.agreement import compare, config_items, module_items
from spindle.train.batch_source import BatchSource, MakeFeed, StepBatches, StepHeaders
from spindle.train.config import TrainConfig
from spindle.train.feed import Batch, Feed, LoaderPosition
from spindle.train.garbage import frozen_objects
from spindle.train.header import Table, check_changes, header_row, idle_in, is_stopped, read_batch_headers, saves_in
from spindle.train.memory import FitMemory
from spindle.train.reporting import LOSSES_BEHIND, StepReports
from spindle.train.result import FitResult
from spindle.train.run_folder import profiled_step
from spindle.train.save_points import SavePoints
from spindle.train.session import NEW_VARIANT, TrainSession
from spindle.train.steps import StepRun, microbatches_of, wanted_of
from spindle.train.timing import StepTimes

# Steps of a fit before which tasks are recorded again, because what they read from outside may have changed.
_RECORDED_AGAIN = frozenset([0, *(4 * 8**power for power in range(8))])
_SEARCH_SHARE = 0.5  # the share of a step's time that planning the next step may take


class Loop:
    """Trains from step `first` on. Each loop has new `feeds`."""

    def __init__(self, session: TrainSession, feeds: dict[str, Feed], make_feed: MakeFeed, first: int) -> None:
        self._session, self._world = session, session.world
        # Makes feeds for loaders of tasks that are added.
        self._requested: tuple[TrainConfig, dict[str, Any]] | None = None
        self._calls: list[str] = []  # names of the Trainer's methods that requested changes, for messages
        self._num_applied = 0  # how many of these have been applied
        self._is_stopping = False  # whether this rank wants to end the fit
        session.plan(feeds)
        self.next_step = self._first = first  # while losses are reported: the step that is about to run
        self._times = StepTimes(self._world)
        self._memory = FitMemory(session)
        self._source = BatchSource(session, feeds, make_feed)
        self._save_points = SavePoints(session, self._source)
        self._reports = StepReports(session, first, self._times, self._memory, self._end_trial)

    @property
    def _config(self) -> TrainConfig:
        return self._session.config

    @property
    def next_config(self) -> TrainConfig:
        """The configuration of the next step."""
        return self._config if self._requested is None else self._requested[0]

    def data_positions(self) -> tuple[dict[str, int], dict[str, LoaderPosition]]:
        """Before the step that is about to run: how many batches of each task this fit has trained on, and where
        loaders are read."""
        return self._source.num_trained, self._source.positions()

    def change(self, call: str, config: TrainConfig, loaders: Mapping[str, Any] | None = None) -> None:
        """Train from the next step on with this configuration and a new plan. `call` is the user's call, for messages;
        `loaders` are those of added tasks."""
        self._calls.append(call)
        joining = {} if self._requested is None else self._requested[1]
        self._requested = config, {**joining, **(loaders or {})}

    def _end_trial(self, name: str) -> bool:
        """End one trial of a sweep on all ranks before the next step. Returns whether other trials continue."""
        config = self.next_config
        remaining = tuple(task for task in config.tasks if task.name != name)
        if not config.is_sweep or not remaining:
            return False
        if len(remaining) < len(config.tasks):  # otherwise it has ended already
            self.change(f"(trial {name!r} ended)", replace(config, tasks=remaining))
        return True

    def stop(self) -> None:
        """End the fit on all ranks after the next step; its header tells the other ranks."""
        self._is_stopping = True

    def run(self, steps: int) -> FitResult:
        """Train for `steps` steps, or until a rank wants to stop."""
        compare(self._world, {"fit(steps=...)": f"{steps} steps from step {self._first} on"})
        self._session.scatter_parameters()
        self._memory.start()
        self._start_plan()
        self._times.start(steps)
        with frozen_objects(), self._save_points.noticing_signals():
            self._run_steps(steps)
        return self._finish()

    def _run_steps(self, steps: int) -> None:
        world, progress, reports = self._world, self._session.progress, self._reports
        planned_steps = steps
        # One header is always in flight: that of the next step. It is started before the current step is launched, so
        # that no rank waits for it. It also carries the losses of an earlier step.
        batches = self._source.read(self._first)
        gathering = self._start_header(batches)
        carries_report = False  # the gathering of the header in flight
        num_before = self._first - self._session.first_step  # steps of this fit that an earlier run has done
        progress.training(num_before + steps)
        recorder.begin(self._first)
        for number in range(steps):
            begin_s = time.perf_counter()
            step = self.next_step = self._first + number
            table = self._wait_for_headers(gathering, step)
            if carries_report:
                # This calls callbacks, which may request changes, a checkpoint or the end of the fit.
                reports.report(table)
            # All ranks decide from the same table, so all of them stop, save and plan anew before the same step.
            if is_stopped(table):
                self._source.drop_read_ahead()
                gathering, steps = self._start_header(self._no_batches), number
                break
            headers = self._headers(table, step)
            self._times.read_busy_share(step - LOSSES_BEHIND[world.device.type])
            is_saving = self._save_points.is_saving(table, step)
            self._add_new_variants(headers, batches)
            if self._requested is not None or is_saving or self._save_points.falls_due(step):
                # A new plan has other columns, and a resumed run does not report these steps again. This also happens
                # if a checkpoint is skipped, because what `on_step` changes must not depend on the speed of a disk.
                self._report_unsent()
            if self._requested is not None:
                self._apply_change(headers, batches)
            if is_saving:
                step_tasks = {task for row in headers for task in row}
                self._save_points.save(step, saves_in(table), self.next_config, step_tasks)
            recorder.resume()
            current = batches
            if number + 1 < steps:
                with recorder.doing(LOADING):
                    batches = self._source.read(step + 1)
                carries_report = reports.is_due
                gathering = self._start_header(batches, reports.next_row() if carries_report else None)
                if self._session.current_runtime.steps.plans_ahead:
                    # Wait for the header at once, so that the next step is planned while this one runs.
                    self._plan_ahead(self._headers(self._wait_for_headers(gathering, step), step + 1), batches)
                else:
                    self._decode_ahead(batches)
            # A header without batches: a rank that has just requested a change waits for the other ranks' headers.
            else:
                gathering = self._start_header(self._no_batches)
                self._source.end_reading()
            if number in _RECORDED_AGAIN:
                self._session.check_recordings()
            with profiled_step(self._config, world, step):
                runs = self._step(step, headers, current)
            self._source.note_trained()
            reports.launched(step, headers, runs)
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
        self.next_step = self._first + steps
        self._wait_for_headers(gathering, self.next_step)
        self._report_unsent()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        self._save_points.save_last(self.next_step, self.next_config, was_stopped=steps < planned_steps)

    def _finish(self) -> FitResult:
        """Gather parameters, and apply changes that were requested with the last losses."""
        session, runtime, reports = self._session, self._session.current_runtime, self._reports
        planned, main = runtime.planned, runtime.steps.main
        for name, reason in main.without_weight_lane.items():
            session.notify(
                f"{name} computes its weight gradients on the same lane as its input gradients, because another lane "
                f"needs a CUDA graph, and {reason}"
            )
        graphs = main.graph_cache
        if graphs.step_graph_refused is not None:
            session.notify(
                f"each slot has a CUDA graph of its own, not one for the whole step: {graphs.step_graph_refused}"
            )
        peak_bytes = self._memory.peak_bytes
        compare(self._world, self._call_items())
        session.gather_parameters()
        session.num_batches.update(self._source.num_read)
        if self._requested is not None:
            session.set_config(self._requested[0])
        result = self._times.result(
            planned.program, planned.profile, reports.losses, reports.metrics, session.notices, peak_bytes
        )
        for name, reason in graphs.refused.items():
            what = f"{name} runs without a CUDA graph: {reason}"
            if not any(notice.startswith(what) for notice in session.notices):
                session.notify(what + _cost_text(result, main.instructions_of(name)))
        return replace(
            result,
            num_captured_slots=graphs.num_captured,
            slots_without_cuda_graph=dict(graphs.refused),
            notices=tuple(session.notices),
        )

    # Headers

    @property
    def _no_batches(self) -> StepBatches:
        return [{}] * self._config.gradient_accumulation_steps

    def _start_header(self, batches: StepBatches, report: Sequence[float] | None = None) -> PendingGather:
        row = header_row(
            self._config.task_names,
            batches,
            self._reports.no_row if report is None else report,
            len(self._calls),
            self._is_stopping,
            self._times.busy_share,
            *self._save_points.header(),
        )
        return self._world.start_all_gather(row)

    def _wait_for_headers(self, gathering: PendingGather, step: int) -> Table:
        """The headers of all ranks."""
        table = [row.tolist() for row in gathering.wait()]
        check_changes(table, self._calls, step)
        return table

    def _headers(self, table: Table, step: int) -> StepHeaders:
        config = self._config
        return read_batch_headers(table, config.task_names, config.gradient_accumulation_steps, step)

    def _report_unsent(self) -> None:
        """Exchange and report the numbers of steps that are left without a header to carry them."""
        for row in self._reports.remaining_rows():
            gathering = self._start_header(self._no_batches, row)
            self._reports.report(self._wait_for_headers(gathering, self._reports.next_step))

    # Changes between two steps

    def _start_plan(self) -> None:
        """Start running steps under a new plan, once parameters are scattered."""
        assert self._session.update is not None
        self._memory.start_plan(self._session.current_runtime, self._session.update)
        self._reports.start_plan()

    def _call_items(self) -> dict[str, Any]:
        return {"what was called during fit()": ", ".join(self._calls[self._num_applied :]) or "nothing"}

    def _apply_change(self, headers: StepHeaders, batches: StepBatches) -> None:
        """Apply the requested configuration before the step whose batches are read already."""
        assert self._requested is not None
        recorder.pause()
        (config, loaders), self._requested = self._requested, None
        begin_s = time.perf_counter()
        items = self._call_items() | config_items(config)
        with self._session.current_runtime.weights.in_shape():
            # Modules may have been frozen or switched between train and eval mode.
            items |= module_items(self._session.handles)
        compare(self._world, {**items, "the tasks with new loaders": sorted(loaders)})
        self._num_applied = len(self._calls)
        self._source.change_tasks(config, loaders, headers, batches)
        self._session.change_config(config, self._source.feeds)
        self._memory.free()
        self._times.forget()
        self._source.share(headers, batches)
        self._start_plan()
        self._times.changes_s.append(time.perf_counter() - begin_s)

    def _add_new_variants(self, headers: StepHeaders, batches: StepBatches) -> None:
        """Make a new plan if a batch takes a variant for the first time."""
        session, new = self._session, self._unknown_variants(headers)
        if not new:
            return
        self._report_unsent()  # report steps with the columns of the plan under which they ran
        recorder.pause()
        session.gather_parameters()  # tracing and measuring need whole modules
        for micro_step, task in new:
            header = headers[micro_step][task]
            if session.variants.get(task, header.variant) is None:  # unless an earlier micro-step has added it
                batch = self._source.broadcast(batches[micro_step].get(task), header.reader)
                session.take_new_variant(task, header.variant, batch)
        if self._requested is not None:
            config, loaders = self._requested
            self._requested = config.without_given_plan(NEW_VARIANT, session.notify), loaders
        self._times.forget(keep_watched=True)
        session.sample_step, session.extreme_steps = [dict(row) for row in batches], []
        session.plan(self._source.feeds)
        self._memory.free()
        session.scatter_parameters()
        self._start_plan()
        self._source.share(headers, batches)

    def _unknown_variants(self, headers: StepHeaders) -> list[tuple[int, str]]:
        """The micro-steps and tasks whose batches take a variant that is not planned yet."""
        return [
            (micro_step, task)
            for micro_step, row in enumerate(headers)
            for task, header in row.items()
            if self._session.variants.get(task, header.variant) is None
        ]

    # Steps

    def _plan_ahead(self, headers: StepHeaders, batches: StepBatches) -> None:
        """Have the next step planned while this one runs, unless the tasks need a new plan."""
        if self._requested is not None or self._unknown_variants(headers):
            return
        last_s = self._times.last_step_s
        self._session.current_runtime.steps.plan_ahead(
            microbatches_of(headers, self._session.variants),
            len(headers),
            batches,
            None if last_s is None else _SEARCH_SHARE * last_s,
            upcoming=self._source.upcoming(),
        )
        self._decode_ahead(batches)

    def _decode_ahead(self, batches: StepBatches) -> None:
        """Let worker processes decode what this rank needs of the next step, as far as that is known."""
        steps, variants = self._session.current_runtime.steps, self._session.variants
        for micro_step, row in enumerate(batches):
            for task, batch in row.items():
                variant = variants.get(task, batch.variant) if batch.load is not None else None
                if variant is None or (not steps.plans_ahead and variant.name not in self._session.checked):
                    continue
                wanted = steps.wanted(variant.name, micro_step, batch)
                if wanted is not None and batch.load is not None:
                    batch.load.start(wanted)

    def _reads_memory(self, step: int) -> bool:
        """Whether memory is read in the step that is about to run, for the run folder. On a CPU, compiled layers cannot
        be counted."""
        is_countable = self._world.device.type == "cuda" or not any(
            handle.compile is not None for handle in self._session.current_runtime.workload.bound.handles.values()
        )
        return self._config.run_folder is not None and is_countable and self._times.wants_memory(step)

    def _step(self, step: int, headers: StepHeaders, batches: StepBatches) -> list[tuple[StepRun, HostCopy]]:
        """Run a step. Returns its runs, each with its losses."""
        world, checked, update = self._world, self._session.checked, self._session.update
        assert update is not None
        runs = []
        microbatches = microbatches_of(headers, self._session.variants)
        runtime = self._session.current_runtime
        steps = runtime.steps.runs(microbatches, len(headers), batches)
        for number, run in enumerate(steps):
            variants = {microbatch.variant for microbatch in run.microbatches.values()}
            read = {
                name: batches[microbatch.micro_step][microbatch.task]
                for name, microbatch in run.microbatches.items()
                if microbatch.task in batches[microbatch.micro_step]
            }
            checks_losses = run.checks_losses and not checked.issuperset(variants)
            with recorder.doing(LOADING):
                read, held_items = _with_values(run, read, whole=checks_losses)
            is_timed = number == 0 and run.is_as_planned and self._times.is_timed(step)
            if is_timed:
                world.synchronize()  # timelines need a common start, as in the simulator
            is_read = number == 0 and run.is_as_planned and self._reads_memory(step)
            with self._memory.read(runtime, update) if is_read else self._memory.counted() as read_bytes:
                # once per batch: all trials of a sweep share one
                on_device = {id(batch.nest): to_device(world.device, batch.nest) for batch in read.values()}
                losses, timer = run.executor.step(
                    step,
                    {name: on_device[id(batch.nest)] for name, batch in read.items()},
                    {name: microbatch.header.signature for name, microbatch in run.microbatches.items()},
                    update,
                    micro_step=run.micro_step,
                    held={name: batch.held for name, batch in read.items() if batch.held is not None},
                    cuts=run.cuts,
                    lengths=run.lengths,
                    held_items=held_items,
                    loss_scale=None if update.loss_scale is None else update.loss_scale.scale,
                    check_losses=checks_losses,
                    timed=is_timed,
                    read_bytes=read_bytes,
                )
            if run.checks_losses:
                checked.update(variants)
            if is_read:
                self._times.keep_memory(timer, run.executor.program)
            elif run.is_as_planned:
                self._times.compare_compute(timer, run.executor.program, run.profile)
            if is_timed:
                self._times.keep(step, timer, run.executor.program, run.profile)
            runs.append((run, losses))
        return runs


def _with_values(
    run: StepRun, batches: Mapping[str, Batch], *, whole: bool
) -> tuple[dict[str, Batch], dict[str, tuple[int, ...]]]:
    """The batches of a run with values.

    Of balanced data, only what this rank's slots read is decoded, unless batches are wanted `whole`. Also returns which
    items are on this rank, for batches that are decoded in part.
    """
    executor = run.executor
    wanted = {
        name: WHOLE if whole else wanted_of(executor.uses, executor.items_used, name, batch)
        for name, batch in batches.items()
        if batch.load is not None
    }
    for name, what in wanted.items():  # start all of them before waiting for any
        load = batches[name].load
        assert load is not None
        load.start(what)
    loaded = {name: batch.loaded(wanted.get(name, WHOLE)) for name, batch in batches.items()}
    return loaded, {name: what.items for name, what in wanted.items() if what.items is not None}


def _cost_text(result: FitResult, positions: frozenset[int]) -> str:
    """How long instructions took on this rank in the measured step, and their prediction. Empty if that is unknown."""
    if result.measured is None or not positions:
        return ""
    measured_s, predicted_s = (
        timeline.busy_s(result.rank, positions) for timeline in (result.measured, result.predicted)
    )
    step_s = result.measured.makespan_s
    return f"; it takes {seconds(measured_s)} of a step of {seconds(step_s)}, predicted {seconds(predicted_s)}"
