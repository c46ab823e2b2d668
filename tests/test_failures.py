"""No hang: whatever goes wrong on one rank ends the whole job, with the first cause on top."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "faulty.py"
NUM_RANKS = 3
LIMIT_S = 20  # from the fault to the end of the job
START_S = 150  # to import torch three times on two busy cores


def run_job(command: list[str], fault: str, mark: Path) -> subprocess.CompletedProcess[str]:
    """Runs a job that must fail, soon after its fault, and leave nobody behind."""
    done = subprocess.run(
        [*command, str(SCRIPT), fault, str(mark)], capture_output=True, text=True, timeout=START_S, check=False
    )
    ended = time.time()
    assert mark.exists(), done.stderr
    assert ended - float(mark.read_text()) < LIMIT_S, done.stderr
    assert done.returncode != 0
    assert processes_with(str(mark)) == []
    return done


def processes_with(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in words:
                found.append(int(folder.name))
    return found


LAUNCH = [sys.executable, "-m", "spindle.cli", "launch", "-n", str(NUM_RANKS)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]


@pytest.mark.parametrize(
    ("fault", "first_line"),
    [
        ("layer", r"error: rank 1 failed: ArithmeticError: this layer is broken"),
        ("loss", r"error: rank 1 failed: ArithmeticError: this loss is broken"),
        ("loader", r"error: rank 1 failed: OSError: this file is broken"),
        ("short", r"error: rank 1 failed: .*its loader gave a batch of 6 samples, expected 7"),
        ("kill-forward", r"error: rank 1 was killed by SIGKILL"),
        ("kill-backward", r"error: rank 1 was killed by SIGKILL"),
        ("kill-sync", r"error: rank 1 was killed by SIGKILL"),
    ],
)
def test_a_fault_on_one_rank_ends_the_job_with_its_cause_on_top(fault, first_line, tmp_path):
    done = run_job(LAUNCH, fault, tmp_path / "mark")
    lines = done.stderr.splitlines()
    assert re.match(first_line, lines[0]), done.stderr


def test_an_error_says_in_which_step_task_and_layers_it_was(tmp_path):
    done = run_job(LAUNCH, "layer", tmp_path / "mark")
    assert re.search(r"in step \d on rank 1, forward of fit/encoder#0\[0:4\]", done.stderr), done.stderr
    assert "Traceback" in done.stderr
    assert "raise ArithmeticError" in done.stderr


def test_a_loss_that_is_not_a_number_is_reported_with_task_and_step(tmp_path):
    done = run_job(LAUNCH, "nan", tmp_path / "mark")
    assert re.match(r"error: .*task 'fit': its loss is nan in step \d", done.stderr), done.stderr


def test_ranks_that_read_different_batches_are_told_so(tmp_path):
    done = run_job(LAUNCH, "other", tmp_path / "mark")
    assert re.match(r"error: .*the loader of task 'fit' gave rank 1 another batch than rank 0", done.stderr)


@pytest.mark.parametrize("fault", ["layer", "kill-backward"])
def test_torchrun_ends_a_job_too(fault, tmp_path):
    done = run_job(TORCHRUN, fault, tmp_path / "mark")
    if fault == "layer":
        first = done.stderr.index("ArithmeticError: this layer is broken")
        assert "another rank is gone" not in done.stderr[:first]
