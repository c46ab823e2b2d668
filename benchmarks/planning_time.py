"""How long does planning take, and how does it grow? python benchmarks/planning_time.py [--lanes | --steps]

CLIP-10 with a global batch that grows with the number of A800s, warm and in process, in CPU time of all threads, which
does not depend on what else runs; the cold start is the same plan in a fresh interpreter, imports and compiled loops
from the cache included, by the clock. With `--lanes` alone: CLIP-10, 20 slots, on up to four lanes of one device, with
random pressure and fill; to be under a second. With `--steps` alone: one training step after another, with other
lengths each time, by part (`step_planning.py`); what was published of the rest is kept.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace

from common import RESULTS, ROOT, circumstances, markdown, publish, write_between
from spindle.artifact import write_atomically
from spindle.cluster import cluster_named
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.planners.lanes import with_lanes
from spindle.profile import Contention, Profile, roofline_profile
from spindle.recipes import RECIPES
from step_planning import kinds, measured, steps_table

REPEATS = {8: 5, 16: 5, 32: 5, 64: 9, 128: 5, 256: 5, 1024: 3, 8192: 1, 16384: 1}
BEGIN_STEPS = "## Steps of a training"
LANES_RECIPE, LANES_MEMORY = "clip-10", 10**13  # so that all of it fits on one device


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


def contended(profile: Profile, seed: int) -> Profile:
    """The profile with random pressure and fill for each op, and weight gradients that take half of backward."""
    numbers = random.Random(seed)
    curves = []
    for choices in profile.curves:
        shares = numbers.uniform(0.05, 0.6), numbers.uniform(0.3, 0.95)
        curves.append(
            tuple(
                replace(
                    curve,
                    contention=(Contention(forward=shares, backward=shares),) * len(curve.num_devices),
                    weight_s=tuple(time_s / 2 for time_s in curve.backward_s),
                )
                for curve in choices
            )
        )
    return replace(profile, curves=tuple(curves))


def lanes_table() -> str:
    recipe = RECIPES[LANES_RECIPE]
    cluster = cluster_named("h200x1").with_memory(LANES_MEMORY)
    bare = roofline_profile(metagraph_of(recipe.workload()), cluster, recipe.roofline)
    rows = []
    for seed in range(4):
        profile = contended(bare, seed)
        plan = make_plan(profile, "sequential")
        began = time.process_time()
        on_lanes = with_lanes(plan, profile, 4)
        time_s = time.process_time() - began
        cells = [len(plan.slots), f"{time_s:.2f}", on_lanes.num_lanes, f"{plan.makespan_s / on_lanes.makespan_s:.3f}"]
        rows.append([str(seed), *map(str, cells), f"{on_lanes.makespan_s / on_lanes.bound_s:.3f}"])
    return markdown(["seed", "slots", "planning lanes, CPU s", "lanes", "speedup", "time / bound"], rows)


def publish_steps() -> None:
    """Measure steps, and publish them below the tables that there are."""
    path = RESULTS / "planning_time.md"
    about, cells = circumstances(), [measured(kind) for kind in kinds()]
    write_atomically(
        RESULTS / "planning_steps.json", json.dumps({"measured_on": about, "cells": cells}, indent=1) + "\n"
    )
    note = f"Commit {about['commit']}; {about['hardware']}; Python {about['python']}."
    write_between(path, "steps", f"{steps_table(cells)}\n\n{note}")
    print(steps_table(cells))


def main() -> None:
    if "--lanes" in sys.argv[1:]:
        print(lanes_table())
        return
    if "--steps" in sys.argv[1:]:
        publish_steps()
        return
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
    before = (RESULTS / "planning_time.md").read_text(encoding="utf-8")
    publish("planning_time", {"cells": data, "cold_start_s": cold}, table)
    path = RESULTS / "planning_time.md"
    steps = before[before.index(BEGIN_STEPS) :]  # measured by themselves
    write_atomically(path, f"{path.read_text(encoding='utf-8')}\n{steps}")


if __name__ == "__main__":
    main()
