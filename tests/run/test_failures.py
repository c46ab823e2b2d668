"""No hang: whatever goes wrong on one rank ends the whole job, with the first cause on top.

A choice of faults: every job imports torch on each rank. `python tests/gpu/all.py --backend gloo --only failures` has
them all."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu.failures import command, processes_with
from sweeps import chosen

pytest.importorskip("torch")

from preloaded import run_spindle

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "faulty.py"
LIMIT_S = (
    90  # from the fault to the end of the job, on busy cores; a rank that waits for a lost one waits for 30 minutes
)
START_S = 150  # to import torch three times on two busy cores


def torchrun(num_ranks: int) -> list[str]:
    return command("torchrun", "gloo", num_ranks)


def run_job(launcher: list[str] | None, fault: str, mark: Path) -> subprocess.CompletedProcess[str]:
    """Runs a job that must fail, soon after its fault, and leave nobody behind. Without a launcher, two ranks are
    copies of a process that has imported torch."""
    if launcher is None:
        done = run_spindle("launch", "-n", "2", str(SCRIPT), fault, str(mark))
    else:
        done = subprocess.run(
            [*launcher, str(SCRIPT), fault, str(mark)], capture_output=True, text=True, timeout=START_S, check=False
        )
    ended = time.time()
    assert mark.exists(), done.stderr
    assert ended - float(mark.read_text()) < LIMIT_S, done.stderr
    assert done.returncode != 0
    assert processes_with(str(mark)) == []
    return done


@pytest.mark.parametrize(
    ("fault", "first_line"),
    chosen(
        [
            ("kill-transfer", r"error: rank 1 was killed by SIGKILL"),
            ("stop-backward", r"error: rank 1 was stopped \(SIGSTOP\) for 8 s\n"),
            ("raise-callback", r"error: rank 1 failed: ArithmeticError: this layer is broken"),
        ],
        # In CI, other tests have these errors in one process or on processes that import torch once.
        ("loader", r"error: rank 1 failed: OSError: this file is broken"),
        ("nan", r"error: .*task 'fit': its loss is nan in step \d"),
        (
            "other",
            r"error: .*the loader of task 'fit' gave rank 1 a different batch than rank 0.*torch\.manual_seed",
        ),
        ("loss", r"error: rank 1 failed: ArithmeticError: this loss is broken"),
        ("short", r"error: rank 1 failed: .*its loader gave a batch of 6 samples, expected 7"),
        ("memory-forward", r"error: rank 1 failed: .*OutOfMemoryError: "),
        ("kill-backward", r"error: rank 1 was killed by SIGKILL"),
    ),
)
def test_a_fault_on_one_rank_ends_the_job_with_its_cause_on_top(fault, first_line, tmp_path):
    launcher = command("launch", "gloo", 2) if fault.startswith("stop") else None
    done = run_job(launcher, fault, tmp_path / "mark")
    assert re.match(first_line, done.stderr), done.stderr


def test_a_rank_that_hangs_is_named_with_its_step_and_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_HUNG_S", "2")
    done = run_job(None, "hang-forward", tmp_path / "mark")
    first_line = rf"error: rank 1 has made no progress for \d+ s, in step \d+ \({SCRIPT}:\d+ in fail_in\)"
    assert re.match(first_line, done.stderr), done.stderr


def test_an_error_says_in_which_step_task_and_layers_it_was(tmp_path):
    done = run_job(None, "raise-forward", tmp_path / "mark")
    assert done.stderr.startswith("error: rank 1 failed: ArithmeticError: this layer is broken"), done.stderr
    assert re.search(r"in step \d on rank 1, forward of fit/encoder#0\[0:4\]", done.stderr), done.stderr
    assert "Traceback" in done.stderr
    assert "raise ArithmeticError" in done.stderr


@pytest.mark.parametrize("fault", chosen(["raise-forward"], "kill-backward"))
def test_torchrun_ends_a_job_too(fault, tmp_path):
    done = run_job(torchrun(2), fault, tmp_path / "mark")
    if fault == "raise-forward":
        first = done.stderr.index("ArithmeticError: this layer is broken")
        assert "another rank is gone" not in done.stderr[:first]
        summary = done.stderr[done.stderr.index("Root Cause") :]  # torchrun's own
        assert "ArithmeticError: this layer is broken" in summary


def test_a_rank_that_is_stopped_is_noticed_by_its_heartbeat_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_HEARTBEAT_S", "8")  # instead of 12
    done = run_job(torchrun(2), "stop-forward", tmp_path / "mark")
    assert "rank 0 stopped: rank 1 has not answered for 8 s" in done.stderr, done.stderr


# What a rank does last is to write which threads of gloo it still has. Its Trainer is alive, and the batch headers of
# the step after the last one may be in flight.
LEAVING = """
import atexit, os, sys, time
from pathlib import Path
import torch
from torch import nn
import spindle
from spindle.run.world import gloo_workers

