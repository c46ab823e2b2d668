"""Planner `pipeline` compared with other pipeline schedules, simulated: python benchmarks/pipelines.py [MODEL ...]

The five models of the DIP paper (§5) on its clusters, with efficiencies measured on an H200 (SEMU). Batches are drawn
like its data; chunks are placed once, tuned on the first batch, for all planners. Each cell is the mean over some
batches of 32 microbatches: throughput over `vpp` (Megatron-LM's interleaved 1F1B) and over the best of all baselines.
Beside it the paper's range for the family, over all its baselines.

The decomposition goes from Megatron-LM's settings to planner `pipeline`, one difference after another. The ladder is
the paper's ablation on VLM-S: from `vpp` (tuned) on, one part of the planner after another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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
    choose_layout,
    make_plan,
    pipeline_bound_s,
    planners_of,
)
from spindle.planners.pipeline.baselines import (
    BASELINES,
    FALLING,
    LEVELS,
    NATURAL,
    RISING,
    from_level,
    kept_alike,
    with_microbatches_in,
)
from spindle.planners.pipeline.interleave import Schedule, interleave
from spindle.planners.pipeline.memory import fastest_choices
from spindle.planners.pipeline.orders import interleaved
from spindle.planners.pipeline.retime import stage_columns
from spindle.planners.pipeline.search import search
from spindle.planners.pipeline.segments import Column, Segments
from spindle.planners.pipeline.stage_costs import NS
from spindle.planners.pipeline.stages import Batch, batches_of
from spindle.profile import Profile
from spindle.program import lower
from spindle.recipes import batch_profile, batches, emulator, model_flops, sub_microbatch_sizes
from spindle.recipes.multimodal import MODELS
from spindle.simulate import simulate
from spindle.timeline import measure
from spindle.workload import Microbatch

NUM_BATCHES, NUM_MICROBATCHES, EVALUATIONS = 3, 32, 4000
PAPER = {"vlm": (15.6, 76.2), "t2v": (36.6, 97.3)}  # % of throughput, over all its baselines
PAPER_LADDER_S = {"vpp": 26.13, "partition": 22.27, "interleaving": 18.81, "reordering": 17.61, "memory": 16.05}
REFERENCE = "vpp"


class Pipelined:
    """A model on its cluster. Sizes of sub-microbatches and layouts are chosen once, on the first batch."""

    def __init__(self, name: str) -> None:
        self.model, self.cluster = MODELS[name], MODELS[name].cluster
        self.semu = emulator(self.cluster)
        self.sizes: dict[str, int] | None = None
        self.layouts: dict[str, tuple[Layout, ...]] = {}
        self.bounds_s: dict[tuple[Microbatch, ...], float] = {}

    def batches(self) -> list[tuple[Microbatch, ...]]:
        return list(islice(batches(self.model, NUM_MICROBATCHES, seed=0), NUM_BATCHES))

    def profile(self, microbatches: Sequence[Microbatch], sizes: dict[str, int] | None = None) -> Profile:
        return batch_profile(self.model, microbatches, sizes or {}, self.cluster, self.semu)

    def split_profile(self, microbatches: Sequence[Microbatch]) -> Profile:
        """With sub-microbatches as planner `pipeline` chose them."""
        if self.sizes is None:
            choices = sub_microbatch_sizes(self.model, microbatches, self.semu)
            profiles = [self.profile(microbatches, sizes) for sizes in choices]
            profile, layout = choose_layout(profiles, self.model.num_stages)
            self.layouts["pipeline"] = (layout,)
            self.sizes = choices[next(number for number, each in enumerate(profiles) if each is profile)]
        return self.profile(microbatches, self.sizes)

    def bound_s(self, microbatches: tuple[Microbatch, ...]) -> float:
        """Over all sizes of sub-microbatches."""
        if microbatches not in self.bounds_s:
            choices = sub_microbatch_sizes(self.model, microbatches, self.semu)
            profiles = (self.profile(microbatches, sizes) for sizes in choices)
            self.bounds_s[microbatches] = pipeline_bound_s(profiles, self.model.num_stages)
        return self.bounds_s[microbatches]

    def plan(self, microbatches: tuple[Microbatch, ...], planner: str) -> tuple[Plan, Profile]:
        """A finished plan for a batch, and the profile it was made from."""
        is_ours = PLANNERS[planner].splits_microbatches
        profile = self.split_profile(microbatches) if is_ours else self.profile(microbatches)
        if planner not in self.layouts:
            self.layouts[planner] = baseline_layouts(planner, profile, self.model.num_stages)
        options = PlanOptions(
            evaluations=EVALUATIONS, layouts=self.layouts[planner], bound_s=self.bound_s(microbatches)
        )
        return make_plan(profile, planner, options), profile

    def mfu(self, microbatches: Sequence[Microbatch], step_s: float) -> float:
        """Which share of all devices' peak a step of this length uses, recomputation not counted."""
        peak = self.cluster.kind.peak_flops * self.cluster.num_devices
        return model_flops(self.model, microbatches) / peak / step_s


