"""The fleet's planned estimates against measured steps: python benchmarks/fleet_estimates.py
    [--gloo 4,2,1] [--gpu 1,2,4,8] [--jobs towers,vlm,bert] [--budget-s 150] [-o FILE.json]

Small real jobs (`scripts/estimated_jobs.py`) run under `spindle launch`: as gloo processes with one thread each
(`--gloo`; the profile is measured with the first number, and others get their part of it, as with `submit --profile`),
and on one GPU as so many devices (`--gpu`; each number measures its own profile, because a share of a GPU is another
device). *Planned* is the simulated step of the fleet's plan, made before any step; *measured* the median of 20 steps
after the 20th. *Corrected*: times the measured / planned of the job's cell with one device, as the scheduler corrects
other cells of a kind. Roofline: what the fleet estimates of a script for which nothing was measured. Finished cells are
in FILE.json and are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, circumstances, markdown
from spindle.artifact import write_atomically

SCRIPT = ROOT / "benchmarks" / "scripts" / "estimated_jobs.py"


def launch(count: int, output: Path, options: argparse.Namespace, left_s: float, is_gpu: bool) -> None:
    """Estimate and measure what is missing of one number of devices."""
    environment = dict(os.environ)
    how = ["--virtual-devices", str(count)]
    profiles: list[str] = []
    if not is_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        how = ["-n", str(count)]
        profiles = ["--profiles", str(output.with_suffix(".profiles"))]
    command = [sys.executable, "-m", "spindle.cli", "launch", *how, str(SCRIPT), "--output", str(output)]
    command += ["--jobs", options.jobs, "--budget-s", str(left_s), *profiles]
    try:
        subprocess.run(command, env=environment, check=False, timeout=left_s + 60)
    except subprocess.TimeoutExpired:  # ranks end with their launcher; finished cells are in the file
        print(f"{count} devices: not done in time", flush=True)


def measure_all(options: argparse.Namespace, output: Path) -> None:
    begin_s = time.monotonic()
    worlds = [(int(count), True) for count in options.gpu.split(",") if count]
    worlds += [(int(count), False) for count in options.gloo.split(",") if count]
    for count, is_gpu in worlds:
        left_s = options.budget_s - (time.monotonic() - begin_s)
        names = {f"{'H200' if is_gpu else 'gloo'}/{count}/{job}" for job in options.jobs.split(",")}
        known = json.loads(output.read_text()) if output.exists() else {}
        if left_s > 0 and not names <= known.keys():
            launch(count, output, options, left_s, is_gpu)
            print(f"{time.monotonic() - begin_s:5.0f} s  {count} devices", flush=True)


def error_of(estimate_s: float, measured_s: float) -> float:
    return abs(estimate_s / measured_s - 1)


def rows_of(cells: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The cells measured on gloo or on the GPU, with errors of all estimates."""
    rows = []
    for key, cell in cells.items():
        name, count, job = key.split("/")
        if name != where:
            continue
        alone = cells.get(f"{where}/1/{job}")
        row = {"job": job, "num_devices": int(count), **cell, "error": error_of(cell["planned_s"], cell["measured_s"])}
        row["roofline_error"] = error_of(cell["roofline_s"], cell["measured_s"])
        if alone is not None and int(count) > 1:
            for grade in ("planned_s", "roofline_s"):
                corrected_s = cell[grade] * alone["measured_s"] / alone[grade]
                row[f"corrected_{grade}"] = corrected_s
                row[f"corrected_{grade}_error"] = error_of(corrected_s, cell["measured_s"])
        rows.append(row)
    return sorted(rows, key=lambda row: (row["job"], row["num_devices"]))


def table_of(rows: list[dict[str, Any]]) -> str:
    def milliseconds(row: dict[str, Any], key: str) -> str:
        return f"{1e3 * row[key]:.1f}" if key in row else ""

    def percent(row: dict[str, Any], key: str) -> str:
        return f"{100 * row[key]:.1f}" if key in row else ""

    header = ["job", "devices", "measured, ms", "planned, ms", "error, %", "corrected, %"]
    header += ["roofline, ms", "error, %", "corrected, %"]
    body = [
        [
            row["job"],
            str(row["num_devices"]),
            milliseconds(row, "measured_s"),
            milliseconds(row, "planned_s"),
            percent(row, "error"),
            percent(row, "corrected_planned_s_error"),
            milliseconds(row, "roofline_s"),
            percent(row, "roofline_error"),
            percent(row, "corrected_roofline_s_error"),
        ]
        for row in rows
    ]
    body.append(["**mean**", "", "", "", *(mean_text(rows, key) for key in ("error", "corrected_planned_s_error"))])
    body[-1] += ["", *(mean_text(rows, key) for key in ("roofline_error", "corrected_roofline_s_error"))]
    return markdown(header, body)


def mean_text(rows: Iterable[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return f"**{100 * statistics.fmean(values):.1f}**" if values else ""


def report(cells: dict[str, Any]) -> str:
    parts = ["# Planned against measured"]
    for where, title in (("H200", "One H200 as 1, 2, 4, 8 devices"), ("gloo", "gloo, one thread each")):
        rows = rows_of(cells, where)
        if rows:
            hosts = sorted({f"commit {row['commit']}, {row['hardware']}" for row in rows})
            parts.append(f"## {title}\n\n{table_of(rows)}\n\nMeasured at {'; '.join(hosts)}.")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gloo", default="")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--jobs", default="towers,vlm,bert")
    parser.add_argument("--budget-s", type=float, default=math.inf)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "fleet_estimates.json")
    options = parser.parse_args()
    cells_path = options.output.with_suffix(".cells.json")
    data: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    cells: dict[str, Any] = data.get("cells", {})
    ended = json.loads(cells_path.read_text()) if cells_path.exists() else {}  # of a run that was ended
    write_atomically(cells_path, json.dumps(ended | cells))
    measure_all(options, cells_path)
    about = circumstances()
    new = json.loads(cells_path.read_text())
    data["cells"] = {key: cells.get(key) or cell | about for key, cell in new.items()}
    write_atomically(options.output, json.dumps(data, indent=1) + "\n")
    text = report(data["cells"])
    write_atomically(options.output.with_suffix(".md"), text + "\n")
    print(text, flush=True)
    cells_path.unlink()


if __name__ == "__main__":
    main()
