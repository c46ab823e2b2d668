"""No hang: whatever goes wrong on one rank ends the whole job, with the first cause on top.

A choice of faults: every job imports torch on each rank. `python tests/gpu/all.py --backend gloo --only failures` has
them all."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from gpu.failures import command, processes_with
from sweeps import chosen

pytest.importorskip("torch")

from preloaded import run_spindle

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "faulty.py"
LIMIT_S = 20  # from the fault to the end of the job
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
