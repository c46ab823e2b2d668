"""Planner `pipeline` compared with other pipeline schedules, simulated: python benchmarks/pipelines.py [MODEL ...]

The five models of the DIP paper (§5) on its clusters, with efficiencies measured on an H200 (SEMU). Batches are drawn
like its data; chunks are placed once, on the first batch. Each cell is the mean over some batches of 32 microbatches:
throughput over `vpp` (Megatron-LM's interleaved 1F1B) and over the best of all baselines. Beside it the paper's range
for the family, over all its baselines.

The ladder is the paper's ablation on VLM-S: from `vpp` on, one part of the planner after another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from common import ROOT, markdown, publish, write_between
from spindle.errors import DoesNotFitError
from spindle.plan import Plan
from spindle.planners import (
    PLANNERS,
    Layout,
    PlanOptions,
    baseline_layouts,
    make_plan,
    pipeline_layout,
    planners_of,
)
from spindle.planners.pipeline.baselines import LEVELS, from_level, plan_in_order
from spindle.planners.pipeline.interleave import Schedule, interleave
from spindle.planners.pipeline.orders import interleaved
from spindle.planners.pipeline.planner import fitting_plan
from spindle.planners.pipeline.search import search
from spindle.planners.pipeline.segments import Column, Segments
from spindle.planners.pipeline.stages import Batch, batches_of
from spindle.profile import Profile
from spindle.program import lower
from spindle.recipes import MODELS, batch_profile, batches, emulator, model_flops, sub_microbatch_sizes
from spindle.simulate import simulate
from spindle.timeline import measure
from spindle.workload import Microbatch

NUM_BATCHES, NUM_MICROBATCHES, EVALUATIONS = 3, 32, 2000
PAPER = {"vlm": (15.6, 76.2), "t2v": (36.6, 97.3)}  # % of throughput, over all its baselines
PAPER_LADDER_S = {"vpp": 26.13, "partition": 22.27, "interleaving": 18.81, "reordering": 17.61, "memory": 16.05}
REFERENCE = "vpp"


class Pipelined:
    """A model on its cluster. Splits and layouts are chosen once, on the first batch that has all modules."""

    def __init__(self, name: str) -> None:
        self.model, self.cluster = MODELS[name], MODELS[name].cluster
        self.semu = emulator(self.cluster)
        self.splits: dict[str, int] = {}
        self.layouts: dict[str, tuple[Layout, ...]] = {}

    def plan(self, microbatches: Sequence[Microbatch], planner: str) -> tuple[Plan, Profile]:
        """A finished plan for a batch, and the profile it was made from."""
        splits = {}
        if PLANNERS[planner].splits_microbatches:
            splits = self.splits = sub_microbatch_sizes(self.model, microbatches, self.semu) | self.splits
        profile = batch_profile(self.model, microbatches, splits, self.cluster, self.semu)
        modules = set(profile.graph.modules)
        layouts = self.layouts.get(planner, ())
        if not layouts or any(modules - layout.modules for layout in layouts):
            ranks = self.model.num_stages
            is_ours = planner == "pipeline"
            chosen = (pipeline_layout(profile, ranks),) if is_ours else baseline_layouts(planner, profile, ranks)
            layouts = self.layouts[planner] = chosen
        return make_plan(profile, planner, PlanOptions(evaluations=EVALUATIONS, layouts=layouts)), profile

    def mfu(self, microbatches: Sequence[Microbatch], step_s: float) -> float:
        """Which share of all devices' peak a step of this length uses, recomputation not counted."""
        peak = self.cluster.kind.peak_flops * self.cluster.num_devices
        return model_flops(self.model, microbatches) / peak / step_s


