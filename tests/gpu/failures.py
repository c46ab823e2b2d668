"""Failures on a GPU (or on CPUs): a rank that is killed, is stopped, raises, or runs out of memory ends the whole job.

Each case runs `tests/scripts/faulty.py` under a launcher. It must end within 20 s of the fault, name the first cause,
and leave no process, no MPS daemon and no file in /dev/shm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu.virtual_devices import mps_processes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "faulty.py"
LIMIT_S = 20.0  # from the fault to the end of the job
JOB_S = 120.0  # of a whole job
PHASES = ("forward", "transfer", "backward", "sync", "optimizer")
SHARED_MEMORY = Path("/dev/shm")
NUM_RANKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    launcher: str  # "launch", "torchrun"
    fault: str
    expected: str  # a regular expression: at the start of what `spindle launch` says, anywhere in what torchrun does

    @property
    def name(self) -> str:
        return f"{self.launcher} {self.fault}"


def cases(backend: str) -> Iterator[Case]:
    """The most telling first."""
    killed, stopped = r"error: rank 1 was killed by SIGKILL", r"error: rank 1 was stopped \(SIGSTOP\) for 8 s"
    raised, memory = r"error: rank 1 failed: ArithmeticError", r"error: rank 1 failed: .*OutOfMemoryError"
    yield Case(launcher="launch", fault="raise-forward", expected=raised)
    yield Case(launcher="launch", fault="memory-forward", expected=memory)
    for phase in PHASES:
        yield Case(launcher="launch", fault=f"kill-{phase}", expected=killed)
    for phase in PHASES:
        yield Case(launcher="launch", fault=f"stop-{phase}", expected=stopped)
    if backend != "gloo":
        yield Case(launcher="launch", fault="kill-replay", expected=killed)
        yield Case(launcher="launch", fault="stop-replay", expected=stopped)
    if backend == "ipc":  # virtual devices need `spindle launch`
        return
    yield Case(launcher="torchrun", fault="raise-forward", expected="ArithmeticError: this layer is broken")
    for phase in PHASES:
        yield Case(launcher="torchrun", fault=f"kill-{phase}", expected="Signal 9")
    for phase in PHASES:
        yield Case(
            launcher="torchrun", fault=f"stop-{phase}", expected="rank 0 stopped: rank 1 has not answered for 12 s"
        )


def run_case(case: Case, backend: str, num_ranks: int = NUM_RANKS, *, is_alone: bool = True) -> float:
    """Runs a job that must fail, and checks how it does. Returns the seconds from the fault to the end of the job. What
    others leave in /dev/shm is not looked at unless the job is alone."""
    on_cpus = backend == "gloo"
    mps_before, shared_before = mps_processes(), set(os.listdir(SHARED_MEMORY))
    with tempfile.TemporaryDirectory(prefix="spindle-faulty-") as folder:
        mark = Path(folder) / "mark"
        job = subprocess.Popen(
            [*command(case.launcher, backend, num_ranks), str(SCRIPT), case.fault, str(mark)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpus else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = job.communicate(timeout=JOB_S)
        except subprocess.TimeoutExpired:
            said = f"the job did not end within {JOB_S:g} s\n{_kill(job, str(mark))}"
        ended = time.time()
        assert mark.exists(), said
        took_s = ended - float(mark.read_text())
        left = processes_with(str(mark))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert took_s < LIMIT_S, f"{took_s:.1f} s from the fault to the end\n{said}"
    assert job.returncode not in (0, None), said
    find = re.match if case.launcher == "launch" else re.search
    assert find(case.expected, said), said
    assert left == [], f"processes are left: {left}\n{said}"
    if backend == "ipc":  # else the daemon is not the job's
        assert mps_processes() <= mps_before, "MPS is still there"
    shared = set(os.listdir(SHARED_MEMORY)) - shared_before
    assert on_cpus or not is_alone or not shared, f"left in /dev/shm: {sorted(shared)}"
    return took_s


def command(launcher: str, backend: str, num_ranks: int) -> list[str]:
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    option = "--virtual-devices" if backend == "ipc" else "-n"
    return [sys.executable, "-m", "spindle.cli", "launch", option, str(num_ranks)]


def processes_with(text: str) -> list[int]:
    """Processes whose command line contains a text."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in words:
                pids.append(int(folder.name))
    return pids


def _kill(job: subprocess.Popen[str], mark: str) -> str:
    """Ends a job that hangs, and gives what it said."""
    job.terminate()
    try:
        return job.communicate(timeout=15)[1]
    except subprocess.TimeoutExpired:
        for pid in [job.pid, *processes_with(mark)]:
            os.kill(pid, signal.SIGKILL)
        return job.communicate()[1]
