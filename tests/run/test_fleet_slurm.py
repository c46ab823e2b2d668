"""Live fleets on Slurm: a real controller and four nodes on this host, real trainings."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from live_fleets import SCRIPT, LiveTestFleet, largest_difference, processes_of, steps_of, undisturbed, weights_of
from slurm import missing, slurm_cluster
from spindle.cli.main import run
from spindle.fleet import NodeShare, SchedulerOptions
from spindle.fleet.engine import AttemptStart
from spindle.fleet.live import LiveFleet
from spindle.fleet.slurm_engine import SlurmEngine, slurm, slurm_fleet
from spindle.fleet.store import Store, Submission
from spindle.launch.slurm_rank import rank_variables

STEPS = 30
needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"needs Slurm's programs, Debian has them: {missing()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    nodes = {"n0": ("a100", 1), "n1": ("a100", 1), "n2": ("l40s", 2), "n3": ("l40s", 1)}
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "job", STEPS)


@needs_slurm
def test_a_job_on_slurm_leaves_a_drained_node_and_survives_the_scheduler(cluster, tmp_path, expected):
    fleet = LiveTestFleet(tmp_path, "", "--engine", "slurm", "--interval", "1", "--reallocation", "1")
    try:
        fleet.up()
        folder = fleet.submit("moved", STEPS, "--pause", "2", options=("--count", "2", "--kinds", "a100,l40s"))
        line = fleet.wait_for_step(folder, 3)
        job = fleet.job("moved")
        fleet.kill_scheduler()
        fleet.wait_for_step(folder, line["step"] + 3)
        fleet.up()
        assert fleet.call("drain", job["nodes"][0])[0] == 0
        fleet.wait_for_step(folder, 0, attempt=2)
        (folder / "fast").touch()  # until here it must not end, however long a scheduler takes to come up
        assert not set(fleet.job("moved")["nodes"]) & set(job["nodes"][:1])
        assert fleet.wait_for_end("moved") == "completed"
        assert largest_difference(weights_of(folder), expected) < 1e-9
        steps = [line["step"] for line in steps_of(folder) if "step" in line]
        assert len(steps) - len(set(steps)) <= 2  # it was stopped with a checkpoint; only reports are repeated
        fleet.submit("broken", STEPS, "--raise-at", "4", options=("--count", "1"))
        assert fleet.wait_for_end("broken") == "failed"
        assert "ValueError: step 4 is broken" in fleet.job("broken")["reason"]
        assert run(["fleet", "replay", str(fleet.store_path)]) == 0
    finally:
        fleet.down()
    assert not processes_of(tmp_path)


@needs_slurm
def test_a_batch_script_trains_on_two_nodes(cluster, tmp_path, expected, capsys):
    folder = tmp_path / "job"
    folder.mkdir()
    options = ["--nodes", "2", "--devices", "1", "--kind", "a100", "-o", str(tmp_path / "batch.sh")]
    assert run(["fleet", "sbatch", *options, str(SCRIPT), str(folder), str(STEPS)]) == 0
    submit = ["sbatch", "--wait", f"--output={tmp_path}/out", str(tmp_path / "batch.sh")]
    answer = subprocess.run(submit, capture_output=True, text=True, timeout=90)
    assert answer.returncode == 0, (tmp_path / "out").read_text()
    assert steps_of(folder)[-1]["ranks"] == 2
    assert largest_difference(weights_of(folder), expected) < 1e-9


def attempt_start(folder: Path, *shares: tuple[str, int], job: str = "a") -> AttemptStart:
    """An attempt whose ranks write `ready` and sleep; SIGTERM makes them write `saved`."""
    script = "trap 'touch saved; exit 143' TERM; touch ready; for i in $(seq 600); do sleep 0.1; done"
    submission = Submission(
        command=("bash", "-c", script), is_script=False, folder=str(folder), logs=str(folder / "logs"), environment={}
    )
    nodes = tuple(NodeShare(node=node, num_devices=count) for node, count in shares)
    return AttemptStart(job=job, attempt=1, nodes=nodes, submission=submission, grace_s=5.0)


def wait_until(condition, engine: SlurmEngine) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, engine.poll()
        engine.poll()
        time.sleep(0.1)


@pytest.fixture
def engine(cluster, tmp_path):
    engine = SlurmEngine(f"test-{tmp_path.name}", slurm_fleet(None), folder=tmp_path)
    yield engine
    engine.close(end_machines=True)
    wait_until(lambda: not slurm("squeue", "--noheader").strip(), engine)


@pytest.fixture
def no_controller(cluster, tmp_path):
    """Environment of commands that do not reach the controller."""
    path = tmp_path / "slurm.conf"
    text = Path(os.environ["SLURM_CONF"]).read_text()
    path.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", text) + "MessageTimeout=1\n")
    return {"SLURM_CONF": str(path)}


@needs_slurm
def test_a_stop_while_the_controller_is_away_is_delivered_later_and_the_grace_begins_then(
    engine, no_controller, tmp_path, monkeypatch
):
    engine.start(attempt_start(tmp_path, ("n0", 1)))
    wait_until((tmp_path / "ready").exists, engine)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", no_controller["SLURM_CONF"])
        engine.stop(("a", 1), 3.0)
        time.sleep(3.5)  # a grace that began with the request is over now
        (report,) = engine.poll()
        assert report.phase != "ended"
    wait_until(lambda: engine.poll()[0].phase == "ended", engine)
    assert engine.poll()[0].outcome == "stopped"
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "slurm" / "a-1" / "exit").read_text() == "143\n"


@needs_slurm
def test_an_attempt_that_was_submitted_but_not_noted_is_adopted_from_its_comment(engine, tmp_path, monkeypatch):
    def die_after_sbatch(*command):
        answer = slurm(*command)
        if command[0] == "sbatch":
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patch:
        patch.setattr("spindle.fleet.slurm_engine.slurm", die_after_sbatch)
        with pytest.raises(KeyboardInterrupt):
            engine.start(attempt_start(tmp_path, ("n0", 1)))
    other = SlurmEngine("another", slurm_fleet(None), folder=tmp_path)
    assert other.adopt() == []
    assert engine.adopt() == [("a", 1)]
    wait_until((tmp_path / "ready").exists, engine)
    engine.stop(("a", 1), 20.0)
    wait_until(lambda: engine.poll()[0].phase == "ended", engine)
    assert (tmp_path / "saved").exists()


@needs_slurm
def test_a_job_leaves_devices_to_others_that_hold_them(engine, tmp_path, monkeypatch):
    """Slurm has several users: what one of them has is not the fleet's."""
    monkeypatch.setattr("spindle.fleet.slurm_engine._EXPLAINED_S", 1.0)
    other = ("sbatch", "--parsable", "--nodelist=n0", "--gpus-per-node=a100:1", f"--output={tmp_path}/other.log")
    slurm_id = slurm(*other, "--wrap", "sleep 600").strip()
    wait_until(lambda: slurm("squeue", f"--jobs={slurm_id}", "--noheader", "--format=%T").strip() == "RUNNING", engine)
    options = SchedulerOptions(min_interval_s=0.1, max_interval_s=0.5, realloc_s=1.0)
    with Store.create(tmp_path / "fleet.db", slurm_fleet(None), options) as store:
        live = LiveFleet(store, engine, grace_s=5.0, notify=lambda _: None)
        live.recover()
        wait_until(lambda: live.step() or engine.nodes()["n0"].num_occupied == 1, engine)
        assert live.state.occupied == ()  # nothing waits for it
        again = SlurmEngine("again", slurm_fleet(None), folder=tmp_path / "again")
        assert again.nodes()["n0"].num_occupied == 1  # at the first look
        command = ("submit", "--store", str(store.path), "--name", "a", "--time", "a100:1=1", "--steps", "9")
        monkeypatch.setattr("spindle.fleet.ask.wait_for_answer", lambda *_: None)  # this process is the scheduler
        assert run(["fleet", *command, "sleep", "600"]) == 0
        wait_until(lambda: live.step() or live.state.occupied == (NodeShare(node="n0", num_devices=1),), engine)
        wait_until(lambda: live.step() or ("a", 2) in live.attempts.running, engine)
        (record,) = (record for record in store.attempts() if record.attempt == 2)
        assert [share.node for share in record.nodes] == ["n1"]
        wait_until(lambda: live.step() or live.state.find("a").phase == "running", engine)
        assert engine.nodes()["n1"].num_occupied == 0  # it is ours
        slurm("scancel", slurm_id)
        wait_until(lambda: live.step() or live.state.occupied == (), engine)
        live.shut_down()
        live.close()


