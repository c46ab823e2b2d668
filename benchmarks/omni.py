"""Planner `colocate` over shares of image tokens from 1:9 to 9:1, simulated: python benchmarks/omni.py [RECIPE ...]

Recipes like those of MegaScale-Omni (sizes, data and baselines are ours: nothing here is a reproduction), one batch of
seed 0, the slowest replica of each step. Baselines have sequences in the order in which they were drawn (`natural`), as
those systems do; all planners also have them assigned level (`balanced`). Beside it: the layout chosen at 5:5, kept at
the other mixes; what is lost without one part at a time; and VLM-S and VLM-M with collectives of tensor groups that
cost nothing.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from common import ROOT, markdown, publish
from spindle.errors import DoesNotFitError
from spindle.planners import PLANNERS, PlanOptions, choose_colocation, choose_layout, make_plan, pipeline_bound_s
from spindle.planners.balance import assign_items
from spindle.planners.colocate.columns import EVERYTHING
from spindle.planners.colocate.planner import SYSTEMS, plan_by_rules
from spindle.planners.options import REPLICATED
from spindle.program import lower
from spindle.recipes import MODELS, OMNI_DATA, BatchOptions, Step, step_of
from spindle.simulate import simulate

MIXES = tuple(f"{share}:{10 - share}" for share in range(1, 10))
NATURAL = ("stage-0", "dedicated", "static", "optimus")
BALANCED = ("colocate", "pipeline", "upfront", *NATURAL)
ABLATIONS = ("omni-c", "7:3")
PAPER = {"omni-a": 1.54, "omni-b": 3.30, "omni-c": 7.57, "omni-d": 1.98}
EVALUATIONS = 500
# Here planner `pipeline` takes many minutes of CPU: images of as many lengths are as many stages that differ.
LARGE = ("omni-b", "omni-b-audio", "omni-c", "omni-d")
_RESULTS = ROOT / "benchmarks" / "results" / "omni.json"


def cell(step: Step, planner: str, with_spread: bool = True) -> dict[str, Any]:
    """One planner on one step: length, bound, peak memory; or why there is no plan. `with_spread` has the layout of
    planner `pipeline` among the candidates of `colocate`."""
    assert step.pipeline_ranks is not None
    began = time.process_time()
    split, in_parts = step.split_profiles() if with_spread else [step.whole], step.part_profiles()
    bound_s = pipeline_bound_s([*split, *in_parts], step.pipeline_ranks)
    options = PlanOptions(bound_s=bound_s, evaluations=EVALUATIONS, pipeline_ranks=step.pipeline_ranks)
    try:
        profile = step.whole
        if PLANNERS[planner].takes_parts:
            profile, layout = choose_colocation(planner, in_parts, split if with_spread else [], step.pipeline_ranks)
            options = replace(options, layouts=(layout,))
        elif PLANNERS[planner].splits_microbatches:
            profile, layout = choose_layout(split, step.pipeline_ranks)
            options = replace(options, layouts=(layout,))
        plan = make_plan(profile, planner, options)
    except DoesNotFitError as error:
        return {"planner": planner, "bound_s": bound_s, "refused": str(error)}
    peak = simulate(lower(plan, profile), profile).peak_bytes().max()
    return {
        "planner": planner,
        "step_s": plan.makespan_s,
        "bound_s": bound_s,
        "peak_gib": float(peak) / 2**30,
        "recomputed": sum(slot.recomputed for slot in plan.slots) / sum(slot.num_layers for slot in plan.slots),
        "settings": plan.settings,
        "cpu_s": time.process_time() - began,
    }


def recipe_cells(name: str, mixes: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for mix in mixes:
        for data, planners in (("balanced", BALANCED), ("natural", NATURAL)):
            batch = BatchOptions(mix=mix, is_balanced=data == "balanced")
            step = step_of(MODELS[name], MODELS[name].cluster, batch)
            for planner in planners:
                if planner == "pipeline" and name in LARGE:
                    continue
                rows.append({"recipe": name, "mix": mix, "data": data} | cell(step, planner, name not in LARGE))
                shown = rows[-1].get("step_s", "-")
                print(name, mix, data, planner, shown, rows[-1].get("settings", ""), file=sys.stderr, flush=True)
    return rows


def kept_layout_cells(name: str, mixes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Steps at every mix with the layout that was chosen at 5:5, parts of the same size."""
    model, rows, chosen = MODELS[name], [], None
    for mix in ("5:5", *mixes):
        step = step_of(model, model.cluster, BatchOptions(mix=mix))
        assert step.pipeline_ranks is not None
        in_parts = step.part_profiles()
        if chosen is None:
            profile, layout = choose_colocation("colocate", in_parts, [], step.pipeline_ranks)
            size = next((number for number, each in enumerate(in_parts) if each is profile), None)
            if size is None:
                return []
            chosen = size, layout
            continue
        try:
            plan = make_plan(in_parts[chosen[0]], "colocate", PlanOptions(layouts=(chosen[1],), bound_s=1.0))
            rows.append({"recipe": name, "mix": mix, "step_s": plan.makespan_s})
        except DoesNotFitError as error:
            rows.append({"recipe": name, "mix": mix, "refused": str(error)})
    return rows


