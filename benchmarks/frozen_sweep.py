"""A sweep over a frozen encoder against its trials one after another: python benchmarks/frozen_sweep.py

Two processes. In one run, in turn: a few steps of a sweep of n trials, and as many of each trial by itself. Each trial
has a head, an optimizer (AdamW or SGD), a learning rate and a clipping norm of its own. The ratio of the times of each
pair; the median of all pairs, and their spread: of time, and of CPU time of both processes, which other work on the
machine does not lengthen. Beside it the largest difference of weights, over the largest weight of each parameter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spindle
from common import markdown, publish
from encoder import Encoder

COUNTS, PAIRS, STEPS = (2, 4), 5, 3
BATCH, LENGTH, WIDTH, BLOCKS = 16, 32, 192, 4


def make_encoder() -> nn.Module:
    torch.manual_seed(0)
    encoder = Encoder(WIDTH, BLOCKS)
    encoder.out = nn.Linear(WIDTH, WIDTH)
    return encoder.requires_grad_(False).eval()


def make_trial(vision: Any, number: int) -> spindle.Trial:
    torch.manual_seed(1 + number)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))
    head = spindle.module(f"head_{number}", module)

    @spindle.task(batch_size=BATCH, name=f"trial_{number}", per_sample_mean=True)
    def classify(batch: Any) -> Any:
        return nn.functional.cross_entropy(head(vision(batch["x"])), batch["y"])

    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        parameters, rate = [parameter for _, parameter in named], 1e-4 * 2**number
        if number % 2:
            return torch.optim.SGD(parameters, lr=10 * rate, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=rate)

    return spindle.Trial(classify, make_optimizer, max_grad_norm=1.0 + number)


def make_trainer(numbers: list[int]) -> spindle.Trainer:
    vision = spindle.module("vision", make_encoder())
    # The search for plans would take longer than the steps: every module on both processes in turn.
    planning = spindle.Planning(planner="sequential")
    return spindle.Trainer([make_trial(vision, number) for number in numbers], planning=planning)


def timed(trainers: list[spindle.Trainer], data: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Seconds that some steps of each take one after another, and CPU seconds of all processes."""
    world = trainers[0].world
    begin_s = time.process_time()
    wall_s = sum(sum(trainer.fit(data, steps=STEPS, progress=False).step_s) for trainer in trainers)
    return wall_s, sum(world.broadcast_object(world.gather_objects(time.process_time() - begin_s)))


def largest_difference(sweep: spindle.Trainer, alone: list[spindle.Trainer]) -> float:
    """The largest difference of weights, over the largest weight."""
    ours = sweep.state_dict()
    theirs = {name: value for trainer in alone for name, value in trainer.state_dict().items()}
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max() / value.abs().max()) for name, value in theirs.items())


def measure(report: Path) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    torch.manual_seed(100)
    data = [{"x": torch.randn(BATCH, LENGTH, 32), "y": torch.randint(10, (BATCH,))} for _ in range(STEPS)]
    results = []
    for count in COUNTS:
        sweep = make_trainer(list(range(count)))
        alone = [make_trainer([number]) for number in range(count)]
        timed([sweep, *alone], data)  # plans, and warms up
        pairs = [(timed([sweep], data), timed(alone, data)) for _ in range(PAIRS)]
        results.append(
            {
                "trials": count,
                "sweep_s": [once[0] for once, _ in pairs],
                "alone_s": [each[0] for _, each in pairs],
                "sweep_cpu_s": [once[1] for once, _ in pairs],
                "alone_cpu_s": [each[1] for _, each in pairs],
                "largest_difference": largest_difference(sweep, alone),
            }
        )
    if sweep.rank == 0:
        report.write_text(json.dumps(results))


def spread(whole: list[float], sweep: list[float]) -> str:
    ratios = sorted(alone / once for alone, once in zip(whole, sweep, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        launch = [sys.executable, "-m", "spindle.cli", "launch", "-n", "2"]
        subprocess.run([*launch, __file__, "--report", str(report)], check=True)
        results = json.loads(report.read_text())
    rows = [
        [
            str(result["trials"]),
            f"{1e3 * statistics.median(result['sweep_s']) / STEPS:.0f} ms",
            spread(result["alone_s"], result["sweep_s"]),
            spread(result["alone_cpu_s"], result["sweep_cpu_s"]),
            f"{result['largest_difference']:.1e}",
        ]
        for result in results
    ]
    header = ["trials", "step of the sweep", "alone / sweep", "in CPU time", "largest difference of weights"]
    note = (
        f"Two processes on gloo, torch {torch.__version__.partition('+')[0]}; float32. A frozen encoder of {BLOCKS} "
        f"blocks of width {WIDTH}, {BATCH} samples of {LENGTH} tokens. CPU time is that of whole fits, with gathering "
        "and sending of weights at the end of each."
    )
    publish("frozen_sweep", {"results": results}, f"{markdown(header, rows)}\n\n{note}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--report"]:
        measure(Path(sys.argv[2]))
    else:
        main()
