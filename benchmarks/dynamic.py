"""The cost of changing tasks, simulated at the paper's size and trained on this machine: python benchmarks/dynamic.py

Simulated: the paper's dynamic CLIP and OFASys, whose tasks leave one after another. Schedules and totals are read off
its figure; that there are 16 A800s, and which task leaves, is our choice. The other planners plan each phase anew as
well, and pay nothing for a change.

Trained: four tasks on two processes of this machine, which leave and return, compared with a restart without one of
them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import markdown, publish
from spindle.cluster import cluster_named
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.profile import Profile, roofline_profile
from spindle.program import StateSharding, lower, moves_between, moving_s, state_sharding
from spindle.recipes import RECIPES

CLUSTER, SIZES = "a800x16", ("a800x8", "a800x16", "a800x32")
# Thousands of iterations at which a task leaves; the last one is the end.
ENDS = {"clip-10": (20, 50, 80, 110, 140, 180, 190, 200), "ofasys-7": (30, 50, 60, 75, 90, 105)}
# Our planners, and the paper's systems in the order of its totals (thousands of seconds).
PLANNERS = {
    "wavefront": "Spindle",
    "paper": "Spindle",
    "distmm": "DistMM",
    "sequential": "DeepSpeed",
    "task-level": "Spindle-Optimus",
}
PAPER = {
    "clip-10": {"Spindle": 98, "DistMM": 118, "Megatron": 122, "DeepSpeed": 129, "Spindle-Optimus": 135},
    "ofasys-7": {"Spindle": 86, "DistMM": 114, "Megatron": 118, "DeepSpeed": 116, "Spindle-Optimus": 108},
}
SCRIPT = Path(__file__).resolve().parent / "scripts" / "changing_tasks.py"
REPEATS, PROCESSES = 3, 2


def profile_of(recipe: str, num_tasks: int, cluster: str = CLUSTER) -> Profile:
    workload = RECIPES[recipe]
    graph = metagraph_of(workload.build(dict(workload.batch_sizes[:num_tasks])))
    return roofline_profile(graph, cluster_named(cluster), workload.roofline)


def sequential_s(recipe: str, cluster: str) -> float:
    """The total of all phases one module at a time, which hints at how many devices the paper had."""
    num_tasks = len(RECIPES[recipe].batch_sizes)
    return sum(
        make_plan(profile_of(recipe, num_tasks - number, cluster), "sequential").makespan_s * (last - first) * 1000
        for number, (first, last) in enumerate(pairwise((0, *ENDS[recipe])))
    )


def checkpoint_s(profile: Profile) -> float:
    """Lower bound for a change through a checkpoint of S bytes on H hosts, each of which writes its share and reads all
    of it through its uplink: (S / H + S) / uplink. Slower storage and the start of processes come on top."""
    hosts, numerics = profile.cluster.islands, profile.graph.numerics
    elements = sum(parameter.num_elements for parameter in profile.graph.parameters)
    state_bytes = elements * (numerics.parameter_bytes + numerics.optimizer_bytes)
    return state_bytes * (1 / len(hosts) + 1) / min(host.uplink.bytes_per_s for host in hosts)


def change_of(before: StateSharding, held: StateSharding, profile: Profile) -> dict[str, Any]:
    moves = moves_between(before, held, profile.graph, profile.cluster)
    received = [0] * profile.cluster.num_devices
    for move in moves:
        received[move.destination] += move.num_bytes
    return {
        "moved_bytes": sum(received),
        "most_received_bytes": max(received),
        "moving_s": moving_s(moves, profile.cluster),
    }


def simulate(recipe: str) -> dict[str, Any]:
    """Every phase with every planner, and what each change moves under wavefront's plans."""
    num_tasks = len(RECIPES[recipe].batch_sizes)
    phases: list[dict[str, Any]] = []
    held: StateSharding | None = None
    for number, (first, last) in enumerate(pairwise((0, *ENDS[recipe]))):
        print(f"\r{recipe}: phase {number + 1} of {len(ENDS[recipe])}  ", end="", file=sys.stderr, flush=True)
        profile = profile_of(recipe, num_tasks - number)
        phase: dict[str, Any] = {"iterations": (last - first) * 1000, "num_tasks": num_tasks - number, "step_s": {}}
        for planner in PLANNERS:
            begin = time.perf_counter()
            plan = make_plan(profile, planner)
            planning_s = time.perf_counter() - begin
            phase["step_s"][planner] = plan.makespan_s
            if planner == "wavefront":
                phase |= {"bound_s": plan.bound_s, "planning_s": planning_s}
                before, held = held, state_sharding(lower(plan, profile), profile.graph, held)
        assert held is not None
        if before is not None:
            task = RECIPES[recipe].batch_sizes[num_tasks - number][0]
            phase["change"] = {"task": task, "at": first * 1000} | change_of(before, held, profile)
        phases.append(phase)
    bound_s = sum(phase["bound_s"] * phase["iterations"] for phase in phases)
    totals = {planner: sum(phase["step_s"][planner] * phase["iterations"] for phase in phases) for planner in PLANNERS}
    lost_s = sum(phase["planning_s"] + phase["change"]["moving_s"] for phase in phases[1:])
    return {
        "recipe": recipe,
        "phases": phases,
        "bound_s": bound_s,
        "total_s": totals,
        "lost_s": lost_s,
        "checkpoint_s": checkpoint_s(profile_of(recipe, num_tasks)),
        "sequential_s": {cluster: sequential_s(recipe, cluster) for cluster in SIZES},
    }


