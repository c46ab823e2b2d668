"""Planner `colocate` over shares of image tokens from 1:9 to 9:1, simulated: python benchmarks/omni.py [WHAT ...]

Recipes like those of MegaScale-Omni (sizes, data and baselines are ours: nothing here is a reproduction), one batch of
seed 0, the slowest replica of each step. Baselines have sequences in the order in which they were drawn (`natural`), as
those systems do; all planners also have them assigned level (`balanced`). Beside it: one layout for all mixes;
what is lost without one part at a time; and VLM-S and VLM-M with collectives of tensor groups that cost nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, circumstances, markdown, publish, write_between
from spindle.artifact import write_atomically
from spindle.errors import DoesNotFitError
from spindle.planners import PLANNERS, PlanOptions, choose_colocation, choose_layout, make_plan, pipeline_bound_s
from spindle.planners.balance import assign_items
from spindle.planners.colocate.columns import STRICT
from spindle.planners.colocate.planner import SYSTEMS, plan_by_rules
from spindle.planners.options import REPLICATED
from spindle.program import lower
from spindle.recipes import MODELS, OMNI_DATA, BatchOptions, Step, step_of
from spindle.recipes.omni import IMAGE_SIGMA
from spindle.simulate import simulate

MIXES = tuple(f"{share}:{10 - share}" for share in range(1, 10))
KEPT_MIXES = ("5:5", "1:9", "9:1")  # on which the layout is chosen that all mixes are planned with
NATURAL = ("stage-0", "dedicated", "static", "optimus")
BALANCED = ("colocate", "pipeline", "upfront", *NATURAL)
# Recipes, their mixes, and how far sizes of images spread.
ABLATIONS = (("omni-c", "7:3"), ("omni-c", "1:9"), ("omni-c", "1:9 σ=1.2"), ("vlm-s", ""), ("vlm-m", ""))
PAPER = {"omni-a": 1.54, "omni-b": 3.30, "omni-c": 7.57, "omni-d": 1.98}
EVALUATIONS = 500
# Here planner `pipeline` takes many minutes of CPU: images of as many lengths are as many stages that differ.
LARGE = ("omni-b", "omni-b-audio", "omni-c", "omni-d")
DIP_MODELS = ("vlm-s", "vlm-m", "vlm-l", "t2v-s", "t2v-l")
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


def kept_layout_cells(name: str, mixes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Steps at every mix with one layout, chosen on a batch of each of `KEPT_MIXES`, parts of the same size."""
    model, rows = MODELS[name], []
    part_profiles = {
        mix: step_of(model, model.cluster, BatchOptions(mix=mix)).part_profiles() for mix in (*KEPT_MIXES, *mixes)
    }
    first, *other_batches = (part_profiles[mix] for mix in KEPT_MIXES)
    profile, layout = choose_colocation("colocate", first, [], model.num_stages, other_batches=other_batches)
    size = next(number for number, each in enumerate(first) if each is profile)
    for mix in mixes:
        try:
            plan = make_plan(part_profiles[mix][size], "colocate", PlanOptions(layouts=(layout,), bound_s=1.0))
            rows.append({"recipe": name, "mix": mix, "step_s": plan.makespan_s})
        except DoesNotFitError as error:
            rows.append({"recipe": name, "mix": mix, "refused": str(error)})
    return rows


