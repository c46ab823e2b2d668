"""Live fleets: a real scheduler, Ray nodes with devices that do not exist, real trainings. Nothing is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from live_fleets import (
    SCRIPT,
    LiveTestFleet,
    fleet_file,
    largest_difference,
    processes_of,
    steps_of,
    undisturbed,
    weights_of,
)
from spindle.cli.main import run
from spindle.errors import InputError
from spindle.fleet import Draining, Estimated, NodeLost, Resize, Start, Started, Stopped, Submitted
from spindle.fleet.event_log import replay
from spindle.fleet.machines import ray_island
from spindle.fleet.ray_nodes import LocalRay, end_processes, is_listening, session_processes
from spindle.fleet.store import Store

pytest.importorskip("ray", reason="live fleets need Ray: pip install 'spindle-train[fleet]'")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    # Ray leaves sockets and processes to the operating system.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
STEPS = 30
PAUSED = ("--pause", "0.1")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Three nodes with five devices. Tests use it one after the other, each with jobs of its own."""
    folder = tmp_path_factory.mktemp("fleet")
    machines = fleet_file(folder / "fleet.toml", a100=(1, 1), l40s=(3,))
    fleet = LiveTestFleet(folder, str(machines), "--interval", "1", "--reallocation", "1", "--view")
    try:
        fleet.up()
        yield fleet
    finally:
        local = fleet.local()
        fleet.down()
        assert not session_processes(local)
        assert not processes_of(folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of one process that nobody disturbs."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "job", STEPS)


def is_same(folder: Path, expected) -> bool:
    return largest_difference(weights_of(folder), expected) < 1e-9


def test_up_serves_its_report_on_this_machine_until_it_ends(fleet):
    match = fleet.wait(lambda: re.search(r"view: http://127\.0\.0\.1:(\d+)/", fleet.output()), "the address is shown")

    def page() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=30)
        try:
            connection.request("GET", "/")
            return connection.getresponse().read()
        except OSError:
            return b""
        finally:
            connection.close()

    assert b"No job was submitted yet" in page()
    fleet.kill_scheduler()
    fleet.wait(lambda: not page(), "nothing listens there")
    fleet.up()


def test_training_continues_without_a_scheduler_and_the_next_one_adopts_it(fleet, expected):
    folder = fleet.submit("adopted", STEPS, *PAUSED, options=("--kinds", "l40s", "--count", "2"))
    before = fleet.wait_for_step(folder, 2)
    fleet.kill_scheduler()
    alone = fleet.wait_for_step(folder, before["step"] + 5)  # nobody schedules
    code, text = fleet.call("status")
    assert code == 0
    assert "The scheduler is down" in text
    fleet.up()
    assert fleet.wait_for_end("adopted") == "completed"
    assert {line["pid"] for line in steps_of(folder)} == {before["pid"]} == {alone["pid"]}
    assert fleet.job("adopted")["attempt"] == 1
    assert steps_of(folder)[-1]["cluster"] == "2 x L40S"  # it has measured and planned nothing: no CPU has that profile
    assert is_same(folder, expected)


def test_a_job_on_a_lost_node_resumes_elsewhere_on_another_number_of_devices(fleet, expected):
    folder = fleet.submit("moved", STEPS, *PAUSED, options=("--count", "1-2", "--kinds", "a100"))
    fleet.wait_for_step(folder, 7)
    job = fleet.job("moved")
    assert job["cell"].startswith("2 x")  # on both nodes
    fleet.kill_node("node1")
    fleet.wait_for_step(folder, 0, attempt=job["attempt"] + 1)
    assert not fleet.status()["nodes"]["node1"]
    fleet.add_node("node1", "a100", 1)
    assert fleet.wait_for_end("moved") == "completed"
    assert is_same(folder, expected)
    starts = [line["step"] for line in steps_of(folder) if "step" in line]
    repeated = len(starts) - len(set(starts))
    assert repeated <= 10 + 2  # one checkpoint interval for each restart, and steps in flight
    lost = [event for event, _ in fleet.log().entries if isinstance(event, NodeLost)]
    assert [event.node for event in lost] == ["node1"]
    fleet.wait(lambda: fleet.status()["nodes"]["node1"], "the node is back, and was checked")


