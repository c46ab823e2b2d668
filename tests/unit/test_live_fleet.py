"""The loop of a live fleet, with an engine that does nothing: what it asks for, and what users are told."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from fleets import fleet, submitted
from spindle.artifact import artifact_text, to_json
from spindle.cli.main import run
from spindle.display import seconds
from spindle.errors import InputError, StoreError
from spindle.fleet import (
    Cell,
    DeviceCount,
    Draining,
    Estimate,
    Estimated,
    Failed,
    JobState,
    NodeJoined,
    NodeLost,
    NodeShare,
    Plan,
    SchedulerOptions,
    Started,
    State,
    Stopped,
    Team,
    Ticked,
    schedule,
)
from spindle.fleet.engine import ENDED, PENDING, RUNNING, AttemptReport, NodeStatus
from spindle.fleet.event_log import read_event_log
from spindle.fleet.explain import explain_job
from spindle.fleet.job_plans import JobPlans, unplanned_smaller
from spindle.fleet.live import LiveFleet
from spindle.fleet.machines import node_describer
from spindle.fleet.planning import ChangedJob, PlannedCell, tasks_of
from spindle.fleet.ray_cluster import RayCluster
from spindle.fleet.ray_engine import RayEngine, _RayAttempt
from spindle.fleet.ray_nodes import LocalRay, start_local_ray
from spindle.fleet.state import Allocation
from spindle.fleet.store import Join, Store, Submission
from spindle.launch.agent import COMPLETED, FAILED
from spindle.launch.capture import WorkloadCapture, capturing
from spindle.recipes import RECIPES
from spindle.workload import Workload, read_workload

PROGRAM = Submission(command=("program",), is_script=False, folder="/", logs="/logs", environment={})


class IdleEngine:
    """Nodes that are there, and attempts that wait until they are told to stop. `standby` is what is prepared."""

    def __init__(self, store: Store) -> None:
        self._names, self.waiting, self.grace_s = store.fleet.node_names, {}, None
        self.standby, self.can_prepare, self.outcomes = {}, False, {}
        self.num_occupied, self.crowded_out = 0, set()
        self.num_taken, self.checkpoints, self.progress = 0, "", {}

    def nodes(self):
        return {name: NodeStatus(identity=name, num_occupied=self.num_occupied) for name in self._names}

    def adopt(self):
        return ()

    def start(self, start):
        self.waiting[start.job, start.attempt] = PENDING
        self.standby.pop((start.job, start.attempt), None)

    def prepare(self, start):
        if self.can_prepare:
            self.standby[start.job, start.attempt] = None
        return self.can_prepare

    def is_prepared(self, key):
        return self.standby[key]

    def stop(self, key, grace_s):
        self.waiting[key], self.grace_s = ENDED, grace_s

    def discard(self, key):
        self.standby.pop(key, None)
        self.waiting.pop(key, None)

    def poll(self):
        return [
            AttemptReport(
                job=job,
                attempt=attempt,
                phase=phase,
                reason="waits for devices",
                outcome=self.outcomes.get((job, attempt), ""),
                is_crowded_out=(job, attempt) in self.crowded_out,
                num_taken=self.num_taken,
                checkpoints=self.checkpoints,
                **self.progress,
            )
            for (job, attempt), phase in self.waiting.items()
        ]


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), SchedulerOptions(min_interval_s=0.1)) as store:
        yield store


def submit(store: Store, name: str, times=(("big", 4, 1.0),), **fields) -> None:
    event = submitted(name, {(kind, count): step_s for kind, count, step_s in times}, **fields)
    body = {"job": to_json(event.job), "estimates": to_json(event.estimates), "submission": to_json(PROGRAM)}
    store.request({"command": "submit", **body})


def live_fleet(store: Store, monkeypatch) -> tuple[LiveFleet, IdleEngine]:
    monkeypatch.setattr("spindle.fleet.attempt_reports._WRITE_S", 0.0)
    engine = IdleEngine(store)
    live = LiveFleet(store=store, engine=engine, grace_s=9.0, notify=lambda _: None)
    live.recover()
    return live, engine


def test_a_stopped_job_no_longer_says_what_it_waits_for(store, monkeypatch):
    live, engine = live_fleet(store, monkeypatch)
    submit(store, "a")
    for _ in range(3):
        live.step()
    assert store.waits() == {"a": "waits for devices"}
    store.request({"command": "stop", "job": "a"})
    for _ in range(3):
        live.step()
    assert not engine.waiting
    assert store.waits() == {}


def test_a_fleet_goes_down_once_and_with_the_grace_that_was_asked_for(store, monkeypatch):
    store.request({"command": "down", "grace_s": 5.0})  # of which no scheduler has heard
    first, _ = live_fleet(store, monkeypatch)
    first.shut_down()
    second, engine = live_fleet(store, monkeypatch)
    submit(store, "a")
    for _ in range(3):
        second.step()
    assert not second.is_down
    store.request({"command": "down", "grace_s": 5.0})
    second.step()
    assert second.is_down
    assert engine.grace_s == 5.0


def test_a_node_is_drained_within_the_seconds_that_were_given(store, monkeypatch):
    live, _ = live_fleet(store, monkeypatch)
    store.request({"command": "drain", "node": "node0", "within_s": 0.0})
    live.step()
    (event,) = (event for event, _ in store.entries() if isinstance(event, Draining))
    assert event.deadline_s == event.time_s
    assert event.grace_s == 9.0


def test_a_drain_stops_jobs_before_the_next_round_would_be_due(tmp_path, monkeypatch):
    options = SchedulerOptions(min_interval_s=1000.0, max_interval_s=1000.0)
    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), options) as store:
        live, engine = live_fleet(store, monkeypatch)
        submit(store, "a")
        for _ in range(3):
            live.step()
        assert engine.waiting == {("a", 1): PENDING}
        store.request({"command": "drain", "node": "node0", "within_s": 5.0})
        live.step()
        assert engine.waiting == {("a", 1): ENDED}


def test_a_lost_node_is_not_used_again_when_its_drain_ends(store, monkeypatch):
    monkeypatch.setattr("spindle.fleet.live._NODES_S", 0.0)
    live, engine = live_fleet(store, monkeypatch)
    store.request({"command": "drain", "node": "node0", "within_s": 0.0})
    live.step()
    names, engine._names = engine._names, ()
    live.step()
    number = store.request({"command": "drain", "node": "node0", "ends": True})
    live.step()
    assert store.answer(number) == "ok"
    assert not any(isinstance(event, NodeJoined) for event, _ in store.entries())
    engine._names = names
    live.step()
    assert live.state.unavailable == ()


def test_a_scheduler_killed_after_an_attempt_ended_has_noted_how_and_the_next_confirms_its_start(store, monkeypatch):
    live, _ = live_fleet(store, monkeypatch)
    submit(store, "a")
    for _ in range(3):
        live.step()
    store.request({"command": "stop", "job": "a"})

    class Killed(BaseException):
        """Nothing is executed after it, as after SIGKILL."""

    def killed(*_):
        raise Killed

    def end_attempt():
        for _ in range(3):
            live.step()

    with monkeypatch.context() as patch:
        patch.setattr(Store, "confirm", killed)
        patch.setattr(Store, "write_attempts", killed)
        with pytest.raises(Killed):
            end_attempt()
    assert [record.outcome for record in store.attempts()] == ["stopped"]
    assert not all(entry.is_done for entry in store.actions())
    following, _ = live_fleet(store, monkeypatch)
    following.step()
    assert all(entry.is_done for entry in store.actions())


def test_an_attempt_that_was_gone_when_the_scheduler_came_back_has_failed_and_its_job_resumes(store, monkeypatch):
    live, engine = live_fleet(store, monkeypatch)
    submit(store, "a")
    steps(live)
    engine.waiting["a", 1] = RUNNING
    steps(live)
    following, engine = live_fleet(store, monkeypatch)  # which finds no attempt
    assert [(record.attempt, record.outcome) for record in store.attempts()] == [(1, "failed")]
    following.clock._base_s += 1.0  # a round is due
    steps(following)
    assert engine.waiting == {("a", 2): PENDING}
    assert "were gone when the scheduler came back" in following.state.find("a").reason


def resizing_fleet(store, monkeypatch) -> tuple[LiveFleet, IdleEngine]:
    """Job a trains on four devices, and is to train on two; its next attempt is on standby."""
    live, engine = live_fleet(store, monkeypatch)
    engine.can_prepare = True
    submit(store, "a", (("big", 4, 1.0), ("big", 2, 2.0)))
    for _ in range(3):
        live.step()
    engine.waiting["a", 1] = RUNNING
    submit(store, "b", (("big", 2, 1.0),), priority="urgent")
    live.step()
    live.clock._base_s += 1.0  # a round is due
    live.step()
    assert engine.standby == {("a", 2): None}
    return live, engine


def steps(live: LiveFleet) -> None:
    for _ in range(3):
        live.step()


def test_an_attempt_trains_on_until_the_one_that_replaces_it_is_ready(store, monkeypatch):
    live, engine = resizing_fleet(store, monkeypatch)
    live.clock._base_s += 20.0
    steps(live)
    assert engine.waiting == {("a", 1): RUNNING, ("b", 1): PENDING}
    engine.standby["a", 2] = True
    steps(live)
    assert (engine.waiting, engine.standby) == ({("a", 2): PENDING, ("b", 1): PENDING}, {})
    live.clock._base_s += 3.0
    engine.waiting["a", 2] = RUNNING
    steps(live)
    (started,) = (event for event, _ in store.entries() if isinstance(event, Started) and event.attempt == 2)
    assert 3.0 <= started.paused_s < 20.0
    assert live.state.find("a").realloc_costs_s[-1] == started.paused_s


def test_an_attempt_trains_on_while_other_jobs_have_the_devices_of_the_next_one(store, monkeypatch):
    live, engine = resizing_fleet(store, monkeypatch)
    engine.standby["a", 2] = True
    steps(live)
    engine.waiting |= {("a", 2): RUNNING, ("b", 1): RUNNING}
    steps(live)
    stopped = []
    engine.stop = lambda key, grace_s: stopped.append(key)  # a checkpoint takes its time
    store.request({"command": "stop", "job": "b"})
    live.step()
    live.clock._base_s += 1.0  # a round is due: a gets all devices again
    live.step()
    engine.standby["a", 3] = True
    steps(live)
    assert stopped == [("b", 1)]
    engine.waiting["b", 1] = ENDED
    steps(live)
    assert stopped == [("b", 1), ("a", 2)]


@pytest.mark.parametrize(
    "what", ["late", "standby fails", "a drain", "a user stops it", "it fails", "another scheduler", "a lost node"]
)
def test_an_attempt_that_is_not_replaced_as_it_was_to_be_ends_as_without_a_standby(what, store, monkeypatch):
    live, engine = resizing_fleet(store, monkeypatch)
    after = {("a", 2): PENDING, ("b", 1): PENDING}
    match what:
        case "late":
            live.clock._base_s += 121.0
        case "standby fails":
            engine.standby["a", 2] = False
        case "it fails":
            engine.waiting["a", 1], engine.outcomes["a", 1] = ENDED, FAILED
        case "a user stops it":
            store.request({"command": "stop", "job": "a"})
            del after["a", 2]
        case "a drain":
            store.request({"command": "drain", "node": "node0", "within_s": 0.0})
            after = {}
        case "a lost node":
            live._next_nodes_s = 0.0
            engine._names, after = (), {}
        case "another scheduler":
            engine.standby.clear()
            engine.adopt = lambda: list(engine.waiting)
            live = LiveFleet(store=store, engine=engine, notify=lambda _: None)
            live.recover()
    steps(live)
    assert (engine.waiting, engine.standby) == (after, {})
    events = [event for event, _ in store.entries()]
    assert not any(isinstance(event, Failed) for event in events)
    assert any(isinstance(event, Stopped | NodeLost) for event in events)
    for key in after:
        engine.waiting[key] = RUNNING
    steps(live)
    assert all(entry.is_done for entry in store.actions())


def test_a_job_that_ends_while_it_is_to_be_resized_has_ended(store, monkeypatch):
    live, engine = resizing_fleet(store, monkeypatch)
    engine.waiting["a", 1], engine.outcomes["a", 1] = ENDED, COMPLETED
    engine.waiting["b", 1] = RUNNING
    steps(live)
    assert (engine.waiting, engine.standby) == ({("b", 1): RUNNING}, {})
    assert [(job.name, job.phase) for job in live.state.ended] == [("a", "completed")]
    assert all(entry.is_done for entry in store.actions())


class PlanningHere:
    """Plans that take as long as their bounds say. `asked` are the cells that were asked for, in order. `changed`: the
    submission of a job whose tasks have changed."""

    changed: Submission

    def __init__(self) -> None:
        self.asked, self._waiting = [], []

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def request(self, job, submission, fleet, bound):
        planned = replace(bound, grade="planned")
        self.asked.append((job, bound.cell.num_devices))
        self._waiting.append(PlannedCell(job=job, tasks=tasks_of(submission), estimate=planned, plan="", profile=""))

    def request_bounds(self, job, submission, fleet, tasks):
        bounds = (Estimate(cell=Cell(kind="big", num_devices=4), step_s=0.6, grade="bound"),)
        self._waiting.append(ChangedJob(job=job.name, tasks=tasks, submission=self.changed, bounds=bounds))

    def done(self):
        waiting, self._waiting = self._waiting, []
        return waiting


def test_a_job_gives_devices_to_one_that_arrives_in_a_cell_that_was_planned_ahead(store, monkeypatch):
    monkeypatch.setattr("spindle.fleet.job_plans.PlanningProcess", PlanningHere)
    live, engine = live_fleet(store, monkeypatch)
    workload = json.loads(artifact_text("workload", RECIPES["clip-4"].workload()))
    event = submitted("a", {("big", count): 4.4 / count for count in (1, 2, 3)}, grade="bound")
    start = Estimate(cell=Cell(kind="big", num_devices=4), step_s=1.1)
    body = {"job": to_json(event.job), "estimates": to_json((*event.estimates, start))}
    store.request({"command": "submit", **body, "submission": to_json(replace(PROGRAM, workload=workload))})
    steps(live)
    assert engine.waiting == {("a", 1): PENDING}
    steps(live)
    planning = live.plans._process
    assert planning.asked == [("a", 2), ("a", 3)]  # half of its devices, then the next smaller number
    submit(store, "b", (("big", 2, 1.0),), priority="urgent")
    steps(live)
    live.clock._base_s += 1.0  # a round is due
    steps(live)
    actions = [entry.action for entry in store.actions()]
    assert [type(action).__name__ for action in actions] == ["Start", "Resize", "Start"]
    assert actions[1].cell.num_devices == 2
    steps(live)
    assert planning.asked == [("a", 2), ("a", 3), ("a", 1)]  # to which it may be shrunk next
    assert not live.state.jobs[0].planning  # the scheduler has asked for none of them


def test_a_cell_is_planned_for_new_tasks_although_their_steps_are_measured_before_the_next_round(tmp_path, monkeypatch):
    monkeypatch.setattr("spindle.fleet.job_plans.PlanningProcess", PlanningHere)
    before, after = (
        replace(PROGRAM, is_script=True, workload=json.loads(artifact_text("workload", RECIPES[name].workload())))
        for name in ("clip-10", "clip-4")
    )
    rare_rounds = SchedulerOptions(min_interval_s=3600.0, max_interval_s=3600.0)
    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), rare_rounds) as store:
        live, engine = live_fleet(store, monkeypatch)
        planning = live.plans._process
        planning.changed = after
        event = submitted("a", {("big", 4): 1.1})
        body = {"job": to_json(event.job), "estimates": to_json(event.estimates), "submission": to_json(before)}
        store.request({"command": "submit", **body})
        steps(live)
        engine.waiting["a", 1], engine.num_taken = RUNNING, 30
        engine.progress = {"step": 30, "tasks": tasks_of(after)}
        live.step()
        engine.progress = {"step": 60, "step_s": 0.5, "tasks": tasks_of(after)}
        steps(live)
    assert [(estimate.grade, estimate.step_s) for estimate in live.state.jobs[0].estimates] == [("measured", 0.5)]
    assert planning.asked == [("a", 4)]
    grades = [
        event.estimates[0].grade
        for event, _ in read_event_log(tmp_path / "fleet.db").entries
        if isinstance(event, Estimated)
    ]
    assert grades == ["bound", "planned"]


def test_nothing_is_planned_ahead_while_the_scheduler_waits_for_a_plan(store, monkeypatch):
    monkeypatch.setattr("spindle.fleet.job_plans.PlanningProcess", PlanningHere)
    workload = json.loads(artifact_text("workload", RECIPES["clip-4"].workload()))
    plans = JobPlans(SimpleNamespace(submission=lambda _: replace(PROGRAM, workload=workload)))
    running = a_job_on(4, {1: "bound", 2: "bound", 4: "planned"})
    state = State(fleet=store.fleet, jobs=(running,))
    wanted = Cell(kind="big", num_devices=1)
    assert plans.request(7, Plan(job="a", cell=wanted), running, store.fleet)
    plans.plan_ahead(state)
    assert plans._process.asked == [("a", 1)]
    assert [answer.confirmed for answer in plans.answers()] == [(7,)]
    plans.plan_ahead(state)
    plans.plan_ahead(state)
    assert plans._process.asked == [("a", 1), ("a", 2)]
    assert [answer.confirmed for answer in plans.answers()] == [()]  # of no action


def a_job_on(num_devices: int, grades: dict[int, str], unfit: tuple[int, ...] = ()) -> JobState:
    """A job on so many devices of kind big, whose cells there have estimates of these grades."""
    event = submitted("a", {("small", 1): 9.0}, grade="bound")
    estimates = (
        Estimate(cell=Cell(kind="big", num_devices=count), step_s=8 / count, grade=grade, fits=count not in unfit)
        for count, grade in grades.items()
    )
    allocation = Allocation(cell=Cell(kind="big", num_devices=num_devices), nodes=()) if num_devices else None
    return JobState(job=event.job, arrival_s=0.0, estimates=(*estimates, *event.estimates), allocation=allocation)


@pytest.mark.parametrize(
    ("job", "planned_next"),
    [
        (a_job_on(8, {1: "bound", 3: "bound", 4: "bound", 6: "bound", 8: "planned"}), 4),
        (a_job_on(8, {1: "bound", 3: "bound", 4: "planned", 6: "bound", 8: "measured"}), 6),
        (a_job_on(8, {1: "bound", 3: "bound", 4: "planned", 6: "planned", 8: "planned"}), None),
        (a_job_on(8, {1: "bound", 3: "bound", 4: "planned", 6: "planned", 8: "planned"}, unfit=(4,)), 3),
        (a_job_on(8, {8: "planned", 12: "bound"}), None),
        (a_job_on(0, {1: "bound", 8: "planned"}), None),
    ],
    ids=["half", "next smaller", "both planned", "half does not fit", "no smaller", "waits"],
)
def test_a_job_may_be_shrunk_to_half_of_its_devices_or_to_the_next_smaller_number(job, planned_next):
    bound = unplanned_smaller(job)
    assert (None if bound is None else bound.cell.num_devices) == planned_next


def test_a_job_that_others_crowd_out_is_stopped_and_starts_when_they_are_gone(store, monkeypatch):
    monkeypatch.setattr("spindle.fleet.live._NODES_S", 0.0)
    live, engine = live_fleet(store, monkeypatch)
    submit(store, "a", (("big", 2, 1.0),))
    steps(live)
    assert engine.waiting == {("a", 1): PENDING}
    engine.num_occupied, engine.crowded_out = 3, {("a", 1)}
    live.step()
    assert live.state.occupied == (NodeShare(node="node0", num_devices=3),)
    live.clock._base_s += 1.0  # a round is due
    steps(live)
    assert engine.waiting == {}
    assert live.state.find("a").phase == "waiting"
    assert "the fleet can use 1 big device now" in explain_job(live.state, "a").reason
    assert run(["fleet", "status", "--store", str(store.path)]) == 0
    engine.num_occupied = 2
    live.step()
    assert live.state.occupied == (NodeShare(node="node0", num_devices=2),)
    live.clock._base_s += 1.0
    steps(live)
    assert engine.waiting == {("a", 2): PENDING}
    assert all(entry.is_done for entry in store.actions() if entry.action.attempt == 1)


def test_a_stop_or_resume_that_changes_nothing_says_so(store, monkeypatch, capsys):
    live, _ = live_fleet(store, monkeypatch)
    submit(store, "a")
    live.step()
    monkeypatch.setattr("spindle.fleet.ask.wait_for_answer", lambda *_: live.step() or "ok")

    def said(*verb: str) -> str:
        assert run(["fleet", *verb, "--store", str(store.path)]) == 0
        return capsys.readouterr().out

    assert said("resume", "a") == "a: is starting already\n"
    assert said("stop", "a") == "a: stops after a checkpoint\n"
    assert said("stop", "a") == "a: is stopped already\n"
    assert said("resume", "a") == "a: waits for devices\n"
    assert [type(event).__name__ for event, _ in store.entries() if not isinstance(event, Stopped | Ticked)] == [
        *("Submitted", "Suspended", "Resumed")
    ]


def test_a_job_that_saves_no_checkpoints_is_named(store, tmp_path, monkeypatch, capsys):
    live, engine = live_fleet(store, monkeypatch)
    event = submitted("a", {("big", 4): 1.0})
    body = {"job": to_json(event.job), "estimates": to_json(event.estimates)}
    store.request({"command": "submit", **body, "submission": to_json(replace(PROGRAM, is_script=True))})
    steps(live)

    def said() -> str:
        steps(live)
        assert run(["fleet", "status", "--store", str(store.path)]) == 0
        return capsys.readouterr().out

    engine.waiting["a", 1] = RUNNING
    assert "checkpoints" not in said()  # not known before its first step
    engine.num_taken = 1
    assert "a: saves no checkpoints on disk (Trainer(checkpoints=...))" in " ".join(said().split())
    engine.checkpoints = str(tmp_path)
    assert "saves no checkpoints" not in said()


def test_a_job_that_waits_for_its_scheduler_keeps_its_name(store, capsys):
    command = ["fleet", "submit", "--store", str(store.path), "--name", "a", "--time", "big:4=1", "program"]
    assert run(command) == 0
    assert run(command) == 2
    assert "a job called 'a' was submitted before" in capsys.readouterr().err
    assert len(store.pending()) == 1


def test_a_job_that_its_teams_limit_keeps_out_forever_is_refused(tmp_path, capsys):
    machines = fleet({"big": [4]}, (Team(name="t", limits=(DeviceCount(kind="big", num_devices=2),)),))
    with Store.create(tmp_path / "limited.db", machines, SchedulerOptions()) as store:
        submission = ["fleet", "submit", "--store", str(store.path), "--team", "t", "--time", "big:4=1"]
        assert run([*submission, "program"]) == 2
        assert "job 'program' can never start: it needs at least 4 x big" in capsys.readouterr().err
        assert not store.pending()
        assert run([*submission, "--time", "big:2=2", "program"]) == 0


def test_a_deadline_that_no_policy_keeps_is_not_promised(tmp_path, capsys):
    with Store.create(tmp_path / "fcfs.db", fleet({"big": [4]}), SchedulerOptions(policy="fcfs")) as store:
        job = ["--steps", "10", "--time", "big:4=1", "--deadline", "6h", "program"]
        assert run(["fleet", "submit", "--store", str(store.path), *job]) == 0
    assert "the deadline cannot be promised: policy 'fcfs' knows none" in capsys.readouterr().out


def test_a_deadline_is_answered_from_now_on_and_not_from_the_last_event(store, capsys):
    """Nothing has happened since the fleet was started ten hours ago."""
    store.set_meta("origin_unix_s", repr(time.time() - 36_000))
    eight_hours = ["--steps", "28800", "--time", "big:4=1", "--deadline", "6h", "program"]
    assert run(["fleet", "submit", "--store", str(store.path), *eight_hours]) == 0
    assert "the deadline will be missed by about 2 hours: best effort" in capsys.readouterr().out


def test_a_live_fleet_is_explained_as_of_now_and_not_of_its_last_event(store, capsys):
    state = State(fleet=store.fleet, options=store.options)
    for event in (submitted("first", {("big", 4): 1.0}), submitted("second", {("big", 4): 1.0}), Ticked(time_s=0.0)):
        state, actions = schedule(state, event)
        store.append(event, actions, submission=None if isinstance(event, Ticked) else PROGRAM)
    waiting = next(job.name for job in state.jobs if job.allocation is None)
    store.set_meta("origin_unix_s", repr(time.time() - 7 * 3600))
    assert run(["fleet", "explain", "--store", str(store.path), waiting]) == 0
    assert "a lease of at least 3.0 h, due in 5.0 h" in capsys.readouterr().out


def test_a_deadline_that_promised_ones_leave_no_room_for_is_answered(store, monkeypatch, capsys):
    live, _ = live_fleet(store, monkeypatch)
    submit(store, "promised", deadline_s=10_000.0, num_steps=1000)
    live.step()
    late = ["--steps", "1000", "--time", "big:4=1", "--deadline", "2h", "program"]
    assert run(["fleet", "submit", "--store", str(store.path), *late]) == 0
    assert "cannot be promised: promised deadlines of other" in capsys.readouterr().out
    live.close()


SWEEP = str(Path(__file__).parent.parent / "scripts" / "sweep_job.py")


def captured_here(script: str, *arguments: str) -> Workload:
    """The workload of a script, run in this process: a new one takes seconds to import torch."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "argv", [script, *arguments]):
        capture = WorkloadCapture(output=Path(folder) / "workload.json")
        with capturing(capture):
            runpy.run_path(script)
        return read_workload(capture.output)