rank = int(os.environ["RANK"])
atexit.register(lambda: Path(sys.argv[1], f"left-{rank}").write_text(repr(gloo_workers())))
torch.manual_seed(0)
towers = [spindle.module(name, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for name in ("left", "right")]

@spindle.task(batch_size=4, per_sample_mean=True)
def pull(batch):
    return (towers[0](batch) - towers[1](batch)).square().mean()

def sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

trainer = spindle.Trainer([pull], optimizer=sgd)
result = trainer.fit({"pull": [torch.randn(4, 8) for _ in range(8)]}, steps=4)
Path(sys.argv[1], f"before-{rank}").write_text(repr(gloo_workers()))
"""


@pytest.mark.parametrize("launcher", chosen(["launch"], "torchrun"))
def test_a_rank_that_leaves_has_no_thread_of_gloo_when_python_shuts_down(launcher, tmp_path):
    (tmp_path / "train.py").write_text(LEAVING)
    arguments = [*command(launcher, "gloo", 2), str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"before-{rank}").read_text() != "{}"
        assert (tmp_path / f"left-{rank}").read_text() == "{}"


ALONE = """
import torch
from torch import nn
import spindle
import spindle.train.trainer

spindle.train.trainer._LONE_CALL_S = 1.0
torch.manual_seed(0)
tower = spindle.module("tower", nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))


@spindle.task(batch_size=4)
def pull(batch):
    return tower(batch["x"]).square().mean()


def on_step(step, losses):
    if trainer.rank == 0:
        {in_fit}


loaders = {{"pull": [{{"x": torch.ones(4, 8)}}]}}
trainer = spindle.Trainer([pull], optimizer=torch.optim.SGD)
if {condition}:
    trainer.fit(loaders, steps=8, on_step=on_step)
"""


@pytest.mark.parametrize(
    ("condition", "in_fit", "message"),
    chosen(
        [
            (
                "True",
                "trainer.evaluate(loaders)",
                "Trainer.evaluate was called on rank 0, but not on all ranks within 1 s",
            ),
            (
                "trainer.rank == 0",
                "pass",
                "Trainer.fit was called on rank 0, but not on a rank that has ended its script",
            ),
        ],
        ("True", "trainer.state_dict()", "Trainer.state_dict was called on rank 0, but not on all ranks within 1 s"),
    ),
)
def test_a_method_that_one_rank_calls_alone_is_named(condition, in_fit, message, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(ALONE.format(condition=condition, in_fit=in_fit))
    done = run_spindle("launch", "-n", "2", str(script))
    assert done.returncode != 0
    assert f"error: rank 0 failed: {message}: call it on all ranks" in done.stderr


# Rank 0 has the store.
DIED = """
import os, sys
from spindle.errors import PeerLostError
from spindle.run import join_world

world = join_world()
world.barrier()
if world.rank == 0:
    os._exit(9)
try:
    world.rendezvous("Trainer.fit", print, None)
except PeerLostError as error:
    print(error)
"""


def test_a_rank_that_waits_for_a_call_follows_the_rank_that_died_with_the_store(tmp_path, monkeypatch):
    script = tmp_path / "died.py"
    script.write_text(DIED)
    monkeypatch.setenv("SPINDLE_HEARTBEAT_S", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    shown = [rank.communicate(timeout=START_S)[0] for rank in ranks]
    assert "another rank is gone, noticed while waiting until all ranks call Trainer.fit" in shown[1]