def model_cells(name: str) -> dict[str, Any]:
    """All planners on some batches of a model."""
    pipelined = Pipelined(name)
    planners = [planner for planner in planners_of(is_pipeline=True) if not PLANNERS[planner].takes_parts]
    cells: dict[str, list[dict[str, Any]]] = {planner: [] for planner in planners}
    refusals: dict[str, str] = {}
    for microbatches in pipelined.batches():
        for planner in planners:
            began = time.process_time()
            try:
                plan, profile = pipelined.plan(microbatches, planner)
            except DoesNotFitError as error:
                refusals[planner] = str(error)
                continue
            took_s = time.process_time() - began
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
                    "planning_cpu_s": took_s,
                    "settings": plan.settings,
                }
            )
            print(f"{name} {planner} {plan.makespan_s:.2f} s, {plan.makespan_s / plan.bound_s:.3f} x bound", flush=True)
    return {
        "model": name,
        "cluster": pipelined.cluster.name,
        "sub_microbatch": pipelined.sizes,
        "decomposition_s": decomposition(name),
        "planners": {planner: rows for planner, rows in cells.items() if len(rows) == NUM_BATCHES},
        "refusals": refusals,
    }


def decomposition(name: str) -> dict[str, float]:
    """Seconds of the first batch, from Megatron-LM's interleaved 1F1B to planner `pipeline`, one difference after
    another; schedules alone, without the optimizer and without what is in flight between ranks."""
    pipelined = Pipelined(name)
    microbatches, num_ranks = pipelined.batches()[0], pipelined.model.num_stages
    whole, split = pipelined.profile(microbatches), pipelined.split_profile(microbatches)

    def vpp_s(cut_by: str, microbatch_orders: Sequence[str], has_limit: bool) -> float:
        layouts = [layout for layout in BASELINES["vpp"].layouts(whole, num_ranks) if layout.cut_by == cut_by]
        best_s = float("inf")
        for layout in layouts:
            try:
                (batch,) = batches_of(whole, layout)
                for microbatch_order in microbatch_orders:
                    ordered = with_microbatches_in(batch, microbatch_order)
                    budget = batch.activation_budget if has_limit else np.full_like(batch.activation_budget, 1 << 60)
                    schedule = kept_alike(ordered.segments, BASELINES["vpp"].order(whole, layout, ordered), budget)
                    best_s = min(best_s, schedule.makespan_ns / NS)
            except DoesNotFitError:
                continue
        return best_s

    (layout,) = pipelined.layouts["pipeline"]
    (batch,) = batches_of(split, layout)
    free = search(batch.segments, None, evaluations=EVALUATIONS)
    limited = search(batch.segments, batch.activation_budget, evaluations=EVALUATIONS)
    return {
        "vpp cut by parameters": vpp_s("parameters", [NATURAL], True),
        "without the memory cap": vpp_s("parameters", [NATURAL], False),
        "cut by time": vpp_s("time", [NATURAL], False),
        "microbatches sorted": vpp_s("time", [NATURAL, FALLING, RISING], False),
        "modules cut apart, sub-microbatches, interleaving": interleave_s(batch),
        "order searched": free.schedule.makespan_ns / NS,
        "under the memory cap": limited.schedule.makespan_ns / NS,
    }


