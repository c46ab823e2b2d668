"""What Spindle's runtime costs where it cannot help: python benchmarks/overhead.py

One process and one task against a plain PyTorch loop, and data parallel on two processes against torch's DDP: the same
model, batches and optimizer, a few steps of one after a few steps of the other, in one run. The ratio of the medians of
each pair; the median of all pairs, and their spread.
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

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spindle
from common import ROOT, circumstances, markdown, publish, write_between
from encoder import Encoder, make_optimizer

PAIRS, STEPS_OF_A_PAIR = 20, 5
BATCH, LENGTH, WIDTH, BLOCKS = 16, 32, 128, 6


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(BATCH, LENGTH, 32), "y": torch.randint(10, (BATCH,))} for _ in range(STEPS_OF_A_PAIR)]


def spindle_steps(planner: str) -> tuple[spindle.Trainer, object]:
    torch.manual_seed(0)
    encoder = spindle.module("encoder", Encoder(WIDTH, BLOCKS))

    @spindle.task(batch_size=BATCH, per_sample_mean=True)
    def classify(batch):  # type: ignore[no-untyped-def]
        return nn.functional.cross_entropy(encoder(batch["x"]), batch["y"])

    trainer = spindle.Trainer([classify], optimizer=make_optimizer, planning=spindle.Planning(planner=planner))
    return trainer, lambda data: trainer.fit({"classify": data}, steps=STEPS_OF_A_PAIR, progress=False)


def plain_steps(rank: int, size: int) -> object:
    """A plain loop over the same batches; with several processes DDP's, each on its share."""
    torch.manual_seed(0)
    model: nn.Module = Encoder(WIDTH, BLOCKS)
    if size > 1:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(list(model.named_parameters()))
    share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)

    def run(data: list[dict[str, torch.Tensor]]) -> list[float]:
        times = []
        for batch in data:
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["x"][share]), batch["y"][share])
            loss.backward()
            optimizer.step()
            loss.item()
            times.append(time.perf_counter() - begin)
        return times

    return run


def measure(report: Path) -> None:
    """Pairs of a few plain steps and a few of ours, turn and turn about."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer, ours = spindle_steps("sequential")
    plain = plain_steps(trainer.rank, size)
    data = batches()
    pairs = []
    for number in range(PAIRS + 2):
        first = number % 2
        seconds = {}
        for turn in (first, 1 - first):
            trainer.world.barrier()
            if turn:
                seconds["spindle"] = statistics.median(ours(data).step_s)  # type: ignore[operator]
            else:
                seconds["plain"] = statistics.median(plain(data))  # type: ignore[operator]
        if number >= 2:  # the first pairs warm up
            pairs.append(seconds)
    if trainer.rank == 0:
        report.write_text(json.dumps(pairs))


def main() -> None:
    rows, data = [], {}
    for name, command in (
        ("one process, plain PyTorch", [sys.executable]),
        ("two processes, torch DDP", [sys.executable, "-m", "spindle.cli", "launch", "-n", "2"]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "pairs.json"
            subprocess.run([*command, __file__, "--report", str(report)], check=True)
            pairs = json.loads(report.read_text())
        ratios = sorted(pair["spindle"] / pair["plain"] for pair in pairs)
        data[name] = pairs
        rows.append(
            [
                name,
                f"{statistics.median(pair['plain'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(pair['spindle'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            ]
        )
    table = markdown(["against", "theirs", "Spindle", "ratio, median of 20 pairs", "middle half", "all"], rows)
    publish("overhead", {"pairs": data, "steps_of_a_pair": STEPS_OF_A_PAIR}, table)
    about = circumstances()
    write_between(
        ROOT / "docs" / "results.md", "overhead", f"{table}\n\nMeasured: {about['hardware']}, commit {about['commit']}."
    )


if __name__ == "__main__":
    if "--report" in sys.argv:
        measure(Path(sys.argv[sys.argv.index("--report") + 1]))
    else:
        main()
