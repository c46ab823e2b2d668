"""The equality tests of the gloo suite on one GPU, under NCCL and under virtual devices, then failures:

    python tests/gpu/all.py [--backend nccl,ipc] [--only PART,...] [--ranks 4] [--budget SECONDS] [--jobs 4]
                            [--resume FILE ...] [--results FILE] [--table FILE.md]

Every test that goes through the pool runs as it is; SPINDLE_TEST_BACKEND tells the pool which backend to use. Results
are appended to a file of JSON lines as they come, so a lease that ends early loses one test: the next run skips what
has passed on the same sources. `--backend gloo` runs the same tests on CPUs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parent, HERE.parent.parent
RUN_TESTS = TESTS / "run"
for folder in (TESTS, ROOT / "src"):
    sys.path.insert(0, str(folder))

from gpu import failures, results  # noqa: E402
from gpu.results import FAILED, PASSED, SKIPPED, Result  # noqa: E402

LIMIT_S = 60  # of one request to the pool; then tracebacks of all ranks are dumped and the pool starts anew
FAILURES = "failures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Test files, and which of their tests where not all."""

    files: tuple[str, ...]
    graphs: str = "on"
    pattern: str = ""


# The most telling first: a lease may end before the last one.
PARTS = {
    "tensor": Part(files=("test_tensor.py",)),
    "zero1": Part(files=("test_sharded.py",)),
    "pipelines": Part(files=("test_pipelined.py", "test_pipeline_training.py")),
    "colocated": Part(files=("test_colocated.py",)),
    "balanced-data": Part(files=("test_balanced_data.py",)),
    "changes": Part(files=("test_changing.py",)),
    "combined": Part(files=("test_combined.py",)),
    "sequence": Part(files=("test_sequence.py",)),
    "features": Part(files=("test_features.py",)),
    "hooks": Part(files=("test_callbacks.py", "test_metrics.py", "test_ema.py", "test_float16.py")),
    "resuming": Part(files=("test_resuming.py",)),
    "composites": Part(files=("test_composites.py",)),
    "mixed-batches": Part(files=("test_mixed_batches.py",)),
    "data-parallel": Part(files=("test_run.py",)),
    "without-graphs": Part(
        files=("test_run.py",), graphs="off", pattern=r"every_kind_of_module_gives_the_numbers|random_legal_plans"
    ),
    "data": Part(files=("test_data.py",)),
    "hugging-face": Part(files=("test_hf.py",)),
    FAILURES: Part(files=()),
}

EXCLUDED = {
    r"test_run\.py::test_a_rank_that_fails": "about the pool itself; part `failures` has ranks that fail",
    r"test_memory\.py": "memory is counted tensor by tensor on CPUs only; a GPU's allocator counts by itself",
    r"test_measure\.py": "about measured times, which have no reference",
    r"test_examples\.py": "scripts that choose their own device; their losses are printed to four digits",
    r"test_ipc\.py": "the backend itself; `virtual_devices.py` runs its checks on a GPU",
}


class Harness:
    """A pytest plugin: selects and orders tests, skips those that have passed, and records each as it ends."""

    def __init__(
        self,
        parts: Sequence[str],
        about: Result,
        done: set[results.Key],
        file: Path,
        end_s: float,
        match: str = "",
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._shard = shard
        self._parts, self._about, self._done, self._file = parts, about, done, file
        self._end_s, self._match = end_s, match
        self._reports: list[Any] = []
        self._requests: list[Any] = []
        self.num_left = 0
        self.broken: list[str] = []  # what could not even be collected
        self.recorded: list[Result] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = []
        for item in items:
            part = self._part_of(item)
            if part is None or "pool" not in item.fixturenames or reason_to_exclude(name_of(item)):
                continue
            if not re.search(self._match, name_of(item)):
                continue
            if (name_of(item), self._about.backend, self._about.graphs) not in self._done:
                parameters = item.callspec.params if hasattr(item, "callspec") else {}
                chosen.append((self._parts.index(part), parameters.get("num_ranks", 0), item))
        # Tests with as many ranks one after the other share a process group.
        items[:] = [item for _, _, item in sorted(chosen, key=lambda entry: entry[:2])][
            self._shard[0] :: self._shard[1]
        ]
        self.num_left = len(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[Any]:
        self._reports, self._requests = [], []
        answer = yield
        self._record(item)
        self.num_left -= 1
        if time.monotonic() > self._end_s:
            item.session.shouldstop = "the budget is used"
        return answer

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: Any) -> None:
        if "pool" in item.funcargs:
            log = item.funcargs["pool"].log
            self._requests = list(log)
            log.clear()

    def _record(self, item: Any) -> None:
        from pool import largest_error

        failed = next((report for report in self._reports if report.failed), None)
        skipped = next((report for report in self._reports if report.skipped), None)
        message = str((failed or skipped).longrepr) if failed or skipped else ""
        sizes = sorted({request.num_ranks for request in self._requests})
        result = replace(
            self._about,
            test=name_of(item),
            part=self._part_of(item) or "",
            ranks="-".join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:]))),
            error=largest_error([request.error for request in self._requests]),
            verdict=FAILED if failed else SKIPPED if skipped else PASSED,
            time_s=round(sum(report.duration for report in self._reports), 2),
            message=message[-6000:] if failed else message[-300:],
        )
        self.recorded.append(result)
        results.append(self._file, result)
        say(f"{' '.join(results.row_of(result))} {result.time_s:.1f} s")
        if failed:
            say(result.message)

    def _part_of(self, item: Any) -> str | None:
        for name in self._parts:
            if item.path.name in PARTS[name].files and re.search(PARTS[name].pattern, item.name):
                return name
        return None


