"""A lease of a GPU, as one command: the steps of `steps.py` in their order, as many as fit into the time.

    python tests/gpu/lease.py --minutes 9 --results DIR [--given DIR/lease.tar.gz] [--only STEP,...]
    python tests/gpu/lease.py --rehearse [--only STEP,...]
    python tests/gpu/lease.py --table

All that a step writes, its log, and what layers were measured to take (`SPINDLE_CACHE`) go into a folder beside the
machine's temporary files, and from there into DIR/lease.tar.gz at the end of every call. The next call, on a fresh
machine, goes on from that file. A step that its time limit ended, or that used up its budget, goes on in the next call;
one that failed is not tried again unless `--again` names it. Steps that measure have the GPU to themselves; others run
two at a time.

`--rehearse` runs each step in the smallest form that a CPU can, so that what is misspelt shows before the lease.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
for folder in (HERE.parent, ROOT / "src"):
    sys.path.insert(0, str(folder))

from gpu import results  # noqa: E402
from gpu.steps import COMPILED_LOOPS, STEPS, Step, calls_table, table  # noqa: E402

ARCHIVE = "lease.tar.gz"
MAX_ARCHIVE_BYTES = 15 * 2**20
MAX_LOG_BYTES = 200_000
NUM_LINES = 8  # of each log are printed
LEAST_S = 20.0  # a step is not begun with less
END_S = 10.0  # from SIGINT, at which MPS and workers are ended, to SIGKILL
SIDE_BY_SIDE = 2
REHEARSAL_S = 300.0
DONE, FAILED, CUT = "done", "failed", "cut off"


@dataclass(slots=True)
class Running:
    step: Step
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began_s: float
    end_s: float
    budget_s: float  # that its command was given
    signalled_s: float = 0.0  # when it was told to end


class Lease:
    """The steps that have been run, and the folder with all that they wrote."""

    def __init__(self, folder: Path, *, rehearses: bool = False) -> None:
        self.folder, self._rehearses = folder, rehearses
        self._file = folder / "steps.json"
        (folder / "results").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        self.entries: dict[str, dict[str, object]] = {}
        if self._file.exists():
            self.entries = json.loads(self._file.read_text(encoding="utf-8"))

    def is_over(self, step: Step) -> bool:
        return self.entries.get(step.name, {}).get("verdict") in (DONE, FAILED)

    def used_s(self, step: Step) -> float:
        return float(self.entries.get(step.name, {}).get("time_s", 0.0))  # type: ignore[arg-type]

    def forget(self, name: str) -> None:
        self.entries.pop(name, None)

    def run(self, steps: Sequence[Step], end_s: float) -> None:
        """Run what is not over, one after another, neighbours that measure nothing side by side."""
        waiting = [step for step in steps if not self.is_over(step)]
        running: list[Running] = []
        try:
            while waiting or running:
                while (step := self._next(waiting, end_s - time.monotonic())) and self._can_begin(step, running):
                    waiting.remove(step)
                    running.append(self._begin(step, end_s))
                if not running:
                    return
                time.sleep(0.1)
                running = [entry for entry in running if not self._ended(entry)]
        finally:
            for entry in running:  # this process is being ended
                _signal(entry.process, signal.SIGKILL)

    def _next(self, waiting: Sequence[Step], left_s: float) -> Step | None:
        """The first step for which there is time enough."""
        return next((step for step in waiting if left_s > max(LEAST_S, 60 * step.least_minutes)), None)

    def _can_begin(self, step: Step, running: Sequence[Running]) -> bool:
        if step.alone or self._rehearses:
            return not running
        return len(running) < SIDE_BY_SIDE and not any(entry.step.alone for entry in running)

    def _begin(self, step: Step, end_s: float) -> Running:
        now_s = time.monotonic()
        # A step that was cut off has used its time already, and gets half of it again.
        left_s = max(60 * step.minutes - self.used_s(step), 30 * step.minutes)
        limit_s = REHEARSAL_S if self._rehearses else min(left_s, end_s - END_S - now_s)
        command = step.rehearsal if self._rehearses else step.command
        folder = self.folder / "results"
        if step.begins_with and not self._rehearses and not (folder / Path(step.begins_with).name).exists():
            (folder / Path(step.begins_with).name).write_bytes((ROOT / step.begins_with).read_bytes())
        # A command with a budget ends by itself, before it is ended.
        budget_s = max(5, int(0.85 * limit_s))
        values = {"{results}": str(folder), "{seconds}": str(budget_s), "{name}": step.name}
        for name, value in values.items():
            command = command.replace(name, value)
        log = (self.folder / "logs" / f"{step.name}.log").open("ab")
        log.write(f"$ {command}\n".encode())
        log.flush()
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=ROOT,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Running(step, process, log, now_s, now_s + limit_s, budget_s)

    def _environment(self) -> dict[str, str]:
        cache = self.folder / "cache"
        variables = {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "SPINDLE_CACHE": str(cache / "spindle"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        return os.environ | variables | ({"CUDA_VISIBLE_DEVICES": ""} if self._rehearses else {})

    def _ended(self, entry: Running) -> bool:
        code, now_s = entry.process.poll(), time.monotonic()
        if code is None:
            if now_s > entry.end_s and not entry.signalled_s:
                entry.signalled_s = now_s
                _signal(entry.process, signal.SIGINT)
            elif entry.signalled_s and now_s > entry.signalled_s + END_S:
                _signal(entry.process, signal.SIGKILL)
            return False
        _signal(entry.process, signal.SIGKILL)  # what it left behind
        entry.log.close()
        time_s = now_s - entry.began_s
        # With its budget used, a command leaves out the rest and exits with 0. It goes on where its results end.
        is_used = time_s >= entry.budget_s and all(name in entry.step.command for name in ("{seconds}", "{results}"))
        is_cut = entry.signalled_s or (code == 0 and is_used and not self._rehearses)
        verdict = CUT if is_cut else DONE if code == 0 else FAILED
        self.entries[entry.step.name] = {
            "verdict": verdict,
            "code": code,
            "time_s": round(self.used_s(entry.step) + time_s, 1),
            "sources": results.sources_digest(),
        }
        self._file.write_text(json.dumps(self.entries, indent=1), encoding="utf-8")
        # All that is known of a call whose archive is lost.
        *others, last = last_lines(self.folder / "logs" / f"{entry.step.name}.log")
        print(f"{time_s:5.0f} s  {verdict:7}  {entry.step.name}: {last}", *others, sep="\n    ", flush=True)
        return True

    def summary(self, steps: Sequence[Step]) -> str:
        by_verdict = {
            verdict: [name for name, entry in self.entries.items() if entry["verdict"] == verdict]
            for verdict in (DONE, CUT, FAILED)
        }
        by_verdict["not begun"] = [step.name for step in steps if step.name not in self.entries]
        lines = [f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items() if names]
        digest = results.sources_digest()
        if old := [name for name, entry in self.entries.items() if entry["sources"] != digest]:
            lines.append(f"of other sources, --again to repeat: {', '.join(old)}")
        return "\n".join(lines)


def last_lines(log: Path) -> list[str]:
    """The last lines of a log that are not empty, the command at least."""
    lines = [line.strip()[:160] for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [line for line in lines if line][-NUM_LINES:]


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def pack(folder: Path, archive: Path) -> list[str]:
    """Write the folder into an archive: results and logs first, then caches as long as they fit. Returns what does
    not."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    for log in (folder / "logs").glob("*.log"):
        content = log.read_bytes()
        if len(content) > MAX_LOG_BYTES:
            log.write_bytes(content[:2000] + b"\n...\n" + content[-MAX_LOG_BYTES:])
    # What matters first is in place before large caches are tried: the call may be ended meanwhile.
    part, num_packed = archive.with_suffix(".part"), 0
    for count in range(2, len(CONTENTS) + 1):  # steps that are done never without their results
        with tarfile.open(part, "w:gz") as tar:
            for name in CONTENTS[:count]:
                if (folder / name).exists():
                    tar.add(folder / name, arcname=name)
        if num_packed and part.stat().st_size > MAX_ARCHIVE_BYTES:
            break
        part.replace(archive)
        num_packed = count
    part.unlink(missing_ok=True)
    return list(CONTENTS[num_packed:])


