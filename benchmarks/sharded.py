"""What sharding the optimizer costs where memory does not ask for it: python benchmarks/sharded.py

Data parallel on two processes, sharded against not sharded: the same model, batches and optimizer, some steps of one
after some steps of the other, in one run. The ratio of the medians of each pair; the median of all pairs, and their
spread. CPU time tells of work where other programs of the machine disturb the clock. Two models: one with much compute
for each parameter, one with little, which spends its step on synchronisation and the update.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import spindle
from common import markdown, publish
from encoder import Encoder, make_optimizer

PAIRS, STEPS_OF_A_PAIR = 20, 8
# Width, blocks, length of a sequence.
MODELS = {"narrow": (128, 6, 32), "wide": (512, 3, 8)}
BATCH = 16


def steps_of(
    model: str, plain: spindle.Trainer | None = None
) -> tuple[spindle.Trainer, Callable[[], tuple[float, float]]]:
    """A trainer, and what gives the median of some of its steps and the CPU's seconds for one on this rank: the plain
    one, or one that shards in the same plan."""
    width, num_blocks, length = MODELS[model]
    torch.manual_seed(0)
    encoder = spindle.module("encoder", Encoder(width, num_blocks))
    data = [{"x": torch.randn(BATCH, length, 32), "y": torch.randint(10, (BATCH,))} for _ in range(STEPS_OF_A_PAIR)]

    @spindle.task(batch_size=BATCH, per_sample_mean=True)
    def classify(batch):  # type: ignore[no-untyped-def]
        return nn.functional.cross_entropy(encoder(batch["x"]), batch["y"])

    trainer = spindle.Trainer(
        [classify],
        optimizer=make_optimizer,
        planning=spindle.Planning(
            planner="sequential",
            plan=plain and plain.plan,
            profile=plain and plain.profile,
            shard_optimizer=plain is not None,
        ),
    )

    def run() -> tuple[float, float]:
        begin = time.process_time()
        result = trainer.fit({"classify": data}, steps=STEPS_OF_A_PAIR, progress=False)
        return statistics.median(result.step_s), (time.process_time() - begin) / STEPS_OF_A_PAIR

    return trainer, run


def measure(model: str, report: Path) -> None:
    """Pairs of a few steps of either kind, turn and turn about."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    trainer, plain = steps_of(model)
    plain()  # makes the plan
    both = {"plain": plain, "sharded": steps_of(model, trainer)[1]}
    pairs = []
    for number in range(PAIRS + 2):
        seconds = {}
        for name in sorted(both, reverse=bool(number % 2)):
            trainer.world.barrier()
            seconds[name], seconds[f"{name}_cpu"] = both[name]()
        if number >= 2:  # the first pairs warm up
            pairs.append(seconds)
    if trainer.rank == 0:
        report.write_text(json.dumps(pairs))


def main() -> None:
    rows, data = [], {}
    for model, (width, num_blocks, _) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "pairs.json"
            launch = [sys.executable, "-m", "spindle.cli", "launch", "-n", "2"]
            subprocess.run([*launch, __file__, "--report", model, str(report)], check=True)
            pairs = json.loads(report.read_text())
        ratios = sorted(pair["sharded"] / pair["plain"] for pair in pairs)
        of_cpu = statistics.median(pair["sharded_cpu"] / pair["plain_cpu"] for pair in pairs)
        data[model] = pairs
        elements = sum(parameter.numel() for parameter in Encoder(width, num_blocks).parameters())
        rows.append(
            [
                f"{elements / 1e6:.1f} M parameters",
                f"{statistics.median(pair['plain'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(pair['sharded'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                f"{of_cpu:.3f}",
            ]
        )
    header = [
        "model",
        "not sharded",
        "sharded",
        f"ratio, median of {PAIRS} pairs",
        "middle half",
        "all",
        "ratio of CPU time",
    ]
    publish("sharded", {"pairs": data, "steps_of_a_pair": STEPS_OF_A_PAIR}, markdown(header, rows))


if __name__ == "__main__":
    if "--report" in sys.argv:
        place = sys.argv.index("--report")
        measure(sys.argv[place + 1], Path(sys.argv[place + 2]))
    else:
        main()