def name_of(item: Any) -> str:
    return f"{item.path.name}::{item.name}"


def reason_to_exclude(test: str) -> str | None:
    return next((reason for pattern, reason in EXCLUDED.items() if re.match(pattern, test)), None)


def say(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


@contextmanager
def environment(backend: str, ranks: int, *, with_mps: bool = True) -> Iterator[None]:
    """Inside, the environment has what ranks of this backend need, and on a GPU MPS runs."""
    from backends import BACKEND_VARIABLE, MAX_RANKS_VARIABLE
    from spindle.launch.mps import VIRTUAL_VARIABLE, shared_gpu

    before = dict(os.environ)
    os.environ |= {BACKEND_VARIABLE: backend, MAX_RANKS_VARIABLE: str(ranks), "SPINDLE_TEST_LIMIT_S": str(LIMIT_S)}
    try:
        # One MPS daemon serves all jobs.
        is_served = backend == "gloo" or not with_mps or "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        with nullcontext({}) if is_served else shared_gpu(ranks) as shared:
            os.environ |= shared
            if backend == "nccl":  # MPS, but no virtual devices
                os.environ.pop(VIRTUAL_VARIABLE, None)
            yield
    finally:
        os.environ.clear()
        os.environ |= before


def run_tests(parts: Sequence[str], graphs: str, harness: Harness) -> int:
    """Runs the tests of these parts in this process; their ranks are processes of the pool."""
    from backends import GRAPHS_VARIABLE

    os.environ[GRAPHS_VARIABLE] = graphs
    files = dict.fromkeys(str(RUN_TESTS / file) for name in parts for file in PARTS[name].files)
    options = ["-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    return int(pytest.main([*options, *files], plugins=[harness]))


def run_failures(
    about: Result, done: set[results.Key], file: Path, end_s: float, match: str, jobs: int
) -> tuple[list[Result], int]:
    """Runs the jobs that must fail, so many at a time; the results, and how many are left."""
    recorded: list[Result] = []
    waiting = []
    shared_before = set(os.listdir(failures.SHARED_MEMORY))
    for case in failures.cases(about.backend):
        result = replace(about, test=f"failures::{case.name}", part=FAILURES, ranks=str(failures.NUM_RANKS))
        if result.key not in done and re.search(match, result.test):
            waiting.append((case, result))

    def run_waiting() -> None:
        while waiting and time.monotonic() < end_s:
            case, result = waiting.pop(0)
            begin_s, verdict, message = time.monotonic(), PASSED, ""
            try:
                took_s = failures.run_case(case, about.backend, is_alone=jobs == 1)
                message = f"ended {took_s:.1f} s after the fault"
            except AssertionError as error:
                verdict, message = FAILED, str(error)[-6000:]
            result = replace(result, verdict=verdict, time_s=round(time.monotonic() - begin_s, 2), message=message)
            recorded.append(result)
            results.append(file, result)
            say(f"{' '.join(results.row_of(result))} {message}")

    threads = [threading.Thread(target=run_waiting) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if jobs > 1 and (left := set(os.listdir(failures.SHARED_MEMORY)) - shared_before):
        raise RuntimeError(f"left in /dev/shm: {sorted(left)}")
    return recorded, len(waiting)


def device_name(backend: str) -> str:
    """What the tests run on. Asks nvidia-smi: this process must not start CUDA."""
    if backend == "gloo":
        return "CPU"
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return asked.stdout.splitlines()[0].strip() if asked.stdout.strip() else "unknown GPU"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nccl,ipc", help="nccl, ipc, gloo, or several of them")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--match", default="", help="a regular expression that names of tests must contain")
    parser.add_argument("--ranks", type=int, default=4, help="the most; tests that ask for more get this many")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no test starts")
    parser.add_argument("--jobs", type=int, default=1, help="so many tests at a time")
    parser.add_argument("--shard", default="0/1", help="of the tests, every N-th from number K on: K/N")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "all.jsonl")
    parser.add_argument("--resume", type=Path, action="append", default=[], help="results of earlier runs")
    parser.add_argument("--table", type=Path, help="write all results as Markdown")
    parser.add_argument("--no-run", action="store_true", help="only write the table, of all results in the files")
    options = parser.parse_args()
    options.backend, options.only = options.backend.split(","), options.only.split(",")
    options.shard = tuple(map(int, options.shard.split("/")))
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))} (parts: {', '.join(PARTS)})")
    if unknown := set(options.backend) - {"nccl", "ipc", "gloo"}:
        parser.error(f"no such backend: {', '.join(sorted(unknown))}")
    return options