def simulated_tables(result: dict[str, Any]) -> list[str]:
    recipe, totals, phases = result["recipe"], result["total_s"], result["phases"]
    paper, ours = PAPER[recipe], totals["wavefront"] + result["lost_s"]
    rows = [
        [
            planner,
            f"{(total + (result['lost_s'] if planner == 'wavefront' else 0)) / 1e3:.1f}",
            f"{total / ours:.2f}" if planner != "wavefront" else "",
            system,
            str(paper[system]),
            f"{paper[system] / paper['Spindle']:.2f}" if system != "Spindle" else "",
        ]
        for planner, total in totals.items()
        for system in [PLANNERS[planner]]
    ]
    rows.append(["(bound)", f"{result['bound_s'] / 1e3:.1f}", f"{result['bound_s'] / ours:.2f}", "", "", ""])
    rows.append(["", "", "", "Megatron", str(paper["Megatron"]), f"{paper['Megatron'] / paper['Spindle']:.2f}"])
    header = ["planner", "10³ s", "wavefront's speedup", "the paper's system", "10³ s there", "Spindle's speedup there"]
    steps = [
        [
            str(phase["num_tasks"]),
            f"{phase['iterations'] // 1000}",
            f"{phase['bound_s'] * 1e3:.0f}",
            *(f"{phase['step_s'][planner] * 1e3:.0f}" for planner in PLANNERS),
        ]
        for phase in phases
    ]
    changes = [
        [
            f"{phase['change']['at'] // 1000}",
            phase["change"]["task"],
            f"{phase['planning_s'] * 1e3:.0f}",
            f"{phase['change']['moved_bytes'] / 1e9:.1f}",
            f"{phase['change']['most_received_bytes'] / 1e9:.2f}",
            f"{phase['change']['moving_s'] * 1e3:.0f}",
        ]
        for phase in phases[1:]
    ]
    last = ENDS[recipe][-1]
    return [
        f"## {recipe}, {last},000 iterations on {CLUSTER}, simulated",
        markdown(header, rows),
        "Sequential on other clusters: "
        + ", ".join(f"{total / 1e3:.0f} on {cluster}" for cluster, total in result["sequential_s"].items())
        + f"; the paper's DeepSpeed {paper['DeepSpeed']}.",
        "Milliseconds of a step in each phase:",
        markdown(["tasks", "10³ iterations", "bound", *PLANNERS], steps),
        f"Wavefront's changes, which together take {result['lost_s']:.1f} s of {ours / 1e3:.1f} · 10³:",
        markdown(["at 10³", "leaves", "planning ms", "GB moved", "GB to one device", "moving ms"], changes),
        f"Through a checkpoint, state would take {result['checkpoint_s'] * 1e3:.0f} ms at the least. Every minute that "
        f"starting anew takes would make all of it {60 * len(changes) / ours * 100:.1f} % longer.",
    ]


