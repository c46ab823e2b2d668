"""Faults, injected into live fleets of real processes: schedulers, Ray nodes with devices that do not exist, trainings.

    python -m tests.fleet_faults                    everything that has not passed yet with these sources
    python -m tests.fleet_faults --only written --only pairs
    python -m tests.fleet_faults --list
    python -m tests.fleet_faults --budget-s 600     begins no series after 600 s
    python -m tests.fleet_faults --report           the table of all results again

A series is one fleet with two jobs: one is moved to other nodes, or stopped and resumed, or resized while it trains,
again and again, and in a phase of that action a fault happens, or two at once; the other job trains beside it. A series
passes if every fault happened, both jobs ended with the parameters of one process that nothing disturbed (float64,
1e-9), no attempt began before the newest checkpoint that was complete when it started, no node ever had more jobs than
devices, recorded events give the same actions again, every action was confirmed, and afterwards no placement group, no
agent, no occupied device and no process is left.

Phases are those of the moved job's actions: `written` (in the store, nothing executed), `group removed`, `group
created`, `ranks up`; `training` is none of them. A resize has two more: `standby` (the next ranks have been started
beside those that train) and `handover` (they are ready, those that train are told to stop). The scheduler runs in a
process that calls `reached` in each phase.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import itertools
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(ROOT / "benchmarks")]

from live_fleets import (  # noqa: E402
    LiveTestFleet,
    fleet_file,
    largest_difference,
    processes_of,
    steps_of,
    undisturbed,
    weights_of,
)

RESULTS = ROOT / "benchmarks" / "results" / "fleet_faults.jsonl"
NODES = {"node0": 1, "node1": 1, "node2": 2}
MOVED, BESIDE = JOBS = ("moved", "beside")
STEPS, PAUSE_S, EVERY = 1000, 0.6, 3
RECOVERY_S = 150.0
GRACE_S = 15
CALM_S = 1.5  # without an action, before the next fault
HUNG_S = 12  # instead of 60: without progress, after which a rank hangs
TOLERANCE = 1e-9
PHASES = ("training", "written", "standby", "handover", "group removed", "group created", "ranks up")
COMMON_PHASES = ("training", "written", "group removed", "group created", "ranks up")
MOVE, STOP = ACTIONS = ("move", "stop and resume")
RESIZE = "resize"
PREFER = "prefer"  # a command that only schedulers of this file have: a number of devices for the moved job
FAULTS = (
    "exception",
    "killed rank",
    "stopped rank",
    "hung rank",
    "killed node",
    "drained node",
    "returning node",
    "killed scheduler",
    "full disk",
    "full disk of ranks",
    "clock",
)
HEAD = "killed head"
# Of a resize: in `handover` and before, ranks and agents are those that train, unless they are on standby.
RESIZE_FAULTS = {
    "written": ("killed rank", "killed agent", "killed node", "killed scheduler"),
    "standby": (
        *("exception", "killed rank", "killed agent", "killed standby rank", "killed standby agent"),
        *("stopped standby rank", "killed node", "drained node", "killed scheduler", "full disk"),
    ),
    "handover": (
        *("killed rank", "killed agent", "killed standby rank", "killed standby agent", "killed node"),
        *("killed scheduler", "full disk", "full disk of ranks"),
    ),
    "group removed": ("killed standby rank", "killed standby agent", "killed node", "killed scheduler", "full disk"),
    "group created": ("killed standby rank", "killed standby agent", "killed node", "killed scheduler"),
    "ranks up": ("killed rank", "killed agent", "killed node", "killed scheduler"),
}
# What is rarer while a job is resized, and two at once.
FURTHER_RESIZE_FAULTS = {
    "standby": ("stopped rank", "hung rank", "returning node", "full disk of ranks", "clock"),
    "handover": ("exception", "stopped rank", "drained node", "returning node", "clock"),
}
RESIZE_PAIRS = {
    "standby": (
        ("killed rank", "killed standby rank"),
        ("killed standby agent", "killed scheduler"),
        ("killed node", "killed scheduler"),
        ("full disk", "killed rank"),
    ),
    "handover": (
        ("killed agent", "killed standby agent"),
        ("killed standby rank", "killed scheduler"),
        ("killed node", "full disk"),
        ("killed rank", "drained node"),
    ),
}
STANDBY_FAULTS = ("killed agent", "killed standby rank", "killed standby agent", "stopped standby rank")
JUMPS_S = (3 * 3600.0, -3 * 3600.0, 30 * 3600.0)
_real_time = time.time  # the scheduler's process has another, which jumps
_FULL = 1000  # bytes that a file may have on a full disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Faults that happen at once, in a phase of an action. `choice` picks a rank, a node, a jump of the clock."""

    faults: tuple[str, ...]
    phase: str
    action: str
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    injections: tuple[Injection, ...]
    steps: int = STEPS  # of each job, more than there is time for until the last fault

    @property
    def num_faults(self) -> int:
        return sum(len(injection.faults) for injection in self.injections)


