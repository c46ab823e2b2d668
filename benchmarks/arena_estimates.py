"""The fleet's estimates of Arena's BERT and MoE sizes against its measured times: python benchmarks/arena_estimates.py

Arena's times are of the plan that Alpa found, with 16 microbatches, on A100, V100, A40 and A10. Sizes are those of
Alpa's public benchmark suites: sequences of 1,024 tokens, and in an MoE every second layer has experts, of which a
token uses two. The estimate is the planned step of a workload described by these sizes, as for a script that never ran:
peaks of data sheets, the efficiency of `Roofline` (0.5), links of `arena_fleet`. Memory of devices is larger by the
activations of 15 of the 16 microbatches, which are not alive at once. Left out: the exchange of tokens between experts,
recomputation, idle time of pipelines. *Corrected*: times measured / planned of the model's smallest cell of the kind.

Needs `../shared/traces` beside the checkout, or `--tables FOLDER`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, markdown, publish
from spindle.cluster import Cluster
from spindle.errors import SpindleError
from spindle.fleet import Cell, Fleet, arena_fleet
from spindle.fleet.estimates import bound_estimate, planned_cell, workload_step
from spindle.fleet.public_traces import arena_models
from spindle.recipes.transformer import Tower, call_name, call_of, module_of, parameters_of
from spindle.workload import Task, Workload

TOKENS, MICROBATCHES = 1024, 16
# Width, layers, heads; of an MoE also experts.
BERT = {
    "760M": (1536, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.6B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "15B": (5120, 48, 40),
    "39B": (8192, 48, 64),
}
MOE = {
    "690M": (768, 8, 16, 16),
    "1.3B": (768, 16, 16, 16),
    "2.4B": (1024, 16, 16, 16),
    "10B": (1536, 16, 16, 32),
    "27B": (2048, 16, 16, 48),
    "70B": (2048, 32, 16, 64),
}
BERT_WORDS, MOE_WORDS = 51200, 32000
USED_EXPERTS = 2


def bert(size: str, batch_size: int) -> Workload:
    width, depth, heads = BERT[size]
    tower = Tower(
        name="bert",
        num_layers=depth,
        width=width,
        num_heads=heads,
        vocabulary=BERT_WORDS,
        has_embedding=True,
        has_head=True,
        max_tensor_degree=8,
    )
    return _workload(f"bert {size}", (tower,), batch_size)


def moe(size: str, batch_size: int) -> Workload:
    """All plain layers, then all with experts: the order does not matter to a step of equal rows."""
    width, depth, heads, num_experts = MOE[size]
    plain = Tower(
        name="plain",
        num_layers=depth // 2,
        width=width,
        num_heads=heads,
        vocabulary=MOE_WORDS,
        has_embedding=True,
        max_tensor_degree=8,
    )
    experts = Tower(
        name="experts",
        num_layers=depth // 2,
        width=width,
        num_heads=heads,
        mlp_width=USED_EXPERTS * 4 * width,
        vocabulary=MOE_WORDS,
        has_head=True,
        max_tensor_degree=8,
    )
    workload = _workload(f"moe {size}", (plain, experts), batch_size)
    unused = (num_experts - USED_EXPERTS) * 8 * width * width
    parameters = tuple(
        replace(parameter, num_elements=parameter.num_elements + unused)
        if parameter.name.startswith("experts.blocks")
        else parameter
        for parameter in workload.parameters
    )
    return replace(workload, parameters=parameters)


def _workload(name: str, towers: tuple[Tower, ...], batch_size: int) -> Workload:
    names = [call_name(tower.name) for tower in towers]
    flows = tuple(itertools.pairwise(names))
    task = Task(
        name="words", batch_size=batch_size, calls=tuple(call_of(tower, TOKENS) for tower in towers), flows=flows
    )
    return Workload(
        name=name,
        modules=tuple(module_of(tower) for tower in towers),
        parameters=tuple(parameter for tower in towers for parameter in parameters_of(tower)),
        tasks=(task,),
    )


def saved_bytes(workload: Workload) -> float:
    """Activations of a whole batch."""
    total = 0.0
    layers = {module.name: [layer.kind for layer in module.layers] for module in workload.modules}
    for task in workload.tasks:
        for call in task.calls:
            costs = dict(call.costs)
            total += task.batch_size * sum(costs[kind].saved_bytes for kind in layers[call.module])
    return total


def with_activations(fleet: Fleet, extra_bytes: float) -> Fleet:
    """The fleet with so much more memory on every device."""
    islands = tuple(
        replace(island, kind=replace(island.kind, memory_bytes=int(island.kind.memory_bytes + extra_bytes)))
        for island in fleet.cluster.islands
    )
    return replace(fleet, cluster=Cluster(name=fleet.cluster.name, islands=islands))


def estimates(tables: Path) -> list[dict[str, Any]]:
    rows = []
    machines = arena_fleet(64)
    for model, times in sorted(arena_models(tables).items()):
        name, size, batch = model.split("_")[0], model.split("_")[1], model.split("_")[-1]
        sizes = {"bert": BERT, "moe": MOE}.get(name, {})
        if size not in sizes:
            continue
        workload = (bert if name == "bert" else moe)(size, int(batch))
        step_on = workload_step(workload)
        for time in times:
            row: dict[str, Any] = {"model": f"{name} {size}", "batch_size": int(batch), "kind": time.kind}
            row |= {"num_devices": time.num_devices, "measured_s": time.step_s, "planned_s": None}
            extra = saved_bytes(workload) * (1 - 1 / MICROBATCHES) / time.num_devices
            fleet = with_activations(machines, extra)
            try:
                bound = bound_estimate(step_on, fleet, Cell(kind=time.kind, num_devices=time.num_devices))
                if bound is not None:
                    estimate, _, _ = planned_cell(step_on, fleet, bound)
                    row |= {"planned_s": estimate.step_s if estimate.fits else None, "bound_s": bound.step_s}
            except SpindleError as error:
                row["error"] = str(error)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def add_corrections(rows: list[dict[str, Any]]) -> None:
    smallest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["num_devices"]):
        if row["planned_s"] is None:
            continue
        key = (row["model"], row["batch_size"], row["kind"])
        first = smallest.setdefault(key, row)
        row["ratio"] = row["planned_s"] / row["measured_s"]
        if first is not row:
            row["corrected_ratio"] = row["ratio"] / first["ratio"]


def table_of(rows: list[dict[str, Any]]) -> str:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["kind"]].append(row)

    def error(values: list[float]) -> str:
        return f"{100 * statistics.fmean(abs(value - 1) for value in values):.0f}" if values else ""

    def line(name: str, kind: str, group: list[dict[str, Any]]) -> list[str]:
        known = [row["ratio"] for row in group if "ratio" in row]
        corrected = [row["corrected_ratio"] for row in group if "corrected_ratio" in row]
        middle = math.exp(statistics.fmean(map(math.log, known))) if known else math.nan
        return [
            name,
            kind,
            f"{len(known)} of {len(group)}",
            f"{middle:.2f} ({min(known):.2f}–{max(known):.2f})" if known else "",
            error(known),
            error(corrected),
        ]

    header = ["model", "kind", "cells planned", "planned / measured", "error, %", "corrected, %"]
    body = [line(model, kind, group) for (model, kind), group in sorted(groups.items())]
    body += [
        line("**all**", kind, [row for row in rows if row["kind"] == kind]) for kind in ("a100", "v100", "a40", "a10")
    ]
    return markdown(header, [*body, line("**all**", "all", rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, default=ROOT.parent / "shared" / "traces" / "arena")
    options = parser.parse_args()
    if not options.tables.is_dir():
        sys.exit("arena_estimates: skipped, there is no ../shared/traces/arena beside the checkout; give --tables")
    rows = estimates(options.tables)
    add_corrections(rows)
    publish("arena_estimates", {"cells": rows}, table_of(rows))


if __name__ == "__main__":
    main()
