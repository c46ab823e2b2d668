"""Lanes on one GPU: python benchmarks/lanes.py --output FILE.json [--only pair,clip-4-2] [--variants lanes] [--table]

Steps in one process, of every variant. Each cell starts from the same weights and data; cells that the file has are not
measured again, so that a run that `--budget-s` has ended is continued by the next; the most telling come first.
`--table` prints ratios of what the file has, and measures nothing. Profiles are written beside FILE.json, so that plans
can be simulated again. `--compile-only` runs two steps of what `torch.compile` compiles whole, for its cache on disk.

    plain            a PyTorch loop over the tasks: forward, backward; then fused AdamW
    plain-compiled   the same with every tower compiled (mode `max-autotune-no-cudagraphs`)
    plain-overhead   the same in mode `reduce-overhead`
    sequential       `Trainer` with lanes=1: modules one after another, the whole step as one CUDA graph
    sequential-again the same once more, after all others: how far two measurements of one variant are apart
    lanes            up to four at a time
    weights          as `lanes`, and weight gradients on lanes of their own where the planner expects enough of a gain;
                     the default
    weights-any      the same wherever the planner expects any gain
    double           as `weights`, with twice the samples; the time is half of its step
    compiled         as `lanes`, with layers compiled by `spindle.module(..., compile=True)`; `compiled-sequential`
    slots            as `lanes`, with a CUDA graph for each slot and one for each of its backward passes
    quotas           the fastest of a scan: plans with two lanes, and with as many as the planner chooses, each lane
                     with SMs of its own, in those quotas that are simulated to be fastest; `scan` has all of them, and
                     the same plans without quotas
    saturated        four copies of everything at once, on up to eight lanes; the time is a quarter of their step
    random-S         a random plan with lanes, which calibrated nothing: predicted beside measured
    ...-passes       without the optimizer's step

    pair        two encoders that do not fill a GPU: 12 layers of width 1024 over 4 x 256 tokens, and of width 768 over
                8 x 128
    clip-T-B    as in `virtual/workloads.py`, with any number of samples
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from operator import sub
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import nn

import spindle
from alone import alone, join, measured_alone
from common import circumstances, markdown
from spindle.errors import SpindleError
from spindle.plan import MAX_LANES, Piece, Plan, assemble, format_plan, setting_of
from spindle.planners import PlanOptions, lanes, make_plan
from spindle.planners.lanes import _Search
from spindle.planners.quotas import QuotaSearch
from spindle.profile import Profile, write_profile
from spindle.run import graph_cache
from spindle.train import profiling
from virtual import workloads
from virtual.plain import Together, in_order, make_optimizer
from virtual.workloads import Task, Workload

CELLS = (
    "pair",
    *(f"clip-{num_tasks}-{size}" for num_tasks in (4, 10) for size in (2, 4, 8, 16, 32)),
    *("ofasys-4", "qwen-val-1", "qwen-val-2", "qwen-val-4"),
)
PASSES = "-passes"
STAGES = (  # each for all cells before the next
    (f"sequential{PASSES}", f"weights{PASSES}", f"lanes{PASSES}"),
    ("sequential", "weights", f"saturated{PASSES}"),
    ("plain-overhead", "plain-compiled", f"random-0{PASSES}", f"random-1{PASSES}", "sequential-again"),
    ("compiled", "lanes", "plain", "compiled-sequential", "double", "slots"),
    (*(f"random-{seed}{PASSES}" for seed in range(2, 8)), f"weights-any{PASSES}"),
    (f"quotas{PASSES}", "quotas"),
)
VARIANTS = tuple(variant for stage in STAGES for variant in stage)
WARM_UP, STEPS = 8, 20
NUM_DIVISIONS, DIFFERENT_SMS = 1, 16  # of the SMs that are run for each plan, and how much they differ at least
NUM_COPIES = 4
MODES = {"plain-compiled": "max-autotune-no-cudagraphs", "plain-overhead": "reduce-overhead"}
MOST_TOWERS = 64  # that share the code of their forward


class WithoutUpdate(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__([parameter for _, parameter in named], {})

    def step(self, closure: Any = None) -> None:
        pass


def optimizer_of(variant: str) -> Callable[..., torch.optim.Optimizer]:
    return WithoutUpdate if variant.endswith(PASSES) else make_optimizer


def pair(device: torch.device, small: bool, times: int = 1) -> Workload:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tasks, batches, towers = [], {}, {}
    for name, width, heads, rows, length in (("vision", 1024, 16, 4, 256), ("text", 768, 12, 8, 128)):
        rows *= times
        if small:
            width, heads, length = 32, 4, 8
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        tower = nn.TransformerEncoder(layer, 2 if small else 12, enable_nested_tensor=False).to(device, dtype)
        for parameter in tower.parameters():  # the layers are copies of one
            parameter.data += 0.02 * torch.randn_like(parameter)
        towers[name] = tower
        tasks.append(Task(name=name, batch_size=rows, towers=(name,), loss=_mean_square_of(name)))
        batches[name] = [{"x": torch.randn(rows, length, width, device=device, dtype=dtype)}]
    return Workload(name="pair", towers=towers, tasks=tuple(tasks), batches=batches)


def _mean_square_of(name: str) -> Callable[..., Any]:
    return lambda towers, batch: towers[name](batch["x"]).float().square().mean()


def build(cell: str, device: torch.device, small: bool) -> Workload:
    return pair(device, small) if cell == "pair" else workloads.build(cell, device, small)


def doubled(cell: str, device: torch.device, small: bool) -> Workload:
    """The workload of a cell with twice the samples."""
    if cell == "pair":
        return pair(device, small, times=2)
    *name, size = cell.split("-")
    if name == ["ofasys"]:
        raise SpindleError("ofasys-4 has no size that could be doubled")
    return workloads.build("-".join([*name, str(2 * int(size))]), device, small)


def copies_of(workload: Workload) -> Workload:
    """The workload several times, each with weights of its own."""
    tasks, batches, towers = [], {}, {}
    for copy in range(NUM_COPIES):
        own = {name: f"{name}{copy}" for name in workload.towers}
        towers |= {own[name]: deepcopy(tower) for name, tower in workload.towers.items()}
        for task in workload.tasks:
            loss = _renamed(task.loss, own)
            tasks.append(replace(task, name=f"{task.name}{copy}", towers=tuple(map(own.get, task.towers)), loss=loss))
            batches[tasks[-1].name] = workload.batches[task.name]
    return Workload(name=f"{workload.name} saturated", towers=towers, tasks=tuple(tasks), batches=batches)


def _renamed(loss: Callable[..., Any], own: dict[str, str]) -> Callable[..., Any]:
    return lambda towers, batch: loss({name: towers[copy] for name, copy in own.items()}, batch)


def random_lanes(profile: Profile, seed: int) -> Plan:
    """A plan with each module on a random one of two to four lanes, slots as early as lane and data allow; with an odd
    seed, weight gradients are on another one."""
    numbers = random.Random(seed)
    plan, num_lanes = make_plan(profile), numbers.randint(2, 4)
    ops = {op.name: (number, op.module or op.name) for number, op in enumerate(profile.graph.metaops)}
    lane_of = {module: numbers.randrange(num_lanes) for module in dict.fromkeys(module for _, module in ops.values())}
    setting = setting_of(plan, profile)
    weight_lane_of = {module: numbers.randrange(num_lanes) for module in lane_of} if seed % 2 else dict(lane_of)
    splits = {op: bool(profile.curve(op, setting).weight_s) for op, _ in ops.values()}
    weight_lanes = {weight_lane_of[module] for op, module in ops.values() if splits[op]}
    used = sorted({*lane_of.values(), *weight_lanes})
    pieces = []
    for slot in plan.slots:
        op, module = ops[slot.op]
        lane = used.index(lane_of[module])
        weight_lane = used.index(weight_lane_of[module]) if splits[op] else lane
        pieces.append(
            Piece(
                op=op,
                num_layers=slot.num_layers,
                devices=slot.devices,
                round=slot.round,
                lane=lane,
                weight_lane=None if weight_lane == lane else weight_lane,
            )
        )
    return assemble(profile, setting, f"random-{seed}", pieces)


def clocks() -> dict[str, str]:
    """What the GPU's clock, power and temperature are right now."""
    query = "clocks.sm,power.draw,temperature.gpu"
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return dict(zip(query.split(","), answer.splitlines()[0].split(", "), strict=False)) if answer else {}


