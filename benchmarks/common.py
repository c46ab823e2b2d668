"""Shared by all benchmarks: where results are written, and what they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from spindle.artifact import write_atomically

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def circumstances() -> dict[str, Any]:
    """The commit (marked if the tree differs from it; unknown if the tree has no history) and the hardware."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        commit += " with changes" if git("status", "--porcelain", "--", "src", "benchmarks/*.py") else ""
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": commit,
        "hardware": f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}",
        "python": platform.python_version(),
    }


def publish(name: str, data: dict[str, Any], table: str) -> None:
    """Write results as JSON and as a table, and print the table."""
    RESULTS.mkdir(exist_ok=True)
    about = circumstances()
    write_atomically(RESULTS / f"{name}.json", json.dumps({"measured_on": about} | data, indent=1) + "\n")
    note = f"Commit {about['commit']}; {about['hardware']}; Python {about['python']}."
    write_atomically(RESULTS / f"{name}.md", f"{table}\n\n{note}\n")
    print(f"{table}\n\n{note}\n", flush=True)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_between(path: Path, name: str, body: str) -> None:
    """Replace the text between the markers of this name in a document."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, rest = path.read_text(encoding="utf-8").split(start)
    write_atomically(path, f"{head}{start}\n{body}\n{end}{rest.split(end)[1]}")