def test_a_sweep_takes_in_trials_that_are_submitted_while_it_waits(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr("spindle.cli.script.workload_of_script", captured_here)
    options = SchedulerOptions(min_interval_s=1000.0, max_interval_s=1000.0)
    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), options) as store:
        live, _ = live_fleet(store, monkeypatch)
        submit(store, "first")  # after whose round the next one is far away
        for _ in range(3):
            live.step()

        def submitted(*arguments: str, code: int = 0) -> str:
            assert run(["fleet", "submit", "--store", str(store.path), *arguments]) == code
            live.step()
            written = capsys.readouterr()
            return " ".join((written.out + written.err).split())

        def values() -> dict[str, tuple[str, ...]]:
            return {job.name: store.submission(job.name).sweep[1:] for job in live.state.jobs[1:]}

        submitted("--sweep", "lr=1e-3,1e-2", SWEEP, "--steps", "9")
        (alone,) = live.state.jobs[1:]
        text = submitted("--sweep", "lr=1e-1", SWEEP, "--steps", "9")
        assert "sweep_job: is to take these trials in, --lr 1e-3 1e-2 1e-1; on 4 x big a step of all takes" in text
        assert values() == {"sweep_job": ("1e-3", "1e-2", "1e-1")}
        assert store.submission("sweep_job").command[-6:] == ("--steps", "9", "--lr", "1e-3", "1e-2", "1e-1")
        job = live.state.find("sweep_job")
        first, grown = ({estimate.cell: estimate.step_s for estimate in each.estimates} for each in (alone, job))
        assert all(first[cell] < grown[cell] < 1.5 * first[cell] for cell in first)
        # Other steps are another sweep, and so is one whose encoder cannot be shared.
        submitted("--sweep", "lr=1e-1", SWEEP, "--steps", "8")
        submitted("--sweep", "lr=1e-4", SWEEP, "--random")
        assert values().keys() == {"sweep_job", "sweep_job-2", "sweep_job-3"}
        text = submitted("--sweep", "lr=1e-5", SWEEP, "--random")
        assert "'sweep_job-3' waits with other trials, and does not take these in: together they would not run" in text
        text = submitted("--sweep", "lr=1e-2,1", SWEEP, "--steps", "9", code=2)
        assert "waits with --lr 1e-3 1e-2 1e-1; give values that it does not have already" in text
        assert "the value 1 is given twice" in submitted("--sweep", "lr=1,1", SWEEP, code=2)
        submitted("--sweep", "lr=1e-5", SWEEP, "--shared-steps")
        text = submitted("--sweep", "lr=1e-6", SWEEP, "--shared-steps")
        assert "does not take these in: together they would train for another number of steps" in text
        # So is one that starts before the scheduler sees the command.
        monkeypatch.setattr("spindle.fleet.live.LiveFleet._join", lambda *_: False)
        submitted("--sweep", "lr=1", SWEEP, "--steps", "9")
        assert values()["sweep_job-7"] == ("1",)
        assert values()["sweep_job"] == ("1e-3", "1e-2", "1e-1")
        events = [event for event, _ in store.entries() if isinstance(event, Estimated)]
        assert [(event.job, event.replaces) for event in events] == [("sweep_job", True)]


