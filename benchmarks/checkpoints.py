"""What checkpoints cost: python benchmarks/checkpoints.py

Data parallel on two processes, in one fit: windows of 50 steps, in every other one of which a checkpoint is saved. The
ratio of the times of each pair of windows; the median of all pairs, and their spread. Beside it the pause, in which
ranks copy what they write: predicted (the largest share of bytes over the rate at which a rank copies memory while the
others do, too) and measured. The first checkpoint allocates the memory for copies and is left out.
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

import spindle
from common import markdown, publish
from encoder import Encoder, make_optimizer

WINDOW, PAIRS = 50, 3
WIDTH, NUM_BLOCKS, LENGTH, BATCH = 512, 4, 8, 16
COPIED_BYTES = 64 << 20


def copy_rate(trainer: spindle.Trainer) -> float:
    """Bytes per second at which this rank copies memory while all ranks do."""
    source, target = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    times_s = []
    for _ in range(9):
        trainer.world.barrier()
        begin_s = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - begin_s)
    return COPIED_BYTES / statistics.median(times_s)


def measure(report: Path, folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    torch.manual_seed(0)
    encoder = spindle.module("encoder", Encoder(WIDTH, NUM_BLOCKS))
    data = [{"x": torch.randn(BATCH, LENGTH, 32), "y": torch.randint(10, (BATCH,))} for _ in range(8)]

    @spindle.task(batch_size=BATCH, per_sample_mean=True)
    def classify(batch):  # type: ignore[no-untyped-def]
        return nn.functional.cross_entropy(encoder(batch["x"]), batch["y"])

    trainer = spindle.Trainer(
        [classify],
        optimizer=make_optimizer,
        planning=spindle.Planning(planner="sequential"),
        checkpoints=spindle.Checkpoints(folder, every=None, keep=1),
    )

    def on_step(step: int, losses: dict[str, float]) -> None:
        if step % (2 * WINDOW) == WINDOW:
            trainer.save()

    result = trainer.fit({"classify": data}, steps=2 * WINDOW * (PAIRS + 1), progress=False, on_step=on_step)
    saver = trainer._session.saver
    assert saver is not None
    rows = trainer.world.gather_objects((saver.pauses[1 : PAIRS + 1], copy_rate(trainer)))
    if trainer.rank == 0:
        windows_s = [sum(result.step_s[begin : begin + WINDOW]) for begin in range(0, len(result.step_s), WINDOW)]
        report.write_text(json.dumps({"windows_s": windows_s[2:], "pauses": rows}))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        launch = [sys.executable, "-m", "spindle.cli", "launch", "-n", "2"]
        subprocess.run([*launch, __file__, "--report", str(report), f"{folder}/saved"], check=True)
        data = json.loads(report.read_text())
    windows_s, ranks = data["windows_s"], data["pauses"]
    ratios = sorted(saved / plain for plain, saved in zip(windows_s[::2], windows_s[1::2], strict=True))
    num_bytes = sum(pauses[0][0] for pauses, _ in ranks)
    # A step waits for the slowest rank.
    predicted_s = max(pauses[0][0] / rate for pauses, rate in ranks)
    measured_s = [max(times) for times in zip(*([time_s for _, time_s in pauses] for pauses, _ in ranks), strict=True)]
    step_s = statistics.median(windows_s[::2]) / WINDOW
    row = [
        f"{num_bytes / 1e6:.0f} MB",
        f"{step_s * 1e3:.0f} ms",
        f"{predicted_s * 1e3:.1f} ms",
        f"{statistics.median(measured_s) * 1e3:.1f} ms ({min(measured_s) * 1e3:.1f} to {max(measured_s) * 1e3:.1f})",
        f"{statistics.median(ratios):.3f}",
        f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
    ]
    header = [
        "checkpoint",
        "step",
        "pause, predicted",
        "pause, measured",
        f"{WINDOW} steps with one checkpoint, to {WINDOW} without: median of {PAIRS} pairs",
        "all pairs",
    ]
    publish("checkpoints", data | {"window": WINDOW, "predicted_s": predicted_s}, markdown(header, [row]))


if __name__ == "__main__":
    if "--report" in sys.argv:
        place = sys.argv.index("--report")
        measure(Path(sys.argv[place + 1]), sys.argv[place + 2])
    else:
        main()
