"""Lanes on one GPU with random delays: python tests/gpu/lanes.py [--runs 200] [--budget-s 180] [--kinds weight,plain]

Random workloads under random lane plans, with weight gradients on lanes of their own (`weight`, in one graph for the
step; `slots`, in one for each pass) and without (`plain`), step by step and in CUDA graphs, against one process:
float64 to 1e-9, half of the runs in float32 to 1e-5. Before each instruction its lane sleeps for a random time, so that
whatever an event should order comes in another order where it is missing. Before each step the gradients and losses
that graphs write are NaN, and so is all other memory of graphs (`--poison pools`).

To show that this notices a race, runs are repeated with one dependency between lanes left out whose producer comes late
(an edge of the step's graph, or an event between graphs of passes), with no dependency at all, and with what weight
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

from lane_races import LeftOut, edge_left_out  # noqa: E402
from programs import compare_steps  # noqa: E402
from spindle.run import Executor  # noqa: E402
from spindle.run.graphs import Graphs  # noqa: E402
from spindle.run.lanes import Lanes  # noqa: E402

TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
MAX_CYCLES = 1_000_000  # of a delay: about half a millisecond
LATE_CYCLES = 200_000_000  # a tenth of a second: longer than a step
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


def without_events() -> Any:
    """Inside, no lane waits for another."""
    made = Lanes.__init__

    def without(lanes: Lanes, *arguments: Any) -> None:
        made(lanes, *arguments)
        lanes._waits.clear()

    return mock.patch.object(Lanes, "__init__", without)


@contextmanager
def lost_race(seed: int) -> Iterator[LeftOut]:
    """Inside, one instruction does not wait for another, which begins when all that does not wait for it has ended."""
    undelayed = Lanes.on_stream_of
    with edge_left_out(seed) as left_out:

        @contextmanager
        def delayed(lanes: Lanes, position: int) -> Iterator[None]:
            with undelayed(lanes, position):
                if position in left_out.late:
                    torch.cuda._sleep(LATE_CYCLES)
                yield

        with mock.patch.object(Lanes, "on_stream_of", delayed):
            yield left_out


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


class Bytes:
    """Memory at an address, as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def fill_graph_memory() -> None:
    """Fill the memory pools of all graphs with ones, which are NaN in every floating-point type: a replay reads nothing
    there that it has not written."""
    torch.cuda.synchronize()
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) != (0, 0):
            torch.as_tensor(Bytes(segment["address"], segment["total_size"]), device="cuda").fill_(255)
    torch.cuda.synchronize()


@contextmanager
def poisoned(*, pools: bool) -> Iterator[None]:
    """Inside, gradients and losses in the memory of graphs are NaN before each step, with `pools` all of this memory,
    so that what a replay does not write shows; why a step has no graph of its own is printed."""
    run, capture = Executor.step, Graphs.capture_step

    def step(executor: Executor, *arguments: Any, **options: Any) -> Any:
        step_graphs = [graphs.step_graph for graphs in executor.graph_cache._sets.values()]
        losses = [loss for step_graph in step_graphs if step_graph is not None for loss in step_graph._losses.values()]
        with torch.no_grad():
            for tensor in [*executor.gradient_memory, *losses]:
                tensor.fill_(math.nan)
        if pools:
            fill_graph_memory()
        return run(executor, *arguments, **options)

    def captured(graphs: Graphs, *arguments: Any) -> Any:
        failure = capture(graphs, *arguments)
        if failure is not None:
            print(f"no graph for the whole step: {failure.reason}", flush=True)
        return failure

    with mock.patch.object(Executor, "step", step), mock.patch.object(Graphs, "capture_step", captured):
        yield


COUNTS: Counter[str] = Counter()  # of runs, by how they ran


def dtype_of(seed: int) -> str:
    return "float32" if seed // 3 % 2 else "float64"


def largest_error(seed: int, kind: str, *, pools: bool = False) -> float:
    """The largest error of a run, as a multiple of what is tolerated. Only runs that are meant to succeed have their
    memory filled: indices that are never written would end the process."""
    plan = f"plan {seed} lanes" if kind == "plain" else f"plan {seed} weight lanes"
    with delays(seed), poisoned(pools=pools):
        workload = f"{'float32 ' * (dtype_of(seed) == 'float32')}random {seed % NUM_WORKLOADS}"
        run = compare_steps(0, 1, workload, plan, 5, device="cuda", step_graphs=kind != "slots")
    COUNTS["whole steps" if run.has_step_graph else "slots" if run.captured else "eager"] += 1
    errors = [error for error, _ in run.comparison.largest.values()]
    return math.inf if any(map(math.isnan, errors)) else max(errors) / TOLERANCES[dtype_of(seed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run, to resume")
    parser.add_argument("--budget-s", type=float, default=math.inf)
    parser.add_argument("--kinds", default="weight,slots,plain")
    parser.add_argument("--poison", choices=["pools", "gradients"], default="pools")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    kinds = options.kinds.split(",")
    began = time.monotonic()
    errors: dict[tuple[int, str], float] = {}
    for seed in range(options.first, options.first + options.runs):
        if time.monotonic() - began > 0.7 * options.budget_s:
            break
        kind = kinds[seed % len(kinds)]
        try:
            errors[seed, kind] = largest_error(seed, kind, pools=options.poison == "pools")
        except Exception:
            print(f"seed {seed} ({kind}):\n{traceback.format_exc()}", flush=True)
            errors[seed, kind] = math.inf
            if not is_cuda_alive():
                break
        if errors[seed, kind] > 1:
            print(f"seed {seed} ({kind}, {dtype_of(seed)}): {errors[seed, kind]:.2g} tolerances", flush=True)
    failed = [run for run, error in errors.items() if error > 1]
    for dtype, tolerance in TOLERANCES.items():
        of_dtype = [tolerance * error for (seed, _), error in errors.items() if dtype_of(seed) == dtype]
        if of_dtype:
            num_above = sum(error > tolerance for error in of_dtype)
            print(
                f"{len(of_dtype)} runs in {dtype}: error {max(of_dtype):.2g}, {num_above} above {tolerance:g}",
                flush=True,
            )
    print(f"{dict(COUNTS)}; the next one is --first {1 + max(seed for seed, _ in errors)}", flush=True)
    if not is_cuda_alive():
        return 1
    chosen = list(errors)[: max(6, len(errors) // 4)]
    split = [run for run in chosen if run[1] != "plain"]
    noticed = []
    for what, runs, without in (
        ("what weight gradients read released early", split, lambda seed: released_early()),
        *(
            (f"one dependency left out ({kind})", [run for run in errors if run[1] == kind], lost_race)
            for kind in kinds
        ),
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
        with without(seed) as left_out:
            try:
                is_wrong = largest_error(seed, kind) > 1
                if isinstance(left_out, LeftOut) and left_out.edge is None:
                    continue  # no lane of this plan waits for another
                noticed.append(is_wrong)
            except Exception as error:  # an index out of range, for example, made of memory not written yet
                print(f"seed {seed} with {what}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                noticed.append(True)
                if "CUDA error" in str(error):
                    break
    print(f"{what}: {sum(noticed)} of {len(noticed)} runs fail, expected at least one", flush=True)
    return any(noticed)


if __name__ == "__main__":
    sys.exit(main())
