"""Lanes on one GPU: python benchmarks/lanes.py --output FILE.json [--only pair,clip-4-2] [--variants lanes]

Steps in one process, of every variant. Each cell starts from the same weights and data; cells that the file has are not
measured again.

    plain            a PyTorch loop over the tasks: forward, backward; then fused AdamW
    plain-compiled   the same with every tower compiled (mode `max-autotune-no-cudagraphs`)
    sequential       `Trainer` with lanes=1: modules one after another, the whole step as one CUDA graph
    lanes            up to four at a time
    compiled         as `lanes`, with layers compiled by `spindle.module(..., compile=True)`; `compiled-sequential`
    slots            as `lanes`, with a CUDA graph for each slot and one for each of its backward passes
    ...-passes       without the optimizer's step

    pair        two encoders that do not fill a GPU: 12 layers of width 1024 over 4 x 256 tokens, and of width 768 over
                8 x 128
    clip-T-B    as in `virtual/workloads.py`, with any number of samples
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import spindle
from common import circumstances
from spindle.run import graph_cache
from virtual import workloads
from virtual.plain import Together, in_order, make_optimizer
from virtual.workloads import Task, Workload

CELLS = ("pair", "clip-4-2", "clip-4-4", "clip-4-8", "clip-4-16", "clip-4-32", "clip-10-4", "ofasys-4", "qwen-val")
PASSES = "-passes"
VARIANTS = (
    "sequential",
    "lanes",
    f"sequential{PASSES}",
    f"lanes{PASSES}",
    "slots",
    "compiled",
    "compiled-sequential",
    "plain",
)
WARM_UP, STEPS = 8, 24


class WithoutUpdate(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__([parameter for _, parameter in named], {})

    def step(self, closure: Any = None) -> None:
        pass


def pair(device: torch.device, small: bool) -> Workload:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tasks, batches, towers = [], {}, {}
    for name, width, heads, rows, length in (("vision", 1024, 16, 4, 256), ("text", 768, 12, 8, 128)):
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


def measure(cell: str, variant: str, device: torch.device, small: bool) -> dict[str, Any]:
    workload = build(cell, device, small)
    if variant.startswith("plain"):
        return measure_plain(workload, variant, device)
    batches = {task: ready * (1 + (WARM_UP + STEPS + 4) // len(ready)) for task, ready in workload.batches.items()}
    trainer = spindle.Trainer(
        workload.spindle_tasks(compile=variant.startswith("compiled")),
        optimizer=WithoutUpdate if variant.endswith(PASSES) else make_optimizer,
        planning=spindle.Planning(lanes=1 if "sequential" in variant else 4),
    )
    moments: list[float] = []

    def note(*_: Any) -> None:  # called when a step's losses are known, while the host launches later steps
        moments.append(time.perf_counter())

    begin = time.perf_counter()
    with mock.patch.object(graph_cache, "STEP_GRAPHS", not variant.startswith("slots")):
        trainer.fit(batches, steps=WARM_UP, progress=False)
        ready_s = time.perf_counter() - begin
        result = trainer.fit(batches, steps=STEPS, progress=False, on_step=note)
    # The first steps fill the queue, and the last ones are reported together, when the fit ends.
    steps = [later - earlier for earlier, later in pairwise(moments[2:-2])]
    plan = result.plan
    return {
        "lanes": plan.num_lanes,
        "predicted_s": plan.makespan_s,
        "step_s": statistics.median(steps),
        "steps_s": steps,
        "ready_s": ready_s,
        "losses": result.losses[-1],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
        "predicted_peak_gib": int(result.predicted.peak_bytes().max()) / 2**30,
        "num_captured": result.num_captured_slots,
        "without_graph": result.slots_without_cuda_graph,
        "plan": str(spindle.plan.format_plan(plan)),
    }


def measure_plain(workload: Workload, variant: str, device: torch.device) -> dict[str, Any]:
    towers = dict(workload.towers)
    if variant == "plain-compiled":
        towers = {name: torch.compile(tower, mode="max-autotune-no-cudagraphs") for name, tower in towers.items()}
    model = Together(workload.towers, towers, in_order(workload))
    optimizer = make_optimizer(list(model.named_parameters()))
    losses: dict[str, torch.Tensor] = {}

    def step(number: int) -> None:
        optimizer.zero_grad()
        for task in in_order(workload):
            ready = workload.batches[task.name]
            loss = model(task.name, ready[number % len(ready)])
            loss.backward()
            losses[task.name] = loss.detach()
        optimizer.step()

    begin = time.perf_counter()
    for number in range(WARM_UP):
        step(number)
    _synchronize(device)
    ready_s = time.perf_counter() - begin
    # As in Trainer, the host launches a step before it waits for the one before.
    moments, ends = [], []
    for number in range(STEPS):
        step(number)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CELLS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cells = json.loads(options.output.read_text()) if options.output.exists() else {}
    cells.setdefault("about", circumstances() | {"torch": torch.__version__})
    for cell in options.only.split(","):
        for variant in options.variants.split(","):
            key = f"{cell}/{variant}"
            if key in cells or time.monotonic() - began > options.budget_s:
                continue
            torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
            cells[key] = measure(cell, variant, device, options.small)
            gc.collect()
            torch.cuda.empty_cache() if device.type == "cuda" else None
            options.output.write_text(json.dumps(cells, indent=1))
            result = cells[key]
            print(
                f"{time.monotonic() - began:6.0f} s  {key:28s} {result['lanes']} lanes  "
                f"{result['step_s'] * 1e3:8.2f} ms, "
                f"predicted {result.get('predicted_s', float('nan')) * 1e3:8.2f}, peak {result['peak_gib']:.2f} GiB, "
                f"loss {sum(result['losses'].values()):.6f} {result.get('without_graph') or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