def measure(cell: str, variant: str, device: torch.device, small: bool, output: Path) -> dict[str, Any]:
    if variant.startswith("double"):
        result = measure_trainer(doubled(cell, device, small), variant, device, spindle.Planning(lanes=4))
        return result | {name: result[name] / 2 for name in ("step_s", "predicted_s")}
    if variant.startswith("quotas"):
        return measure_quotas(cell, variant, device, small)
    workload = build(cell, device, small)
    if variant.startswith("plain"):
        return measure_plain(workload, variant, device)
    if variant.startswith("saturated"):
        result = measure_trainer(copies_of(workload), variant, device, spindle.Planning(lanes=MAX_LANES))
        return result | {name: result[name] / NUM_COPIES for name in ("step_s", "predicted_s")}
    planning = spindle.Planning(lanes=1 if "sequential" in variant else 4)
    if variant.startswith("random"):
        seed = int(variant.split("-")[1])
        planning = spindle.Planning(planner=lambda profile: random_lanes(profile, seed))
    if variant.startswith("compiled"):
        torch._dynamo.reset()  # what was compiled for another cell would make sizes dynamic
        return measure_trainer(workload, variant, device, planning)
    profile = profile_of(cell, optimizer_of(variant), device, small)
    kind = PASSES if variant.endswith(PASSES) else ""
    write_profile(output.with_name(f"{output.stem}.{cell}{kind}.profile.json"), profile)
    return measure_trainer(workload, variant, device, planning, profile)


