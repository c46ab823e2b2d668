"""How long does planning take, and how does it grow? python benchmarks/planning_time.py

CLIP-10 with a global batch that grows with the number of A800s, warm and in process, in CPU time of all threads, which
does not depend on what else runs; the cold start is the same plan in a fresh interpreter, imports and compiled loops
from the cache included, by the clock.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

from common import ROOT, markdown, publish
from spindle.cluster import cluster_named
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.profile import Profile, roofline_profile
from spindle.recipes import RECIPES

REPEATS = {8: 5, 16: 5, 32: 5, 64: 9, 128: 5, 256: 5, 1024: 3, 8192: 1, 16384: 1}


def profile_of(num_devices: int) -> Profile:
    recipe = RECIPES["clip-10"]
    workload = recipe.workload(batch_scale=max(1, num_devices // 32))
    return roofline_profile(metagraph_of(workload), cluster_named(f"a800x{num_devices}"), recipe.roofline)


def cold_start_s() -> float:
    """The whole command, process start to exit."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "spindle.cli", "plan", "clip-10", "--cluster", "a800x64", "--json"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return time.perf_counter() - began


def main() -> None:
    make_plan(profile_of(8))  # compile first
    rows, data = [], []
    for num_devices, repeats in REPEATS.items():
        profile = profile_of(num_devices)
        seconds = []
        for _ in range(repeats):
            began = time.process_time()
            plan = make_plan(profile)
            seconds.append(time.process_time() - began)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        ratio = plan.makespan_s / plan.bound_s
        rows.append(
            [
                str(num_devices), f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}",
                f"{ratio:.3f}", str(len(plan.slots)), f"{peak_mib:.0f}",
            ]
        )  # fmt: skip
        data.append({"num_devices": num_devices, "seconds": seconds, "ratio": ratio, "peak_mib": peak_mib})
        print(rows[-1], file=sys.stderr, flush=True)
    cold = statistics.median(cold_start_s() for _ in range(3))
    header = ["devices", "planning CPU s, median", "range", "time / bound", "slots", "peak memory of the process MiB"]
    table = markdown(header, rows) + f"\n\nCold start of `spindle plan clip-10 --cluster a800x64`: {cold:.2f} s."
    publish("planning_time", {"cells": data, "cold_start_s": cold}, table)


if __name__ == "__main__":
    main()