def test_a_job_that_has_started_or_changed_takes_nothing_in(store, monkeypatch):
    live, _ = live_fleet(store, monkeypatch)
    submit(store, "a")
    join = Join(job="a", before=PROGRAM, submission=replace(PROGRAM, sweep=("lr", "1")), estimates=())
    body = {"command": "submit", "join": to_json(replace(join, before=replace(PROGRAM, folder="/other")))}
    event = submitted("b", {("big", 4): 1.0})
    body |= {"job": to_json(event.job), "estimates": to_json(event.estimates), "submission": to_json(PROGRAM)}
    number = store.request(body)
    live.step()
    assert (store.answer(number), store.submission("a"), store.submission("b")) == ("ok", PROGRAM, PROGRAM)
    for _ in range(3):
        live.step()
    assert live.state.find("a").attempt == 1
    number = store.request({**body, "join": to_json(join), "job": {**body["job"], "name": "c"}})
    live.step()
    assert (store.answer(number), store.submission("a"), store.submission("c")) == ("ok", PROGRAM, PROGRAM)


def test_a_sweep_is_estimated_beside_its_trials_one_by_one(monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr("spindle.cli.script.workload_of_script", captured_here)
    arguments = ["fleet", "estimate", SWEEP, "--fleet", "h100x1", "--sweep", "lr=1e-3,1e-2"]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (whole,), trials_s = told["estimates"], [each["step_s"] for (each,) in told["trials"]]
    assert len(trials_s) == 2
    assert max(trials_s) < whole["step_s"] < sum(trials_s)
    assert run(arguments) == 0
    assert f"{sum(trials_s) / whole['step_s']:.2f}" in capsys.readouterr().out
    assert run(["fleet", "estimate", "clip-4", "--fleet", "h100x1", "--sweep", "lr=1,2"]) == 2
    assert "--sweep is for a training script" in capsys.readouterr().err


PLANNED_SCRIPT = """
import torch
from torch import nn

import spindle

head = spindle.module("head", nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))


@spindle.task(batch_size=8)
def pull(batch):
    return head(batch["x"]).square().mean()


def function(profile):
    raise AssertionError("only a training calls this")


trainer = spindle.Trainer(
    [pull], optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.1), planning=spindle.Planning({})
)
trainer.fit({{"pull": [{{"x": torch.randn(8, 64)}}]}}, steps=5, progress=False)
"""
BY_DEFAULT = "are estimated with 'wavefront':"
OF_STEPS = "places encoders by the items of each step, which only the running script has"


@pytest.mark.parametrize(
    ("planning", "planner", "note", "counts"),
    [
        ("", "wavefront", "", [1, 2, 3, 4]),
        *((f'planner="{name}"', name, "", [1, 2, 3, 4]) for name in ("sequential", "distmm", "task-level", "paper")),
        ("planner=function", "", f"{BY_DEFAULT} the script's planner is a function, which only the", [1, 2, 3, 4]),
        ('plan="plan.txt"', "", f"{BY_DEFAULT} the script has a plan of its own, which is for one", [1, 2, 3, 4]),
        ('planner="colocate"', "", f"{BY_DEFAULT} the script's planner 'colocate' {OF_STEPS}", [1, 2, 3, 4]),
        ('planner="pipeline", pipeline_parallel_degree=2', "", "", [2, 4]),  # the script plans each of its steps
    ],
)
def test_a_scripts_own_planner_plans_its_cells_or_it_is_said_why_not(
    planning, planner, note, counts, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("torch")
    monkeypatch.setattr("spindle.cli.script.workload_of_script", captured_here)
    script = tmp_path / "train.py"
    script.write_text(PLANNED_SCRIPT.format(planning))

    def told(*arguments: str) -> tuple[str, str]:
        assert run(["fleet", *arguments]) == 0
        written = capsys.readouterr()
        return written.out, " ".join((written.out + written.err).split())

    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), SchedulerOptions()) as store:
        live, _ = live_fleet(store, monkeypatch)
        _, text = told("submit", "--store", str(store.path), str(script))
        assert note in text
        assert (BY_DEFAULT in text) == bool(note)
        live.step()
        (job,) = live.state.jobs
        assert [estimate.cell.num_devices for estimate in job.estimates] == counts
        assert job.estimates[-1].grade == "planned"
        # A plan is handed to the job only if its own planner would have made it.
        stored = store.plan("train", job.estimates[-1].cell)
        assert ("" if stored is None else json.loads(stored[0])["planner"]) == planner
        _, text = told("explain", "--store", str(store.path), "train")
        assert note in text
        assert (BY_DEFAULT in text) == bool(note)
    out, text = told("estimate", str(script), "--fleet", "a100x4", "--planned", "--json")
    assert note in text
    assert [item["cell"]["num_devices"] for item in json.loads(out)["estimates"]] == counts


