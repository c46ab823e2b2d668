"""Faults, injected into trainings of real processes under `spindle launch --restarts`, and survived.

    python -m tests.faults                       everything that has not passed yet with these sources
    python -m tests.faults --only kill --only sharded/stop
    python -m tests.faults --list
    python -m tests.faults --budget-s 600        begins no job after 600 s
    python -m tests.faults --fresh               ranks that import torch themselves, as users' do
    python -m tests.faults --report              the table of all results again

A job trains `scripts/surviving.py` on three ranks while faults happen one after the other. It passes if all of them
happened and it ended with the parameters of a job that nothing disturbed (the same bits; 1e-9 for pipelines, which
choose orders by time), and left no process, nothing in /dev/shm and TMPDIR, and no unfinished checkpoint. Ranks are
copies of a process that has imported torch, unless they are to be fresh or the launcher is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(ROOT / "benchmarks")]

SCRIPT = TESTS / "scripts" / "surviving.py"
RESULTS = ROOT / "benchmarks" / "results" / "faults.jsonl"
KINDS = ("wavefront", "sharded", "tensor", "pipeline")  # and "planned", to measure on another number of ranks
NUM_RANKS = 3
STOPPED_LIMIT_S = 1.0  # instead of 8: of a rank that is stopped
HUNG_LIMIT_S = 6.0  # instead of 60: of a rank that makes no progress, where ranks are to hang
FAULT_LIMIT_S = 90.0  # for a job, for each of its faults
MOST_STARTS = 60  # of a job that ends with 143, as a queue would start it
# In the order in which a run reaches them; those of a start, then those of a step, then those of a checkpoint.
STARTING = ("joining", "loading")
STEPPING = ("forward", "transfer", "backward", "sync", "update", "gather", "replanning")
SAVING = ("staging", "writing", "renaming", "removing")
RECOVERING_TERMS = tuple(f"TERM at {point}" for point in STARTING)  # in the start that follows the fault before
ON_RANK_0 = ("renaming", "removing")  # which rank 0 does alone: others are lost meanwhile
SHARED_MEMORY = Path("/dev/shm")
TOLERANCE = {"pipeline": 1e-9}
PARTS = ("noticed", "started", "imported", "joined", "planned", "loaded", "first step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong when rank `at` reaches a point."""

    action: str  # KILL, STOP, TERM, hang, raise, full disk, cut, flip
    point: str
    at: int
    targets: tuple[int | str, ...] = ()  # ranks, "launcher" or "planner"
    recovering: bool = False  # at once, in the start that follows the fault before
    file: int = 0  # of the newest checkpoint, to be damaged at a tenth of its bytes
    tenth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    kind: str
    faults: tuple[Fault, ...]
    memory_every: int = 0
    is_fresh: bool = False
    num_ranks: int = NUM_RANKS

    @property
    def steps(self) -> int:
        """Enough for all faults: replanning and gathering come every sixth step. Few different numbers: each needs an
        undisturbed run."""
        return 40 * -(-(7 * len(self.faults) + 8) // 40)


def signalled(action: str, point: str, target: int | str, *, recovering: bool = False) -> Fault:
    at = 0 if point in ON_RANK_0 or not isinstance(target, int) else target
    recovering = recovering or point in STARTING
    return Fault(action=action, point=point, at=at, targets=(target,), recovering=recovering)


def jobs() -> Iterator[Job]:
    faults = [signalled("KILL", "forward", rank) for rank in (1, 0, 2)]
    yield Job(name="planned/four fresh ranks", kind="planned", faults=tuple(faults), is_fresh=True, num_ranks=4)
    for kind in KINDS:
        for rank in range(NUM_RANKS):
            for action in ("KILL", "STOP"):
                faults = [signalled(action, point, rank) for point in (*STEPPING, *SAVING, *STARTING)]
                name = f"{kind}/{action.lower()}/{rank}"
                yield Job(name=name, kind=kind, faults=tuple(faults), memory_every=int(rank == 1))
        faults = [signalled("TERM", point, "launcher") for point in (*STEPPING, *SAVING, *STARTING)]
        yield Job(name=f"{kind}/term", kind=kind, faults=tuple(faults))
        yield Job(name=f"{kind}/disk", kind=kind, faults=tuple(_disk_faults()))
        yield Job(name=f"{kind}/damage", kind=kind, faults=tuple(_damage_faults()))
        faults = [Fault(action="raise", point="reading", at=rank) for rank in range(NUM_RANKS)]
        yield Job(name=f"{kind}/loader", kind=kind, faults=tuple(faults), memory_every=1)
        faults = [
            Fault(action="hang", point=point, at=rank) for rank, point in enumerate(("forward", "sync", "update"))
        ]
        yield Job(name=f"{kind}/hang", kind=kind, faults=tuple(faults), memory_every=1)
        yield Job(name=f"{kind}/together", kind=kind, faults=tuple(_faults_at_once()), memory_every=1)
        yield Job(name=f"{kind}/recovery", kind=kind, faults=tuple(_recovery_faults()))
        faults = [signalled("KILL", point, "launcher") for point in ("forward", "writing")]
        yield Job(name=f"{kind}/launcher", kind=kind, faults=tuple(faults), is_fresh=True)
        if kind == "pipeline":
            faults = [signalled(action, "forward", "planner") for action in ("KILL", "STOP", "KILL")]
            yield Job(name=f"{kind}/planner", kind=kind, faults=tuple(faults))
        yield Job(name=f"{kind}/random", kind=kind, faults=random_faults(50, kind), memory_every=1)


def _disk_faults() -> Iterator[Fault]:
    for rank in range(NUM_RANKS):
        yield Fault(action="full disk", point="writing", at=rank)
        yield signalled("KILL", "forward", rank)


def _damage_faults() -> Iterator[Fault]:
    """Each file of the newest checkpoint: state, index, plan, profile and three of bytes."""
    for file in range(7):
        yield Fault(action="cut", point="update", at=file % NUM_RANKS, file=file, tenth=(3 * file) % 10)
        yield Fault(action="flip", point="update", at=(file + 1) % NUM_RANKS, file=file, tenth=(7 * file + 2) % 10)


def _faults_at_once() -> Iterator[Fault]:
    for targets in ((0, 1), (1, 2), (0, 2), (0, 1, 2)):
        yield Fault(action="KILL", point="backward", at=targets[0], targets=targets)
        yield Fault(action="STOP", point="sync", at=targets[-1], targets=targets)


def _recovery_faults() -> Iterator[Fault]:
    for rank in range(NUM_RANKS):
        yield signalled("KILL", "backward", rank)
        for point in ("joining", "replanning", "loading"):
            yield signalled("KILL", point, (rank + 1) % NUM_RANKS, recovering=True)


def random_faults(count: int, seed: str) -> tuple[Fault, ...]:
    generator = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        action = generator.choice(["KILL"] * 5 + ["STOP"] * 3 + ["TERM", "raise", "full disk", "cut", "flip"])
        rank = generator.randrange(NUM_RANKS)
        match action:
            case "raise":
                fault = Fault(action=action, point="reading", at=rank)
            case "full disk":
                fault = Fault(action=action, point="writing", at=rank)
            case "cut" | "flip":
                place = {"file": generator.randrange(7), "tenth": generator.randrange(10)}
                fault = Fault(action=action, point="update", at=rank, **place)
            case _:
                point = generator.choice(STEPPING + SAVING + STARTING)
                fault = signalled(action, point, "launcher" if action == "TERM" else rank)
        # Nothing starts again after what ends no rank.
        if not (fault.recovering and (not faults or faults[-1].action == "full disk")):
            faults.append(fault)
    return tuple(faults)


# Running a job.


def launch(arguments: Sequence[str]) -> int:
    """`spindle launch ARGUMENTS` in this process, with a short limit for ranks that are stopped; notes when it sees
    that a rank is gone."""
    from preloaded import preloaded_ranks
    from spindle.cli.main import run
    from spindle.launch import launch as launcher
    from spindle.launch import ranks

    is_fresh, folder, *command = arguments
    ranks.STOPPED_LIMIT_S, ranks.STOPPED_POLL_S = STOPPED_LIMIT_S, 0.1
    end = launcher.end_ranks

    def noted_end(*args: Any) -> None:
        with (Path(folder) / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "noticed", "time_s": time.time()}) + "\n")
        end(*args)

    launcher.end_ranks = noted_end
    os.environ["FAULTS_LAUNCHER"] = str(os.getpid())
    with contextlib.nullcontext() if is_fresh == "fresh" else preloaded_ranks():
        return run(["launch", *command])