def model_cells(name: str) -> dict[str, Any]:
    """All planners on some batches of a model."""
    pipelined, planners = Pipelined(name), planners_of(is_pipeline=True)
    cells: dict[str, list[dict[str, float]]] = {planner: [] for planner in planners}
    refusals: dict[str, str] = {}
    for microbatches in islice(batches(pipelined.model, NUM_MICROBATCHES, seed=0), NUM_BATCHES):
        for planner in planners:
            began = time.perf_counter()
            try:
                plan, profile = pipelined.plan(microbatches, planner)
            except DoesNotFitError as error:
                refusals[planner] = str(error)
                continue
            took_s = time.perf_counter() - began
            measures = measure(simulate(lower(plan, profile), profile))
            layers = sum(slot.num_layers for slot in plan.slots)
            cells[planner].append(
                {
                    "step_s": plan.makespan_s,
                    "bound_s": plan.bound_s,
                    "bubble": 1 - measures.compute_share,
                    "peak_gib": measures.peak_bytes / 2**30,
                    "mfu": pipelined.mfu(microbatches, plan.makespan_s),
                    "recomputed": sum(slot.recomputed for slot in plan.slots) / layers,
                    "offloaded": sum(slot.offloaded for slot in plan.slots) / layers,
                    "planning_s": took_s,
                }
            )
            print(f"{name} {planner} {plan.makespan_s:.2f} s, {plan.makespan_s / plan.bound_s:.3f} x bound", flush=True)
    return {
        "model": name,
        "cluster": pipelined.cluster.name,
        "sub_microbatch": pipelined.splits,
        "planners": {planner: rows for planner, rows in cells.items() if len(rows) == NUM_BATCHES},
        "refusals": refusals,
    }


def ladder() -> dict[str, float]:
    """VLM-S with one part of the planner after another, the mean over the same batches."""
    pipelined = Pipelined("vlm-s")
    times: dict[str, list[float]] = {}
    for microbatches in islice(batches(pipelined.model, NUM_MICROBATCHES, seed=0), NUM_BATCHES):
        plans = {"vpp": pipelined.plan(microbatches, "vpp")[0]}
        whole, profile = pipelined.plan(microbatches, "pipeline")
        (layout,) = pipelined.layouts["pipeline"]
        found = batches_of(profile, layout)

        plans["partition"] = plan_in_order(
            profile,
            layout,
            "partition",
            lambda profile, layout, batch: lambda segments, activation_budget: interleaved(segments),
        )
        plans["interleaving"] = plan_in_order(profile, layout, "interleaving", natural)
        plans["reordering"] = fitting_plan(profile, layout, "reordering", found, partial(reordered, found))
        plans["memory"] = whole
        for rung, plan in plans.items():
            times.setdefault(rung, []).append(plan.makespan_s)
            print(f"ladder {rung} {plan.makespan_s:.2f} s", flush=True)
    return {rung: float(np.mean(times_s)) for rung, times_s in times.items()}


def natural(profile: Profile, layout: Layout, batch: Batch) -> Callable[[Segments, Column], Schedule]:
    """Microbatches in their natural order, interleaved."""

    def order(segments: Segments, activation_budget: Column) -> Schedule:
        schedule = interleave(segments, None, activation_budget)
        assert schedule is not None
        return schedule

    return order


def reordered(found: Sequence[Batch], activation_budgets: Sequence[Column], is_first: bool) -> list[Schedule]:
    """The best orders, without memory choices."""
    evaluations = 16 if is_first else EVALUATIONS
    return [
        alike(batch.segments, activation_budget, evaluations)
        for batch, activation_budget in zip(found, activation_budgets, strict=True)
    ]


def alike(segments: Segments, activation_budget: Column, evaluations: int) -> Schedule:
    """The best order with every microbatch kept alike."""
    fitting = [
        level for level in range(0, LEVELS + 1, 2) if _natural_ns(segments, level, activation_budget) is not None
    ]
    level = min(fitting, key=lambda level: _natural_ns(segments, level, activation_budget) or 0)
    changed, choice = from_level(segments, level)
    fixed = replace(changed, choice_count=np.ones_like(changed.choice_count))
    return replace(search(fixed, activation_budget, evaluations=evaluations).schedule, choice=choice)


