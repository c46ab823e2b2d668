"""Lanes on one GPU with random delays: python tests/gpu/lanes.py [--runs 200] [--budget-s 180] [--kinds weight,plain]

Random workloads under random lane plans, with weight gradients on lanes of their own (`weight`, in one graph for the
step; `slots`, in one for each pass) and without (`plain`), step by step and in CUDA graphs, against one process:
float64 to 1e-9. Before each instruction its lane sleeps for a random time, so that whatever an event should order comes
in another order where it is missing; before each step the gradients and losses that graphs write are NaN. To show that
this notices a race, runs are repeated with one event between lanes left out, with none at all, and with what weight
gradients read released early: at least one run of each kind must fail.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

from programs import compare_steps  # noqa: E402
from spindle.run import Executor  # noqa: E402
from spindle.run.graphs import Graphs  # noqa: E402
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


@contextmanager
def released_early() -> Iterator[None]:
    """Inside, what weight gradients read is not held: others get its memory while they may still read it."""
    run = Graphs.backward_weights

    def released(graphs: Graphs, slot: Any, first: int, *arguments: Any) -> Any:
        left = run(graphs, slot, first, *arguments)
        graphs._slots[slot.number].parts[first].clear() if first in graphs._slots[slot.number].parts else None
        return left

    with mock.patch.object(Graphs, "backward_weights", released):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, gradients and losses in the memory of graphs are NaN before each step, so that what a replay does not
    write shows; why a step has no graph of its own is printed."""
    run, capture = Executor.step, Graphs.capture_step

    def step(executor: Executor, *arguments: Any, **options: Any) -> Any:
        step_graphs = [graphs.step_graph for graphs in executor.graph_cache._sets.values()]
        losses = [loss for step_graph in step_graphs if step_graph is not None for loss in step_graph._losses.values()]
        with torch.no_grad():
            for tensor in [*executor.gradient_memory, *losses]:
                tensor.fill_(math.nan)
        return run(executor, *arguments, **options)

    def captured(graphs: Graphs, *arguments: Any) -> Any:
        failure = capture(graphs, *arguments)
        if failure is not None:
            print(f"no graph for the whole step: {failure.reason}", flush=True)
        return failure

    with mock.patch.object(Executor, "step", step), mock.patch.object(Graphs, "capture_step", captured):
        yield


COUNTS: Counter[str] = Counter()  # of runs, by how they ran


def largest_error(seed: int, kind: str) -> float:
    plan = f"plan {seed} lanes" if kind == "plain" else f"plan {seed} weight lanes"
    with delays(seed), poisoned():
        workload = f"random {seed % NUM_WORKLOADS}"
        run = compare_steps(0, 1, workload, plan, 5, device="cuda", step_graphs=kind != "slots")
    COUNTS["whole steps" if run.has_step_graph else "slots" if run.captured else "eager"] += 1
    errors = [error for error, _ in run.comparison.largest.values()]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run, to resume")
    parser.add_argument("--budget-s", type=float, default=math.inf)
    parser.add_argument("--kinds", default="weight,slots,plain")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    began = time.monotonic()
    errors: dict[tuple[int, str], float] = {}
    for seed in range(options.first, options.first + options.runs):
        if time.monotonic() - began > 0.7 * options.budget_s:
            break
        kind = kinds[seed % len(kinds)]
        try:
            errors[seed, kind] = largest_error(seed, kind)
        except Exception:
            print(f"seed {seed} ({kind}):\n{traceback.format_exc()}", flush=True)
            errors[seed, kind] = math.inf
            if not is_cuda_alive():
                break
        if errors[seed, kind] > TOLERANCE:
            print(f"seed {seed} ({kind}): {errors[seed, kind]:.2g}", flush=True)
    failed = [run for run, error in errors.items() if error > TOLERANCE]
    print(
        f"{len(errors)} runs ({dict(COUNTS)}), largest error {max(errors.values()):.2g}, "
        f"{len(failed)} above {TOLERANCE:g}; the next one is --first {1 + max(seed for seed, _ in errors)}",
        flush=True,
    )
    if not is_cuda_alive():
        return 1
    chosen = list(errors)[: max(6, len(errors) // 4)]
    split = [run for run in chosen if run[1] != "plain"]
    noticed = []
    for what, runs, without in (
        ("what weight gradients read released early", split, lambda seed: released_early()),
        ("one event between lanes left out", chosen, without_events),
        ("no event between lanes", chosen, lambda seed: without_events()),
    ):
        left_s = options.budget_s - (time.monotonic() - began)
        noticed += [is_noticed(what, runs, without, left_s)] if runs and is_cuda_alive() else []
    return 1 if failed or not all(noticed) else 0


def is_cuda_alive() -> bool:
    """Whether CUDA has met no error that stays."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"CUDA has failed: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def is_noticed(what: str, runs: Sequence[tuple[int, str]], without: Callable[[int], Any], left_s: float) -> bool:
    """Whether a run fails inside `without`."""
    noticed, began = [], time.monotonic()
    for seed, kind in runs:
        if time.monotonic() - began > left_s or sum(noticed) >= 3:
            break
        with without(seed):
            try:
                noticed.append(largest_error(seed, kind) > TOLERANCE)
            except Exception as error:  # an index out of range, for example, made of memory not written yet
                print(f"seed {seed} with {what}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                noticed.append(True)
                if "CUDA error" in str(error):
                    break
    print(f"{what}: {sum(noticed)} of {len(noticed)} runs fail, expected at least one", flush=True)
    return any(noticed)


if __name__ == "__main__":
    sys.exit(main())
