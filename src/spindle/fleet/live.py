"""A live fleet: the scheduler's loop between a store and an engine.

    commands, reports, nodes, plans ──▶ events ──▶ schedule ──▶ store (event and actions) ──▶ engine ──▶ confirmed

An event becomes part of the state when it is in the store, together with its actions; only then are they executed. So
the scheduler may be killed at any instruction: the next one replays the events, asks the engine which attempts there
are, adopts those that should run, stops those that should not, and starts those that are missing. While the store
cannot be written nothing is reallocated; jobs train on.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

from spindle.artifact import from_json, to_json
from spindle.checkpoint import steps_in
from spindle.errors import FleetError, InputError, StoreError
from spindle.fleet.cells import Estimate
from spindle.fleet.engine import ENDED, LOST, PENDING, AttemptReport, AttemptStart, Engine, EngineLostError, Key
from spindle.fleet.event_log import latest_state
from spindle.fleet.events import (
    Action,
    Completed,
    Draining,
    Estimated,
    Event,
    Failed,
    LostAttempt,
    NodeJoined,
    NodeLost,
    Plan,
    Progressed,
    Resize,
    Resumed,
    Start,
    Started,
    Stop,
    Stopped,
    Submitted,
    Suspended,
    Ticked,
)
from spindle.fleet.job import Job
from spindle.fleet.planning import ChangedJob, PlannedCell, PlanningProcess, tasks_of
from spindle.fleet.scheduler import schedule
from spindle.fleet.state import JobState, State
from spindle.fleet.store import AttemptRecord, Command, Store, StoredPlan, Submission
from spindle.launch.agent import COMPLETED, FAILED

GRACE_S = 30.0
POLL_S = 0.1
_NODES_S = 0.5  # between two looks at the nodes
_WRITE_S = 2.0  # between two records of progress
_NAG_S = 30.0  # between two messages about a store that cannot be written
_OFF = 0.1  # a rate that changes by more is told to the scheduler at once
_NODE_GONE_S = 6.0  # until a cluster has noticed that a node is gone
_SNAPSHOT_EVENTS = 500  # between two snapshots of the state
_DRAIN_S = 120.0  # until a drained node is to be left, unless said otherwise


class FleetClock:
    """Seconds since the origin of a store. Never decreases: the system's clock is read once, at the start."""

    def __init__(self, origin_unix_s: float, last_s: float) -> None:
        self._base_s = max(last_s, time.time() - origin_unix_s)
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return round(self._base_s + time.monotonic() - self._start_s, 6)


@dataclass(slots=True)
class _Attempt:
    """An attempt that the engine has. `told_s` is the last step time that the scheduler was told."""

    record: AttemptRecord
    start_action: int | None = None  # not confirmed yet
    stop_action: int | None = None
    is_stopping: bool = False
    told_s: float = 0.0
    told_at_s: float = 0.0
    waits_for: str = ""
    gone_s: float | None = None  # when it was seen to be gone without being told to


@dataclass(slots=True)
class _Pending:
    """A start that waits until the attempt before it is gone."""

    number: int
    action: Start | Resize


@dataclass(slots=True)
class _Unsaved:
    """An event that is not in the store yet."""

    event: Event
    submission: Submission | None = None
    plans: tuple[StoredPlan, ...] = ()
    answers: tuple[tuple[int, str], ...] = ()
    discards: tuple[Key, ...] = ()


