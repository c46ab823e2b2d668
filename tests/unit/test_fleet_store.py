"""The store of a live fleet: what is in it is whole, and one scheduler uses it."""

from __future__ import annotations

import json
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fleets import fleet, submitted
from spindle.artifact import to_json
from spindle.cli.main import run
from spindle.errors import InputError, StoreError
from spindle.fleet import Cell, NodeShare, Plan, SchedulerOptions, Start, State, Ticked, schedule
from spindle.fleet.event_log import action_line, latest_state, read_event_log, replay
from spindle.fleet.journal import FleetClock
from spindle.fleet.store import AttemptRecord, Store, StoredPlan, Submission, network_file_system

MACHINES = fleet({"big": [4, 4], "small": [2]})
JOB = Submission(command=("train.py",), is_script=True, folder="/", logs="/logs", environment={})


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "fleet.db", MACHINES, SchedulerOptions(realloc_s=60.0)) as store:
        yield store


def filled(store: Store) -> State:
    """A store with two jobs that were started."""
    state = State(fleet=store.fleet, options=store.options)
    for event in (
        submitted("a", {("big", 4): 1.0, ("small", 2): 3.0}),
        submitted("b", {("big", 4): 1.0}, 1.0),
        Ticked(time_s=2.0),
    ):
        state, actions = schedule(state, event)
        store.append(event, actions, submission=JOB if hasattr(event, "estimates") else None)
    return state


def test_recorded_events_are_replayed_byte_for_byte(store, capsys):
    state = filled(store)
    log = read_event_log(store.path)
    result = replay(log)
    assert result.state == state
    assert not result.difference
    assert result.num_actions == 2
    assert [action_line(entry.action) for entry in store.actions()] == [
        text for _, texts in log.entries for text in texts
    ]
    assert run(["fleet", "replay", str(store.path)]) == 0
    assert run(["fleet", "replay", "--store", str(store.path)]) == 0
    assert run(["fleet", "nodes", "--store", str(store.path)]) == 0
    assert run(["fleet", "explain", str(store.path), "a"]) == 0
    assert capsys.readouterr().out.startswith("the same: 3 events, 2 actions")


def test_a_store_whose_snapshot_another_version_wrote_is_replayed_from_its_first_event(store):
    state = filled(store)
    written = to_json(state)
    written["jobs"] = [{**job, "trained_s": 1.0} for job in written["jobs"]]
    store.write_snapshot(json.dumps(written))
    assert latest_state(store) == state
    store.write_snapshot(json.dumps(to_json(replace(state, now_s=9.0))))  # one that can be read is used
    assert latest_state(store).now_s == 9.0