def all_series() -> Iterator[Series]:
    """Every fault in each phase of each action, then pairs, then random ones; the head's last, which take a minute."""
    for action in ACTIONS:
        for phase in COMMON_PHASES if action == MOVE else COMMON_PHASES[1:]:
            choices = enumerate(FAULTS, COMMON_PHASES.index(phase))
            injections = [Injection(faults=(fault,), phase=phase, action=action, choice=n) for n, fault in choices]
            yield Series(name=f"{action}, {phase}" if phase != "training" else phase, injections=tuple(injections))
    for phase, faults in RESIZE_FAULTS.items():
        injections = [Injection(faults=(fault,), phase=phase, action=RESIZE) for fault in faults]
        yield Series(name=f"{RESIZE}, {phase}", injections=tuple(injections))
    rare = [(phase, fault) for phase, faults in FURTHER_RESIZE_FAULTS.items() for fault in faults]
    injections = [
        Injection(faults=(fault,), phase=phase, action=RESIZE, choice=n) for n, (phase, fault) in enumerate(rare)
    ]
    yield Series(name=f"{RESIZE}, further", injections=tuple(injections))
    both = [(phase, pair) for phase, pairs in RESIZE_PAIRS.items() for pair in pairs]
    injections = [Injection(faults=pair, phase=phase, action=RESIZE, choice=n) for n, (phase, pair) in enumerate(both)]
    yield Series(name=f"{RESIZE}, pairs", injections=tuple(injections))
    generator = random.Random("pairs")
    pairs = [(first, second) for number, first in enumerate(FAULTS) for second in FAULTS[number + 1 :]]
    generator.shuffle(pairs)
    for number in range(4):
        chosen = pairs[8 * number : 8 * (number + 1)]
        yield Series(name=f"pairs {number}", injections=tuple(_random(generator, pair) for pair in chosen))
    for number in range(4):
        generator = random.Random(f"random {number}")
        injections = [_random(generator, (generator.choice(FAULTS),)) for _ in range(10)]
        yield Series(name=f"random {number}", injections=tuple(injections))
    yield Series(
        name=HEAD, injections=tuple(Injection(faults=(HEAD,), phase=phase, action=MOVE) for phase in COMMON_PHASES)
    )


def _random(generator: random.Random, faults: tuple[str, ...]) -> Injection:
    phase, action = generator.choice(COMMON_PHASES), generator.choice(ACTIONS)
    return Injection(faults=faults, phase=phase, action=action, choice=generator.randrange(12))


# Faults. They happen in the scheduler's process, in a phase of an action, or in this one.


def inject(folder: Path, number: int, injection: Injection) -> None:
    """Have the faults of an injection happen, and note what there was before."""
    from spindle.checkpoint import steps_in
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.store import Store

    with Store.open(folder / "fleet.db") as store:
        allocations = {job.name: job.allocation for job in latest_state(store).jobs}
        nodes = {name: [share.node for share in each.nodes] if each else [] for name, each in allocations.items()}
    steps = {job: max((line["step"] for line in steps_of(folder / job) if "step" in line), default=-1) for job in JOBS}
    saved = {job: max(steps_in(folder / job / "saved"), default=0) for job in JOBS}
    mark: dict[str, Any] = {"time_s": _real_time(), "steps": steps, "saved": saved, "nodes": nodes}
    for fault in injection.faults:
        prepared = _prepare(folder, fault, injection.choice, nodes)
        assert prepared[fault] or fault == "clock", f"{fault}: there is nothing to hit"
        mark |= prepared
    path = folder / f"fault-{number}.json"
    path.with_suffix(".part").write_text(json.dumps(mark))
    path.with_suffix(".part").rename(path)  # before the process that writes it is killed
    for fault in sorted(injection.faults, key=lambda fault: fault == "killed scheduler"):
        _happen(folder, fault, mark)


