"""The paper's cells, simulated with transfers, synchronisation and optimizer: python benchmarks/cells.py

Every planner on CLIP-4/7/10 and OFASys-4/7 with 8, 16 and 32 A800s and on QWen-VAL with 32 and 64, compared with the LP
bound, the paper's speedups, and the speedup that the bound allows; then the 30B and 70B QWen-VAL that the paper
simulated on 256. The cells on several hosts are planned again with one 400 Gb/s adapter per host, 50 GB/s, instead of
200 GB/s, with the fit as it is.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from common import ROOT, circumstances, markdown, publish, write_between
from paper_cells import CELLS, SIMULATED
from spindle.cluster import PRESETS, Island, uniform_cluster
from spindle.errors import DoesNotFitError
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.profile import Profile, roofline_profile
from spindle.program import lower
from spindle.recipes import RECIPES
from spindle.simulate import simulate
from spindle.timeline import measure

BASELINES = ("sequential", "distmm", "task-level")
PLANNERS = ("wavefront", "paper", *BASELINES)
HOST = PRESETS["a800"]
ONE_ADAPTER = replace(HOST, uplink=replace(HOST.uplink, bytes_per_s=50e9))


def profile_of(recipe: str, num_devices: int, host: Island = HOST) -> Profile:
    graph = metagraph_of(RECIPES[recipe].workload())
    return roofline_profile(graph, uniform_cluster(f"a800x{num_devices}", host, num_devices), RECIPES[recipe].roofline)


def measure_cell(recipe: str, num_devices: int, host: Island = HOST) -> dict[str, Any]:
    profile = profile_of(recipe, num_devices, host)
    cell: dict[str, Any] = {"recipe": recipe, "num_devices": num_devices, "planners": {}}
    for planner in PLANNERS:
        print(f"\r{recipe} on {num_devices}: {planner}          ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            plan = make_plan(profile, planner)
        except DoesNotFitError as error:
            cell["planners"][planner] = {"refused": str(error)}
            continue
        planning_s = time.perf_counter() - start
        measures = measure(simulate(lower(plan, profile), profile))
        cell["bound_s"] = plan.bound_s
        cell["planners"][planner] = {
            "makespan_s": plan.makespan_s,
            "folded_s": plan.folded_s,
            "idle": measures.idle_share,
            "transfer": measures.transfer_share,
            "sync": measures.sync_share,
            "peak_bytes": measures.peak_bytes,
            "num_rounds": plan.num_rounds,
            "num_recomputed": len(plan.recompute),
            "tensor_degrees": {module: degree for module, degree in plan.tensor_degrees if degree > 1},
            "planning_s": planning_s,
        }
    return cell


def makespan(cell: dict[str, Any], planner: str) -> float:
    return float(cell["planners"][planner].get("makespan_s", np.inf))


def geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def row(cell: dict[str, Any], paper_spindle: float, paper_best: float) -> list[str]:
    ours, bound = makespan(cell, "wavefront"), cell["bound_s"]
    sequential = makespan(cell, "sequential")
    best = min(makespan(cell, planner) for planner in BASELINES)
    shares = cell["planners"]["wavefront"]
    allows = sequential / bound
    return [
        cell["recipe"],
        str(cell["num_devices"]),
        f"{bound * 1e3:.0f}",
        *(f"{makespan(cell, planner) * 1e3:.0f}" for planner in PLANNERS),
        f"**{ours / bound:.3f}**",
        f"{sequential / ours:.2f}",
        f"{paper_spindle:.2f}",
        f"{allows:.2f}" + (" (below the paper's)" if allows < paper_spindle else ""),
        f"{best / ours:.2f}",
        f"{paper_spindle / paper_best:.2f}",
        f"{shares['idle'] * 100:.1f} / {shares['transfer'] * 100:.1f} / {shares['sync'] * 100:.1f}",
        f"{shares['peak_bytes'] / 2**30:.0f}",
    ]


def readme_table(cells: list[dict[str, Any]], mean_ratio: float, slower: list[str]) -> str:
    """The largest cluster of each workload, for the front page."""
    paper = {(cell.recipe, cell.num_devices): cell for cell in CELLS}
    largest = {cell["recipe"]: cell for cell in cells}
    rows = []
    for cell in largest.values():
        ours, sequential = makespan(cell, "wavefront"), makespan(cell, "sequential")
        best = min((makespan(cell, planner), planner) for planner in BASELINES)
        rows.append(
            [
                f"{cell['recipe']} on {cell['num_devices']} A800",
                f"{sequential * 1e3:.0f} ms",
                f"{best[0] * 1e3:.0f} ms ({best[1]})",
                f"**{ours * 1e3:.0f} ms**",
                f"{cell['bound_s'] * 1e3:.0f} ms",
                f"{sequential / ours:.2f}",
                f"{paper[cell['recipe'], cell['num_devices']].spindle:.2f}",
            ]
        )
    header = ["one step", "one module at a time", "best baseline", "Spindle", "bound", "speedup", "the paper's"]
    about = circumstances()
    others = f"another planner is faster in {', '.join(slower)}" if slower else "no other planner is faster in any cell"
    note = (
        f"Spindle's plans take {mean_ratio:.3f} times the bound (geometric mean of 17 cells); {others}. "
        f"Simulated; commit {about['commit']}."
    )
    return markdown(header, rows) + "\n\n" + note


def one_adapter_table(cells: list[dict[str, Any]], with_one: list[dict[str, Any]]) -> str:
    """Cells on several hosts: 50 GB/s per host beside 200."""
    many = {(cell["recipe"], cell["num_devices"]): cell for cell in cells}
    rows, ratios = [], []
    for cell in with_one:
        row = [cell["recipe"], str(cell["num_devices"])]
        for each in (many[cell["recipe"], cell["num_devices"]], cell):
            ours = makespan(each, "wavefront")
            best = min(makespan(each, planner) for planner in BASELINES)
            row += [f"{ours * 1e3:.0f}", f"{ours / each['bound_s']:.3f}", f"{best / ours:.2f}"]
            row += [f"{makespan(each, 'task-level') / ours:.2f}"]
        ratios.append(makespan(cell, "wavefront") / cell["bound_s"])
        rows.append(row)
    columns = ["wavefront ms", "/ bound", "over best baseline", "over task-level"]
    header = ["workload", "GPUs", *(f"200 GB/s: {each}" for each in columns), *(f"50 GB/s: {each}" for each in columns)]
    note = f"Geometric mean at 50 GB/s per host: {geometric_mean(ratios):.4f} times the bound."
    return f"{markdown(header, rows)}\n\n{note}"


HEADER = [
    "workload", "GPUs", "bound ms", *(f"{planner} ms" for planner in PLANNERS), "wavefront / bound", "over sequential",
    "paper's", "bound allows", "over best baseline", "paper's", "idle / transfer / sync %", "peak GiB",
]  # fmt: skip


def main() -> None:
    make_plan(profile_of("clip-4", 8))  # compile first
    cells = [measure_cell(cell.recipe, cell.num_devices) for cell in CELLS]
    rows = [
        row(ours, cell.spindle, max(1.0, cell.optimus, cell.distmm, cell.megatron))
        for ours, cell in zip(cells, CELLS, strict=True)
    ]
    large = [measure_cell(cell.recipe, cell.num_devices) for cell in SIMULATED]
    large_rows = [
        row(ours, cell.spindle, max(1.0, cell.optimus, cell.distmm))
        for ours, cell in zip(large, SIMULATED, strict=True)
    ]
    several_hosts = [cell for cell in CELLS if cell.num_devices > HOST.num_devices]
    with_one = [measure_cell(cell.recipe, cell.num_devices, ONE_ADAPTER) for cell in several_hosts]
    print(file=sys.stderr)
    ratios = [makespan(cell, "wavefront") / cell["bound_s"] for cell in cells]
    over_sequential = [makespan(cell, "sequential") / makespan(cell, "wavefront") for cell in cells]
    over_best = [min(makespan(cell, p) for p in BASELINES) / makespan(cell, "wavefront") for cell in cells]
    slower = [
        f"{cell['recipe']}@{cell['num_devices']} than {planner}"
        for cell in cells
        for planner in PLANNERS[1:]
        if makespan(cell, "wavefront") > makespan(cell, planner)
    ]
    paper_geometric = geometric_mean([cell.spindle for cell in CELLS])
    summary = (
        f"Geometric means over 17 cells: wavefront / bound **{geometric_mean(ratios):.4f}**, speedup over sequential "
        f"{geometric_mean(over_sequential):.2f} (paper {paper_geometric:.2f}), over the best baseline "
        f"{geometric_mean(over_best):.2f}. Cells in which wavefront is slower than another planner: "
        f"{', '.join(slower) or 'none'}."
    )
    tables = [
        summary,
        markdown(HEADER, rows),
        "Simulated on 256 GPUs, as in the paper:",
        markdown(HEADER, large_rows),
        "With one adapter per host (50 GB/s) beside four (200 GB/s):",
        one_adapter_table(cells, with_one),
    ]
    write_between(ROOT / "docs" / "results.md", "cells", readme_table(cells, geometric_mean(ratios), slower))
    results = {"cells": cells, "large": large, "one_adapter": with_one, "geometric_mean": geometric_mean(ratios)}
    publish("cells", results, "\n\n".join(tables))


if __name__ == "__main__":
    main()