CONTENTS = ("steps.json", "results", "cache/spindle", "logs", "cache/inductor", "cache/triton")  # what matters first


def chosen_steps(names: str | None) -> Iterator[Step]:
    wanted = None if names is None else names.split(",")
    if unknown := set(wanted or ()) - {step.name for step in STEPS}:
        raise SystemExit(
            f"no such step: {', '.join(sorted(unknown))} (steps: {', '.join(step.name for step in STEPS)})"
        )
    yield from (step for step in STEPS if wanted is None or step.name in wanted)


def main() -> int:
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call, packing included")
    parser.add_argument("--results", type=Path, help=f"the folder that gets {ARCHIVE}")
    parser.add_argument("--given", type=Path, help=f"the {ARCHIVE} of the call before")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "spindle-lease")
    parser.add_argument("--only", help="steps, by name")
    parser.add_argument("--again", default="", help="steps that are run though they are over")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, each step in its smallest form")
    parser.add_argument("--table", action="store_true", help="print the tables of README.md")
    options = parser.parse_args()
    if options.table:
        print(f"{calls_table()}\n\n{table()}")
        return 0
    steps = list(chosen_steps(options.only))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that running steps are ended
    if options.rehearse:
        with tempfile.TemporaryDirectory() as folder:
            lease = Lease(Path(folder), rehearses=True)
            lease.run(steps, began_s + len(steps) * (REHEARSAL_S + END_S))
            failed = [name for name, entry in lease.entries.items() if entry["verdict"] != DONE]
            for name in failed:
                print(f"\n{name}:\n{(lease.folder / 'logs' / f'{name}.log').read_text(errors='replace')[-3000:]}")
            print(lease.summary(steps))
            return 1 if failed else 0
    if options.results is None:
        parser.error("--results DIR: where the archive goes")
    is_fresh = not options.folder.exists()
    options.folder.mkdir(parents=True, exist_ok=True)
    for archive in (options.given, options.results / ARCHIVE):
        if archive is not None and (archive == options.given or archive.exists()):
            with tarfile.open(archive) as tar:
                tar.extractall(options.folder, filter="data")
    lease = Lease(options.folder)
    for name in filter(None, [*options.again.split(","), COMPILED_LOOPS if is_fresh else ""]):
        lease.forget(name)
    try:
        lease.run(steps, began_s + 60 * options.minutes - 15)
    finally:
        left_out = pack(options.folder, options.results / ARCHIVE)
        size = (options.results / ARCHIVE).stat().st_size / 2**20
        print(lease.summary(steps))
        print(f"{options.results / ARCHIVE}: {size:.1f} MiB" + (f", without {', '.join(left_out)}" if left_out else ""))
    return 1 if any(entry["verdict"] == FAILED for entry in lease.entries.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