def ablations(name: str, mix: str) -> list[dict[str, Any]]:
    """Without one part of the planner at a time."""
    step = step_of(MODELS[name], MODELS[name].cluster, BatchOptions(mix=mix))
    natural = step_of(MODELS[name], MODELS[name].cluster, BatchOptions(mix=mix, is_balanced=False))
    assert step.pipeline_ranks is not None
    rules, ranks = SYSTEMS["colocate"].rules, step.pipeline_ranks
    profile, layout = choose_colocation("upfront", step.part_profiles(), [], ranks)
    size = next(number for number, each in enumerate(step.part_profiles()) if each is profile)
    unbalanced = natural.part_profiles()[size]
    variants = {
        "colocate": (profile, rules),
        "no sequence groups": (profile, replace(rules, sequence_groups=False)),
        "items in turn": (profile, replace(rules, sequence_groups=False, is_in_turn=True)),
        "items and sequences in turn": (unbalanced, replace(rules, sequence_groups=False, is_in_turn=True)),
        "upfront": (profile, replace(rules, ahead=(EVERYTHING,), lag=(EVERYTHING,))),
    }
    rows = []
    for variant, (given, rule) in variants.items():
        options = PlanOptions(layouts=(layout,), bound_s=1.0)
        try:
            step_s = plan_by_rules(given, options, "colocate", rule, (REPLICATED,)).makespan_s
        except DoesNotFitError as error:
            rows.append({"variant": variant, "refused": str(error)})
            continue
        rows.append({"variant": variant, "step_s": step_s})
    spread = cell(step, "optimus")
    rows.append({"variant": "spread (optimus)", "step_s": spread.get("step_s")})
    return rows