def _prepare(folder: Path, fault: str, choice: int, nodes: dict[str, list[str]]) -> dict[str, Any]:
    """What a fault will hit: the moved job where it has ranks, or else the one beside it."""
    from spindle.fleet.ray_nodes import raylets, session_processes

    ranks = {job: _ranks(folder / job) for job in JOBS}
    job = MOVED if ranks[MOVED] and not (choice % 3 == 2 and ranks[BESIDE]) else BESIDE
    places = nodes.get(MOVED) or nodes.get(BESIDE) or list(NODES)
    match fault:
        case "exception" | "hung rank":
            return {f"{fault}": job}
        case "killed rank" | "stopped rank":
            return {fault: ranks[job][choice % len(ranks[job]) :][:1] if ranks[job] else []}
        case "killed standby rank" | "stopped standby rank":
            return {fault: _ranks(folder / MOVED, standby=True)[:1]}
        case "killed agent":
            return {fault: [_parent(pid) for pid in ranks[MOVED][:1]]}
        case "killed standby agent":
            return {fault: [_parent(pid) for pid in _ranks(folder / MOVED, standby=True)[:1]]}
        case "killed node" | "drained node":
            return {fault: places[choice % len(places)]}
        case "returning node":
            node = places[choice % len(places)]
            raylet = raylets(_local(folder)).get(node)
            return {fault: node, "frozen": [raylet, *_agents(raylet)] if raylet else []}
        case "full disk of ranks":
            return {fault: ranks[job]}
        case "clock":
            return {fault: JUMPS_S[choice % len(JUMPS_S)], "restarts": choice % 2 == 1}
        case "killed head":
            pids = session_processes(_local(folder))
            return {fault: [pid for pid in pids if _command(pid).split("\0")[0].endswith("gcs_server")]}
        case _:
            return {fault: True}


def _happen(folder: Path, fault: str, mark: dict[str, Any]) -> None:
    from spindle.fleet.ray_nodes import raylets
    from spindle.fleet.store import Store

    target = mark[fault]
    match fault:
        case "exception" | "hung rank":
            (folder / target / ("raise" if fault == "exception" else "hang")).touch()
        case "killed rank" | "killed head" | "killed agent" | "killed standby rank" | "killed standby agent":
            _signal(target, signal.SIGKILL)
        case "stopped rank" | "stopped standby rank":
            _signal(target, signal.SIGSTOP)
        case "killed node":
            _signal([raylets(_local(folder)).get(target)], signal.SIGKILL)
        case "drained node":
            with Store.open(folder / "fleet.db") as store:
                store.request({"command": "drain", "node": target, "within_s": 5.0})
        case "returning node":
            _signal(mark["frozen"], signal.SIGSTOP)
        case "full disk":
            _limit_files([_scheduler(folder)], _FULL)
        case "full disk of ranks":
            _limit_files(target, _FULL)
        case "clock":
            (folder / "clock").write_text(str(target))
            if mark["restarts"]:
                _signal([_scheduler(folder)], signal.SIGKILL)
        case "killed scheduler":
            _signal([_scheduler(folder)], signal.SIGKILL)
        case _:
            raise AssertionError(fault)


def _scheduler(folder: Path) -> int:
    return int((folder / "scheduler.pid").read_text())


def _local(folder: Path) -> Any:
    return LiveTestFleet(folder, "").local()