def ablations(name: str, mix: str) -> list[dict[str, Any]]:
    """Without one part of the planner at a time."""
    model, (ratio, _, sigma) = MODELS[name], mix.partition(" σ=")
    batch = BatchOptions(mix=ratio or None, image_sigma=float(sigma or IMAGE_SIGMA))
    step, natural = (step_of(model, model.cluster, replace(batch, is_balanced=each)) for each in (True, False))
    assert step.pipeline_ranks is not None
    rules, ranks = SYSTEMS["colocate"].rules, step.pipeline_ranks
    profile, layout = choose_colocation("colocate", step.part_profiles(), [], ranks)
    size = next(number for number, each in enumerate(step.part_profiles()) if each is profile)
    unbalanced = natural.part_profiles()[size]  # of models without a mix, the same: they have one replica
    variants = {
        "colocate": (profile, rules),
        "strict 1F1B, whole backwards": (profile, replace(rules, slack=(STRICT,), num_split=(0,))),
        "microbatches as they come": (profile, replace(rules, light_ends=False)),
        "long items shared where levels ask": (profile, replace(rules, longest=(0,))),
        "no sequence groups": (profile, replace(rules, sequence_groups=False)),
        "items in turn": (profile, replace(rules, sequence_groups=False, is_in_turn=True)),
        "items and sequences in turn": (unbalanced, replace(rules, sequence_groups=False, is_in_turn=True)),
        "upfront": (profile, replace(rules, num_blocks=(1,))),
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
    return [{"recipe": name, "mix": mix} | row for row in rows]


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


Job = tuple[str, ...]  # a kind, and what of it


def jobs_of(names: list[str], mixes: tuple[str, ...], only: list[str]) -> list[Job]:
    """What is asked for, the longest first: large recipes, and planners that search. `only` are planners of the sweep,
    all if there are none."""
    jobs: list[Job] = []
    for recipe in reversed(list(OMNI_DATA)):
        if not names or f"{recipe}-kept" in names:
            jobs.append(("kept", recipe))
        for mix in mixes if not names or recipe in names else ():
            for data, planners in (("balanced", BALANCED), ("natural", NATURAL)):
                shown = [planner for planner in planners if planner != "pipeline" or recipe not in LARGE]
                shown = [planner for planner in shown if not only or planner in only]
                jobs += [("cell", recipe, mix, data, planner) for planner in shown]
    jobs += [("model", name) for name in DIP_MODELS if not names or name in names]
    jobs += [("ablations", *which) for which in ABLATIONS if not names or "ablations" in names]
    jobs += [("balance",)] if not names or "balance" in names else []
    searches = ("colocate", "upfront", "dedicated")
    return sorted(jobs, key=lambda job: job[0] == "cell" and job[-1] not in searches)


def run_job(job: Job) -> Any:
    match job:
        case ("cell", recipe, mix, data, planner):
            step = step_of(
                MODELS[recipe], MODELS[recipe].cluster, BatchOptions(mix=mix, is_balanced=data == "balanced")
            )
            known = {"recipe": recipe, "mix": mix, "data": data}
            return known | cell(step, planner, with_spread=recipe not in LARGE)
        case ("kept", recipe):
            return kept_layout_cells(recipe, MIXES)
        case ("model", name):
            return free_collectives(name)
        case ("ablations", recipe, mix):
            return ablations(recipe, mix)
        case _:
            return balance_figures()


def known_jobs(data: dict[str, Any]) -> set[Job]:
    known = {("cell", row["recipe"], row["mix"], row["data"], row["planner"]) for row in data.get("cells", [])}
    known |= {("kept", row["recipe"]) for row in data.get("kept", [])}
    known |= {("model", name) for name in data.get("models", {})}
    known |= {("ablations", row["recipe"], row["mix"]) for row in data.get("ablations", [])}
    return known | ({("balance",)} if data.get("balance") else set())


def take(data: dict[str, Any], job: Job, result: Any) -> None:
    """Put the result of a job in the place of an earlier one."""
    match job:
        case ("cell", *which):
            others = [
                row
                for row in data.get("cells", [])
                if [row["recipe"], row["mix"], row["data"], row["planner"]] != which
            ]
            data["cells"] = [*others, result]
        case ("kept", recipe):
            data["kept"] = [row for row in data.get("kept", []) if row["recipe"] != recipe] + result
        case ("model", name):
            data.setdefault("models", {})[name] = result
        case ("ablations", recipe, mix):
            others = [row for row in data.get("ablations", []) if (row["recipe"], row["mix"]) != (recipe, mix)]
            data["ablations"] = others + result
        case _:
            data["balance"] = result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="recipes, mixes (7:3), models, RECIPE-kept, ablations, balance")
    parser.add_argument("--planners", nargs="*", default=[], help="of the sweep; all unless given")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="what is not done by then is left out")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have already")
    parser.add_argument("-o", "--output", type=Path, help="a copy of the results as JSON, written as they come")
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.budget_s
    data = json.loads(_RESULTS.read_text(encoding="utf-8")) if _RESULTS.exists() else {}
    data.pop("measured_on", None)
    mixes = tuple(argument for argument in arguments.what if ":" in argument) or MIXES
    jobs = jobs_of([argument for argument in arguments.what if ":" not in argument], mixes, arguments.planners)
    if arguments.missing:
        jobs = [job for job in jobs if job not in known_jobs(data)]
    commit = circumstances()["commit"]
    with multiprocessing.get_context("forkserver").Pool(arguments.processes) as pool:
        waiting = {job: pool.apply_async(run_job, (job,)) for job in jobs}
        while waiting and time.monotonic() < ends:
            for job in [job for job, answer in waiting.items() if answer.ready()]:
                result = waiting.pop(job).get()
                for row in [result] if isinstance(result, dict) else result:
                    row["commit"] = commit
                take(data, job, result)
                shown = result.get("step_s", "does not fit") if job[0] == "cell" else ""
                print(*job, shown, file=sys.stderr, flush=True)
                if arguments.output is not None:
                    write_atomically(arguments.output, json.dumps(data, indent=1) + "\n")
            time.sleep(0.1)
        for job in waiting:
            print("not run within the budget:", *job, file=sys.stderr, flush=True)
    publish("omni", data, report(data))
    write_between(ROOT / "docs" / "results.md", "omni", summary(data))


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
    for recipe, mix in ABLATIONS:
        of_recipe = [row for row in data.get("ablations", []) if (row["recipe"], row["mix"]) == (recipe, mix)]
        whole = of_recipe[0].get("step_s") if of_recipe else None
        rows = [
            [
                row["variant"],
                f"{row['step_s']:.2f}" if row.get("step_s") else "does not fit",
                f"-{100 * (1 - whole / row['step_s']):.1f} %" if whole and row.get("step_s") else "",
            ]
            for row in of_recipe
        ]
        parts += [markdown([f"{' '.join(filter(None, (recipe, mix)))}, replicated", "s", "throughput"], rows)] * bool(
            rows
        )
    if data.get("models"):
        parts.append(models_table(data["models"]))
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`colocate` in one cell of the sweep, beside the others: seconds by data and planner, None where nothing fits."""

    recipe: str
    mix: str
    lengths: dict[tuple[str, str], float | None]
    ours_s: float
    bound_s: float

    @property
    def of_bound(self) -> float:
        return self.ours_s / self.bound_s

    @property
    def gain(self) -> float:
        """Over the fastest baseline with sequences as they come."""
        return min(filter(None, (self.lengths["natural", planner] for planner in NATURAL))) / self.ours_s

    @property
    def lead(self) -> float:
        """Over the fastest other planner with the same data."""
        others = [of for (data, planner), of in self.lengths.items() if data == "balanced" and planner != "colocate"]
        return min(filter(None, others)) / self.ours_s


def comparisons(data: dict[str, Any]) -> list[Comparison]:
    """The cells of the sweep that have `colocate` and all baselines, by recipe and mix."""
    by_cell: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in data["cells"]:
        by_cell.setdefault((row["recipe"], row["mix"]), {})[row["data"], row["planner"]] = row
    needed = {("balanced", "colocate"), *(("natural", planner) for planner in NATURAL)}
    return [
        Comparison(
            recipe=recipe,
            mix=mix,
            lengths={which: row.get("step_s") for which, row in cells.items()},
            ours_s=cells["balanced", "colocate"]["step_s"],
            bound_s=cells["balanced", "colocate"]["bound_s"],
        )
        for (recipe, mix), cells in sorted(by_cell.items())
        if needed <= cells.keys() and "step_s" in cells["balanced", "colocate"]
    ]


def models_table(models: dict[str, Any]) -> str:
    """`pipeline` and `colocate` on the models of DIP, also with collectives that cost nothing."""
    rows = []
    for name, result in sorted(models.items()):
        for label, remark in (("as_is", ""), ("free", ", collectives free")):
            pipeline, colocate = result[label]["pipeline"], result[label]["colocate"]
            if "step_s" not in pipeline or "step_s" not in colocate:
                rows.append([f"{name}{remark}", "does not fit", "", "", ""])
                continue
            rows.append(
                [
                    f"{name}{remark}",
                    f"{pipeline['step_s']:.2f} s, {pipeline['peak_gib']:.0f} GiB",
                    f"{colocate['step_s']:.2f} s, {colocate['peak_gib']:.0f} GiB",
                    f"{pipeline['step_s'] / colocate['step_s']:.2f}",
                    f"{colocate['step_s'] / colocate['bound_s']:.3f}",
                ]
            )
    return markdown(["step, peak memory", "`pipeline`", "`colocate`", "speedup", "x bound"], rows)


def commits_of(rows: Iterable[dict[str, Any]]) -> str:
    """The commits at which cells were run, and how many at each."""
    counts = Counter(row.get("commit", "earlier ones").removesuffix(" with changes") for row in rows)
    if len(counts) == 1:
        return f"commit {next(iter(counts))}"
    return "commits " + ", ".join(f"{commit} ({count})" for commit, count in counts.most_common())


def _sweep_tables(data: dict[str, Any]) -> list[str]:
    kept = {(row["recipe"], row["mix"]): row for row in data.get("kept", [])}
    cells, rows = comparisons(data), []
    for cell in cells:

        def length(data_order: str, planner: str, of: Comparison = cell) -> str:
            if (data_order, planner) not in of.lengths:
                return "not run"
            length_s = of.lengths[data_order, planner]
            return "does not fit" if length_s is None else f"{length_s:.2f}"

        with_one = kept.get((cell.recipe, cell.mix), {}).get("step_s")
        rows.append(
            [
                f"{cell.recipe} {cell.mix}",
                *(length("natural", planner) for planner in NATURAL),
                *(length("balanced", planner) for planner in ("static", "optimus", "pipeline", "upfront", "colocate")),
                f"{cell.of_bound:.3f}",
                f"{cell.gain:.2f}",
                f"{with_one / cell.ours_s:.3f}" if with_one else "",
            ]
        )
    headings = ["s", *NATURAL, "static, balanced", "optimus, balanced", "pipeline", "upfront", "colocate"]
    headings += ["x bound", "over the best natural", "one layout"]
    return [markdown(headings, rows), gains_table(cells), f"Cells of the sweep: {commits_of(data['cells'])}."]


def gains_table(cells: Sequence[Comparison]) -> str:
    """What `colocate` gains, by recipe and over all cells."""
    by_recipe: dict[str, list[Comparison]] = {}
    for cell in cells:
        by_recipe.setdefault(cell.recipe, []).append(cell)
    rows = []
    for recipe, of_recipe in [*by_recipe.items(), ("all", list(cells))]:
        gains, of_bound = [cell.gain for cell in of_recipe], [cell.of_bound for cell in of_recipe]
        rows.append(
            [
                recipe,
                f"{len(of_recipe)}",
                f"{_mean(gains):.2f}",
                f"{min(gains):.2f} to {max(gains):.2f}",
                f"{PAPER[recipe]:.2f}" if recipe in PAPER else "",
                f"{min(cell.lead for cell in of_recipe):.3f}",
                f"{min(of_bound):.2f} to {max(of_bound):.2f}",
            ]
        )
    headings = ["`colocate`", "mixes", "over the best natural, mean", "smallest to largest", "the paper's largest"]
    return markdown([*headings, "over the best other planner, at least", "x bound"], rows)


def summary(data: dict[str, Any]) -> str:
    """What the documentation says of the sweep."""
    cells = comparisons(data)
    ours = [row for row in data["cells"] if (row["data"], row["planner"]) == ("balanced", "colocate")]
    texts = [gains_table(cells), f"`colocate`: {commits_of(ours)}. All cells: {commits_of(data['cells'])}."]
    if data.get("kept"):
        texts.append(kept_sentence(cells, data["kept"]))
    if data.get("ablations"):
        texts.append(ablations_table(data["ablations"]))
    if data.get("models"):
        texts.append(models_table(data["models"]))
    others = [*data.get("kept", []), *data.get("ablations", []), *data.get("models", {}).values()]
    if others:
        texts.append(f"Kept layouts, ablations and models of DIP: {commits_of(others)}.")
    return "\n\n".join(texts)


def kept_sentence(cells: Sequence[Comparison], kept: Sequence[dict[str, Any]]) -> str:
    """How much slower steps are with one layout for all mixes."""
    ours_s = {(cell.recipe, cell.mix): cell.ours_s for cell in cells}
    texts = []
    for recipe in dict.fromkeys(row["recipe"] for row in sorted(kept, key=lambda row: str(row["recipe"]))):
        rows = [row for row in kept if row["recipe"] == recipe and (recipe, row["mix"]) in ours_s]
        slower = [
            (100 * row["step_s"] / ours_s[recipe, row["mix"]] - 100, row["mix"]) for row in rows if "step_s" in row
        ]
        text = f"{recipe} {max(slower)[0]:.1f} % (at {max(slower)[1]})"
        refused = [row["mix"] for row in rows if "step_s" not in row]
        texts.append(text + (f", and it does not fit at {', '.join(refused)}" if refused else ""))
    return (
        f"With one layout, chosen on a batch of each of {', '.join(KEPT_MIXES)}, and no search, steps are slower than "
        f"with one chosen for their mix and a search by at most: {'; '.join(texts)}."
    )


def ablations_table(rows: Sequence[dict[str, Any]]) -> str:
    """The throughput that is lost without one part, beside the paper's."""
    seconds = {(row["recipe"], row["mix"], row["variant"]): row.get("step_s") for row in rows}
    shown = [(recipe, mix) for recipe, mix in ABLATIONS if mix and seconds.get((recipe, mix, "colocate"))]
    table = []
    for what, variant, paper in (
        ("encoders on the language model's ranks (`optimus` instead)", "spread (optimus)", "53 to 61 %"),
        ("balancing of items and sequences", "items and sequences in turn", "46 to 51 %"),
        ("sequence groups", "no sequence groups", "19 %"),
        ("just in time (`upfront` instead)", "upfront", ""),
        ("two halves of backwards, other orders", "strict 1F1B, whole backwards", ""),
    ):
        lost = []
        for recipe, mix in shown:
            length_s = seconds.get((recipe, mix, variant))
            lost.append(f"{100 - 100 * seconds[recipe, mix, 'colocate'] / length_s:.1f} %" if length_s else "")
        table.append([what, *lost, paper])
    names = [f"{recipe} {mix}" for recipe, mix in shown]
    return markdown(["throughput lost without", *names, "the paper's"], table)


if __name__ == "__main__":
    main()