def balance_figures() -> list[dict[str, Any]]:
    """Slowest device over mean, longest first and with sequence groups at 12 % loss; milliseconds warm."""
    rows = []
    for num_devices in (16, 64, 512):
        patches = np.random.default_rng(0).lognormal(math.log(1500), 1.0, 8 * num_devices)
        patches = np.clip(np.rint(patches), 64, 16384).astype(np.int64)
        cost = patches * patches // 2 + 3000 * patches
        degrees, islands = (1, 2, 4, 8), [8] * (num_devices // 8)
        times = np.stack([cost, *(cost * 112 // (100 * degree) for degree in degrees[1:])])
        whole = assign_items(times[:1], (1,), islands)
        shared = assign_items(times, degrees, islands)
        took = []
        for _ in range(21):
            began = time.process_time()
            assign_items(times, degrees, islands)
            took.append(time.process_time() - began)
        rows.append(
            {
                "devices": num_devices,
                "items": len(cost),
                "longest_first": whole.imbalance,
                "with_groups": shared.imbalance,
                "split": int((shared.degree > 1).sum()),
                "ms": 1e3 * float(np.median(took)),
            }
        )
    return rows


def free_collectives(name: str) -> dict[str, Any]:
    """`pipeline` and `colocate` on a DIP model as it is, and with collectives of tensor groups that cost nothing."""
    model = MODELS[name]
    result: dict[str, Any] = {"model": name}
    for label, cluster in (("as_is", model.cluster), ("free", _with_free_links(model.cluster))):
        step = step_of(model, cluster)
        result[label] = {planner: cell(step, planner) for planner in ("pipeline", "colocate")}
    return result


def _with_free_links(cluster: Any) -> Any:
    """The cluster with links inside islands a million times as fast, and without latency."""
    islands = tuple(
        replace(island, link=replace(island.link, bytes_per_s=1e6 * island.link.bytes_per_s, latency_s=0.0))
        for island in cluster.islands
    )
    return replace(cluster, islands=islands)


def main(arguments: list[str]) -> None:
    given = [argument for argument in arguments if ":" not in argument]
    mixes = tuple(argument for argument in arguments if ":" in argument) or MIXES
    data = json.loads(_RESULTS.read_text(encoding="utf-8")) if _RESULTS.exists() else {}
    data.pop("measured_on", None)
    if not given or "balance" in given:
        data["balance"] = balance_figures()
        publish("omni", data, report(data))
    for name in OMNI_DATA:
        for mix in mixes if not given or name in given else ():
            rows = [row for row in data.get("cells", []) if (row["recipe"], row["mix"]) != (name, mix)]
            data["cells"] = rows + recipe_cells(name, (mix,))
            publish("omni", data, report(data))
        if f"{name}-kept" in given or not given:
            data["kept"] = [row for row in data.get("kept", []) if row["recipe"] != name]
            data["kept"] += kept_layout_cells(name, mixes)
            publish("omni", data, report(data))
    if not given or "ablations" in given:
        data["ablations"] = ablations(*ABLATIONS)
    for name in ("vlm-s", "vlm-m", "vlm-l", "t2v-s", "t2v-l"):
        if not given or name in given:
            data.setdefault("models", {})[name] = free_collectives(name)
            publish("omni", data, report(data))
    publish("omni", data, report(data))


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def report(data: dict[str, Any]) -> str:
    parts = []
    if "balance" in data:
        rows = [
            [
                f"{row['devices']}",
                f"{row['items']:,}",
                f"{row['longest_first']:.2f}",
                f"{row['with_groups']:.3f}",
                f"{row['split']}",
                f"{row['ms']:.2f}",
            ]
            for row in data["balance"]
        ]
        headings = ["devices", "items", "longest first: slowest / mean", "with sequence groups", "split", "ms of CPU"]
        parts.append(markdown(headings, rows))
    if data.get("cells"):
        parts += _sweep_tables(data)
    if data.get("ablations"):
        whole = data["ablations"][0].get("step_s")
        rows = [
            [
                row["variant"],
                f"{row['step_s']:.2f}" if row.get("step_s") else "does not fit",
                f"-{100 * (1 - whole / row['step_s']):.1f} %" if whole and row.get("step_s") else "",
            ]
            for row in data["ablations"]
        ]
        parts.append(markdown([f"{' '.join(ABLATIONS)}, replicated", "s", "throughput"], rows))
    if data.get("models"):
        rows = []
        for name, result in data["models"].items():
            for label in ("as_is", "free"):
                cells = result[label]
                if any("step_s" not in cells[planner] for planner in ("pipeline", "colocate")):
                    rows.append([name, label.replace("_", " "), "does not fit", "", "", ""])
                    continue
                pipeline, colocate = cells["pipeline"], cells["colocate"]
                rows.append(
                    [
                        name,
                        "collectives free" if label == "free" else "",
                        f"{pipeline['step_s']:.2f} s, {pipeline['peak_gib']:.0f} GiB",
                        f"{colocate['step_s']:.2f} s, {colocate['peak_gib']:.0f} GiB",
                        f"{pipeline['step_s'] / colocate['step_s']:.2f}",
                        f"{colocate['step_s'] / colocate['bound_s']:.3f}",
                    ]
                )
        parts.append(markdown(["", "", "pipeline", "colocate", "speedup", "x bound"], rows))
    return "\n\n".join(parts)


def _sweep_tables(data: dict[str, Any]) -> list[str]:
    by_cell: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in data["cells"]:
        by_cell.setdefault((row["recipe"], row["mix"]), {})[row["data"], row["planner"]] = row
    kept = {(row["recipe"], row["mix"]): row for row in data.get("kept", [])}
    rows, gains = [], dict[str, list[float]]()
    for (recipe, mix), cells in sorted(by_cell.items()):
        ours = cells["balanced", "colocate"]

        def length(data_order: str, planner: str, of: Any = cells) -> str:
            if (data_order, planner) not in of:
                return "not run"
            row = of[data_order, planner]
            return f"{row['step_s']:.2f}" if "step_s" in row else "does not fit"

        natural = [cells["natural", planner] for planner in NATURAL]
        best = min((row["step_s"] for row in natural if "step_s" in row), default=None)
        gain = best / ours["step_s"] if best and "step_s" in ours else None
        if gain:
            gains.setdefault(recipe, []).append(gain)
        at_5_5 = kept.get((recipe, mix), {}).get("step_s")
        rows.append(
            [
                f"{recipe} {mix}",
                *(length("natural", planner) for planner in NATURAL),
                *(length("balanced", planner) for planner in ("static", "optimus", "pipeline", "upfront", "colocate")),
                f"{ours['step_s'] / ours['bound_s']:.3f}" if "step_s" in ours else "",
                f"{gain:.2f}" if gain else "",
                f"{at_5_5 / ours['step_s']:.3f}" if at_5_5 and "step_s" in ours else "",
            ]
        )
    headings = ["s", *NATURAL, "static, balanced", "optimus, balanced", "pipeline", "upfront", "colocate"]
    headings += ["x bound", "over the best natural", "layout of 5:5"]
    means = [
        [recipe, f"{len(values)}", f"{_mean(values):.2f}", f"{max(values):.2f}", f"{PAPER.get(recipe, '')}"]
        for recipe, values in gains.items()
    ]
    together = [gain for values in gains.values() for gain in values]
    if together:
        means.append(["all", f"{len(together)}", f"{_mean(together):.2f}", f"{max(together):.2f}", ""])
    return [
        markdown(headings, rows),
        markdown(["speedup over the best natural", "mixes", "mean", "largest", "the paper's largest"], means),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