def run_job(
    job: Job, *, steps: int | None = None, is_fresh: bool = False, output: Path | None = None
) -> dict[str, Any]:
    """Run a job with its faults, as a queue does: one that ends with 143, or whose launcher is gone, is started again.
    Returns what happened."""
    begin_s = time.time()
    # A short name: sockets in it have names of up to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as name:
        folder, temporary = Path(name), Path(name) / "tmp"
        temporary.mkdir()
        (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in job.faults]))
        said: list[str] = []
        for _ in range(MOST_STARTS):
            code, text = _run_once(job, steps or job.steps, folder, temporary, is_fresh=is_fresh or job.is_fresh)
            said.append(text)
            if code not in (143, -signal.SIGKILL):
                break
            _age_folders(temporary)
        if output is not None:
            output.write_text("\n".join(said))
        problems = [] if code == 0 else [f"ended with {code}: {said[-1][-2000:]}"]
        problems += _left_behind(folder, temporary)
        state = folder / "final.pt"
        events = [json.loads(line) for line in _lines(folder / "events.jsonl")]
        marks = [folder / f"fault-{number}.json" for number in range(len(job.faults))]
        happened = [json.loads(mark.read_text()) if mark.exists() else None for mark in marks]
        missing = [fault for fault, mark in zip(job.faults, happened, strict=True) if mark is None]
        if missing:
            problems.append(f"{len(missing)} faults did not happen, from {missing[0]} on")
        parameters = None
        if state.exists():
            import torch

            parameters = torch.load(state)
    rows = [
        _outcome(fault, mark, _next_s(happened[number + 1 :]), events)
        for number, (fault, mark) in enumerate(zip(job.faults, happened, strict=True))
        if mark is not None
    ]
    return {
        "faults": rows,
        "problems": problems,
        "time_s": round(time.time() - begin_s, 1),
        "parameters": parameters,
        "said": said,
    }


