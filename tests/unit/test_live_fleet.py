"""The loop of a live fleet, with an engine that does nothing: what it asks for, and what users are told."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from fleets import fleet, submitted
from spindle.artifact import to_json
from spindle.cli.main import run
from spindle.errors import InputError, StoreError
from spindle.fleet import Draining, NodeJoined, SchedulerOptions
from spindle.fleet.engine import ENDED, PENDING, AttemptReport, NodeStatus
from spindle.fleet.live import LiveFleet
from spindle.fleet.ray_engine import RayEngine, _RayAttempt
from spindle.fleet.ray_nodes import LocalRay, start_local_ray
from spindle.fleet.store import Store, Submission

PROGRAM = Submission(command=("program",), is_script=False, folder="/", logs="/logs", environment={})


class IdleEngine:
    """Nodes that are there, and attempts that wait until they are told to stop."""

    def __init__(self, store: Store) -> None:
        self._names, self.waiting, self.grace_s = store.fleet.node_names, {}, None

    def nodes(self):
        return {name: NodeStatus(identity=name) for name in self._names}

    def adopt(self):
        return ()

    def start(self, start):
        self.waiting[start.job, start.attempt] = PENDING

    def stop(self, key, grace_s):
        self.waiting[key], self.grace_s = ENDED, grace_s

    def discard(self, key):
        del self.waiting[key]

    def poll(self):
        return [
            AttemptReport(job=job, attempt=attempt, phase=phase, reason="waits for devices")
            for (job, attempt), phase in self.waiting.items()
        ]


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "fleet.db", fleet({"big": [4]}), SchedulerOptions(min_interval_s=0.1)) as store:
        yield store


def submit(store: Store, name: str) -> None:
    event = submitted(name, {("big", 4): 1.0})
    body = {"job": to_json(event.job), "estimates": to_json(event.estimates), "submission": to_json(PROGRAM)}
    store.request({"command": "submit", **body})


def live_fleet(store: Store, monkeypatch) -> tuple[LiveFleet, IdleEngine]:
    monkeypatch.setattr("spindle.fleet.live._WRITE_S", 0.0)
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
    first.go_down()
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


def test_a_job_that_waits_for_its_scheduler_keeps_its_name(store, capsys):
    command = ["fleet", "submit", "--store", str(store.path), "--name", "a", "--time", "big:4=1", "program"]
    assert run(command) == 0
    assert run(command) == 2
    assert "a job called 'a' was submitted before" in capsys.readouterr().err
    assert len(store.pending()) == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_devices_of_a_discarded_attempt_are_freed_whenever_its_group_is_created(is_late):
    removed = []
    engine = object.__new__(RayEngine)
    engine._ray = SimpleNamespace(util=SimpleNamespace(remove_placement_group=removed.append))
    engine._attempts = {("a", 1): (attempt := _RayAttempt(start=None))}

    def create(key, attempt):
        if is_late:
            engine.discard(key)
        attempt.group = "group"

    engine._create = create
    engine._bring_up(("a", 1), attempt)
    engine.discard(("a", 1))
    assert removed == ["group"]


def test_a_head_that_does_not_answer_does_not_hold_up_a_scheduler_that_discards_an_attempt(monkeypatch):
    monkeypatch.setattr("spindle.fleet.ray_engine._PING_S", 0.05)
    answer, removed = threading.Event(), []

    def remove(group):
        assert answer.wait(30)
        removed.append(group)

    engine = object.__new__(RayEngine)
    engine._ray = SimpleNamespace(util=SimpleNamespace(remove_placement_group=remove))
    engine._attempts = {("a", 1): _RayAttempt(start=None, group="group")}
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

    monkeypatch.setattr("spindle.fleet.ray_engine.start_local_ray", start)
    monkeypatch.setattr("spindle.fleet.ray_engine.end_local_ray", lambda local: ended.append(local.session))
    engine = object.__new__(RayEngine)
    engine._ray, engine._connect = SimpleNamespace(is_initialized=lambda: False), lambda: None
    engine.local, engine._local_nodes, engine._remember = LocalRay(address="127.0.0.1:1", session="a"), (), remember
    engine._ids, engine._checks, engine._checked, engine._lost_s = {}, {}, {}, float("-inf")
    with pytest.raises(StoreError):
        engine.recover()
    assert engine.recover()
    assert (ended, engine.local.session) == (["a", "b"], "c")


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