def _ranks(folder: Path, *, standby: bool = False) -> list[int]:
    """Ranks of a job's first attempt that has any, in the order of their numbers; with `standby`, of the last. A
    process that was forked a moment ago is left out."""
    found: dict[int, dict[int, int]] = {}
    for pid in processes_of(folder):
        if "spindle.launch.worker" in _command(pid):
            with contextlib.suppress(OSError, StopIteration):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                attempt, rank = (
                    next(int(word.removeprefix(name)) for word in variables if word.startswith(name))
                    for name in (b"SPINDLE_ATTEMPT=", b"RANK=")
                )
                found.setdefault(attempt, {})[rank] = pid
    if not found:
        return []
    ranks = found[max(found) if standby else min(found)]
    return [ranks[rank] for rank in sorted(ranks)]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _agents(raylet: int) -> list[int]:
    children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    return [int(pid) for pid in children if _command(int(pid)).startswith("ray::RayAgent")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _signal(pids: Sequence[int | None], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)


def _limit_files(pids: Sequence[int], limit: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


# The scheduler's process.


def scheduler(folder: Path, arguments: Sequence[str]) -> int:
    """`spindle fleet up ARGUMENTS` in this process, in which armed faults happen in their phase, and whose clock may
    jump."""
    import importlib

    from spindle.cli.main import run
    from spindle.fleet import Estimate, Estimated
    from spindle.fleet.engine import RUNNING
    from spindle.fleet.events import Plan
    from spindle.fleet.live import LiveFleet
    from spindle.fleet.ray_engine import RayEngine
    from spindle.fleet.ray_nodes import import_ray
    from spindle.fleet.store import Store

    import_ray(is_local=True)
    groups = importlib.import_module("ray.util.placement_group")  # a function has that name, too
    faulthandler.register(signal.SIGUSR1)
    (folder / "scheduler.pid").write_text(str(os.getpid()))
    _jumping_clock(folder / "clock")
    lock, names = threading.Lock(), threading.local()

    def reached(phase: str, job: str) -> None:
        armed = folder / "armed.json"
        with lock:
            if job != MOVED or not armed.exists():
                return
            data = json.loads(armed.read_text())
            if data["injection"]["phase"] != phase:
                return
            armed.unlink()
        injection = Injection(**{**data["injection"], "faults": tuple(data["injection"]["faults"])})
        inject(folder, data["number"], injection)

    append, discard, create, wait = Store.append, RayEngine.discard, RayEngine._create, groups.PlacementGroup.wait
    make_group, stop, handle = groups.placement_group, RayEngine.stop, LiveFleet._handle

    def noted_append(self: Store, event: Any, actions: Any, **options: Any) -> list[int]:
        numbers = append(self, event, actions, **options)
        for action in actions:
            if not isinstance(action, Plan):
                reached("written", action.job)
        return numbers

    def noted_discard(self: RayEngine, key: Any) -> None:
        had = key in self._attempts
        discard(self, key)
        if had:
            reached("group removed", key[0])

    def noted_group(*args: Any, name: str = "", **options: Any) -> Any:
        names.job = name.split("/")[2] if name.count("/") == 3 else ""
        return make_group(*args, name=name, **options)

    def noted_wait(self: Any, timeout_seconds: float = 30) -> bool:
        is_ready = wait(self, timeout_seconds)
        if is_ready:
            reached("group created", getattr(names, "job", ""))
        return is_ready

    def noted_create(self: RayEngine, key: Any, attempt: Any) -> None:
        create(self, key, attempt)
        if attempt.phase == RUNNING:
            reached("ranks up", key[0])

    def noted_stop(self: RayEngine, key: Any, grace_s: float) -> None:
        is_handover = any(job == key[0] for job, _ in self._standbys)
        stop(self, key, grace_s)
        if is_handover:
            reached("handover", key[0])

    def noted_is_prepared(self: RayEngine, key: Any) -> bool | None:
        # Once ranks on standby run; they may be ready.
        if (folder / "armed.json").exists() and _ranks(folder / MOVED, standby=True) != _ranks(folder / MOVED):
            reached("standby", key[0])
        return is_prepared(self, key)

    def handle_ours(self: LiveFleet, command: Any) -> None:
        if command.body["command"] != PREFER:
            handle(self, command)
            return
        cells = [estimate.cell for estimate in self.state.find(MOVED).estimates]
        for cell in cells:
            if self.store.plan(MOVED, cell) is None:
                bound = Estimate(cell=cell, step_s=1.0, grade="bound")
                self.plans._process.request(MOVED, self.store.submission(MOVED), self.state.fleet, bound)
        estimates = tuple(
            Estimate(cell=cell, step_s=0.1 if cell.num_devices == command.body["count"] else 100.0, grade="measured")
            for cell in cells
        )
        event = Estimated(time_s=self.clock.now_s(), job=MOVED, estimates=estimates)
        self.journal.record(event, answers=((command.number, "ok"),))

    is_prepared = RayEngine.is_prepared
    RayEngine.stop, RayEngine.is_prepared, LiveFleet._handle = noted_stop, noted_is_prepared, handle_ours
    Store.append, RayEngine.discard, RayEngine._create = noted_append, noted_discard, noted_create
    groups.placement_group, groups.PlacementGroup.wait = noted_group, noted_wait
    return run(["fleet", "up", *arguments])


def _jumping_clock(path: Path) -> None:
    """Have this process's clock follow the seconds in a file."""
    real, ahead_s = time.time, [0.0]

    def follow() -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                ahead_s[0] = float(path.read_text())
            time.sleep(0.05)

    with contextlib.suppress(OSError, ValueError):
        ahead_s[0] = float(path.read_text())
    time.time = lambda: real() + ahead_s[0]
    threading.Thread(target=follow, daemon=True).start()


class FaultyFleet(LiveTestFleet):
    """A fleet whose scheduler's process has faults happen."""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, __file__, "--scheduler", str(self.folder), "--grace", str(GRACE_S), *arguments]

    def is_running(self) -> bool:
        return self.scheduler is not None and self.scheduler.poll() is None

    def keep_up(self) -> None:
        """Start the scheduler if it is gone."""
        if not self.is_running():
            assert self.scheduler is None or self.scheduler.returncode == -signal.SIGKILL, self.output()[-3000:]
            self.start()

    def request(self, **body: Any) -> None:
        """Ask the scheduler, and do not wait for its answer."""
        from spindle.fleet.store import Store

        with Store.open(self.store_path) as store:
            store.request(body)


# Running a series.


class SavedSteps:
    """When checkpoints of jobs were seen to be complete: by a thread that looks again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, {job: [(0.0, 0)] for job in JOBS}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        from spindle.checkpoint import steps_in

        while not self._is_over.wait(0.1):
            for job, seen in self._seen.items():
                with contextlib.suppress(OSError):
                    newest = max(steps_in(self._folder / job / "saved"), default=0)
                    if newest < seen[-1][1]:  # a listing may miss what is renamed meanwhile
                        newest = max(newest, *steps_in(self._folder / job / "saved"), 0)
                    if newest != seen[-1][1]:
                        seen.append((time.time(), newest))

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def at(self, job: str, time_s: float) -> int:
        return max(step for seen_s, step in self._seen[job] if seen_s <= time_s)

    def backward(self) -> list[str]:
        """Checkpoints that were overwritten by older ones."""
        problems = []
        for job, seen in self._seen.items():
            steps = [step for _, step in seen]
            problems += [
                f"{job}: the newest checkpoint was {later} after {earlier}"
                for earlier, later in itertools.pairwise(steps)
                if later < earlier
            ]
        return problems


def run_series(series: Series, output: Path | None = None) -> dict[str, Any]:
    """Run a fleet with its faults. Returns what happened, and what is not as it should be."""
    begin_s = time.time()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fleet-faults-", dir="/tmp") as name:
        folder = Path(name)
        machines = fleet_file(folder / "fleet.toml", a100=tuple(NODES.values()))
        options = ("--interval", "1", "--reallocation", "1")
        fleet = FaultyFleet(folder, str(machines), *options)
        os.environ["SPINDLE_HUNG_S"] = str(HUNG_S)
        saved: SavedSteps | None = None
        try:
            fleet.up()
            arguments = ("--pause", str(PAUSE_S), "--every", str(EVERY))
            fleet.submit(MOVED, series.steps, *arguments, options=("--count", "1-2"))
            fleet.submit(BESIDE, series.steps, *arguments, options=("--count", "1"))
            saved = SavedSteps(folder)
            _settle(fleet)
            for number, injection in enumerate(series.injections):
                mark = _disturb(fleet, number, injection)
                _recover(fleet, mark)
                _settle(fleet)
                rows.append({**asdict(injection), **_outcome(fleet.folder, mark)})
            for job in JOBS:
                (folder / job / "fast").touch()
            problems += [f"{job} has {end}" for job in JOBS if (end := fleet.wait_for_end(job)) != "completed"]
            problems += _left_in_ray(fleet)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error)[:3000]}")
        finally:
            if saved is not None:
                saved.close()
            problems += _end(fleet)
        if output is not None:
            texts = [fleet.output(), *(path.read_text() for path in folder.glob("*/steps.jsonl"))]
            output.write_text("\n\n".join(texts))
        weights = {job: weights_of(folder / job) for job in JOBS if (folder / job / "final.npz").exists()}
        if saved is not None:
            problems += [*_lost_steps(folder, saved), *saved.backward()]
        problems += _store_problems(folder)
    return {
        "faults": rows,
        "problems": problems,
        "weights": weights,
        "time_s": round(time.time() - begin_s, 1),
    }


def _settle(fleet: FaultyFleet) -> None:
    """Wait until both jobs train, beyond the step in which they failed last, and nothing is being done."""
    since: list[tuple[float, dict[str, int]]] = []

    def is_settled() -> bool:
        fleet.keep_up()
        taken = _taken_in_calm(fleet)
        if taken is None:
            since.clear()
            return False
        since.append((time.monotonic(), taken))
        first_s, first = since[0]
        return since[-1][0] - first_s > CALM_S and all(taken[job] > first[job] for job in JOBS)

    fleet.wait(is_settled, "both jobs train", RECOVERY_S)


def _taken_in_calm(fleet: FaultyFleet) -> dict[str, int] | None:
    """The steps that each job has taken in its attempt; None while an action is being executed, a node is away, a fault
    is still to come, or a job has not saved a checkpoint after the step in which it failed last."""
    from spindle.checkpoint import steps_in
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.events import Plan
    from spindle.fleet.state import RUNNING
    from spindle.fleet.store import Store

    with Store.open(fleet.store_path) as store:
        state = latest_state(store)
        is_idle = all(entry.is_done or isinstance(entry.action, Plan) for entry in store.actions())
    if not is_idle or state.unavailable or not fleet.is_up() or {job.name for job in state.jobs} != set(JOBS):
        return None
    taken = {}
    for job in state.jobs:
        folder = fleet.folder / job.name
        lines = [line for line in steps_of(folder) if "step" in line and line["attempt"] == job.attempt]
        newest = max(steps_in(folder / "saved"), default=0)
        is_asked = (folder / "raise").exists() or (folder / "hang").exists()
        if job.phase != RUNNING or newest <= job.failed_step or is_asked:
            return None
        taken[job.name] = len(lines)
    return taken


def _disturb(fleet: FaultyFleet, number: int, injection: Injection) -> dict[str, Any]:
    """Begin the action, and wait until the faults have happened in its phase. Returns what there was before them."""
    path = fleet.folder / f"fault-{number}.json"
    job = fleet.job(MOVED)
    if injection.phase == "training":
        inject(fleet.folder, number, injection)
    else:
        armed = {"number": number, "injection": asdict(injection)}
        part = fleet.folder / "armed.part"
        part.write_text(json.dumps(armed))
        part.rename(fleet.folder / "armed.json")
        if injection.action == MOVE:
            node = job["nodes"][-1]
            fleet.request(command="drain", node=node, within_s=0.0)
        elif injection.action == RESIZE:
            fleet.request(command=PREFER, count=3 - len(_ranks(fleet.folder / MOVED)))
        else:
            fleet.request(command="stop", job=MOVED)
            if injection.phase in ("group created", "ranks up"):
                fleet.wait(lambda: fleet.job(MOVED)["phase"] == "suspended", "it is suspended")
                fleet.request(command="resume", job=MOVED)
        fleet.wait(path.exists, f"{injection.faults} in phase {injection.phase!r}", RECOVERY_S)
    return json.loads(path.read_text())


def _recover(fleet: FaultyFleet, mark: dict[str, Any]) -> None:
    """Take back what a person would: the disk has space again, the node is back, the scheduler is started again."""
    if "full disk" in mark or "full disk of ranks" in mark or "clock" in mark:
        time.sleep(2.5)
    if "full disk" in mark:
        _limit_files([_scheduler(fleet.folder)] if fleet.is_running() else [], resource.RLIM_INFINITY)
    if "full disk of ranks" in mark:
        _limit_files(mark["full disk of ranks"], resource.RLIM_INFINITY)
    if HEAD in mark:
        address = fleet.local().address
        fleet.wait(lambda: fleet.local().address not in ("", address), "Ray was started again", RECOVERY_S)
    fleet.wait(lambda: fleet.keep_up() or fleet.is_up(), "the scheduler is up")
    if "returning node" in mark:
        _return_node(fleet, mark)
    if "killed node" in mark and HEAD not in mark:
        fleet.wait(lambda: not _has_raylet(fleet, mark["killed node"]), "the node is gone")
        _add_node(fleet, mark["killed node"])
    fleet.keep_up()
    for node in NODES:  # of the action, and of the fault
        fleet.request(command="drain", node=node, ends=True)
    fleet.wait(lambda: fleet.keep_up() or not fleet.status()["num_pending_commands"], "commands are answered")
    if fleet.job(MOVED)["phase"] == "suspended":
        fleet.request(command="resume", job=MOVED)


def _outcome(folder: Path, mark: dict[str, Any]) -> dict[str, Any]:
    """How many steps the jobs repeated after a fault, and the seconds until they were beyond those before it."""
    repeated, recovered_s = {}, 0.0
    for job in JOBS:
        lines = [line for line in steps_of(folder / job) if "step" in line]
        attempts = sorted({line["attempt"] for line in lines if line["time_s"] > mark["time_s"]})
        repeated[job] = 0
        for attempt in attempts:
            before = [line["step"] for line in lines if line["attempt"] < attempt]
            own = [line for line in lines if line["attempt"] == attempt]
            if not before or own[0]["time_s"] <= mark["time_s"]:
                continue
            repeated[job] += max(0, max(before) + 1 - own[0]["step"])
            beyond = next((line["time_s"] for line in own if line["step"] > max(before)), own[-1]["time_s"])
            if attempt in attempts[:2]:  # not moves that come later
                recovered_s = max(recovered_s, beyond - mark["time_s"])
    return {"repeated": repeated, "recovered_s": round(recovered_s, 1), "saved": mark["saved"]}


def _has_raylet(fleet: FaultyFleet, node: str) -> bool:
    from spindle.fleet.ray_nodes import raylets

    return node in raylets(fleet.local())


def _return_node(fleet: FaultyFleet, mark: dict[str, Any]) -> None:
    """Let a node that was frozen go on, after its jobs were given to others; Ray lets it in as a new one only."""
    node = mark["returning node"]
    fleet.wait(lambda: fleet.keep_up() or not fleet.status()["nodes"][node], "the node is lost", 60.0)
    time.sleep(2.0)  # its ranks train beside those of the next attempt
    _signal(mark["frozen"], signal.SIGCONT)
    fleet.wait(lambda: not _has_raylet(fleet, node), "the raylet that was given up ends", RECOVERY_S)
    _add_node(fleet, node)


def _add_node(fleet: FaultyFleet, node: str) -> None:
    if not _has_raylet(fleet, node):
        fleet.add_node(node, "A100", NODES[node])


# Judging.


def _lost_steps(folder: Path, saved: SavedSteps) -> Iterator[str]:
    """Attempts that began before the newest checkpoint that was complete when they started."""
    for job in JOBS:
        lines = steps_of(folder / job)
        for start in (line for line in lines if line.get("start")):
            same = [line["step"] for line in lines if line["attempt"] == start["attempt"] and "step" in line]
            newest = saved.at(job, start["time_s"])
            if same and min(same) < newest:
                yield f"{job}: attempt {start['attempt']} began at step {min(same)}, checkpoint {newest} was complete"


def _left_in_ray(fleet: FaultyFleet) -> list[str]:
    """Placement groups, agents and occupied devices when no job is left; asked in a process of its own."""
    code = (
        "import json, sys, time; from spindle.fleet.ray_nodes import import_ray\n"
        "ray = import_ray(is_local=True)\n"
        "ray.init(address=sys.argv[1], namespace='spindle', log_to_driver=False, logging_level='ERROR')\n"
        "def left():\n"
        "    table = ray.util.placement_group_table().values()\n"
        "    groups = [each['name'] for each in table if each['state'] != 'REMOVED']\n"
        "    names = ray.util.list_named_actors()\n"
        "    return groups, names, [ray.cluster_resources().get('GPU'), ray.available_resources().get('GPU')]\n"
        "end_s = time.monotonic() + 10\n"
        "while left() != ([], [], [float(sys.argv[2])] * 2) and time.monotonic() < end_s: time.sleep(0.2)\n"
        "print(json.dumps(left()))"
    )
    command = [sys.executable, "-c", code, fleet.local().address, str(sum(NODES.values()))]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    groups, agents, devices = json.loads(answer.stdout.splitlines()[-1])
    problems = [f"placement groups are left: {groups}"] if groups else []
    problems += [f"agents are left: {agents}"] if agents else []
    expected = float(sum(NODES.values()))
    return problems + ([f"of {expected:g} devices {devices} are there, and free"] if devices != [expected] * 2 else [])


def _end(fleet: FaultyFleet) -> list[str]:
    """End a fleet; what is left of it is a problem, and is killed."""
    from spindle.fleet.ray_nodes import end_processes, session_processes

    if not fleet.store_path.exists():
        return ["no store was made"]
    problems = []
    local = fleet.local()
    _signal(session_processes(local), signal.SIGCONT)
    if fleet.is_running():
        _limit_files([_scheduler(fleet.folder)], resource.RLIM_INFINITY)
    (fleet.folder / "armed.json").unlink(missing_ok=True)
    try:
        local = fleet.local()
        fleet.down()
    except Exception as error:
        problems.append(f"the fleet does not go down: {str(error)[:500]}")
    end_s = time.monotonic() + 10
    while (left := [*session_processes(local), *processes_of(fleet.folder)]) and time.monotonic() < end_s:
        time.sleep(0.1)
    if left:
        problems.append(f"processes are left: {[_command(pid)[:120] for pid in left]}")
        end_processes(left)
    return problems


def _store_problems(folder: Path) -> list[str]:
    """Whether the store tells a possible story: the same actions again, all confirmed, no device used twice."""
    import sqlite3

    from spindle.fleet import State, schedule
    from spindle.fleet.event_log import read_event_log, replay

    path = folder / "fleet.db"
    if not path.exists():
        return []
    log = read_event_log(path)
    result = replay(log)
    problems = [f"replayed, the scheduler acts differently: {result.difference}"] if result.difference else []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (num_open,) = connection.execute("SELECT count(*) FROM actions WHERE done_s IS NULL").fetchone()
    problems += [f"{num_open} actions were never confirmed"] if num_open else []
    state = State(fleet=log.fleet, options=log.options)
    sizes = dict(zip(log.fleet.node_names, log.fleet.size_of_node, strict=True))
    for event, _ in log.entries:
        state, _ = schedule(state, event)
        used = dict.fromkeys(sizes, 0)
        for job in state.jobs:
            for share in job.allocation.nodes if job.allocation else ():
                used[share.node] += share.num_devices
        problems += [
            f"{node} has {used[node]} of {size} devices in use" for node, size in sizes.items() if used[node] > size
        ]
    return problems


class Undisturbed:
    """The parameters of one process that nothing disturbs, by its number of steps."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def weights(self, steps: int) -> Any:
        if steps not in self._known:
            with tempfile.TemporaryDirectory(prefix="fleet-faults-", dir="/tmp") as name:
                self._known[steps] = undisturbed(Path(name) / "job", steps)
        return self._known[steps]


def judged(series: Series, ran: dict[str, Any], expected: Any) -> dict[str, Any]:
    """What happened, without weights, and whether it is as it should be."""
    weights, problems = ran.pop("weights"), list(ran.pop("problems"))
    errors = {job: largest_difference(state, expected) for job, state in weights.items()}
    problems += [f"{job} has written no parameters" for job in JOBS if job not in errors]
    problems += [f"{job}: parameters are {error:.2g} off" for job, error in errors.items() if not error <= TOLERANCE]
    num_missing = len(series.injections) - len(ran["faults"])
    problems += [f"{num_missing} injections did not happen, or nobody recovered"] if num_missing else []
    verdict = "failed" if problems else "passed"
    return {"series": series.name, "verdict": verdict, "problems": problems, "errors": errors, **ran}


# Results.


def sources() -> str:
    """A digest of what the results depend on."""
    digest = hashlib.sha256()
    package = ROOT / "src" / "spindle"
    folders = [package / name for name in ("fleet", "launch", "checkpoint", "train")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    for path in sorted([*paths, TESTS / "scripts" / "fleet_job.py", Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table of the last result of each series, by fault."""
    from common import markdown

    last = {row["series"]: row for row in rows}
    injected = [(each, row["verdict"] == "passed") for row in last.values() for each in row["faults"]]
    lines = []
    for fault in (*FAULTS, *STANDBY_FAULTS, HEAD):
        lines.append(_summary(fault, [(each, passed) for each, passed in injected if each["faults"] == [fault]]))
    lines.append(_summary("two at once", [(each, passed) for each, passed in injected if len(each["faults"]) > 1]))
    lines.append(_summary("all", injected))
    header = ["fault", *PHASES, "injected", "survived", "steps repeated: median (most)", "seconds to recover: median"]
    commits = ", ".join(sorted({row["commit"] for row in last.values()}))
    machines = ", ".join(sorted({row["hardware"] for row in last.values()}))
    note = (
        f"Commits {commits}; {machines}, shared with other work. Three Ray nodes with four devices, two jobs; a "
        f"checkpoint every {EVERY} steps: more are repeated where one was still being written. Seconds include what a "
        "person takes to bring a node back, and those that a stopped or hung rank is given."
    )
    failed = [f"- {row['series']}: {row['problems'][0][:300]}" for row in last.values() if row["problems"]]
    return "\n".join(
        [
            markdown(header, [line for line in lines if line]),
            "",
            note,
            *(["", "Failed:", *failed] if failed else []),
            "",
        ]
    )


def _summary(name: str, injected: Sequence[tuple[dict[str, Any], bool]]) -> list[str]:
    if not injected:
        return []
    counts = [sum(len(each["faults"]) for each, _ in injected if each["phase"] == phase) for phase in PHASES]
    survived = sum(len(each["faults"]) for each, passed in injected if passed)
    lost = [max(each["repeated"].values()) for each, _ in injected]
    times_s = [each["recovered_s"] for each, _ in injected if each["recovered_s"]]
    return [
        *(name, *map(str, counts), str(sum(counts)), str(survived)),
        f"{statistics.median(lost):g} ({max(lost)})",
        f"{statistics.median(times_s):.1f}" if times_s else "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", help="series whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the series")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no series after so many seconds")
    parser.add_argument("--again", action="store_true", help="also series that have passed with these sources")
    parser.add_argument("--report", action="store_true", help="write the table again, and run nothing")
    parser.add_argument("--output", type=Path, help="a folder for what schedulers print")
    options = parser.parse_args()
    chosen = [each for each in all_series() if not options.only or any(text in each.name for text in options.only)]
    if options.list:
        for series in chosen:
            print(f"{series.name:32} {series.num_faults:3} faults")
        print(f"{len(chosen)} series, {sum(series.num_faults for series in chosen)} faults")
        return 0
    digest, begin_s, num_failed = sources(), time.monotonic(), 0
    passed = {row["series"] for row in read_results() if row["sources"] == digest and row["verdict"] == "passed"}
    reference = Undisturbed()
    for series in () if options.report else chosen:
        if series.name in passed and not options.again:
            continue
        if time.monotonic() - begin_s > options.budget_s:
            print("the time is spent; the next call goes on from here")
            break
        row = _run_and_keep(series, digest, reference, options.output)
        num_failed += row["verdict"] != "passed"
    text = report(read_results())
    RESULTS.with_suffix(".md").write_text(text)
    print(text)
    return 1 if num_failed else 0


def _run_and_keep(series: Series, digest: str, reference: Undisturbed, output: Path | None) -> dict[str, Any]:
    from common import circumstances

    path = None
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"{series.name.replace(' ', '-')}.txt"
    row = judged(series, run_series(series, path), reference.weights(series.steps))
    about = circumstances()
    row |= {"sources": digest, "commit": about["commit"], "hardware": about["hardware"]}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    times_s = [each["recovered_s"] for each in row["faults"]]
    median = f", {statistics.median(times_s):.1f} s to recover" if times_s else ""
    print(f"{row['verdict']:7} {series.name:32} {len(row['faults']):3} in {row['time_s']:.0f} s{median}", flush=True)
    for problem in row["problems"]:
        print(f"        {problem}", flush=True)
    return row


if __name__ == "__main__":
    if sys.argv[1:2] == ["--scheduler"]:
        sys.exit(scheduler(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
