"""Lanes on one GPU: python benchmarks/lanes.py --output FILE.json [--only pair,clip-4-2] [--lanes 1,4] [--budget-s 300]

Whole steps of `Trainer`, in one process: modules one after another (lanes=1), and up to four at a time. Each cell
starts from the same weights and data. Cells that the file has are not measured again.

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spindle
from common import circumstances
from virtual import workloads

CELLS = ("pair", "clip-4-2", "clip-4-4", "clip-4-8", "clip-4-16", "clip-4-32", "clip-10-4", "ofasys-4")
WARM_UP, STEPS = 8, 24


def pair(device: torch.device, small: bool) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tasks, batches = [], {}
    shapes = (("vision", 1024, 16, 4, 256), ("text", 768, 12, 8, 128))
    for name, width, heads, rows, length in shapes:
        if small:
            width, heads, length = 32, 4, 8
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        tower = nn.TransformerEncoder(layer, 2 if small else 12, enable_nested_tensor=False).to(device, dtype)
        for parameter in tower.parameters():  # the layers are copies of one
            parameter.data += 0.02 * torch.randn_like(parameter)
        handle = spindle.module(name, tower)
        tasks.append(spindle.task(name=name, batch_size=rows)(_squared(handle)))
        batches[name] = [{"x": torch.randn(rows, length, width, device=device, dtype=dtype)}] * (WARM_UP + STEPS + 4)
    return tasks, batches


def _squared(handle: Any) -> Any:
    return lambda batch: handle(batch["x"]).float().square().mean()


def build(cell: str, device: torch.device, small: bool) -> tuple[list[Any], dict[str, Any]]:
    if cell == "pair":
        return pair(device, small)
    workload = workloads.build(cell, device, small)
    batches = {task: ready * (1 + (WARM_UP + STEPS + 4) // len(ready)) for task, ready in workload.batches.items()}
    return workload.spindle_tasks(), batches


def measure(cell: str, lanes: int, device: torch.device, small: bool) -> dict[str, Any]:
    tasks, batches = build(cell, device, small)
    trainer = spindle.Trainer(
        tasks,
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4),
        planning=spindle.Planning(lanes=lanes),
    )
    moments: list[float] = []

    def note(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        moments.append(time.perf_counter())

    begin = time.perf_counter()
    trainer.fit(batches, steps=WARM_UP, progress=False)
    ready_s = time.perf_counter() - begin
    result = trainer.fit(batches, steps=STEPS, progress=False)
    trainer.fit(batches, steps=STEPS, progress=False, on_step=note)
    steps = [later - earlier for earlier, later in pairwise(moments)]
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
        "plan": str(spindle.plan.format_plan(plan)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CELLS))
    parser.add_argument("--lanes", default="1,4")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cells = json.loads(options.output.read_text()) if options.output.exists() else {}
    cells.setdefault("about", circumstances() | {"torch": torch.__version__})
    for cell in options.only.split(","):
        for lanes in map(int, options.lanes.split(",")):
            key = f"{cell}/{lanes}"
            if key in cells or time.monotonic() - began > options.budget_s:
                continue
            torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
            cells[key] = measure(cell, lanes, device, options.small)
            gc.collect()
            torch.cuda.empty_cache() if device.type == "cuda" else None
            options.output.write_text(json.dumps(cells, indent=1))
            cell_result = cells[key]
            print(
                f"{time.monotonic() - began:6.0f} s  {key:14s} {cell_result['lanes']} lanes  "
                f"{cell_result['step_s'] * 1e3:8.2f} ms, predicted {cell_result['predicted_s'] * 1e3:8.2f}, "
                f"peak {cell_result['peak_gib']:.2f} GiB, loss {sum(cell_result['losses'].values()):.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
