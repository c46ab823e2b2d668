"""Results of `all.py`: one JSON line for each test, from which a later run resumes, and tables of them."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Key = tuple[str, str, str]  # a test, its backend, and whether CUDA graphs were on


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One test on one backend. `error` is the largest that its comparisons found, where they report one."""

    test: str
    part: str
    backend: str
    graphs: str  # "on", "off"
    ranks: str  # "4", "2-4" where one test runs on several numbers of ranks
    error: float | None
    verdict: str
    time_s: float
    sources: str  # digest of what was tested
    commit: str
    device: str
    message: str = ""

    @property
    def key(self) -> Key:
        return self.test, self.backend, self.graphs


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(paths: Iterable[Path]) -> list[Result]:
    """The results in these files, oldest first. A line that was cut off when a lease ended is skipped."""
    results = []
    for path in paths:
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    results.append(Result(**json.loads(line)))
                except (ValueError, TypeError):
                    continue
    return results


def latest(results: Iterable[Result]) -> dict[Key, Result]:
    return {result.key: result for result in results}


def passed_keys(results: Iterable[Result], sources: str) -> set[Key]:
    """Tests that need not run again: their last result on these sources is that they passed, or cannot run here."""
    last = latest(result for result in results if result.sources == sources)
    return {key for key, result in last.items() if result.verdict in (PASSED, SKIPPED)}


def sources_digest(root: Path = ROOT) -> str:
    """A digest of the runtime and the equality tests; the harness itself may change between two runs.

    The machine with the GPU gets a copy of the working tree without its history, so this stands for the commit.
    """
    digest = hashlib.sha256()
    paths = [
        *root.glob("src/**/*.py"),
        *root.glob("benchmarks/pipelined.py"),
        *root.glob("tests/*.py"),
        *root.glob("tests/run/*.py"),
    ]
    paths += [*root.glob("tests/scripts/*.py"), *root.glob("tests/*.json")]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit_of(root: Path = ROOT) -> str:
    """The commit that is checked out, with a + where the working tree differs; nothing where there is no history."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()


HEADER = ("workload", "backend", "ranks", "error", "verdict")


def row_of(result: Result) -> tuple[str, ...]:
    graphs = "" if result.graphs == "on" else ", no graphs"
    error = "–" if result.error is None else f"{result.error:.1e}"
    return result.test, f"{result.backend}{graphs}", result.ranks, error, result.verdict


def text_table(results: Sequence[Result]) -> str:
    rows = [HEADER, *map(row_of, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def summary_lines(results: Sequence[Result]) -> list[str]:
    """One line for each part and backend."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.part, result.backend, result.graphs), []).append(result)
    lines = []
    for (part, backend, graphs), members in groups.items():
        counts = {
            verdict: sum(result.verdict == verdict for result in members) for verdict in (PASSED, FAILED, SKIPPED)
        }
        errors = [result.error for result in members if result.error is not None]
        largest = max(errors, key=lambda error: (math.isnan(error), error), default=0.0)
        worst = f", largest error {largest:.1e}" if errors else ""
        counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        time_s = sum(result.time_s for result in members)
        took = f", {time_s:.0f} s" if time_s else ""
        lines.append(f"{part} on {backend}{'' if graphs == 'on' else ', no graphs'}: {counted}{worst}{took}")
    return lines


def markdown(results: Sequence[Result], excluded: Mapping[str, str]) -> str:
    """The table that is checked in."""
    devices = ", ".join(sorted({result.device for result in results}))
    lines = [
        "# Equality tests on one GPU",
        "",
        f"{devices}: several NCCL ranks on one GPU over loopback sockets (nccl), or virtual devices (ipc). Errors "
        "are those of a comparison with one process on the same GPU; tests in float32 (1e-7) and bfloat16 (1e-2) have "
        "limits of their own. Written by `python tests/gpu/all.py --table`.",
        "",
    ]
    lines += [f"- {line}" for line in summary_lines(results)]
    header = (*HEADER, "commit")
    lines += ["", _markdown_row(header), _markdown_row(["---"] * len(header))]
    lines += [_markdown_row((*row_of(result), result.commit or "unknown")) for result in results]
    lines += ["", "Not run here:", ""] + [f"- `{pattern}`: {reason}" for pattern, reason in excluded.items()]
    failed = [result for result in results if result.verdict == FAILED]
    if failed:
        lines += ["", "Failures:", ""] + [f"- `{result.test}`: {_last_line(result.message)}" for result in failed]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _last_line(text: str) -> str:
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[0] if lines else (text.strip().splitlines() or [""])[-1]