@dataclass(slots=True)
class LiveFleet:
    """`step` does all there is to do now. `notify` is called with sentences for people."""

    store: Store
    engine: Engine
    grace_s: float = GRACE_S
    notify: Callable[[str], None] = print
    planner: PlanningProcess = field(default_factory=PlanningProcess)
    state: State = field(init=False)
    clock: FleetClock = field(init=False)
    is_down: bool = False
    _attempts: dict[Key, _Attempt] = field(default_factory=dict)
    _starts: dict[str, _Pending] = field(default_factory=dict)
    _unsaved: deque[_Unsaved] = field(default_factory=deque)
    _executed: deque[tuple[int, float]] = field(default_factory=deque)  # actions to be confirmed
    _identities: dict[str, str] = field(default_factory=dict)
    _drained: set[str] = field(default_factory=set)  # by a user
    _leaving: set[str] = field(default_factory=set)  # as the cluster says
    _planning: dict[tuple[str, Any], int] = field(default_factory=dict)  # actions to confirm
    _tasks: dict[str, str] = field(default_factory=dict)  # digests of what jobs train
    _refused: dict[str, str] = field(default_factory=dict)  # digests of changes that could not be estimated
    _next_nodes_s: float = 0.0
    _next_write_s: float = 0.0
    _next_nag_s: float = 0.0
    _down_command: int | None = None
    _num_new: int = 0  # events since the last snapshot
    _is_going_down: bool = False
    _is_lost: bool = False  # the engine does not answer

    def __post_init__(self) -> None:
        self.state = latest_state(self.store)
        self.clock = FleetClock(self.store.origin_unix_s, self.state.now_s)
        self._drained = set(json.loads(self.store.meta("drained") or "[]"))

    # The loop.

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run until the fleet is down, or `is_over`: then training continues without a scheduler."""
        self.recover()
        while not self.is_down and not is_over():
            self.step()
            time.sleep(POLL_S)

    def step(self) -> None:
        """Handle everything that has happened."""
        try:
            if not self._save_unsaved():
                return
            if self._is_lost and not self._engine_is_back():
                return
            self._handle_commands()
            self._look_at_nodes()
            self._look_at_attempts()
            for answer in self.planner.done():
                if isinstance(answer, PlannedCell):
                    self._planned(answer)
                else:
                    self._changed(answer)
            if self._down_command is not None:
                self.go_down()
                return
            now_s = self.clock.now_s()
            if self.state.next_round_s is not None and now_s >= self.state.next_round_s:
                self._tell(Ticked(time_s=now_s))
            self._start_pending()
            self._write_executed()
            self._write_progress()
            if self._num_new >= _SNAPSHOT_EVENTS:
                self.store.write_snapshot(json.dumps(to_json(self.state)))
                self._num_new = 0
        except StoreError as error:
            self._nag(error)
        except EngineLostError as error:
            self._engine_lost(error)

    def close(self) -> None:
        self.planner.close()

    # Recovery.

    def recover(self) -> None:
        """Bring the engine in line with the store: adopt what should run, stop what should not, start what is
        missing."""
        records = {(record.job, record.attempt): record for record in self.store.attempts()}
        written = self.store.actions()
        found = set(self.engine.adopt())
        wanted = {(job.name, job.attempt): job for job in self.state.jobs if job.allocation is not None}
        starts = {
            (entry.action.job, entry.action.attempt): entry
            for entry in written
            if isinstance(entry.action, Start | Resize)
        }
        for key in sorted(found):
            entry = starts.get(key)
            if entry is None:  # of another store with the same name of fleet: cannot be
                self.engine.discard(key)
                continue
            assert isinstance(entry.action, Start | Resize)
            record = records.get(key) or self._new_record(entry.action)
            self._attempts[key] = attempt = _Attempt(record=record)
            if not entry.is_done:
                attempt.start_action = entry.number
            if key not in wanted:
                self._stop(key, None)
        for key, job in wanted.items():
            if key in found:
                continue
            entry = starts[key]
            assert isinstance(entry.action, Start | Resize)
            if not entry.is_done:
                self._starts[job.name] = _Pending(entry.number, entry.action)
            else:
                record = records.get(key) or self._new_record(entry.action)
                self._attempts[key] = _Attempt(record=record)
                self._failed(key, by_script=False, reason="its processes were gone when the scheduler came back")
        for entry in written:
            if entry.is_done:
                continue
            match entry.action:
                case Plan():
                    self._plan(entry.number, entry.action)
                case Stop(job=name, attempt=number):
                    self._stop_action(entry.number, name, number)
                case Start(job=name, attempt=number) | Resize(job=name, attempt=number):
                    if (name, number) not in {*found, *wanted}:  # ended, or dropped, before that was noted
                        self._confirm(entry.number)
                case _:
                    assert_never(entry.action)
        for key, record in records.items():  # that nobody was there to see end
            if key not in self._attempts and record.end_s is None:
                self.store.write_attempts([replace(record, end_s=self.state.now_s, outcome="stopped")])

    # Events.

    def _tell(
        self,
        event: Event,
        *,
        submission: Submission | None = None,
        plans: tuple[StoredPlan, ...] = (),
        answers: tuple[tuple[int, str], ...] = (),
        discards: tuple[Key, ...] = (),
    ) -> None:
        """Tell the scheduler: store the event with its actions, then execute them."""
        self._unsaved.append(_Unsaved(event, submission, plans, answers, discards))
        self._save_unsaved()

    def _save_unsaved(self) -> bool:
        """Store the events that have happened, and execute the actions; False if the store cannot be written."""
        while self._unsaved:
            entry = self._unsaved[0]
            try:
                state, actions = schedule(self.state, entry.event)
            except FleetError:  # inconsistent: whoever asked for it is told
                self._unsaved.popleft()
                raise
            ended = [self._attempts[key].record for key in entry.discards if key in self._attempts]
            try:
                numbers = self.store.append(
                    entry.event,
                    actions,
                    submission=entry.submission,
                    plans=entry.plans,
                    answers=entry.answers,
                    attempts=ended,
                )
            except StoreError as error:
                self._nag(error)
                return False
            self._unsaved.popleft()
            self.state = state
            self._num_new += 1
            for key in entry.discards:
                self._discard(key)
            for number, action in zip(numbers, actions, strict=True):
                self._execute(number, action)
        return True

    def _nag(self, error: StoreError) -> None:
        if time.monotonic() >= self._next_nag_s:
            self._next_nag_s = time.monotonic() + _NAG_S
            self.notify(f"ERROR: {error}. Nothing is reallocated until it can be written again; jobs train on.")

    # Actions.

    def _execute(self, number: int, action: Action) -> None:
        match action:
            case Plan():
                self._plan(number, action)
            case Start():
                self._starts[action.job] = _Pending(number, action)
            case Stop():
                self._stop_action(number, action.job, action.attempt)
            case Resize():
                self._stop_action(None, action.job, action.attempt - 1)
                self._starts[action.job] = _Pending(number, action)
            case _:
                assert_never(action)

    def _confirm(self, number: int | None) -> None:
        """Note that an action was executed; written with the next records."""
        if number is not None:
            self._executed.append((number, self.clock.now_s()))

    def _write_executed(self) -> None:
        while self._executed:
            self.store.confirm(*self._executed[0])
            self._executed.popleft()

    def _plan(self, number: int, action: Plan) -> None:
        job = self.state.find(action.job)
        bound = None if job is None else job.estimate(action.cell)
        submission = self.store.submission(action.job)
        if bound is None or submission.workload is None:
            self._confirm(number)
            return
        self._planning[action.job, action.cell] = number
        self.planner.request(action.job, submission, self.state.fleet, bound)

    def _planned(self, planned: PlannedCell) -> None:
        cell = planned.estimate.cell
        if planned.tasks != self._tasks_of(planned.job):  # the job has changed since; another plan was asked for
            return
        if planned.error:
            self.notify(f"{planned.job} cannot be planned on {cell.text}: {planned.error}")
        plans = (StoredPlan(cell=cell, plan=planned.plan, profile=planned.profile),) if planned.plan else ()
        event = Estimated(time_s=self.clock.now_s(), job=planned.job, estimates=(planned.estimate,))
        self._tell(event, plans=plans)
        self._confirm(self._planning.pop((planned.job, cell), None))

    def _tasks_of(self, job: str) -> str:
        """The digest of the tasks that a job's cells are estimated for."""
        if job not in self._tasks:
            self._tasks[job] = tasks_of(self.store.submission(job))
        return self._tasks[job]

    def _look_at_tasks(self, report: AttemptReport) -> None:
        """Have a job's cells estimated anew when its tasks are others than before: one has ended or joined."""
        if not report.tasks or report.tasks == self._tasks_of(report.job) or not self._tasks_of(report.job):
            return
        job = self.state.find(report.job)
        if job is not None and job.attempt == report.attempt and self._refused.get(report.job) != report.tasks:
            self.planner.request_bounds(job.job, self.store.submission(report.job), self.state.fleet, report.tasks)

    def _changed(self, changed: ChangedJob) -> None:
        if changed.error:
            self._refused[changed.job] = changed.tasks
            self.notify(f"{changed.job} trains other tasks now, and its cells are as before: {changed.error}")
            return
        self.notify(f"{changed.job} trains other tasks now: its cells are estimated anew")
        event = Estimated(time_s=self.clock.now_s(), job=changed.job, estimates=changed.bounds, replaces=True)
        self._tasks[changed.job] = changed.tasks
        self._refused.pop(changed.job, None)  # what was refused may be estimated when the job trains it again
        for key in [key for key in self._planning if key[0] == changed.job]:  # of what it was before
            self._confirm(self._planning.pop(key))
        self._tell(event, submission=changed.submission)

    def _stop_action(self, number: int | None, job: str, attempt: int) -> None:
        pending = self._starts.get(job)
        if pending is not None and pending.action.attempt == attempt:  # it never began
            del self._starts[job]
            self._confirm(pending.number)
        elif (job, attempt) in self._attempts:
            self._stop((job, attempt), number)
            return
        self._confirm(number)

    def _stop(self, key: Key, number: int | None) -> None:
        attempt = self._attempts[key]
        attempt.is_stopping, attempt.stop_action = True, number
        self.engine.stop(key, self.grace_s)

    def _start_pending(self) -> None:
        """Start jobs whose earlier attempts are gone."""
        busy = {job for job, _ in self._attempts}
        for job, pending in list(self._starts.items()):
            if job in busy:
                continue
            action = pending.action
            plan, profile = self.store.plan(job, action.cell) or ("", "")
            start = AttemptStart(
                job=job,
                attempt=action.attempt,
                nodes=action.nodes,
                submission=self.store.submission(job),
                grace_s=self.grace_s,
                plan=plan,
                profile=profile,
            )
            record = self._new_record(action)
            self.store.write_attempts([record])
            try:
                self.engine.start(start)
            except (EngineLostError, StoreError):
                raise
            except FleetError as error:  # tried again
                self._nag_start(job, error)
                continue
            del self._starts[job]
            self._attempts[job, action.attempt] = _Attempt(record=record, start_action=pending.number)
            nodes = ", ".join(f"{share.num_devices} of {share.node}" for share in action.nodes)
            self.notify(f"{job}: attempt {action.attempt} on {action.cell.text} ({nodes})")

    def _nag_start(self, job: str, error: FleetError) -> None:
        if time.monotonic() >= self._next_nag_s:
            self._next_nag_s = time.monotonic() + _NAG_S
            self.notify(f"{job} cannot be started now, and is tried again: {error}")

    def _new_record(self, action: Start | Resize) -> AttemptRecord:
        return AttemptRecord(
            job=action.job, attempt=action.attempt, cell=action.cell, nodes=action.nodes, start_s=self.clock.now_s()
        )

    # Attempts.

    def _look_at_attempts(self) -> None:
        for report in self.engine.poll():
            attempt = self._attempts.get((report.job, report.attempt))
            if attempt is not None:
                self._look_at(attempt, report)

    def _look_at(self, attempt: _Attempt, report: AttemptReport) -> None:
        key = (report.job, report.attempt)
        now_s = self.clock.now_s()
        attempt.waits_for = report.reason if report.phase == PENDING else ""
        if report.phase not in (PENDING, LOST):
            self._confirm_start(attempt, report.phase)
        attempt.record = record = replace(
            attempt.record,
            step=attempt.record.step if report.step is None else report.step,
            step_s=report.step_s or attempt.record.step_s,
            checkpoints=report.checkpoints or attempt.record.checkpoints,
        )
        if report.phase == LOST:
            if self._waits_for_node(attempt):
                return
            self._failed(key, by_script=False, reason=report.reason or "its processes are gone")
            return
        is_ready = report.num_taken > 0 or (report.phase == "running" and self._reports_nothing(report.job))
        if is_ready and record.ready_s is None and not attempt.is_stopping:
            attempt.record = replace(record, ready_s=now_s)
            attempt.told_at_s = now_s
            self._tell(Started(time_s=now_s, job=report.job, attempt=report.attempt))
        if report.phase == ENDED:
            self._ended(key, report)
        elif attempt.record.ready_s is not None and not attempt.is_stopping:
            self._look_at_tasks(report)
            self._progressed(attempt, report, now_s)

    def _waits_for_node(self, attempt: _Attempt) -> bool:
        """Whether an attempt that is gone may be so because of its node, which is known some seconds later: then the
        job has not failed, and must not be started there again."""
        now_s = self.clock.now_s()
        attempt.gone_s = now_s if attempt.gone_s is None else attempt.gone_s
        return not attempt.is_stopping and now_s - attempt.gone_s < _NODE_GONE_S

    def _reports_nothing(self, job: str) -> bool:
        """Whether a job is any command, not a script of Spindle."""
        return not self.store.submission(job).is_script

    def _confirm_start(self, attempt: _Attempt, phase: str) -> None:
        if attempt.start_action is not None and phase in ("running", ENDED):
            self._confirm(attempt.start_action)
            attempt.start_action = None

    def _progressed(self, attempt: _Attempt, report: AttemptReport, now_s: float) -> None:
        """Tell the scheduler how far an attempt is: now and then, and at once when its rate is known or changes."""
        if report.step is None:
            return
        step_s = report.step_s or 0.0
        is_news = bool(step_s) and abs(step_s - attempt.told_s) > _OFF * attempt.told_s
        if is_news or now_s - attempt.told_at_s >= self.state.options.min_interval_s:
            attempt.told_s, attempt.told_at_s = step_s, now_s
            event = Progressed(
                time_s=now_s, job=report.job, attempt=report.attempt, step=float(report.step), step_s=step_s
            )
            self._tell(event)

    def _ended(self, key: Key, report: AttemptReport) -> None:
        job, number = key
        attempt, now_s = self._attempts[key], self.clock.now_s()
        if report.outcome == COMPLETED:
            self._note_end(attempt, COMPLETED)
            newest = self._drop_start(job)  # there is nothing left to do for a resized attempt
            event: Event = Completed(time_s=now_s, job=job, attempt=newest or number)
            self.notify(f"{job}: completed")
            self._tell(event, discards=(key,))
        elif report.outcome == FAILED and not attempt.is_stopping:
            self._failed(key, by_script=report.by_script, reason=report.reason)
        elif attempt.is_stopping:
            self._note_end(attempt, "stopped")
            self._tell(
                Stopped(time_s=now_s, job=job, attempt=number, step=float(self._saved_step(attempt))), discards=(key,)
            )
        elif not self._waits_for_node(attempt):  # stopped by itself: cut off, or a signal of somebody else
            self._failed(key, by_script=False, reason=report.reason or "stopped by a signal")

    def _failed(self, key: Key, *, by_script: bool, reason: str) -> None:
        job, number = key
        attempt, now_s = self._attempts[key], self.clock.now_s()
        saved_step = self._saved_step(attempt)
        self._note_end(attempt, "stopped" if attempt.is_stopping else FAILED)
        if attempt.is_stopping:
            event: Event = Stopped(time_s=now_s, job=job, attempt=number, step=float(saved_step))
        else:
            step = saved_step if attempt.record.step is None else attempt.record.step
            event = Failed(
                time_s=now_s,
                job=job,
                attempt=number,
                step=float(step),
                resume_step=float(saved_step),
                by_script=by_script,
                reason=reason,
            )
            self.notify(f"{job}: attempt {number} failed in step {step}, newest checkpoint {saved_step}: {reason}")
        self._tell(event, discards=(key,))

    def _drop_start(self, job: str) -> int | None:
        """Drop a start that has not begun; the number of its attempt."""
        pending = self._starts.pop(job, None)
        if pending is None:
            return None
        self._confirm(pending.number)
        return pending.action.attempt

    def _note_end(self, attempt: _Attempt, outcome: str) -> None:
        attempt.record = replace(
            attempt.record, end_s=self.clock.now_s(), outcome=outcome, saved_step=self._saved_step(attempt)
        )

    def _saved_step(self, attempt: _Attempt) -> int:
        """The step of a job's newest checkpoint; 0 without one."""
        folder = attempt.record.checkpoints or self._folder_of(attempt.record.job)
        try:
            return max(steps_in(Path(folder)), default=0) if folder else 0
        except OSError:
            return attempt.record.saved_step or 0

    def _folder_of(self, job: str) -> str:
        """The folder of checkpoints that earlier attempts of a job have reported."""
        return next((each.checkpoints for each in reversed(self.store.attempts()) if each.job == job), "")

    def _discard(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        self.engine.discard(key)
        if attempt is None:
            return
        self._confirm(attempt.start_action)
        self._confirm(attempt.stop_action)

    def _write_progress(self) -> None:
        if time.monotonic() >= self._next_write_s:
            self._next_write_s = time.monotonic() + _WRITE_S
            for attempt in self._attempts.values():
                attempt.record = replace(attempt.record, saved_step=self._saved_step(attempt))
            if self._attempts:
                self.store.write_attempts([attempt.record for attempt in self._attempts.values()])
            waits = {job: each.waits_for for (job, _), each in self._attempts.items() if each.waits_for}
            self.store.set_waits(waits)

    # Nodes.

    def _look_at_nodes(self) -> None:
        if time.monotonic() < self._next_nodes_s:
            return
        self._next_nodes_s = time.monotonic() + _NODES_S
        nodes = self.engine.nodes()
        for name, status in nodes.items():
            if name not in self.state.fleet.node_names and status.is_checked and status.island is not None:
                self.notify(f"node {name} is new: {status.island.num_devices} x {status.island.kind.name}")
                self._identities[name] = status.identity
                self._tell(NodeJoined(time_s=self.clock.now_s(), node=name, island=status.island))
        for name in self.state.fleet.node_names:
            now, known = nodes.get(name), self._identities.get(name)
            is_gone = now is None or now.is_checked is False or (known is not None and known != now.identity)
            if is_gone and (known is not None or name not in self.state.unavailable):
                self._identities.pop(name, None)
                self._node_lost(name)
            if now is None or not now.is_checked:
                continue
            self._identities[name] = now.identity
            if name in self.state.unavailable and name not in self._drained and now.drain_s is None:
                self._leaving.discard(name)
                self.notify(f"node {name} has joined")
                self._tell(NodeJoined(time_s=self.clock.now_s(), node=name))
            elif now.drain_s is not None and name not in self._leaving:
                self._leaving.add(name)
                self._drain(name, now.drain_s)

    def _node_lost(self, name: str) -> None:
        keys = tuple(key for key, each in self._attempts.items() if any(s.node == name for s in each.record.nodes))
        running = {(job.name, job.attempt) for job in self.state.jobs if job.allocation is not None}
        lost = []
        for key in keys:
            attempt = self._attempts[key]
            self._note_end(attempt, "lost")
            if key in running:
                lost.append(LostAttempt(job=key[0], step=float(self._saved_step(attempt))))
        for job, pending in list(self._starts.items()):
            if any(share.node == name for share in pending.action.nodes):
                self._drop_start(job)
        self._leaving.discard(name)
        jobs = ", ".join(job for job, _ in keys)
        if not self._is_going_down:
            self.notify(f"node {name} is lost" + (f"; its jobs resume: {jobs}" if jobs else ""))
        stopped = [(key, self._saved_step(self._attempts[key])) for key in keys if key not in running]
        self._tell(NodeLost(time_s=self.clock.now_s(), node=name, attempts=tuple(lost)), discards=keys)
        for (job, number), step in stopped:  # told to stop before
            self._tell(Stopped(time_s=self.clock.now_s(), job=job, attempt=number, step=float(step)))

    def _drain(self, node: str, drain_s: float, answers: tuple[tuple[int, str], ...] = ()) -> None:
        now_s = self.clock.now_s()
        self.notify(f"node {node} is drained: its jobs leave within {drain_s:.0f} s")
        event = Draining(time_s=now_s, node=node, deadline_s=now_s + drain_s, grace_s=self.grace_s)
        self._tell(event, answers=answers)

    def _engine_lost(self, error: EngineLostError) -> None:
        """All nodes are gone with the engine, as far as can be known; agents save checkpoints and end."""
        self._is_lost = True
        self.notify(f"ERROR: {error}")
        for name in self.state.fleet.node_names:
            if name not in self.state.unavailable:
                self._node_lost(name)
        self._identities.clear()

    def _engine_is_back(self) -> bool:
        if not self.engine.recover():
            return False
        self._is_lost = False
        self.notify("the cluster answers again")
        records = {(record.job, record.attempt): record for record in self.store.attempts()}
        for key in self.engine.adopt():  # where a head came back with what it knew: these are counted as lost
            if key in records:
                self._attempts[key] = _Attempt(record=records[key])
                self._stop(key, None)
        return True

    # Commands.

    def _handle_commands(self) -> None:
        for command in self.store.pending():
            if self._unsaved:  # the next one may depend on what the disk had no space for
                return
            try:
                self._handle(command)
            except (FleetError, InputError) as error:
                if isinstance(error, StoreError | EngineLostError):
                    raise
                self.notify(f"refused: {error}")
                self.store.answer_command(command.number, f"error: {error}")

    def _handle(self, command: Command) -> None:
        body, now_s = command.body, self.clock.now_s()
        answers = ((command.number, "ok"),)
        match body.get("command"):
            case "submit":
                job = from_json(Job, body["job"], "job")
                estimates = from_json(tuple[Estimate, ...], body["estimates"], "estimates")
                submission = from_json(Submission, body["submission"], "submission")
                plans = from_json(tuple[StoredPlan, ...], body.get("plans", []), "plans")
                event = Submitted(time_s=now_s, job=job, estimates=estimates)
                schedule(self.state, event)  # which refuses what is inconsistent
                self._tell(event, submission=submission, plans=plans, answers=answers)
                self.notify(f"{job.name}: submitted")
            case "stop":
                self._known(body["job"])
                self._tell(Suspended(time_s=now_s, job=body["job"]), answers=answers)
            case "resume":
                self._known(body["job"])
                self._tell(Resumed(time_s=now_s, job=body["job"]), answers=answers)
            case "drain":
                node = body["node"]
                self.state.fleet.node_number(node)
                self._drained = self._drained - {node} if body.get("ends") else self._drained | {node}
                self.store.set_meta("drained", json.dumps(sorted(self._drained)))
                if body.get("ends") and node not in self._identities:  # lost: it joins when it is back
                    self.store.answer_command(command.number, "ok")
                elif body.get("ends"):
                    self._tell(NodeJoined(time_s=now_s, node=node), answers=answers)
                else:
                    self._drain(node, float(body.get("within_s", _DRAIN_S)), answers)
            case "down":
                self.grace_s = float(body.get("grace_s", self.grace_s))
                self._down_command = command.number
            case name:
                self.store.answer_command(command.number, f"error: unknown command {name!r}")

    def _known(self, name: str) -> JobState:
        job = self.state.find(name)
        if job is not None:
            return job
        ended = next((job for job in self.state.ended if job.name == name), None)
        if ended is not None:
            raise FleetError(f"job {name!r} has {ended.phase}")
        raise FleetError(f"no job is called {name!r}; `spindle fleet status` lists them")

    def go_down(self) -> None:
        """Stop every job after a checkpoint; all nodes leave. The next `up` resumes."""
        self._is_going_down = True
        self.notify("stopping all jobs, after a checkpoint")
        for key in self._attempts:
            self.engine.stop(key, self.grace_s)
        end_s = time.monotonic() + self.grace_s + 15
        waiting = set(self._attempts)
        while waiting and time.monotonic() < end_s:
            for report in self.engine.poll():
                key = (report.job, report.attempt)
                if key in waiting and report.phase in (ENDED, LOST, PENDING):
                    waiting.discard(key)
                    attempt = self._attempts[key]
                    attempt.record = replace(
                        attempt.record, step=report.step, checkpoints=report.checkpoints or attempt.record.checkpoints
                    )
                    if report.outcome == COMPLETED:
                        self._ended(key, report)
            time.sleep(POLL_S)
        for name in self.state.fleet.node_names:
            if name not in self.state.unavailable:
                self._node_lost(name)
        self._write_executed()
        for command in self.store.pending():  # also one that a scheduler before has not answered
            if command.body.get("command") == "down":
                self.store.answer_command(command.number, "ok")
        self.is_down = True


def wait_for_answer(store: Store, number: int, limit_s: float = 60.0) -> str | None:
    """The scheduler's answer to a command; None if there is no scheduler, or it takes too long."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        answer = store.answer(number)
        if answer is not None:
            return answer
        if not store.has_scheduler():
            return store.answer(number)
        time.sleep(0.05)
    return None


def request(store: Store, body: dict[str, Any], limit_s: float = 60.0) -> bool:
    """Ask the scheduler for something: True if it is done, False if there is no scheduler now, which will do it."""
    answer = wait_for_answer(store, store.request(body), limit_s)
    if answer is None:
        return False
    if answer.startswith("error: "):
        raise FleetError(answer.removeprefix("error: "))
    return True