@cache
def profile_of(cell: str, optimizer: Any, device: torch.device, small: bool, quotas: bool = False) -> Profile:
    """The profile of a cell, which its variants share."""
    workload = build(cell, device, small)
    planning = spindle.Planning(lanes=4, quotas=quotas)
    trainer = spindle.Trainer(workload.spindle_tasks(), optimizer=optimizer, planning=planning)
    with mock.patch.object(profiling, "local_profile", measured_alone(profiling.local_profile)):
        return trainer.prepare(dict(workload.batches), progress=False)


def measure_quotas(cell: str, variant: str, device: torch.device, small: bool) -> dict[str, Any]:
    """The fastest plan with quotas of a scan, and all that were run."""
    profile = profile_of(cell, optimizer_of(variant), device, small, quotas=True)
    if profile.cluster.kind.sm_groups is None:
        raise SpindleError("this machine cannot split the SMs of a GPU")
    scan: list[dict[str, Any]] = []
    results = []
    plans = {plan.num_lanes: plan for plan in (plan_lanes(profile, most) for most in (2, 4)) if plan.num_lanes > 1}
    for plan in plans.values():
        for divided in [plan, *divisions(plan, profile)]:
            result = measure_trainer(
                build(cell, device, small), variant, device, spindle.Planning(plan=divided), profile
            )
            gc.collect()
            torch.cuda.empty_cache() if device.type == "cuda" else None
            results.append(result)
            scan.append({name: result[name] for name in ("lanes", "quotas", "predicted_s", "step_s", "losses")})
            print(
                f"    {result['lanes']} lanes, quotas {result['quotas'] or 'none'}: {1e3 * result['step_s']:.2f} ms, "
                f"predicted {1e3 * result['predicted_s']:.2f}, ready after {result['ready_s']:.1f} s",
                flush=True,
            )
    with_quotas = [result for result in results if result["quotas"]]
    if not with_quotas:
        raise SpindleError("no plan with lanes was found")
    return min(with_quotas, key=lambda result: result["step_s"]) | {"scan": scan}