def _run_once(job: Job, steps: int, folder: Path, temporary: Path, *, is_fresh: bool) -> tuple[int, str]:
    mode = "fresh" if is_fresh else "copies"
    options = ["-n", str(job.num_ranks), "--restarts", str(3 * len(job.faults) + 2)]
    script = [str(SCRIPT), job.kind, str(folder), str(steps), str(job.memory_every)]
    path = os.pathsep.join([str(ROOT / "src"), str(TESTS)])
    process = subprocess.Popen(
        [sys.executable, __file__, "--launch", mode, str(folder), *options, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {
            "TMPDIR": str(temporary),
            "PYTHONPATH": path,
            "SPINDLE_HUNG_S": str(HUNG_LIMIT_S) if job.name.endswith("hang") else "60",
        },
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=FAULT_LIMIT_S * (len(job.faults) + 2))
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = process.communicate(timeout=60)
            return 124, f"did not end in time\n{said}"
        process.kill()
        said, _ = process.communicate()
        return 124, f"did not end in time, nor by SIGTERM\n{said}"
    return process.returncode, said


def _age_folders(temporary: Path) -> None:
    """Let the next launcher take folders of one that was killed for abandoned."""
    for parent in (temporary, SHARED_MEMORY):
        for folder in parent.glob("spindle-launch-*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.getuid() and time.time() - folder.stat().st_mtime > 1:
                    os.utime(folder, (time.time() - 3600,) * 2)


def _left_behind(folder: Path, temporary: Path) -> list[str]:
    """What should not be there after a job: its processes, its files but the result, folders of its launchers."""
    end_s = time.monotonic() + 5.0  # which a kernel may take to end them
    while (pids := _processes_in(temporary)) and time.monotonic() < end_s:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    problems = [f"processes are left: {pids}"] if pids else []
    unfinished = [path.name for path in (folder / "saved").glob("*") if path.suffix in (".part", ".removed")]
    problems += [f"unfinished checkpoints are left: {unfinished}"] if unfinished else []
    left = [path.name for path in temporary.iterdir() if not path.name.startswith(("pymp-", "torchinductor_"))]
    problems += [f"left in TMPDIR: {left}"] if left else []
    shared = [path for path in SHARED_MEMORY.iterdir() if _mentions(path, folder)]
    problems += [f"left in /dev/shm: {shared}"] if shared else []
    for path in shared:
        shutil.rmtree(path, ignore_errors=True)
    return problems


def _processes_in(temporary: Path) -> list[int]:
    """Processes with this folder in their environment: copies have the command line of what they are copies of."""
    pids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and os.fsencode(temporary) in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def _mentions(path: Path, folder: Path) -> bool:
    """Whether a folder in memory is of this job: its checkpoints say so by their name, its store by its processes."""
    import zlib

    checkpoints = f"checkpoints-{zlib.crc32(str((folder / 'saved').absolute()).encode())}"
    try:
        return path.is_dir() and (path / checkpoints).exists()
    except OSError:
        return False


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _next_s(marks: Sequence[dict[str, Any] | None]) -> float:
    return next((mark["time_s"] for mark in marks if mark is not None), float("inf"))


def _outcome(fault: Fault, mark: dict[str, Any], next_s: float, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many steps a fault cost, and the seconds until the next first step; None where no rank was lost."""
    row: dict[str, Any] = {"fault": f"{fault.action} at {fault.point}", "at": fault.at, "targets": fault.targets}
    begin_s, step = mark["time_s"], mark["step"]
    later = [event for event in events if event["time_s"] > begin_s]
    first = next((event for event in later if event["event"] == "first step"), None)
    noticed = next((event for event in later if event["event"] == "noticed"), None)
    if first is None or noticed is None or noticed["time_s"] > next_s:
        return row  # it ended no rank: a batch that was read ahead for another plan, a planning process
    same = [
        event for event in later if event.get("start", 0) > noticed["time_s"] and event["time_s"] <= first["time_s"]
    ]
    times = {"noticed": noticed["time_s"]}
    for event in same:  # the last rank's, which the others wait for
        if event["event"] in PARTS:
            times[event["event"]] = max(times.get(event["event"], 0.0), event["time_s"])
    last_s = begin_s
    parts = {}
    for name in PARTS:
        if name in times:
            parts[name] = round(times[name] - last_s, 3)
            last_s = times[name]
    resumed = first["step"] - 1
    row |= {"lost": max(0, step - resumed), "recovered_s": round(first["time_s"] - begin_s, 3)}
    row |= {"lost_beyond_saved": max(0, mark["newest"] - resumed)}
    row |= {"parts_s": parts, "cpu_s": _cpu_seconds(same)}
    return row


def _cpu_seconds(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """CPU seconds of all ranks together in each part of a start."""
    seconds = dict.fromkeys(PARTS[1:], 0.0)
    last: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event["time_s"]):
        if event["event"] in seconds and "rank" in event:
            seconds[event["event"]] += event["cpu_s"] - last.get(event["rank"], 0.0)
            last[event["rank"]] = event["cpu_s"]
    return {part: round(cpu_s, 3) for part, cpu_s in seconds.items()}


# Judging.


class Undisturbed:
    """Parameters of jobs without faults, by kind and number of steps."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Any] = {}

    def parameters(self, job: Job) -> Any:
        key = job.kind, job.steps
        if key not in self._known:
            ran = run_job(replace(job, name="undisturbed", faults=(), is_fresh=False), steps=job.steps)
            assert ran["parameters"] is not None, ran["said"]
            self._known[key] = ran["parameters"]
        return self._known[key]


def judged(job: Job, ran: dict[str, Any], expected: Any) -> dict[str, Any]:
    """What happened, without parameters, and whether it is as it should be."""
    parameters, problems = ran.pop("parameters"), list(ran.pop("problems"))
    ran.pop("said")
    if parameters is not None:
        error = largest_difference(parameters, expected)
        ran["error"] = error
        if not error <= TOLERANCE.get(job.kind, 0.0):
            problems.append(f"parameters are {error:.2g} off those of an undisturbed run")
    elif not problems:
        problems.append("no parameters were written")
    for row in ran["faults"]:
        if row.get("lost_beyond_saved", 0) and not row["fault"].startswith(("cut", "flip")):
            problems.append(f"{row['fault']}: {row['lost_beyond_saved']} steps were lost beyond the newest checkpoint")
    problems += _lost_from_memory(job, ran["faults"])
    return {"job": job.name, "verdict": "failed" if problems else "passed", "problems": problems, **ran}


def _lost_from_memory(job: Job, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """With a checkpoint in memory before every step, no more than one is lost; unless no file could be written, or the
    job was started again by a queue, without its memory."""
    is_full = False
    for row, later in zip(rows, [*rows[1:], {"fault": ""}], strict=True) if job.memory_every == 1 else ():
        loses_memory = row["fault"].startswith("TERM") or later["fault"] in RECOVERING_TERMS
        if row.get("lost", 0) > 1 and not is_full and not loses_memory:
            yield f"{row['fault']}: {row['lost']} steps were lost, though each was saved in memory"
        is_full = row["fault"].startswith("full disk")


def largest_difference(state: Any, expected: Any) -> float:
    assert state.keys() == expected.keys()
    return max(float((value - expected[name]).abs().max()) for name, value in state.items())


# Results.


def sources() -> str:
    """A digest of what the results depend on."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), SCRIPT, Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(RESULTS)]


def write_report(rows: Sequence[dict[str, Any]]) -> str:
    """A table of the last result of each job."""
    from common import markdown

    last = {row["job"]: row for row in rows}
    lines = []
    for kind in ("planned", *KINDS):
        mine = [row for name, row in last.items() if name.startswith(f"{kind}/")]
        if mine:
            lines.append(_summary(kind, mine))
    if last:
        lines.append(_summary("all", list(last.values())))
    header = ["plan", "faults injected", "survived", "steps lost: median (most)", "seconds to recover: median"]
    header += [f"{part} (CPU, all ranks)" if part == "started" else part for part in PARTS]
    commits = sorted({row["commit"] for row in last.values()})
    machines = sorted({row["hardware"] for row in last.values()})
    failed = [f"- {row['job']}: {row['problems'][0][:300]}" for row in last.values() if row["problems"]]
    note = (
        f"Commits {', '.join(commits)}; {', '.join(machines)}, shared with other work. Three gloo ranks, most of them "
        "copies of a process that has imported torch; a rank that is stopped is given up after 1 s instead of 8."
    )
    return "\n".join([markdown(header, lines), "", note, *(["", "Failed:", *failed] if failed else []), ""])


def _summary(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    faults = [fault for row in rows for fault in row["faults"]]
    survived = sum(len(row["faults"]) for row in rows if row["verdict"] == "passed")
    lost = [fault["lost"] for fault in faults if "lost" in fault]
    times = [fault["recovered_s"] for fault in faults if "recovered_s" in fault]
    cells = [name, str(len(faults)), str(survived)]
    cells.append(f"{statistics.median(lost):g} ({max(lost)})" if lost else "")
    cells.append(f"{statistics.median(times):.1f}" if times else "")
    for part in PARTS:
        walls = [fault["parts_s"][part] for fault in faults if part in fault.get("parts_s", {})]
        cpus = [fault["cpu_s"][part] for fault in faults if part in fault.get("cpu_s", {})]
        cell = f"{statistics.median(walls):.1f}" if walls else ""
        cells.append(cell + (f" ({statistics.median(cpus):.1f})" if cpus else ""))
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", help="jobs whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the jobs and their faults")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no job after so many seconds")
    parser.add_argument("--fresh", action="store_true", help="ranks that import torch themselves")
    parser.add_argument("--again", action="store_true", help="also jobs that have passed with these sources")
    parser.add_argument("--report", action="store_true", help="write the table again, and run nothing")
    parser.add_argument("--output", type=Path, help="a folder for what jobs print")
    options = parser.parse_args()
    chosen = [job for job in jobs() if not options.only or any(text in job.name for text in options.only)]
    if options.list:
        for job in chosen:
            print(f"{job.name:24} {len(job.faults):3} faults, {job.steps} steps")
        print(f"{len(chosen)} jobs, {sum(len(job.faults) for job in chosen)} faults")
        return 0
    digest, begin_s, num_failed = sources(), time.monotonic(), 0
    passed = {row["job"] for row in read_results() if row["sources"] == digest and row["verdict"] == "passed"}
    undisturbed = Undisturbed()
    for job in () if options.report else chosen:
        if job.name in passed and not options.again:
            continue
        if time.monotonic() - begin_s > options.budget_s:
            print("the time is spent; the next call goes on from here")
            break
        output = None
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            output = options.output / f"{job.name.replace('/', '-')}.txt"
        from common import circumstances

        row = judged(job, run_job(job, is_fresh=options.fresh, output=output), undisturbed.parameters(job))
        about = circumstances()
        row |= {"sources": digest, "commit": about["commit"], "hardware": about["hardware"]}
        row["ranks"] = "fresh" if options.fresh or job.is_fresh else "copies"
        num_failed += row["verdict"] != "passed"
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        times = [fault["recovered_s"] for fault in row["faults"] if "recovered_s" in fault]
        median = f", {statistics.median(times):.1f} s to recover" if times else ""
        print(
            f"{row['verdict']:7} {job.name:22} {len(row['faults']):3} faults in {row['time_s']:.0f} s{median}",
            flush=True,
        )
        for problem in row["problems"]:
            print(f"        {problem}", flush=True)
    report = write_report(read_results())
    RESULTS.with_suffix(".md").write_text(report)
    print(report)
    return 1 if num_failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        sys.exit(launch(sys.argv[2:]))
    sys.exit(main())