def test_a_reader_beside_the_scheduler_sees_every_event_with_its_actions(store, monkeypatch):
    filled(store)
    event = submitted("c", {("big", 4): 1.0}, 3.0)
    action = Plan(job="c", cell=Cell(kind="big", num_devices=4))

    class Slow:
        """A connection between whose queries the scheduler appends an event."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection, self._num_queries = connection, 0

        def execute(self, *arguments: object) -> list[tuple]:
            rows = self._connection.execute(*arguments)
            self._num_queries += 1
            if self._num_queries == 1:
                rows = Rows(rows.fetchall())
                store.append(event, (action,))
            return rows

    class Rows(list):
        def fetchall(self) -> list[tuple]:
            return self

    with Store.open(store.path) as reader, monkeypatch.context() as patch:
        patch.setattr(reader, "_connection", Slow(reader._connection))
        seen = reader.entries()
    written = store.entries()
    assert seen == written[: len(seen)]
    assert len(written) == 4


def test_an_event_with_its_actions_is_written_as_a_whole_or_not_at_all(store):
    event = submitted("a", {("big", 4): 1.0})
    plan = StoredPlan(cell=Cell(kind="big", num_devices=4), plan="{}", profile="{}")
    number = store.request({"command": "submit"})
    store.append(event, (), submission=JOB, plans=(plan,), answers=((number, "ok"),))
    with pytest.raises(StoreError, match="UNIQUE constraint failed"):  # the job is there already
        store.append(event, (Plan(job="a", cell=plan.cell),), submission=JOB)
    assert len(store.entries()) == 1
    assert store.actions() == []
    assert store.answer(number) == "ok"
    assert store.pending() == []
    assert store.plan("a", plan.cell) == ("{}", "{}")


def test_actions_stay_unconfirmed_until_they_were_executed(store):
    filled(store)
    first, second = store.actions()
    store.confirm(first.number, 3.0)
    assert [entry.is_done for entry in store.actions()] == [True, False]
    assert isinstance(second.action, Start)


def test_a_full_disk_is_one_error_and_nothing_is_half_written(store):
    filled(store)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    long = submitted("x" * 50_000, {("big", 4): 1.0}, 3.0)  # pages that there are not
    with pytest.raises(StoreError, match=r"fleet.db: the store of the fleet cannot be used \(database or disk is full"):
        store.append(long, ())
    num_events = len(store.entries())
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.append(Ticked(time_s=4.0), ())
    assert len(store.entries()) == num_events + 1


def test_a_store_whose_creation_fails_or_that_exists_leaves_nothing_behind(store, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="cannot be created"):
        Store.create(store.path, MACHINES, SchedulerOptions())
    with monkeypatch.context() as patch:
        patch.setattr("spindle.fleet.store._SCHEMA", "nonsense;")
        with pytest.raises(StoreError):
            Store.create(tmp_path / "other.db", MACHINES, SchedulerOptions(), {"id": "1"})
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"fleet.db"}


def test_one_scheduler_uses_a_store_and_others_read_it(store, capsys):
    filled(store)
    store.take_lock()
    with Store.open(store.path) as other:
        assert other.has_scheduler()
        with pytest.raises(InputError, match="in use: another scheduler runs this fleet"):
            other.take_lock()
    store.close()
    with Store.open(store.path) as other:
        assert not other.has_scheduler()
        other.write_attempts(
            [
                AttemptRecord(
                    job="a",
                    attempt=1,
                    cell=Cell(kind="big", num_devices=4),
                    nodes=(NodeShare(node="node0", num_devices=4),),
                    start_s=2.0,
                    step=17,
                )
            ]
        )
        assert other.attempts()[0].step == 17
    assert run(["fleet", "status", "--store", str(store.path)]) == 0
    text = capsys.readouterr().out
    assert "17 of 100000" in text
    assert "The scheduler is down" in text


def test_a_store_of_another_version_or_kind_is_refused(store, tmp_path, capsys):
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE meta SET value = '7' WHERE key = 'version'")
    store.close()
    assert run(["fleet", "status", "--store", str(store.path)]) == 2
    assert "a store of version 7, this Spindle reads version 1" in capsys.readouterr().err
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE a (b)")
    assert run(["fleet", "status", "--store", str(other)]) == 2
    assert "got another SQLite file" in capsys.readouterr().err
    (tmp_path / "text.db").write_text("hello")
    assert run(["fleet", "replay", str(tmp_path / "text.db")]) == 2
    assert run(["fleet", "up", "--store", str(tmp_path / "text.db")]) == 2
    assert run(["fleet", "down", "--store", str(tmp_path / "none.db")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_machines_that_cannot_be_are_refused_before_a_store_is_made(tmp_path, capsys):
    store = tmp_path / "fleet.db"
    empty = tmp_path / "empty.toml"
    empty.write_text("name = 'empty'")
    for options, words in (
        (["--fake", str(empty)], "a fleet needs at least one node"),
        (["--fake", "a100x8", "--address", "127.0.0.1:1"], "not both"),
        (["--address", "127.0.0.1:1"], "there is no Ray"),
        (["--engine", "kubernetes"], "expected ray or slurm"),
        (["--policy", "none", "--fake", "a100x8"], "none"),
    ):
        assert run(["fleet", "up", "--store", str(store), *options]) == 2
        text = capsys.readouterr().err
        assert words in text
        assert "Traceback" not in text
        assert not store.exists()


@pytest.mark.parametrize("option", [("--fake", "a100x8"), ("--policy", "price"), ("--interval", "7")])
def test_a_fleet_that_exists_is_not_described_again(option, store, capsys):
    assert run(["fleet", "up", "--store", str(store.path), *option]) == 2
    text = capsys.readouterr().err
    assert "this fleet exists" in text
    assert f"leave {option[0]} out" in text


def test_the_clock_of_a_fleet_never_goes_back(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    clock = FleetClock(origin_unix_s=900.0, last_s=250.0)  # the system's clock was set back since
    first = clock.now_s()
    assert first >= 250.0
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert clock.now_s() >= first


def test_a_local_folder_is_not_on_a_network(tmp_path):
    assert network_file_system(Path(tmp_path)) == ""


def test_a_store_on_a_network_file_system_has_no_write_ahead_log_and_up_says_so(tmp_path, monkeypatch, capsys):
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"40 22 0:40 / {tmp_path} rw,relatime shared:2 - nfs4 server:/export rw\n"
    )
    read_text = Path.read_text

    def patched(path, *arguments, **options):
        return mounts if str(path) == "/proc/self/mountinfo" else read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", patched)
    path = tmp_path / "fleet.db"
    assert network_file_system(path) == "nfs4"
    Store.create(path, MACHINES, SchedulerOptions()).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()

    def no_engine(store):
        raise InputError("no engine")

    monkeypatch.setattr("spindle.fleet.machines.open_engine", no_engine)
    assert run(["fleet", "up", "--store", str(path)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "is on a network file system (nfs4): it is written without a write-ahead log, slower" in error


def test_without_the_extra_up_says_what_to_install_and_makes_no_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    path = tmp_path / "fleet.db"
    assert run(["fleet", "up", "--store", str(path), "--fake", "a100x2"]) == 2
    assert "pip install 'spindle-train[fleet]'" in capsys.readouterr().err
    assert not path.exists()
