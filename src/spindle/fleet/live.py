"""A live fleet: the scheduler's loop between a store and an engine.

    commands, reports, nodes, plans ──▶ events ──▶ schedule ──▶ store (event and actions) ──▶ engine ──▶ confirmed

An event becomes part of the state when it is in the store, together with its actions; only then are they executed
(`journal`). So the scheduler may be killed at any instruction: the next one replays the events, asks the engine which
attempts exist, adopts those that should run, stops those that should not, and starts those that are missing
(`recover`). While the store cannot be written, nothing is reallocated, and jobs continue to train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spindle.artifact import from_json
from spindle.display import count_of
from spindle.errors import FleetError, InputError, StoreError
from spindle.fleet.ask import JOINED
from spindle.fleet.attempt_reports import AttemptReports
from spindle.fleet.attempts import Attempt, Attempts, Pending
from spindle.fleet.cells import Estimate
from spindle.fleet.engine import Engine, EngineLostError, Key, NodeStatus
from spindle.fleet.events import (
    Action,
    Draining,
    Estimated,
    NodeJoined,
    Occupied,
    Plan,
    Resize,
    Resumed,
    Start,
    Stop,
    Submitted,
    Suspended,
    Ticked,
)
from spindle.fleet.job import Job
from spindle.fleet.job_plans import Answer, JobPlans
from spindle.fleet.journal import FleetClock, Journal
from spindle.fleet.planning import tasks_of
from spindle.fleet.scheduler import schedule
from spindle.fleet.state import JobState, State
from spindle.fleet.store import Command, Join, Store, StoredPlan, Submission, WrittenAction

GRACE_S = 30.0
POLL_S = 0.1
_NODES_S = 0.5  # between two looks at the nodes
_DRAIN_S = 120.0  # until a drained node is to be left, unless said otherwise


class LiveFleet:
    """`step` is one iteration of the loop. `notify` is called with messages for the user. `journal` stores events,
    `attempts` executes actions, `reports` turns reports of attempts into events, `plans` requests plans of cells."""

    def __init__(
        self, store: Store, engine: Engine, grace_s: float = GRACE_S, notify: Callable[[str], None] = print
    ) -> None:
        self.store, self.engine, self.notify = store, engine, notify
        self.is_down = False
        self.plans = JobPlans(store)
        self.journal = Journal(store, notify, self._execute, lambda key: self.attempts.discard(key))
        self.attempts = Attempts(self.journal, engine, grace_s, notify)
        self.reports = AttemptReports(self.attempts, self.plans, notify)
        self._identities: dict[str, str] = {}  # of available nodes, by name
        self._drained = set(json.loads(store.meta("drained") or "[]"))  # nodes that a user drains
        self._leaving: set[str] = set()  # nodes that the cluster drains
        self._next_nodes_s = 0.0
        self._is_shutdown_requested = False
        self._is_lost = False  # whether the engine does not answer

    @property
    def state(self) -> State:
        return self.journal.state

    @property
    def clock(self) -> FleetClock:
        return self.journal.clock

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
            if not self.journal.save():
                return
            if self._is_lost and not self._engine_is_back():
                return
            self._handle_commands()
            self._update_nodes()
            self.reports.handle()
            for answer in self.plans.answers():
                self._answered(answer)
            if self._is_shutdown_requested:
                self.shut_down()
                return
            now_s = self.clock.now_s()
            if self.state.next_round_s is not None and now_s >= self.state.next_round_s:
                self.journal.record(Ticked(time_s=now_s))
            self.attempts.replace()
            self.attempts.start_pending()
            self.plans.plan_ahead(self.state)
            self.journal.write_executed()
            self.reports.write_progress()
            self.journal.write_snapshot()
        except StoreError as error:
            self.journal.warn(error)
        except EngineLostError as error:
            self._engine_lost(error)

    def close(self) -> None:
        self.plans.close()

    def shut_down(self) -> None:
        """Stop every job after a checkpoint, and mark all nodes as lost. The next `up` resumes the jobs."""
        self.notify("stopping all jobs, after a checkpoint")
        self.reports.stop_all()
        for name in self.state.fleet.node_names:
            if name not in self.state.unavailable:
                self._node_lost(name, is_expected=True)
        self.journal.write_executed()
        for command in self.store.pending():  # also those that an earlier scheduler has not answered
            if command.body.get("command") == "down":
                self.store.answer_command(command.number, "ok")
        self.is_down = True

    # Actions and plans.

    def _execute(self, number: int, action: Action) -> None:
        if isinstance(action, Plan):
            self._plan(number, action)
        else:
            self.attempts.execute(number, action)

    def _plan(self, number: int, action: Plan) -> None:
        if not self.plans.request(number, action, self.state.find(action.job), self.state.fleet):
            self.journal.confirm(number)

    def _answered(self, answer: Answer) -> None:
        if answer.message:
            self.notify(answer.message)
        if answer.estimates:
            event = Estimated(
                time_s=self.clock.now_s(), job=answer.job, estimates=answer.estimates, replaces=answer.replaces
            )
            self.journal.record(event, submission=answer.submission, plans=answer.plans)
        if answer.replaces:
            self.plans.plan_again(self.state.find(answer.job), self.state.fleet)
        for number in answer.confirmed:
            self.journal.confirm(number)

    # Recovery.

    def recover(self) -> None:
        """Bring the engine in line with the store: adopt what should run, stop what should not, start what is
        missing."""
        written = self.store.actions()
        found = set(self.engine.adopt())
        wanted = [(job.name, job.attempt) for job in self.state.jobs if job.allocation is not None]
        self._adopt(found, wanted, written)
        for entry in written:
            if entry.is_done:
                continue
            match entry.action:
                case Start() | Resize() as action:
                    if (action.job, action.attempt) not in {*found, *wanted}:
                        self.journal.confirm(entry.number)  # it ended or was dropped, which was not confirmed
                case Stop():
                    self.attempts.stop_action(entry.number, entry.action)
                case Plan():
                    self._plan(entry.number, entry.action)
        for record in self.store.attempts():  # that ended while no scheduler ran
            if (record.job, record.attempt) not in self.attempts.running and record.end_s is None:
                self.store.write_attempts([replace(record, end_s=self.state.now_s, outcome="stopped")])

    def _adopt(self, found: set[Key], wanted: Sequence[Key], written: Sequence[WrittenAction]) -> None:
        """Adopt attempts that the engine has `found`. Other attempts that are `wanted` start, or have failed if they
        were started before."""
        attempts = self.attempts
        records = {(record.job, record.attempt): record for record in self.store.attempts()}
        starts = {
            (entry.action.job, entry.action.attempt): (entry, entry.action)
            for entry in written
            if isinstance(entry.action, Start | Resize)
        }
        for key in sorted(found):
            if key not in starts:  # cannot be: it would belong to another store with the same fleet id
                self.engine.discard(key)
                continue
            entry, action = starts[key]
            attempts.running[key] = Attempt(
                record=records.get(key) or attempts.new_record(action),
                start_action=None if entry.is_done else entry.number,
            )
            if key not in wanted:
                attempts.stop(key)
        for key in wanted:
            if key in found:
                continue
            entry, action = starts[key]
            if not entry.is_done:
                attempts.starts[action.job] = Pending(entry.number, action)
            else:
                attempts.running[key] = Attempt(record=records.get(key) or attempts.new_record(action))
                reason = "its processes were gone when the scheduler came back"
                self.reports.failed(key, by_script=False, reason=reason)

    def _engine_lost(self, error: EngineLostError) -> None:
        """Count all nodes as lost. Agents notice that they are cut off, save checkpoints, and end."""
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
        for key in self.engine.adopt():  # a head that kept its state: these attempts were counted as lost
            if key in records:
                self.attempts.running[key] = Attempt(record=records[key])
                self.attempts.stop(key)
        return True

    # Nodes.

    def _update_nodes(self) -> None:
        if time.monotonic() < self._next_nodes_s:
            return
        self._next_nodes_s = time.monotonic() + _NODES_S
        nodes = self.engine.nodes()
        for name, status in nodes.items():
            if name not in self.state.fleet.node_names and status.is_checked and status.island is not None:
                self.notify(f"node {name} is new: {status.island.num_devices} x {status.island.kind.name}")
                self._identities[name] = status.identity
                self.journal.record(NodeJoined(time_s=self.clock.now_s(), node=name, island=status.island))
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
                self.journal.record(NodeJoined(time_s=self.clock.now_s(), node=name))
            elif now.drain_s is not None and name not in self._leaving:
                self._leaving.add(name)
                self._drain(name, now.drain_s)
        self._update_occupied(nodes)

    def _update_occupied(self, nodes: Mapping[str, NodeStatus]) -> None:
        """Use devices again that processes outside the fleet have released. `AttemptReports` notices those that are
        occupied."""
        for share in self.state.occupied:
            status = nodes.get(share.node)
            if status is not None and status.num_occupied < share.num_devices:
                self.notify(f"node {share.node}: others hold {count_of(status.num_occupied, 'device')} now")
                event = Occupied(time_s=self.clock.now_s(), node=share.node, num_devices=status.num_occupied)
                self.journal.record(event)

    def _node_lost(self, name: str, *, is_expected: bool = False) -> None:
        self._leaving.discard(name)
        self.reports.node_lost(name, is_expected=is_expected)

    def _drain(self, node: str, drain_s: float, answers: tuple[tuple[int, str], ...] = ()) -> None:
        now_s = self.clock.now_s()
        self.notify(f"node {node} is drained: its jobs leave within {drain_s:.0f} s")
        event = Draining(time_s=now_s, node=node, deadline_s=now_s + drain_s, grace_s=self.attempts.grace_s)
        self.journal.record(event, answers=answers)

    # Commands.

    def _handle_commands(self) -> None:
        for command in self.store.pending():
            if self.journal.is_behind:  # the next command may depend on an event that could not be stored
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
                if body.get("join") and self._join(from_json(Join, body["join"], "join"), command.number):
                    return
                job = from_json(Job, body["job"], "job")
                estimates = from_json(tuple[Estimate, ...], body["estimates"], "estimates")
                submission = from_json(Submission, body["submission"], "submission")
                plans = from_json(tuple[StoredPlan, ...], body.get("plans", []), "plans")
                event = Submitted(time_s=now_s, job=job, estimates=estimates)
                schedule(self.state, event)  # raises if the job is inconsistent
                self.journal.record(event, submission=submission, plans=plans, answers=answers)
                self.notify(f"{job.name}: submitted")
            case "stop":
                self._active_job(body["job"])
                self.journal.record(Suspended(time_s=now_s, job=body["job"]), answers=answers)
            case "resume":
                self._active_job(body["job"])
                self.journal.record(Resumed(time_s=now_s, job=body["job"]), answers=answers)
            case "drain":
                node = body["node"]
                self.state.fleet.node_number(node)
                self._drained = self._drained - {node} if body.get("ends") else self._drained | {node}
                self.store.set_meta("drained", json.dumps(sorted(self._drained)))
                if body.get("ends") and node not in self._identities:  # lost: it joins when it is back
                    self.store.answer_command(command.number, "ok")
                elif body.get("ends"):
                    self.journal.record(NodeJoined(time_s=now_s, node=node), answers=answers)
                else:
                    self._drain(node, float(body.get("within_s", _DRAIN_S)), answers)
            case "down":
                self.attempts.grace_s = float(body.get("grace_s", self.attempts.grace_s))
                self._is_shutdown_requested = True
            case name:
                self.store.answer_command(command.number, f"error: unknown command {name!r}")

    def _join(self, join: Join, command: int) -> bool:
        """Add the submitted trials to a waiting job. Returns False if that job has started or changed since."""
        job = self.state.find(join.job)
        if job is None or not job.is_new or self.store.submission(join.job) != join.before:
            return False
        event = Estimated(time_s=self.clock.now_s(), job=join.job, estimates=join.estimates, replaces=True)
        confirmed = self.plans.replace_tasks(join.job, tasks_of(join.submission))
        answers = ((command, f"{JOINED}{join.job}"),)
        self.journal.record(event, submission=join.submission, plans=join.plans, answers=answers)
        for number in confirmed:
            self.journal.confirm(number)
        self.notify(f"{join.job}: takes more trials in: {' '.join(join.submission.sweep)}")
        return True

    def _active_job(self, name: str) -> JobState:
        job = self.state.find(name)
        if job is not None:
            return job
        ended = next((job for job in self.state.ended if job.name == name), None)
        if ended is not None:
            raise FleetError(f"job {name!r} has {ended.phase}")
        raise FleetError(f"no job is called {name!r}; `spindle fleet status` lists them")