def test_an_estimated_step_is_the_scripts_with_all_micro_steps_and_one_update(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    script, cells, workloads = tmp_path / "train.py", {}, {}
    for count in (1, 6):
        accumulates = f"lr=0.1), gradient_accumulation_steps={count}"
        script.write_text(PLANNED_SCRIPT.format("").replace("lr=0.1)", accumulates))
        workloads[count] = captured_here(str(script))
        monkeypatch.setattr("spindle.cli.script.workload_of_script", lambda *_, count=count: workloads[count])
        for flags in ((), ("--planned",)):
            assert run(["fleet", "estimate", str(script), "--fleet", "a100x4", *flags, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)["estimates"]
            cells[count, bool(flags)] = {item["cell"]["num_devices"]: item["step_s"] for item in told}
    for num_devices, step_s in cells[6, True].items():
        assert cells[6, False][num_devices] == pytest.approx(6 * cells[1, False][num_devices])
        assert cells[6, False][num_devices] < step_s < 6 * cells[1, True][num_devices]
    # On one device, a step is its micro-steps and one update.
    once_s, update_s = cells[1, True][1], cells[1, True][1] - cells[1, False][1]
    assert cells[6, True][1] == pytest.approx(6 * (once_s - update_s) + update_s)
    assert run(["plan", str(script), "--cluster", "a100x1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "accumulates gradients over 6 batches of each task" in text
    assert f"a step takes {seconds(cells[6, True][1])}, with one" in text


def test_a_script_whose_planner_or_pipeline_suits_no_cell_is_refused_with_the_reason(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr("spindle.cli.script.workload_of_script", captured_here)
    script = tmp_path / "train.py"
    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), SchedulerOptions()) as store:
        for planning, reason in (
            ('planner="pipeline", pipeline_parallel_degree=3', "=3 of the script does not divide 4 devices"),
            ('planner="exhaustive"', "it cannot be planned: exhaustive search would try"),
        ):
            script.write_text(PLANNED_SCRIPT.format(planning).replace("range(4)", "range(40)"))
            assert run(["fleet", "submit", "--store", str(store.path), "--count", "4", str(script)]) == 2
            assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("job", ["a", "standby-a"])
def test_of_two_agents_for_the_same_devices_the_one_on_standby_is_ended(job):
    """The scheduler died before it had ended agents on standby that did not come to begin."""
    killed, group = [], {"name": f"fleet/1/{job}/2", "state": "CREATED", "bundles": {0: {}}}
    for names in (
        [f"{group['name']}/standby-0", f"{group['name']}/0"],
        [f"{group['name']}/0", f"{group['name']}/standby-0"],
    ):
        report = SimpleNamespace(remote=lambda: SimpleNamespace(is_started=True))
        engine = object.__new__(RayEngine)
        engine._prefix, engine._attempts, engine._standbys = "fleet/1/", {}, {}
        engine._ray = SimpleNamespace(
            util=SimpleNamespace(
                list_named_actors=lambda names=names: names,
                placement_group_table=lambda: {"1": group},
                get_placement_group=lambda name: name,
            ),
            exceptions=SimpleNamespace(RayError=RuntimeError),
            get_actor=lambda name, report=report: SimpleNamespace(name=name, report=report),
            get=lambda calls, timeout: calls,
            kill=lambda agent: killed.append(agent.name),
        )
        assert engine.adopt() == [(job, 2)]
    assert killed == [f"{group['name']}/standby-0"] * 2


@pytest.mark.parametrize("is_late", [False, True])
def test_devices_of_a_discarded_attempt_are_freed_whenever_its_group_is_created(is_late):
    removed = []
    engine = object.__new__(RayEngine)
    engine._ray = SimpleNamespace(util=SimpleNamespace(remove_placement_group=removed.append))
    engine._attempts, engine._standbys = {("a", 1): (attempt := _RayAttempt(start=None))}, {}

    def create(key, attempt):
        if is_late:
            engine.discard(key)
        attempt.group = "group"

    engine._create = create
    engine._bring_up(("a", 1), attempt)
    engine.discard(("a", 1))
    assert removed == ["group"]


def test_a_head_that_does_not_answer_does_not_hold_up_a_scheduler_that_discards_an_attempt(monkeypatch):
    monkeypatch.setattr("spindle.fleet.ray_engine.PING_S", 0.05)
    answer, removed = threading.Event(), []

    def remove(group):
        assert answer.wait(30)
        removed.append(group)

    engine = object.__new__(RayEngine)
    engine._ray = SimpleNamespace(util=SimpleNamespace(remove_placement_group=remove))
    engine._attempts, engine._standbys = {("a", 1): _RayAttempt(start=None, group="group")}, {}
    engine.discard(("a", 1))
    assert (engine._attempts, removed) == ({}, [])
    answer.set()


def test_a_ray_that_could_not_be_remembered_is_ended_before_the_next_is_started(monkeypatch):
    ended, sessions = [], iter("bc")

    def start(nodes, remember):
        session = next(sessions)
        remember(LocalRay(address="", session=session))
        remember(LocalRay(address="127.0.0.1:1", session=session))
        return LocalRay(address="127.0.0.1:1", session=session)

    def remember(local):
        if local.address and local.session == "b":
            raise StoreError("the disk is full")

    monkeypatch.setattr("spindle.fleet.ray_cluster.start_local_ray", start)
    monkeypatch.setattr("spindle.fleet.ray_cluster.end_local_ray", lambda local: ended.append(local.session))
    cluster = object.__new__(RayCluster)
    cluster.ray, cluster._connect = SimpleNamespace(is_initialized=lambda: False), lambda: None
    cluster.local, cluster._local_nodes, cluster._remember = LocalRay(address="127.0.0.1:1", session="a"), (), remember
    cluster.ids, cluster._checks, cluster._checked, cluster._lost_s = {}, {}, {}, float("-inf")
    with pytest.raises(StoreError):
        cluster.recover()
    assert cluster.recover()
    assert (ended, cluster.local.session) == (["a", "b"], "c")


def test_a_node_with_another_spindle_is_named_once_and_is_not_used(caplog, monkeypatch):
    monkeypatch.setattr("spindle.fleet.ray_cluster.cluster_answers", lambda: True)
    cluster = object.__new__(RayCluster)
    node = {"NodeID": "c0ffee", "Alive": True, "Resources": {"GPU": 1.0}, "NodeManagerAddress": "10.0.0.2"}
    cluster.ray = SimpleNamespace(
        nodes=lambda: [node],
        wait=lambda calls, timeout: (calls, []),
        get=lambda call: call,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    check = SimpleNamespace(remote=lambda: ("3.9.1", "0.0.1"))
    cluster._check = SimpleNamespace(options=lambda **_: check)
    cluster.local, cluster._describe = None, lambda node: None
    cluster.ids, cluster.hosts, cluster.sizes, cluster._alive = {}, {}, {}, {}
    cluster._checks, cluster._checked = {}, {}
    for _ in range(2):
        assert cluster.nodes()["c0ffee"].is_checked is False
    (record,) = caplog.records
    assert record.message.startswith("node c0ffee has Python 3.9.1 and Spindle 0.0.1, expected 3.")
    assert record.message.endswith("as here; install the same on it")


def test_a_node_that_joins_without_a_kind_is_named_once_and_is_not_used(caplog):
    describe = node_describer(fleet({"big": [4]}), "10.0.0.1:6379")
    node = {"NodeID": "c0ffee" * 8, "Resources": {"GPU": 4.0}, "Labels": {}}
    assert [describe(node) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "10.0.0.1:6379: node c0ffeec0ffee has 4 devices and no kind; start it with ray start" in record.message
    assert record.message.endswith("; it is not used")
    island = describe({**node, "Labels": {"spindle-kind": "big"}})
    assert (island.kind.name, island.num_devices) == ("big", 4)


def test_an_agents_error_is_told_without_rays_traceback():
    class RayError(Exception):
        cause = InputError("rank 0 cannot be started (no such file)")

    def create(key, attempt):
        raise RayError("ray::RayAgent.start()\n  File ...")

    engine = object.__new__(RayEngine)
    engine._create, attempt = create, _RayAttempt(start=None)
    engine._bring_up(("a", 1), attempt)
    assert attempt.reason == "could not be started: rank 0 cannot be started (no such file)"


def test_a_ray_that_is_started_anew_knows_nothing_of_the_one_before(monkeypatch):
    pytest.importorskip("ray", reason="live fleets need Ray: pip install 'spindle-train[fleet]'")
    given = []

    class Head:
        gcs_address = "127.0.0.1:1"

        def __init__(self, parameters, **_):
            given.append(dict(parameters._system_config))
            parameters._system_config["object_spilling_config"] = "a folder of this session"  # as Ray does

        def get_session_dir_path(self):
            return "session"

    monkeypatch.setattr("spindle.fleet.ray_nodes.import_ray", lambda *, is_local: None)  # which sets variables
    monkeypatch.setattr("ray._private.node.Node", Head)
    known = []
    start_local_ray((), known.append)
    assert [bool(ray.address) for ray in known] == [False, True]  # known before it has processes
    start_local_ray((), known.append)
    assert given[0] == given[1]