def interleave_s(batch: Batch) -> float:
    """The natural order with everything kept, interleaved without a memory cap."""
    segments, choice = batch.segments, fastest_choices(batch.segments)
    forward, backward, memory = stage_columns(segments, choice)
    tables = {
        "choice_of": np.arange(forward.size).reshape(forward.shape),
        "choice_forward_ns": forward.reshape(-1, 1),
        "choice_backward_ns": backward.reshape(-1, 1),
        "choice_memory": memory.reshape(-1, 1),
        "choice_count": np.ones(forward.size, dtype=np.int64),
    }
    schedule = interleave(replace(segments, forward_ns=forward, backward_ns=backward, memory=memory, **tables))
    assert schedule is not None
    return schedule.makespan_ns / NS


def ladder() -> dict[str, float]:
    """VLM-S with one part of the planner after another, the mean over the same batches."""
    pipelined = Pipelined("vlm-s")
    times: dict[str, list[float]] = {}
    for microbatches in pipelined.batches():
        profile = pipelined.split_profile(microbatches)
        (layout,) = pipelined.layouts["pipeline"]
        (batch,) = batches_of(profile, layout)
        segments, budget = batch.segments, batch.activation_budget
        schedules = {
            "partition": kept_alike(segments, lambda segments, activation_budget: interleaved(segments), budget),
            "interleaving": kept_alike(segments, natural, budget),
            "reordering": alike(segments, budget, EVALUATIONS),
            "memory": search(segments, budget, evaluations=EVALUATIONS).schedule,
        }
        steps_s = {"vpp": pipelined.plan(microbatches, "vpp")[0].makespan_s}
        steps_s |= {rung: schedule.makespan_ns / NS for rung, schedule in schedules.items()}
        for rung, step_s in steps_s.items():
            times.setdefault(rung, []).append(step_s)
            print(f"ladder {rung} {step_s:.2f} s", flush=True)
    return {rung: float(np.mean(times_s)) for rung, times_s in times.items()}


def natural(segments: Segments, activation_budget: Column) -> Schedule:
    """Microbatches in their natural order, interleaved."""
    schedule = interleave(segments, None, activation_budget)
    assert schedule is not None
    return schedule


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
    headings = ["throughput of `pipeline`", "x bound", "over vpp", "over the best baseline", "the paper's range"]
    return markdown(headings, [gain_row(cell) for cell in cells])


def decomposition_table(cells: list[dict[str, Any]]) -> str:
    """Seconds, and the factor from each row to the next."""
    rungs = list(cells[0]["decomposition_s"])
    rows = []
    for number, rung in enumerate(rungs):
        row = [rung]
        for cell in cells:
            times = list(cell["decomposition_s"].values())
            factor = f" (x{times[number - 1] / times[number]:.2f})" if number else ""
            row.append(f"{times[number]:.2f}{factor}")
        rows.append(row)
    return markdown(["first batch, s", *(cell["model"] for cell in cells)], rows)


def settings_table(cells: list[dict[str, Any]]) -> str:
    """What each planner chose for the first batch."""
    rows = []
    for cell in cells:
        sizes = [f"sub-microbatches of up to {size} for {module}" for module, size in cell["sub_microbatch"].items()]
        for planner, batch_rows in cell["planners"].items():
            settings = [*(sizes if planner == "pipeline" else []), batch_rows[0]["settings"]]
            rows.append([cell["model"], planner, "; ".join(settings)])
    return markdown(["", "planner", "chosen by simulation"], rows)


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
        "x bound",
        "recomputed / offloaded %",
    ]
    parts = [
        first_table(cells),
        markdown(headings, [row for cell in cells for row in rows_of(cell)]),
    ]
    parts += [decomposition_table(cells), settings_table(cells)]
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
        write_between(ROOT / "docs" / "results.md", "pipelines", first_table(cells))


if __name__ == "__main__":
    main()
