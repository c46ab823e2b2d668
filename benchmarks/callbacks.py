"""What callbacks cost: python benchmarks/callbacks.py

Steps of one process with a callback, JSON lines and TensorBoard against the same steps without: some of one after some
of the other, in one run. The ratio of each pair, in CPU time of the process, which other work on the machine disturbs
less than elapsed time; the median of all pairs. And, directly: the time in records, callbacks and writers, and the time
that the gradient norm takes where gradients are not clipped; medians per step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import spindle
from common import markdown, publish
from encoder import Encoder, make_optimizer
from spindle.train.optimizer import OptimizerUpdate
from spindle.train.reporting import StepReports
from spindle.train.step_forecast import StepForecast

PAIRS, STEPS_OF_A_PAIR = 16, 8
BATCH, LENGTH, WIDTH, BLOCKS = 32, 64, 128, 6  # 1.2 M parameters, 2,048 tokens
PARTS = (
    (StepReports, "report"),
    (StepForecast, "launched"),
    (OptimizerUpdate, "_start_report"),
    (OptimizerUpdate, "_clip_gradients"),
)


class Observer(spindle.Callback):
    """A user's callback, which looks at what it is given."""

    def on_step(self, record: spindle.StepRecord) -> None:
        self.last = record.loss, record.grad_norm, record.step_s


def make_trainer(callbacks: list[spindle.Callback]) -> tuple[spindle.Trainer, Callable[[], None]]:
    torch.manual_seed(0)
    encoder = spindle.module("encoder", Encoder(WIDTH, BLOCKS))
    data = [{"x": torch.randn(BATCH, LENGTH, 32), "y": torch.randint(10, (BATCH,))} for _ in range(STEPS_OF_A_PAIR)]

    @spindle.task(batch_size=BATCH, per_sample_mean=True, tokens=lambda batch: BATCH * LENGTH)
    def classify(batch: Any) -> Any:
        return nn.functional.cross_entropy(encoder(batch["x"]), batch["y"])

    planning = spindle.Planning(planner="sequential")
    trainer = spindle.Trainer([classify], optimizer=make_optimizer, planning=planning, callbacks=callbacks)
    return trainer, lambda: trainer.fit({"classify": data}, steps=STEPS_OF_A_PAIR, progress=False)


class Stopwatch:
    """CPU time of this thread in some methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def around(self, owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds.setdefault(name, []).append(time.thread_time() - begin)

        return mock.patch.object(owner, name, timed)


def cpu_seconds(fit: Callable[[], None]) -> float:
    begin = time.process_time()
    fit()
    return (time.process_time() - begin) / STEPS_OF_A_PAIR


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        writers = [spindle.JSONLines(Path(folder) / "run.jsonl"), spindle.TensorBoard(folder)]
        _, without = make_trainer([])
        _, with_callbacks = make_trainer([Observer(), *writers])
        for fit in (without, with_callbacks):
            fit()
        pairs = []
        for number in range(PAIRS):
            fits = {"without": without, "with": with_callbacks}
            order = list(fits) if number % 2 else list(fits)[::-1]
            pairs.append({name: cpu_seconds(fits[name]) for name in order})
        watch = Stopwatch()
        with ExitStack() as stack:
            for part in PARTS:
                stack.enter_context(watch.around(*part))
            for _ in range(PAIRS // 4):
                with_callbacks()
    ratios = sorted(pair["with"] / pair["without"] for pair in pairs)
    step_s = statistics.median(pair["without"] for pair in pairs)
    direct = {name: statistics.median(seconds) for name, seconds in watch.seconds.items()}
    added_s = sum(direct.values())
    rows = [
        ["a step without callbacks, CPU time", f"{step_s * 1e3:.1f} ms"],
        ["with three, ratio, median of pairs", f"{statistics.median(ratios):.4f}"],
        ["middle half of pairs", f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"],
        ["records, callbacks and writers, directly", f"{(added_s - direct['_clip_gradients']) * 1e6:.0f} µs"],
        ["gradient norm, directly", f"{direct['_clip_gradients'] * 1e6:.0f} µs"],
        ["both as a share of a step", f"{added_s / step_s:.2%}"],
    ]
    publish(
        "callbacks",
        {"pairs": pairs, "direct_s": direct},
        markdown(["one process, 1.2 M parameters, 2,048 tokens a step", ""], rows),
    )


if __name__ == "__main__":
    main()