def _natural_ns(segments: Segments, level: int, activation_budget: Column) -> int | None:
    """How long the natural order takes with everything kept at a level; None where that does not fit."""
    try:
        schedule = interleave(from_level(segments, level)[0], None, activation_budget)
    except DoesNotFitError:
        return None
    assert schedule is not None
    return schedule.makespan_ns


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def rows_of(cell: dict[str, Any]) -> list[list[str]]:
    """A row for each planner, fastest first."""
    planners = cell["planners"]
    order = sorted(planners, key=lambda planner: mean(planners[planner], "step_s"))
    reference = mean(planners[REFERENCE], "step_s") if REFERENCE in planners else None
    rows = []
    for planner in order:
        batches_rows = planners[planner]
        step_s = mean(batches_rows, "step_s")
        rows.append(
            [
                cell["model"] if planner == order[0] else "",
                planner,
                f"{step_s:.2f}",
                "-" if reference is None else f"{100 * (reference / step_s - 1):+.1f} %",
                f"{100 * mean(batches_rows, 'bubble'):.1f}",
                f"{max(row['peak_gib'] for row in batches_rows):.1f}",
                f"{100 * mean(batches_rows, 'mfu'):.1f}",
                f"{float(np.mean([row['step_s'] / row['bound_s'] for row in batches_rows])):.3f}",
                f"{100 * mean(batches_rows, 'recomputed'):.0f} / {100 * mean(batches_rows, 'offloaded'):.0f}",
            ]
        )
    return rows


def gain_row(cell: dict[str, Any]) -> list[str]:
    planners = cell["planners"]
    ours = mean(planners["pipeline"], "step_s")
    baselines = {planner: mean(rows, "step_s") for planner, rows in planners.items() if planner != "pipeline"}
    best = min(baselines, key=lambda planner: baselines[planner])
    low, high = PAPER[cell["model"][:3]]
    over_vpp = f"{100 * (baselines[REFERENCE] / ours - 1):+.1f} %" if REFERENCE in baselines else "vpp does not fit"
    over_bound = float(np.mean([row["step_s"] / row["bound_s"] for row in planners["pipeline"]]))
    return [
        cell["model"],
        f"{over_bound:.3f}",
        over_vpp,
        f"{100 * (baselines[best] / ours - 1):+.1f} % ({best})",
        f"+{low} to +{high} %",
    ]


def first_table(cells: list[dict[str, Any]]) -> str:
    headings = ["throughput of `pipeline`", "x its bound", "over vpp", "over the best baseline", "the paper's range"]
    return markdown(headings, [gain_row(cell) for cell in cells])


def report(cells: list[dict[str, Any]], rungs: dict[str, float]) -> str:
    first, paper_first = next(iter(rungs.values()), 1.0), PAPER_LADDER_S["vpp"]
    ladder_rows = [
        [
            rung,
            f"{time_s:.2f}",
            f"{100 * (first / time_s - 1):+.1f} %",
            f"{PAPER_LADDER_S[rung]:.2f}",
            f"{100 * (paper_first / PAPER_LADDER_S[rung] - 1):+.1f} %",
        ]
        for rung, time_s in rungs.items()
    ]
    headings = [
        "",
        "planner",
        "s",
        "over vpp",
        "bubble %",
        "peak GiB",
        "MFU %",
        "x its bound",
        "recomputed / offloaded %",
    ]
    parts = [
        first_table(cells),
        markdown(headings, [row for cell in cells for row in rows_of(cell)]),
    ]
    if ladder_rows:
        parts.append(markdown(["VLM-S", "s", "", "the paper, s", ""], ladder_rows))
    return "\n\n".join(parts)


def main() -> None:
    names = sys.argv[1:] or [*MODELS]
    cells = [model_cells(name) for name in names]
    rungs = ladder() if "vlm-s" in names else {}
    results = {
        "batches": NUM_BATCHES,
        "microbatches": NUM_MICROBATCHES,
        "evaluations": EVALUATIONS,
        "cells": cells,
        "ladder_s": rungs,
    }
    publish("pipelines", results, report(cells, rungs))
    if len(cells) == len(MODELS):
        write_between(ROOT / "README.md", "pipelines", first_table(cells))


if __name__ == "__main__":
    main()