@needs_slurm
def test_an_attempt_that_was_never_submitted_is_not_adopted(engine, tmp_path, monkeypatch):
    def die_before_sbatch(*command):
        if command[0] == "sbatch":
            raise KeyboardInterrupt
        return slurm(*command)

    with monkeypatch.context() as patch:
        patch.setattr("spindle.fleet.slurm_engine.slurm", die_before_sbatch)
        with pytest.raises(KeyboardInterrupt):
            engine.start(attempt_start(tmp_path, ("n0", 1)))
    assert engine.adopt() == []


@needs_slurm
@pytest.mark.parametrize("same_scheduler", [True, False])
def test_an_attempt_that_was_discarded_while_the_controller_is_away_does_not_train_on(
    engine, no_controller, tmp_path, monkeypatch, same_scheduler
):
    engine.start(attempt_start(tmp_path, ("n0", 1)))
    wait_until((tmp_path / "ready").exists, engine)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", no_controller["SLURM_CONF"])
        engine.discard(("a", 1))
    if not same_scheduler:
        engine._discarded.clear()
        assert engine.adopt() == [("a", 1)]
        engine.discard(("a", 1))
    wait_until(lambda: not slurm("squeue", "--noheader").strip(), engine)


@needs_slurm
def test_names_of_folders_are_quoted_and_nodes_may_have_unequal_shares(engine, tmp_path):
    folder = tmp_path / 'it\'s 100%a "folder"'
    folder.mkdir()
    start = attempt_start(folder, ("n2", 2), ("n3", 1))
    ranks = "echo $SLURM_PROCID on $SLURMD_NODENAME of $SLURM_STEP_TASKS_PER_NODE; pwd"
    start = replace(start, submission=replace(start.submission, command=("bash", "-c", ranks)))
    engine.start(start)
    wait_until(lambda: engine.poll()[0].phase == "ended", engine)
    assert engine.poll()[0].outcome == "completed"
    written = [(folder / "logs" / f"rank-{rank}.log").read_text().splitlines() for rank in range(3)]
    assert written == [[f"{rank} on {node} of 2,1", str(folder)] for rank, node in enumerate(("n2", "n2", "n3"))]


@pytest.mark.parametrize(("node", "size"), [("0", "4"), ("1", "4"), ("2", "3")])
def test_ranks_of_slurm_know_how_many_are_on_their_node(node, size):
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "11", "SLURM_LOCALID": "0", "SLURM_NODEID": node}
    step |= {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert rank_variables(step)["LOCAL_WORLD_SIZE"] == size


def test_ranks_of_slurm_get_torchruns_variables():
    step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    found = rank_variables(
        {**step, "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3"}
    )
    wanted = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.3"}
    assert wanted.items() <= found.items()
    assert "GLOO_SOCKET_IFNAME" not in found