def plan_lanes(profile: Profile, most: int) -> Plan:
    """The default plan with up to `most` lanes, and none for weight gradients alone."""
    with mock.patch.object(_Search, "_can_split", return_value=False):
        return make_plan(profile, options=PlanOptions(lanes=most))


def divisions(plan: Plan, profile: Profile) -> list[Plan]:
    """The plan with those quotas that are simulated to be fastest, of any that differ enough."""
    if plan.num_lanes == 1:
        return []
    search = QuotaSearch(plan, profile)
    search.fastest()
    chosen: list[Plan] = []
    for candidate in sorted(search.simulated, key=lambda plan: plan.makespan_s):
        differ = (max(map(abs, map(sub, candidate.quotas, other.quotas))) >= DIFFERENT_SMS for other in chosen)
        if len(chosen) < NUM_DIVISIONS + (plan.num_lanes == 2) and all(differ):
            chosen.append(candidate)
    return chosen


def measure_trainer(
    workload: Workload,
    variant: str,
    device: torch.device,
    planning: spindle.Planning,
    profile: Profile | None = None,
) -> dict[str, Any]:
    batches = {task: ready * (1 + (WARM_UP + STEPS + 4) // len(ready)) for task, ready in workload.batches.items()}
    trainer = spindle.Trainer(
        workload.spindle_tasks(compile=variant.startswith("compiled")),
        optimizer=optimizer_of(variant),
        planning=planning if profile is None else replace(planning, profile=profile),
    )
    moments: list[float] = []

    def note(*_: Any) -> None:  # called when a step's losses are known, while the host launches later steps
        moments.append(time.perf_counter())

    begin = time.perf_counter()
    without_weight_lanes = variant.startswith(("lanes", "slots", "compiled"))
    with (
        mock.patch.object(graph_cache, "STEP_GRAPHS", not variant.startswith("slots")),
        mock.patch.object(_Search, "_can_split", return_value=False) if without_weight_lanes else nullcontext(),
        mock.patch.object(lanes, "MIN_WEIGHT_LANES_GAIN", 0.0) if "-any" in variant else nullcontext(),
        mock.patch.object(profiling, "local_profile", measured_alone(profiling.local_profile)),
    ):
        warmed_up = trainer.fit(batches, steps=WARM_UP, progress=False)
        ready_s = time.perf_counter() - begin
        with alone():
            result = trainer.fit(batches, steps=STEPS, progress=False, on_step=note)
    # The first steps fill the queue, and the last ones are reported together, when the fit ends.
    steps = [later - earlier for earlier, later in pairwise(moments[2:-2])]
    plan = result.plan
    return {
        "lanes": plan.num_lanes,
        "quotas": list(plan.quotas),
        "weight_lanes": sum(slot.has_weight_lane for slot in plan.slots),
        "predicted_s": result.predicted.makespan_s,
        "step_s": statistics.median(steps),
        "steps_s": steps,
        "ready_s": ready_s,
        "losses": result.losses[-1],
        # Of the fit that captures graphs: a replay allocates nothing, so torch does not count its activations.
        "peak_gib": max(warmed_up.peak_bytes, default=0) / 2**30,
        "predicted_peak_gib": int(result.predicted.peak_bytes().max()) / 2**30,
        "num_captured": result.num_captured_slots,
        "without_graph": result.slots_without_cuda_graph,
        "notices": list(result.notices),
        "plan": format_plan(plan),
    }


def plain_step(workload: Workload, variant: str) -> Callable[[int], dict[str, torch.Tensor]]:
    """A step of plain PyTorch by its number, which gives the losses."""
    torch._dynamo.reset()  # what was compiled for another cell
    towers = dict(workload.towers)
    if variant in MODES:
        # All towers run the same code: beyond the limit they would not be compiled, and their sizes be dynamic.
        torch._dynamo.config.recompile_limit = MOST_TOWERS
        compiled = partial(torch.compile, mode=MODES[variant], dynamic=False)
        towers = {name: compiled(tower) for name, tower in towers.items()}
    model = Together(workload.towers, towers, in_order(workload))
    optimizer = make_optimizer(list(model.named_parameters()))

    def step(number: int) -> dict[str, torch.Tensor]:
        losses = {}
        optimizer.zero_grad()
        # Gradients of one task are in the memory of graphs while those of the next run.
        torch.compiler.cudagraph_mark_step_begin()
        for task in in_order(workload):
            ready = workload.batches[task.name]
            loss = model(task.name, ready[number % len(ready)])
            loss.backward()
            losses[task.name] = loss.detach()
        optimizer.step()
        return losses

    return step


def compile_plain(workload: Workload, variant: str, device: torch.device) -> None:
    step = plain_step(workload, variant)
    for number in range(2):
        step(number)
    _synchronize(device)


def measure_plain(workload: Workload, variant: str, device: torch.device) -> dict[str, Any]:
    step = plain_step(workload, variant)
    losses: dict[str, torch.Tensor] = {}
    begin = time.perf_counter()
    for number in range(WARM_UP):
        step(number)
    _synchronize(device)
    ready_s = time.perf_counter() - begin
    # As in Trainer, the host launches a step before it waits for the one before.
    moments, ends = [], []
    with alone():
        for number in range(STEPS):
            losses = step(number)
            ends.append(torch.cuda.current_stream().record_event() if device.type == "cuda" else None)
            if number:
                ends[number - 1].synchronize() if ends[number - 1] is not None else None
                moments.append(time.perf_counter())
    steps = [later - earlier for earlier, later in pairwise(moments)]
    return {
        "lanes": 0,
        "step_s": statistics.median(steps),
        "steps_s": steps,
        "ready_s": ready_s,
        "losses": {name: float(loss) for name, loss in losses.items()},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(cells: dict[str, Any]) -> str:
    """Ratios over `sequential` of the same kind, and predictions beside what was measured."""

    def step_s(cell: str, variant: str) -> float:
        return float(cells.get(f"{cell}/{variant}", {}).get("step_s", float("nan")))

    def known_s(cell: str, *variants: str) -> list[float]:
        return [cells[f"{cell}/{variant}"]["step_s"] for variant in variants if f"{cell}/{variant}" in cells]

    rows = []
    for cell in dict.fromkeys(key.split("/")[0] for key in cells if "/" in key):
        whole_s, passes_s = step_s(cell, "sequential"), step_s(cell, f"sequential{PASSES}")
        plain_s = min(times if (times := known_s(cell, "plain", *MODES)) else [math.nan])
        best_s = min(times if (times := known_s(cell, "lanes", "weights", "compiled")) else [math.nan])
        rows.append(
            [
                cell,
                f"{1e3 * whole_s:.2f}",
                f"{whole_s / step_s(cell, 'lanes'):.2f}",
                f"{whole_s / step_s(cell, 'weights'):.2f}",
                f"{passes_s / step_s(cell, f'lanes{PASSES}'):.2f}",
                f"{passes_s / step_s(cell, f'weights{PASSES}'):.2f}",
                f"{step_s(cell, f'weights{PASSES}') / step_s(cell, f'saturated{PASSES}'):.2f}",
                f"{step_s(cell, 'compiled-sequential') / step_s(cell, 'compiled'):.2f}",
                f"{plain_s / best_s:.2f}",
                f"{step_s(cell, 'sequential-again') / whole_s:.3f}",
            ]
        )
    rows = [["" if value == "nan" else value for value in row] for row in rows]
    header = ["cell", "sequential ms", "lanes", "weight lanes", "lanes, passes", "weight lanes, passes"]
    text = markdown([*header, "passes / saturated", "compiled lanes", "over best plain", "again"], rows)
    text += quota_table(cells) + "\n"
    for name, is_chosen, measured, predicted in (
        ("steps of random plans", lambda key: "/random-" in key, "step_s", "predicted_s"),
        ("steps of all plans", lambda key: "saturated" not in key, "step_s", "predicted_s"),
        # Without an optimizer there is no state, which is predicted.
        ("peaks of memory", lambda key: not key.endswith(PASSES), "peak_gib", "predicted_peak_gib"),
    ):
        chosen = [cell for key, cell in cells.items() if predicted in cell and is_chosen(key)]
        errors = [abs(cell[predicted] / cell[measured] - 1) for cell in chosen if cell[measured]]
        if errors:
            text += f"\n{len(errors)} {name}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}"
    return text


def quota_table(cells: dict[str, Any]) -> str:
    """Plans with quotas beside the same plans without, and beside the fastest of those."""
    rows = []
    for key, cell in cells.items():
        shared_s = [run["step_s"] for run in cell.get("scan", ()) if not run["quotas"]]
        for run in cell.get("scan", ()):
            quotas = " + ".join(map(str, run["quotas"])) or "shared"
            error = run["predicted_s"] / run["step_s"] - 1
            ratio = min(shared_s) / run["step_s"]
            rows.append([key, str(run["lanes"]), quotas, f"{1e3 * run['step_s']:.2f}", f"{ratio:.3f}", f"{error:+.1%}"])
    header = ["cell", "lanes", "SMs", "ms", "over the fastest without quotas", "predicted"]
    return f"\n\n{markdown(header, rows)}" if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="required but for --compile-only")
    parser.add_argument("--only", default=",".join(CELLS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    if options.output is None and not options.compile_only:
        parser.error("--output FILE.json: where results go")
    if options.table:
        print(table(json.loads(options.output.read_text())))
        return
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.compile_only:
        for cell, variant in product(options.only.split(","), options.variants.split(",")):
            if variant in MODES:
                compile_plain(build(cell, device, options.small), variant, device)
                print(f"{time.monotonic() - began:6.0f} s  {cell}/{variant} is compiled", flush=True)
        return
    join()
    cells = json.loads(options.output.read_text()) if options.output.exists() else {}
    cells.setdefault("about", circumstances() | {"torch": torch.__version__})
    chosen = options.variants.split(",")
    unknown = set(chosen) - set(VARIANTS)
    if unknown:
        parser.error(f"unknown variants {sorted(unknown)}; expected some of {', '.join(VARIANTS)}")
    failed = []
    for stage in STAGES:
        for cell, variant in ((cell, variant) for cell in options.only.split(",") for variant in stage):
            key = f"{cell}/{variant}"
            if variant not in chosen or key in cells or time.monotonic() - began > options.budget_s:
                continue
            torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
            try:
                measured = measure(cell, variant, device, options.small, options.output)
            except Exception as error:
                measured = None
                known = isinstance(error, torch.OutOfMemoryError | SpindleError)
                print(f"{key}: {type(error).__name__}: {error}" if known else traceback.format_exc(), flush=True)
            if measured is None:  # outside of the handler, which holds its memory
                failed.append(key)
                gc.collect()
                torch.cuda.empty_cache() if device.type == "cuda" else None
                continue
            cells[key] = measured | clocks() | {"commit": circumstances()["commit"]}
            gc.collect()
            torch.cuda.empty_cache() if device.type == "cuda" else None
            options.output.write_text(json.dumps(cells, indent=1))
            result = cells[key]
            print(
                f"{time.monotonic() - began:6.0f} s  {key:28s} {result['lanes']} lanes, "
                f"{result.get('weight_lanes', 0)} for weights  "
                f"{result['step_s'] * 1e3:8.2f} ms, "
                f"predicted {result.get('predicted_s', float('nan')) * 1e3:8.2f}, peak {result['peak_gib']:.2f} GiB, "
                f"loss {sum(result['losses'].values()):.6f} {result.get('without_graph') or ''}",
                flush=True,
            )
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
