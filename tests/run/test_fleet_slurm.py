"""Live fleets on Slurm: a real controller and three nodes on this host, real trainings."""

from __future__ import annotations

import subprocess

import pytest

from live_fleets import SCRIPT, LiveTestFleet, largest_difference, processes_of, steps_of, undisturbed, weights_of
from slurm import missing, slurm_cluster
from spindle.cli.main import run
from spindle.launch.slurm_rank import rank_variables

STEPS = 30
needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"needs Slurm's programs, Debian has them: {missing()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    nodes = {"n0": ("a100", 1), "n1": ("a100", 1), "n2": ("l40s", 2)}
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
        folder = fleet.submit("moved", STEPS, "--pause", "0.3", options=("--count", "2", "--kinds", "a100,l40s"))
        line = fleet.wait_for_step(folder, 3)
        job = fleet.job("moved")
        fleet.kill_scheduler()
        fleet.wait_for_step(folder, line["step"] + 3)
        fleet.up()
        assert fleet.call("drain", job["nodes"][0])[0] == 0
        fleet.wait_for_step(folder, 0, attempt=2)
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


def test_ranks_of_slurm_get_torchruns_variables():
    step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    found = rank_variables(
        {**step, "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3"}
    )
    wanted = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.3"}
    assert wanted.items() <= found.items()
    assert "GLOO_SOCKET_IFNAME" not in found