def test_a_killed_rank_is_resumed_and_a_drained_node_is_left(fleet, expected):
    """ray #63968: the warning before a node leaves is used."""
    folder = fleet.submit("drained", STEPS, *PAUSED, options=("--kinds", "a100", "--count", "1"))
    line = fleet.wait_for_step(folder, 6)
    os.kill(line["pid"], signal.SIGKILL)
    line = fleet.wait_for_step(folder, 0, attempt=2)
    (node,) = fleet.job("drained")["nodes"]
    assert fleet.call("drain", node)[0] == 0
    fleet.wait_for_step(folder, 0, attempt=3)
    assert fleet.job("drained")["nodes"] != [node]
    assert fleet.call("drain", node, "--end")[0] == 0
    assert any(isinstance(event, Draining) for event, _ in fleet.log().entries)
    assert fleet.wait_for_end("drained") == "completed"
    assert is_same(folder, expected)


def test_a_job_resumes_from_memory_while_its_node_lives(fleet, expected):
    arguments = (*PAUSED, "--every", "1000", "--memory-every", "1")
    folder = fleet.submit("remembered", STEPS, *arguments, options=("--kinds", "l40s", "--count", "2"))
    line = fleet.wait_for_step(folder, 8)
    os.kill(line["pid"], signal.SIGKILL)
    fleet.wait_for_step(folder, 0, attempt=2)
    steps = {
        number: [line["step"] for line in steps_of(folder) if line.get("attempt") == number and "step" in line]
        for number in (1, 2)
    }
    assert not list((folder / "saved").glob("step-*"))  # nothing is on disk
    assert steps[2][0] in (steps[1][-1], steps[1][-1] + 1)
    assert fleet.wait_for_end("remembered") == "completed"
    assert is_same(folder, expected)


def test_a_script_that_fails_at_the_same_step_again_has_failed_with_its_traceback(fleet):
    fleet.submit("broken", STEPS, "--raise-at", "7", options=("--count", "1"))
    assert fleet.wait_for_end("broken") == "failed"
    job = fleet.job("broken")
    assert job["attempt"] == 2
    assert "ValueError: step 7 is broken" in job["reason"]
    assert "fleet_job.py" in job["reason"]  # its own line
    code, text = fleet.call("logs", "broken", "--lines", "4")
    assert code == 0
    assert "step 7 is broken" in text