def run_jobs(options: argparse.Namespace, backend: str) -> int:
    """Runs the tests in several processes, each with a pool of its own and its share of them; how many are left."""
    num_left = 0
    parts = ",".join(name for name in options.only if name != FAILURES)
    files = [options.results.with_suffix(f".{number}.jsonl") for number in range(options.jobs)]
    with environment(backend, options.ranks * options.jobs):  # who share the GPU's queues
        jobs = []
        for number, file in enumerate(files):
            command = [sys.executable, __file__, "--backend", backend, "--only", parts, "--results", str(file)]
            command += [
                "--shard",
                f"{number}/{options.jobs}",
                "--budget",
                str(options.budget),
                "--match",
                options.match,
            ]
            command += ["--ranks", str(options.ranks)]
            for earlier in (*options.resume, options.results):
                command += ["--resume", str(earlier)]
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for job in jobs:
            out, _ = job.communicate()
            say(out)
            if job.returncode not in (0, 1):
                raise RuntimeError(f"a job ended with exit code {job.returncode}")
            num_left += sum(int(number) for number in re.findall(r"^(\d+) tests are left", out, flags=re.MULTILINE))
    for file in files:
        if file.exists():
            with options.results.open("a", encoding="utf-8") as together:
                together.write(file.read_text(encoding="utf-8"))
            file.unlink()
    return num_left


def main() -> int:
    options = arguments()
    # The processes of the pool must not find an installed spindle instead of this one.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    end_s = time.monotonic() + options.budget
    files, sources = [*options.resume, options.results], results.sources_digest()
    recorded: list[Result] = []
    num_left = 0
    for backend in [] if options.no_run else options.backend:
        about = Result(
            test="",
            part="",
            backend=backend,
            graphs="on",
            ranks="",
            error=None,
            verdict="",
            time_s=0.0,
            sources=sources,
            commit=results.commit_of(),
            device=device_name(backend),
        )
        done = results.passed_keys(results.read(files), sources)
        if options.jobs > 1 and options.only != [FAILURES]:
            before = len(results.read([options.results]))
            num_left += run_jobs(options, backend)
            recorded += results.read([options.results])[before:]
        for graphs in ("on", "off") if options.jobs == 1 else ():
            parts = [name for name in PARTS if name in options.only and PARTS[name].graphs == graphs]
            if (backend == "gloo" and graphs == "off") or parts in ([], [FAILURES]) or time.monotonic() > end_s:
                continue
            with environment(backend, options.ranks):
                harness = Harness(
                    parts, replace(about, graphs=graphs), done, options.results, end_s, options.match, options.shard
                )
                code = run_tests(parts, graphs, harness)
                # All passed, some failed, the budget was used, no test was left.
                if code not in (0, 1, 2, 5) or harness.broken:
                    raise RuntimeError("\n".join([f"pytest ended with exit code {code}", *harness.broken]))
                recorded += harness.recorded
                num_left += harness.num_left
        if FAILURES in options.only:
            # Without MPS, which would end other ranks with one that is killed. Under virtual devices, each launch
            # starts an MPS daemon of its own, and the GPU has room for one.
            with environment(backend, options.ranks, with_mps=False):
                jobs = options.jobs if backend == "nccl" else 1
                failed, left = run_failures(about, done, options.results, end_s, options.match, jobs)
            recorded += failed
            num_left += left
    say("")
    say(results.text_table(recorded))
    for line in results.summary_lines(recorded):
        say(line)
    if num_left:
        say(f"{num_left} tests are left; run again with the same results to go on")
    if options.table:
        latest = results.latest(results.read(files)).values()
        chosen = [result for result in latest if options.no_run or result.sources == sources]
        options.table.write_text(results.markdown(chosen, EXCLUDED), encoding="utf-8")
    return 1 if any(result.verdict == FAILED for result in recorded) else 0


if __name__ == "__main__":
    sys.exit(main())
