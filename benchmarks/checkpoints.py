"""What checkpoints cost: python benchmarks/checkpoints.py (WINDOW=10 for fewer steps, where only the pause is wanted)

Data parallel on two processes, in one fit: windows of 50 steps, in every other one of which a checkpoint is saved. The
ratio of the times of each pair of windows; the median of all pairs, and their spread. Beside it the pause, in which
ranks copy what they write: predicted (the largest share of bytes over the rate at which a rank copies memory while the
others do, too) and measured, both also in CPU time, which other work on the machine does not lengthen. The first
checkpoint allocates the memory for copies and is left out.
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
from encoder import Encoder, make_optimizer
from spindle.train.saving import Saver

WINDOW, PAIRS = int(os.environ.get("WINDOW", "50")), 3
WIDTH, NUM_BLOCKS, LENGTH, BATCH = 1024, 4, 2, 4
COPIED_BYTES = 256 << 20  # beyond any cache, as a rank's share is: 64 MiB are copied up to 1.1 times as fast


def copy_rates(trainer: spindle.Trainer) -> tuple[float, float]:
    """Bytes per second at which this rank copies memory while all ranks do, of time and of CPU time."""
    source, target = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    times_s = []
    for _ in range(9):
        trainer.world.barrier()
        begin_s = time.perf_counter(), time.thread_time()
        target.copy_(source)
        times_s.append((time.perf_counter() - begin_s[0], time.thread_time() - begin_s[1]))
    wall_s, cpu_s = zip(*times_s, strict=True)
    return COPIED_BYTES / statistics.median(wall_s), COPIED_BYTES / statistics.median(cpu_s)


def measured_pauses(saver: Saver) -> list[tuple[int, float, float]]:
    """Bytes, seconds and CPU seconds of the checkpoints that are saved from now on, as they are saved."""
    save, pauses = saver.save, []

    def timed_save(*arguments: Any) -> None:
        begin_s = time.thread_time()
        save(*arguments)
        pauses.append((*saver.pauses[-1], time.thread_time() - begin_s))

    saver.save = timed_save  # type: ignore[method-assign]
    return pauses


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

    pauses: list[tuple[int, float, float]] = []

    def on_step(step: int, losses: dict[str, float]) -> None:
        nonlocal pauses
        if step == 0:
            assert trainer._session.saver is not None
            pauses = measured_pauses(trainer._session.saver)
        if step % (2 * WINDOW) == WINDOW:
            trainer.save()

    result = trainer.fit({"classify": data}, steps=2 * WINDOW * (PAIRS + 1), progress=False, on_step=on_step)
    rows = trainer.world.gather_objects((pauses[1 : PAIRS + 1], copy_rates(trainer)))
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
    cells = []
    for kind in (0, 1):  # time, and CPU time
        predicted_s = max(pauses[0][0] / rates[kind] for pauses, rates in ranks)
        measured_s = [
            max(pause[1 + kind] for pause in same) for same in zip(*(pauses for pauses, _ in ranks), strict=True)
        ]
        median_s = statistics.median(measured_s)
        cells += [
            f"{predicted_s * 1e3:.1f} ms",
            f"{median_s * 1e3:.1f} ms ({min(measured_s) * 1e3:.1f} to {max(measured_s) * 1e3:.1f})",
            f"{median_s / predicted_s:.2f}",
        ]
    step_s = statistics.median(windows_s[::2]) / WINDOW
    row = [
        f"{num_bytes / 1e6:.0f} MB",
        f"{step_s * 1e3:.0f} ms",
        *cells,
        f"{statistics.median(ratios):.3f}",
        f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
    ]
    header = [
        "checkpoint",
        "step",
        "pause, predicted",
        "measured",
        "ratio",
        "CPU time of it, predicted",
        "measured",
        "ratio",
        f"{WINDOW} steps with one checkpoint, to {WINDOW} without: median of {PAIRS} pairs",
        "all pairs",
    ]
    publish("checkpoints", data | {"window": WINDOW}, markdown(header, [row]))


if __name__ == "__main__":
    if "--report" in sys.argv:
        place = sys.argv.index("--report")
        measure(Path(sys.argv[place + 1]), sys.argv[place + 2])
    else:
        main()
