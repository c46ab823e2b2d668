"""Where a host's time goes in a step of small towers: exclusive seconds of the executor's functions, by rank.

    spindle launch --virtual-devices 4 benchmarks/virtual/host_overhead.py [--steps 40]

The multiples in `spindle.measure.host` come from these numbers and the median of `launch_s` beside them. Timers count
the main thread only; waiting (`Transfers.arrived`, `Syncs.finish`, `LaunchThrottle.wait`) is in them.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import spindle
from spindle.run import compute, executor, gradients, graphs, step, syncs, transfers
from spindle.run.world import World
from spindle.train import batch_source, loop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from virtual.alternating import (
    LENGTHS,
    ROWS,
    audio_text,
    batches,
    image_audio,
    image_text,
    make_optimizer,
    small_towers,
)

TIMED: dict[Any, tuple[str, ...]] = {
    batch_source.BatchSource: ("read",),
    loop.Loop: ("_step",),
    World: ("start_all_gather",),
    executor.Executor: ("step", "_run", "_run_region", "_run_step_graph", "_advance", "_launch", "_losses"),
    compute.Compute: ("forward", "backward", "_input", "_output_gradients"),
    syncs.Syncs: ("begin", "_start", "finish", "update"),
    transfers.Transfers: ("post", "arrived", "send_metadata", "finish"),
    graphs.Graphs: ("forward", "backward", "batches"),
    gradients.Gradients: ("fill_bucket", "set_from_bucket", "move_to_buckets"),
    torch.cuda.CUDAGraph: ("replay",),
    torch.optim.AdamW: ("step",),
    step.LaunchThrottle: ("wait",),
}


class Timers:
    """Exclusive seconds and calls, by function."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner_s: list[float] = []  # of the calls that are open, what calls inside them took

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, names in TIMED.items():
                for name in names:
                    timed = self._timed(getattr(owner, name), f"{owner.__name__}.{name}")
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            begin_s = time.perf_counter()
            self._inner_s.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - begin_s
                self.seconds[label] += took_s - self._inner_s.pop()
                self.calls[label] += 1
                if self._inner_s:
                    self._inner_s[-1] += took_s

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    handles = {name: spindle.module(name, module) for name, module in small_towers().items()}
    tasks = [
        spindle.task(batch_size=ROWS, name=loss.__name__)(lambda batch, loss=loss: loss(handles, batch))
        for loss in (image_text, audio_text, image_audio)
    ]
    autocast = torch.bfloat16 if torch.cuda.is_available() else None
    trainer = spindle.Trainer(tasks, optimizer=make_optimizer, autocast=autocast)
    trainer.fit(batches(LENGTHS[:1]), steps=arguments.steps // 2, progress=False)
    timers = Timers()
    with timers.running():
        result = trainer.fit(batches(LENGTHS[:1]), steps=arguments.steps, progress=False)
    lines = [f"rank {trainer.rank}, milliseconds and calls per step:"]
    for label, seconds in timers.seconds.most_common():
        lines.append(f"  {seconds / arguments.steps * 1e3:7.3f} {timers.calls[label] / arguments.steps:6.1f}  {label}")
    print("\n".join(lines), flush=True)
    if trainer.rank == 0:
        predicted_s, measured_s = result.sampled_s[0]
        print(f"step {measured_s * 1e3:.1f} ms, predicted {predicted_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
