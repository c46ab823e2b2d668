"""Lanes on one GPU with random delays: python tests/gpu/lanes.py [--runs 200] [--budget-s 180]

Random workloads under random lane plans, step by step and in CUDA graphs, against one process: float64 to 1e-9. Before
each instruction its lane sleeps for a random time, so that whatever an event should order comes in another order where
it is missing. To show that this notices a race, runs are repeated with one event between lanes left out, and with none
at all: at least one run of each kind must fail.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

from programs import compare_steps  # noqa: E402
from spindle.run.lanes import Lanes  # noqa: E402

TOLERANCE = 1e-9
MAX_CYCLES = 1_000_000  # of a delay: about half a millisecond
NUM_WORKLOADS = 18


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Inside, every lane sleeps before each of its instructions."""
    numbers, undelayed = random.Random(seed), Lanes.on_stream_of

    @contextmanager
    def delayed(lanes: Lanes, position: int) -> Iterator[None]:
        with undelayed(lanes, position):
            if numbers.random() < 0.5:
                torch.cuda._sleep(numbers.randrange(MAX_CYCLES))
            yield

    with mock.patch.object(Lanes, "on_stream_of", delayed):
        yield


def without_events(seed: int | None = None) -> Any:
    """Inside, no lane waits for another; with a seed, one instruction does not wait for one other."""
    made = Lanes.__init__

    def without(lanes: Lanes, *arguments: Any) -> None:
        made(lanes, *arguments)
        if seed is None:
            lanes._waits.clear()
        elif lanes._waits:
            numbers = random.Random(seed)
            waits = lanes._waits[numbers.choice(sorted(lanes._waits))]
            del waits[numbers.randrange(len(waits))]

    return mock.patch.object(Lanes, "__init__", without)


def largest_error(seed: int) -> float:
    with delays(seed):
        run = compare_steps(0, 1, f"random {seed % NUM_WORKLOADS}", f"plan {seed} lanes", 5, device="cuda")
    errors = [error for error, _ in run.comparison.largest.values()]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--budget-s", type=float, default=math.inf)
    options = parser.parse_args()
    began = time.monotonic()
    errors: dict[int, float] = {}
    for seed in range(options.runs):
        if time.monotonic() - began > 0.7 * options.budget_s:
            break
        errors[seed] = largest_error(seed)
        if errors[seed] > TOLERANCE:
            print(f"seed {seed}: {errors[seed]:.2g}", flush=True)
    failed = [seed for seed, error in errors.items() if error > TOLERANCE]
    print(
        f"{len(errors)} runs, largest error {max(errors.values()):.2g}, {len(failed)} above {TOLERANCE:g}", flush=True
    )
    chosen = list(errors)[: max(4, len(errors) // 4)]
    noticed = [is_noticed(chosen, leaves_out_all=leaves_out_all) for leaves_out_all in (False, True)]
    return 1 if failed or not all(noticed) else 0


def is_noticed(seeds: list[int], *, leaves_out_all: bool) -> bool:
    """Whether a run fails where events between lanes are left out."""
    noticed = []
    what = "events between lanes" if leaves_out_all else "one event between lanes"
    for seed in seeds:
        with without_events(None if leaves_out_all else seed):
            try:
                noticed.append(largest_error(seed) > TOLERANCE)
            except Exception as error:  # an index out of range, for example, made of memory not written yet
                print(f"seed {seed} without {what}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                noticed.append(True)
                if "CUDA error" in str(error):
                    break
    print(f"without {what}: {sum(noticed)} of {len(noticed)} runs fail, expected at least one", flush=True)
    return any(noticed)


if __name__ == "__main__":
    sys.exit(main())