def train() -> dict[str, Any]:
    """Fits with changes, alternating with restarts that measure layers and restarts that read a profile."""
    fits, measuring, measured = [], [], []
    launch = [sys.executable, "-m", "spindle.cli", "launch", "-n", str(PROCESSES), str(SCRIPT)]
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as name:
            report = Path(name) / "report.json"
            files = [str(report), str(Path(name) / "checkpoint.pt"), str(Path(name) / "profile.json")]
            for reports in (fits, measuring, measured):
                when = [] if reports is fits else ["--launched", str(time.time())]
                subprocess.run([*launch, *files, *when], check=True, stdout=subprocess.DEVNULL)
                reports.append(json.loads(report.read_text()))
    return {"fits": fits, "restarts_measuring": measuring, "restarts": measured}


def spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def trained_tables(result: dict[str, Any], load: float) -> list[str]:
    fits, starts, measuring = result["fits"], result["restarts"], result["restarts_measuring"]
    apart = fits[0]["apart"]
    rows = []
    for number, change in enumerate(fits[0]["changes"]):
        place = apart * (number + 1)
        # The steps around a change may still warm up, or wait for it.
        before, after = (
            [statistics.median(fit["step_s"][first : first + apart - 10]) for fit in fits]
            for first in (place - apart + 10, place + 10)
        )
        longest = [max(fit["step_s"][place : place + 3]) for fit in fits]
        rows.append(
            [
                change,
                spread([fit["changes_s"][number] * 1e3 for fit in fits]),
                spread([fit["planning_s"][number] * 1e3 for fit in fits]),
                spread([fit["moved_bytes"][number] / 1e6 for fit in fits], 1),
                spread([(step - usual) * 1e3 for step, usual in zip(longest, after, strict=True)]),
                spread([time_s * 1e3 for time_s in before]),
                spread([time_s * 1e3 for time_s in after]),
            ]
        )
    stages = [
        [stage, *(spread([start[stage] for start in runs], 1) for runs in (measuring, starts))] for stage in starts[0]
    ]
    changes_s = [time_s for fit in fits for time_s in fit["changes_s"]]
    start_s = [start["first step"] for start in starts]
    return [
        f"## Four tasks, {fits[0]['num_parameters'] / 1e6:.1f} M parameters, {PROCESSES} processes, trained",
        f"A change takes {spread(changes_s, 2)} s, starting anew with a profile {spread(start_s, 1)} s from launch to "
        f"the first loss, {statistics.median(start_s) / statistics.median(changes_s):.0f} times as long. "
        f"The checkpoint that it starts from holds the weights alone. Medians and ranges of {REPEATS} runs, here "
        f"of all {len(changes_s)} changes; the machine's load was {load:.1f} when they began. Where ranges are wide, "
        "other programs ran beside, and ratios are as rough.",
        markdown(
            ["change", "ms", "of which planning", "MB moved", "its step beyond the usual", "step before", "after"],
            rows,
        ),
        "Starting anew without the first task that leaves, seconds since launch:",
        markdown(["stage", "layers measured anew", "with a profile of them"], stages),
    ]


NOTE = f"""\
Simulated: the paper tells neither how many devices there were nor which tasks leave. {CLUSTER} is our choice, and so is
that the last of the recipe's tasks leaves first. Recipes were fitted to the paper's DeepSpeed times with all tasks, not
to these totals. No plan is below the bound: where its total is close to sequential's, our recipe has less to gain than
the paper's workload had. Planning is measured here; moving is the busiest link's time, without latencies: every
parameter that a device holds in the new plan and did not in the old one comes with 14 bytes for each element, from its
own island where that has it. The runtime does not look at islands yet, and the planner does not try to keep parameters
where they are. A checkpoint of S bytes on H hosts takes (S / H + S) / uplink, at 200 GB/s: no storage is as fast, and
starting processes, recording and measuring come on top. Other planners pay nothing for changes here."""


def main() -> None:
    for recipe in ENDS:
        make_plan(profile_of(recipe, 2))  # compile first
    simulated = [simulate(recipe) for recipe in ENDS]
    print(file=sys.stderr)
    load = os.getloadavg()[0]  # planning is 1 of it; other programs the rest
    trained = train()
    tables = [table for result in simulated for table in simulated_tables(result)]
    publish(
        "dynamic",
        {"cluster": CLUSTER, "paper_thousand_s": PAPER, "simulated": simulated, "trained": trained, "load": load},
        "\n\n".join([*tables, *trained_tables(trained, load), NOTE]),
    )


if __name__ == "__main__":
    main()
