"""Live fleets for tests and benchmarks: real schedulers, Ray nodes that do not exist, and real trainings."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spindle.cli.main import run
from spindle.fleet.event_log import EventLog, read_event_log
from spindle.fleet.store import Store

SCRIPT = Path(__file__).parent / "scripts" / "fleet_job.py"
LINKS = """
link = {bytes_per_s = 300e9, latency_s = 5e-6}
uplink = {bytes_per_s = 200e9, latency_s = 12e-6}
"""
LIMIT_S = 300.0  # until a hang is called one, on busy cores


def fleet_file(path: Path, **nodes: tuple[int, ...]) -> Path:
    """A fleet of these nodes by kind: `a100=(3, 3), l40s=(2,)`."""
    islands = [f'[[islands]]\nkind = "{kind}"\nnum_devices = {size}{LINKS}' for kind in nodes for size in nodes[kind]]
    path.write_text("\n".join(islands))
    return path


class LiveTestFleet:
    """A fleet in a folder, and its scheduler as a process."""

    def __init__(self, folder: Path, machines: str, *options: str) -> None:
        self.folder, self.store_path = folder, folder / "fleet.db"
        self._machines, self._options = machines, options
        self.scheduler: subprocess.Popen[bytes] | None = None

    # The scheduler.

    def up(self) -> None:
        """Start the scheduler, and wait until it is up."""
        self.start()
        self.wait(self.is_up, "the scheduler is up")

    def start(self) -> None:
        machines = ["--fake", self._machines] if self._machines else []
        new = [] if self.store_path.exists() else [*machines, *self._options]
        log = (self.folder / "scheduler.log").open("ab")
        command = self.command("--store", str(self.store_path), *new)
        self.scheduler = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        log.close()

    def command(self, *arguments: str) -> list[str]:
        """How a scheduler is started."""
        return [sys.executable, "-m", "spindle.cli", "fleet", "up", *arguments]

    def is_up(self) -> bool:
        assert self.scheduler is not None
        assert self.scheduler.poll() is None, self.output()
        with contextlib.suppress(Exception), Store.open(self.store_path) as store:
            return store.has_scheduler()
        return False

    def kill_scheduler(self) -> None:
        assert self.scheduler is not None
        self.scheduler.kill()
        self.scheduler.wait()

    def down(self) -> None:
        """End the fleet, whatever state it is in."""
        if self.store_path.exists():
            assert self.call("down", "--grace", "20")[0] == 0, self.output()
        if self.scheduler is not None:
            self.scheduler.wait(LIMIT_S)

    def output(self) -> str:
        return (self.folder / "scheduler.log").read_text()

    # Commands.

    def call(self, verb: str, *arguments: str) -> tuple[int, str]:
        """A verb of `spindle fleet`: its exit code and output."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = run(["fleet", verb, "--store", str(self.store_path), *arguments])
        return code, output.getvalue()

    def submit(self, name: str, steps: int, *arguments: str, options: tuple[str, ...] = ()) -> Path:
        """Submit the script of tests; returns the folder of its results."""
        folder = self.folder / name
        folder.mkdir()
        code, text = self.call("submit", "--name", name, *options, str(SCRIPT), str(folder), str(steps), *arguments)
        assert code == 0, text
        return folder

    def status(self) -> dict[str, Any]:
        code, text = self.call("status", "--json")
        assert code == 0, text
        return json.loads(text)

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.status()["jobs"] if job["job"] == name)

    def log(self) -> EventLog:
        return read_event_log(self.store_path)

    # Machines.

    def local(self) -> Any:
        from spindle.fleet.ray_nodes import LocalRay

        with Store.open(self.store_path) as store:
            return LocalRay.parse(store.meta("ray") or "")

    def address(self) -> str:
        """The address of its Ray, as soon as that runs."""

        def known() -> str:
            with contextlib.suppress(ValueError):
                return self.local().address
            return ""

        return self.wait(known, "its Ray runs")

    def kill_node(self, name: str) -> None:
        """SIGKILL to the raylet of a node."""
        from spindle.fleet.ray_nodes import raylets

        os.kill(raylets(self.local())[name], signal.SIGKILL)

    def add_node(self, name: str, kind: str, num_devices: int) -> None:
        """Start a node, in a process of its own: Ray is read with other settings in this one."""
        code = (
            "import sys; from spindle.fleet.ray_nodes import *\nimport_ray(is_local=True)\n"
            "add_local_node(LocalRay.parse(sys.argv[1]), LocalNode(name=sys.argv[2], kind=sys.argv[3], "
            "num_devices=int(sys.argv[4])))"
        )
        command = [sys.executable, "-c", code, self.local().text, name, kind, str(num_devices)]
        subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)

    # Waiting.

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        end_s = time.monotonic() + limit_s
        while not (value := condition()):
            assert time.monotonic() < end_s, f"not within {limit_s:.0f} s: {what}\n{self.output()}"
            time.sleep(0.1)
        return value

    def wait_for_step(self, folder: Path, step: int, *, attempt: int = 0) -> dict[str, Any]:
        """The line of a step that a job has done, by this attempt or a later one."""

        def reached() -> dict[str, Any] | None:
            lines = [line for line in steps_of(folder) if "step" in line]
            return next((line for line in lines if line["step"] >= step and line["attempt"] >= attempt), None)

        return self.wait(reached, f"step {step} of {folder.name} by attempt {attempt}")

    def wait_for_end(self, name: str, limit_s: float = LIMIT_S) -> str:
        def ended() -> str:
            phase = self.job(name)["phase"]
            return phase if phase in ("completed", "failed") else ""

        return str(self.wait(ended, f"{name} has ended", limit_s))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def undisturbed(folder: Path, steps: int, *arguments: str) -> dict[str, np.ndarray]:
    """The weights after one process that nobody disturbs."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(SCRIPT), str(folder), str(steps), *arguments]
    subprocess.run(
        command, check=True, capture_output=True, timeout=10 * LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return weights_of(folder)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "final.npz") as data:
        return {name: data[name] for name in data.files}


def largest_difference(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """The error of the worst tensor, relative to its norm."""
    assert left.keys() == right.keys()
    return max(
        float(np.linalg.norm(left[name] - right[name]) / max(np.linalg.norm(right[name]), 1e-12)) for name in left
    )


def processes_of(folder: Path) -> list[int]:
    """Ranks of jobs of a fleet that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]