def trains_on_beside_a_full_disk(fleet: LiveTestFleet, folder: Path) -> None:
    """While the store cannot be written, nothing is reallocated."""
    line = fleet.wait_for_step(folder, 1)
    assert fleet.scheduler is not None
    resource.prlimit(fleet.scheduler.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    num_events = len(fleet.log().entries)
    later = fleet.wait_for_step(folder, line["step"] + 6)
    assert later["pid"] == line["pid"]
    assert len(fleet.log().entries) <= num_events + 1
    assert fleet.is_up()
    resource.prlimit(fleet.scheduler.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_job_is_stopped_with_a_checkpoint_and_resumed_and_the_fleet_goes_down_and_up(fleet, expected):
    folder = fleet.submit("stopped", STEPS, "--every", "1000", *PAUSED, options=("--count", "1"))
    trains_on_beside_a_full_disk(fleet, folder)
    assert fleet.call("stop", "stopped")[0] == 0
    fleet.wait(lambda: not processes_of(folder), "its ranks are gone")
    fleet.wait(lambda: fleet.job("stopped")["phase"] == "suspended", "it is suspended")
    saved = fleet.wait(lambda: fleet.job("stopped")["saved_step"], "it is saved")
    assert fleet.call("resume", "stopped")[0] == 0
    fleet.wait_for_step(folder, saved, attempt=2)
    fleet.down()
    assert not processes_of(folder)
    fleet.up()
    assert fleet.wait_for_end("stopped") == "completed"
    assert is_same(folder, expected)
    steps = [line["step"] for line in steps_of(folder) if "step" in line]
    assert len(steps) - len(set(steps)) <= 4  # reports in flight; no step was trained twice but those


def test_a_job_runs_under_a_plan_made_from_its_measured_profile(fleet, expected):
    profile = fleet.folder / "profile.json"
    scratch = str(fleet.folder / "unused")
    assert run(["profile", "-n", "2", "-o", str(profile), str(SCRIPT), scratch, str(STEPS)]) == 0
    options = ("--count", "1", "--kinds", "a100", "--profile", f"a100={profile}")
    folder = fleet.submit("measured", STEPS, options=options)
    assert fleet.wait_for_end("measured") == "completed"
    assert is_same(folder, expected)
    with Store.open(fleet.store_path) as store:
        _, used = store.plan("measured", store.attempts()[-1].cell)
    assert json.loads(used)["measured_on"] == json.loads(profile.read_text())["measured_on"]
    last = next(line for line in steps_of(folder) if line.get("ended"))
    assert last["cluster"] == "2 processes on this machine"  # of the profile: this one process measured nothing


def test_a_job_whose_task_ends_is_estimated_and_planned_anew(fleet):
    folder = fleet.folder / "changing"
    folder.mkdir()
    script = SCRIPT.parent / "changing_job.py"
    options = ("--name", "changing", "--kinds", "a100", "--count", "1")
    code, text = fleet.call("submit", *options, str(script), str(folder), "4000", "8", "--pause", "0.1")
    assert code == 0, text
    fleet.wait_for_step(folder, 9)

    def estimated() -> list[Estimated]:
        events = [event for event, _ in fleet.log().entries]
        return [event for event in events if isinstance(event, Estimated) and event.job == "changing"]

    fleet.wait(lambda: any(event.replaces for event in estimated()), "its new workload is reported")
    fleet.wait(lambda: not estimated()[-1].replaces, "its cell is planned anew")
    *_, changed, planned = estimated()
    before = next(event for event, _ in fleet.log().entries if isinstance(event, Submitted) and is_job(event))
    assert [estimate.grade for estimate in changed.estimates] == ["bound"]
    assert planned.estimates[0].grade == "planned"
    assert planned.estimates[0].step_s < before.estimates[0].step_s  # one task less
    with Store.open(fleet.store_path) as store:
        submission = store.submission("changing")
        plan, _ = store.plan("changing", planned.estimates[0].cell)
    assert [task["name"] for task in submission.workload["tasks"]] == ["first"]
    assert "second" not in plan
    assert fleet.call("stop", "changing")[0] == 0
    fleet.wait(lambda: fleet.job("changing")["phase"] == "suspended", "it is stopped")
    assert not replay(fleet.log()).difference


def is_job(event: Submitted) -> bool:
    return event.job.name == "changing"


def test_two_small_jobs_run_at_once_on_shares_of_one_device(tmp_path, expected):
    machines = fleet_file(tmp_path / "fleet.toml", h200=(1,))
    machines.write_text(f"{machines.read_text()}\nshares = 2\n")
    shared = LiveTestFleet(tmp_path, str(machines), "--interval", "1", "--reallocation", "1")
    try:
        shared.up()
        folders = [shared.submit(name, STEPS, "--pause", "0.5") for name in ("first", "second")]
        for folder in folders:
            shared.wait_for_step(folder, 2)
        shared.wait(lambda: all(job["phase"] == "running" for job in shared.status()["jobs"]), "both jobs run")
        jobs = shared.status()["jobs"]
        assert [(job["cell"], job["nodes"]) for job in jobs] == [("1 x H200-SXM/2", ["node0"])] * 2
        for name, folder in zip(("first", "second"), folders, strict=True):
            assert shared.wait_for_end(name) == "completed"
            assert is_same(folder, expected)
    finally:
        shared.down()


def test_a_job_trains_on_until_the_ranks_that_resize_it_are_ready(fleet, tmp_path):
    """From one rank to more, and back to one, beside an urgent job. No step is lost or taken twice."""

    def occupy(name: str) -> None:
        options = ("--name", name, "--time", "l40s:2=1000", "--steps", "1", "--priority", "urgent")
        code, text = fleet.call("submit", *options, "sleep", "1000")
        assert code == 0, text

    def wait_until_known(attempt: int) -> None:
        """An attempt that the scheduler does not know to run yet is stopped at once, not resized while it trains."""

        def is_known() -> bool:
            events = [event for event, _ in fleet.log().entries if isinstance(event, Started)]
            return any((event.job, event.attempt) == ("wide", attempt) for event in events)

        fleet.wait(is_known, f"attempt {attempt} has started")

    steps = 200  # more than there is time for until it is resized
    occupy("before")
    arguments = ("--pause", "1", "--scales", "--every", "1000")
    folder = fleet.submit("wide", steps, *arguments, options=("--kinds", "l40s", "--count", "1-3"))
    wait_until_known(fleet.wait_for_step(folder, 1)["attempt"])
    assert fleet.call("stop", "before")[0] == 0
    grown = fleet.wait_for_step(folder, 0, attempt=2)
    wait_until_known(grown["attempt"])
    assert not fleet.job("wide")["cell"].startswith("1 x")
    occupy("after")
    shrunk = fleet.wait_for_step(folder, 0, attempt=grown["attempt"] + 1)
    assert fleet.job("wide")["cell"].startswith("1 x")
    (folder / "fast").touch()
    assert fleet.wait_for_end("wide") == "completed"
    for name in ("before", "after"):
        assert fleet.call("stop", name)[0] == 0
    events = [event for event, _ in fleet.log().entries]
    started = {event.attempt: event for event in events if isinstance(event, Started) and event.job == "wide"}
    stopped = {event.attempt: event for event in events if isinstance(event, Stopped) and event.job == "wide"}
    for line in (grown, shrunk):
        assert started[line["attempt"]].paused_s is not None  # the attempt before trained on meanwhile
        assert line["step"] == stopped[line["attempt"] - 1].step
    assert [line["step"] for line in steps_of(folder) if "step" in line] == list(range(steps))
    assert is_same(folder, undisturbed(tmp_path / "wide", steps))


def test_any_command_runs_with_step_times_given_by_hand(fleet):
    path = fleet.folder / "ranks.txt"
    code, text = fleet.call(
        *("submit", "--name", "command", "--time", "l40s:2=1.0", "--steps", "1", "--deadline", "6h"),
        *("sh", "-c", f"echo $RANK of $WORLD_SIZE >> {path}"),
    )
    assert code == 0, text
    assert "the deadline will be met, on 2 x L40S or better" in text
    assert fleet.wait_for_end("command") == "completed"
    assert sorted(path.read_text().splitlines()) == ["0 of 2", "1 of 2"]


def test_a_fleet_joins_a_ray_that_others_started(fleet, tmp_path):
    """Its nodes say their kind; two fleets may share a cluster."""
    joined = LiveTestFleet(tmp_path, "", "--address", fleet.address(), "--interval", "1")
    try:
        joined.up()
        assert set(joined.status()["nodes"]) == {"node0", "node1", "node2"}
        code, text = joined.call(
            "submit", "--name", "hello", "--time", "a100:2=1", "--steps", "1", "sh", "-c", "hostname"
        )
        assert code == 0, text
        assert joined.wait_for_end("hello") == "completed"
        code, text = joined.call("logs", "hello")
        assert "attempt 1, 2 ranks" in text
    finally:
        joined.down()
    assert fleet.is_up()  # of which nothing was ended


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (Debian's package of that name)")
def test_training_continues_while_a_head_that_keeps_its_state_in_redis_is_started_again(tmp_path, expected):
    redis_port, port = free_port(), free_port()
    options = [f"--port={port}", "--node-ip-address=127.0.0.1", "--num-gpus=2", "--labels=spindle-kind=a100"]
    options += ["--num-cpus=0", "--include-dashboard=false", "--object-store-memory=80000000"]
    environment = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    fleet = LiveTestFleet(tmp_path, "", "--address", f"127.0.0.1:{port}", "--interval", "1")
    with contextlib.ExitStack() as cleanup:
        ray_folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))  # paths of sockets are short
        command = ["redis-server", "--port", str(redis_port), "--save", ""]
        redis = cleanup.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        cleanup.callback(redis.kill)
        fleet.wait(lambda: is_listening(f"127.0.0.1:{redis_port}"), "Redis listens")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--temp-dir={ray_folder}", *options]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, timeout=300)
        session = LocalRay(address="", session=os.path.realpath(f"{ray_folder}/session_latest"))
        cleanup.callback(lambda: end_processes(session_processes(session)))
        cleanup.callback(fleet.down)
        fleet.up()
        folder = fleet.submit("job", STEPS, "--pause", "0.3", options=("--count", "2"))
        fleet.wait_for_step(folder, 2)
        (pid,) = [pid for pid in session_processes(session) if command_of(pid)[0].endswith("gcs_server")]
        server, variables = command_of(pid), environment_of(pid)
        os.kill(pid, signal.SIGKILL)
        time.sleep(2.0)
        subprocess.Popen(server, env=variables, start_new_session=True, stdout=subprocess.DEVNULL)
        assert fleet.wait_for_end("job") == "completed"
        assert {line["pid"] for line in steps_of(folder)} == {steps_of(folder)[0]["pid"]}
        assert (fleet.job("job")["attempt"], is_same(folder, expected)) == (1, True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)


def test_devices_that_other_users_of_a_ray_hold_are_noticed(fleet, tmp_path):
    """ray #24259: pending beside devices that look free, without a reason."""
    script = Path(__file__).parent.parent / "scripts" / "shared_ray.py"
    command = [sys.executable, str(script), fleet.address(), "node2", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.stdout.splitlines()[-2:] == ["restarted: 2", "of others: 0 running"], process.stdout + process.stderr


def test_recorded_events_give_the_same_actions_and_every_device_had_one_job(fleet, capsys):
    assert run(["fleet", "replay", str(fleet.store_path)]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    result = replay(fleet.log())
    assert not result.difference
    with sqlite3.connect(fleet.store_path) as connection:
        assert connection.execute("SELECT count(*) FROM actions WHERE done_s IS NULL").fetchone() == (0,)
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute("DELETE FROM events")
    started = [event for event, _ in fleet.log().entries if isinstance(event, Started)]
    starts = [text for _, texts in fleet.log().entries for text in texts if json.loads(text)["action"] != "Plan"]
    assert len(started) <= len(
        [text for text in starts if json.loads(text)["action"] in (Start.__name__, Resize.__name__)]
    )


def test_a_node_without_a_kind_is_named():
    node = {"NodeID": "c0ffee" * 8, "Resources": {"GPU": 4.0}, "Labels": {}}
    with pytest.raises(InputError, match=r"10.0.0.1:6379: node c0ffeec0ffee has 4 devices and no kind; start it with"):
        ray_island(node, None, "10.0.0.1:6379")
    island = ray_island({**node, "Labels": {"ray.io/accelerator-type": "H100"}}, None, "10.0.0.1:6379")
    assert island is not None
    assert (island.kind.name, island.num_devices) == ("H100-SXM", 4)


def test_what_is_wrong_is_said_in_one_sentence_and_nothing_is_submitted(fleet, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        code, text = fleet.call(*arguments)
        assert code == 2, text
        assert "Traceback" not in text
        assert text.startswith("error: "), text
        return text

    code, text = fleet.call("submit", "--name", "known", "--time", "l40s:1=1", "--", "true")
    assert code == 0, text
    assert fleet.wait_for_end("known") == "completed"
    num_jobs = len(fleet.status()["jobs"])
    script = str(SCRIPT)
    assert "unknown kind of device 'b100'" in refused("submit", "--kinds", "b100", script)
    assert "unknown team 'nobody'" in refused("submit", "--team", "nobody", script)
    assert "at least 1 device" in refused("submit", "--count", "0", script)
    assert "years in the past" in refused("submit", "--deadline", "2001-01-01T00:00", script)
    assert "unknown priority" in refused("submit", "--priority", "extreme", script)
    assert "no such file" in refused("submit", str(tmp_path / "none.py"))
    (tmp_path / "nothing.py").write_text("print('nothing')")
    assert "without a call of spindle.Trainer.fit" in refused("submit", str(tmp_path / "nothing.py"))
    (tmp_path / "fails.py").write_text("raise ValueError('broken')")
    code, text = fleet.call("submit", str(tmp_path / "fails.py"))
    assert code == 2
    assert "it failed with the error above" in text
    huge = refused(
        "submit", "--name", "huge", "--kinds", "l40s", "--count", "1", script, str(tmp_path), "1", "--size", "20000"
    )
    assert "job 'huge' fits in no cell of fleet that it accepts; it needs at least" in huge
    assert "submitted before" in refused("submit", "--name", "known", script)
    assert "no job is called 'nobody'" in refused("stop", "nobody")
    assert "unknown node 'nowhere'" in refused("drain", "nowhere")
    assert "in use" in refused("up")
    assert len(fleet.status()["jobs"]) == num_jobs
    assert not fleet.status()["num_pending_commands"]
