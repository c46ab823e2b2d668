"""Lanes on one GPU with random delays: python tests/gpu/lanes.py [--runs 200] [--budget-s 180] [--kinds weight,plain]
                                       [--ranks 2,3]

Random workloads under random lane plans, with weight gradients on lanes of their own (`weight`, in one graph for the
step or for each region; `slots`, in one for each pass) and without (`plain`), in CUDA graphs or without any (`eager`),
against one process: float64 to 1e-9, half of the runs in float32 to 1e-5. Before each instruction its lane sleeps for a
random time, so that whatever an event should order comes in another order where it is missing. Before each step the
gradients and losses that graphs write are NaN, and so is all other memory of graphs (`--poison pools`); and each graph
begins by filling the memory that is free in its pool with NaN, so that whatever is released too early is lost.

Without a GPU, graphs are emulated and replayed in random orders, in one process: this tries the script.

With `--ranks`, so many processes share the GPU under NCCL and MPS, each with lanes of its own.

To show that this notices a race, runs are repeated with one dependency between lanes left out whose producer comes late
(an edge of the step's graph, or an event between graphs of passes), with communication that does not wait for what it
sends, with no dependency at all, and with what weight gradients read released early: at least one run of each kind must
fail.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

import lane_races  # noqa: E402
import programs  # noqa: E402
from backends import GRAPHS_VARIABLE, on_gpu  # noqa: E402
from comparison import Comparison  # noqa: E402
from lane_races import LeftOut, Released, edge_left_out  # noqa: E402
from spindle.run import Executor, graph_memory  # noqa: E402
from spindle.run.graphs import Graphs  # noqa: E402
from spindle.run.lanes import Lanes  # noqa: E402

TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
MAX_CYCLES = 1_000_000  # of a delay: about half a millisecond
LATE_CYCLES = 200_000_000  # a tenth of a second: longer than a step
LATE_WEIGHTS_CYCLES = 20_000_000  # of each pass of weight gradients: longer than the pass that follows on its lane
LARGEST_SMALL_BLOCK = 2**20  # of torch's allocator
NUM_WORKLOADS, NUM_STEPS = 18, 7
# Whole steps with weight lanes in which memory that is released early is used again by a pass that does not wait for
# the weight gradients: the emulation of `tests/replay.py` notices that in all of them, and in no other of the first 18.
EARLY_RELEASE_SEEDS = (0, 1, 2, 4, 12, 16, 17)


def sleep(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the GPU."""
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Inside, every lane sleeps before each of its instructions."""
    numbers, undelayed = random.Random(seed), Lanes.on_stream_of

    @contextmanager
    def delayed(lanes: Lanes, position: int) -> Iterator[None]:
        with undelayed(lanes, position):
            if numbers.random() < 0.5:
                sleep(numbers.randrange(MAX_CYCLES))
            yield

    with mock.patch.object(Lanes, "on_stream_of", delayed):
        yield


def without_events(seed: int) -> Any:
    """Inside, no lane waits for another."""
    made = Lanes.__init__

    def without(lanes: Lanes, *arguments: Any) -> None:
        made(lanes, *arguments)
        lanes._waits.clear()

    return mock.patch.object(Lanes, "__init__", without)


@contextmanager
def lost_race(seed: int, *, of_communication: bool = False) -> Iterator[LeftOut]:
    """Inside, one instruction does not wait for another, which begins when all that does not wait for it has ended."""
    undelayed = Lanes.on_stream_of
    with edge_left_out(seed, of_communication=of_communication) as left_out:

        @contextmanager
        def delayed(lanes: Lanes, position: int) -> Iterator[None]:
            with undelayed(lanes, position):
                if position in left_out.late:
                    sleep(LATE_CYCLES)
                yield

        with mock.patch.object(Lanes, "on_stream_of", delayed):
            yield left_out


def sent_early(seed: int) -> Any:
    """Inside, a transfer or a reduction does not wait for what it sends."""
    return lost_race(seed, of_communication=True)


@contextmanager
def released_early(seed: int) -> Iterator[Released]:
    """Inside, what weight gradients read is not held: the next graph on the lane of their slot gets this memory and
    overwrites it at once, while they are late. With zeros, which are indices that exist."""
    undelayed = Lanes.on_stream_of
    with lane_races.released_early() as released, reused_at_once(0):

        @contextmanager
        def delayed(lanes: Lanes, position: int) -> Iterator[None]:
            with undelayed(lanes, position):
                if position in released.late:
                    sleep(LATE_WEIGHTS_CYCLES)
                yield

        with mock.patch.object(Lanes, "on_stream_of", delayed):
            yield released


@contextmanager
def reused_at_once(value: int) -> Iterator[None]:
    """Inside, each graph begins by filling all memory that is free in its pool with bytes of this value, as if its
    first tensors took it: torch's allocator takes a block of exactly the size that is asked for first."""
    begin = graph_memory.capturing

    @contextmanager
    def capturing(graph: Any, pool: Any, *arguments: Any) -> Iterator[None]:
        num_bytes = free_blocks(pool)  # asked for before the capture begins
        with begin(graph, pool, *arguments):
            fill_new(num_bytes, value)
            yield

    # Emulated pools do this by themselves.
    with mock.patch.object(graph_memory, "capturing", capturing) if torch.cuda.is_available() else nullcontext():
        yield


def free_blocks(pool: Any) -> list[int]:
    """The sizes of the blocks that are free in a pool of graphs for the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    return [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool) and segment["stream"] == stream
        for block in segment["blocks"]
        # Up to 1 MiB is taken from small segments alone, so what is left of a large one is not given to anybody.
        if block["state"] == "inactive"
        and (segment["segment_type"] == "large") == (block["size"] > LARGEST_SMALL_BLOCK)
    ]


def fill_new(num_bytes: Sequence[int], value: int) -> None:
    """Fill new tensors of these sizes, all at a time, and free them."""
    for tensor in [torch.empty(count, dtype=torch.uint8, device="cuda") for count in sorted(num_bytes, reverse=True)]:
        tensor.fill_(value)


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
        if pools and torch.cuda.is_available():
            fill_graph_memory()
        return run(executor, *arguments, **options)

    def captured(graphs: Graphs, *arguments: Any) -> Any:
        failure = capture(graphs, *arguments)
        if failure is not None:
            print(f"no graph for the whole step: {failure.reason}", flush=True)
        return failure

    with mock.patch.object(Executor, "step", step), mock.patch.object(Graphs, "capture_step", captured):
        yield


def dtype_of(seed: int) -> str:
    """Each workload has one type in one round of all workloads and the other in the next."""
    return "float32" if (seed // 3 + seed // NUM_WORKLOADS) % 2 else "float64"


def rounding_error(workload: str, num_steps: int) -> float:
    """How far gradients of one process in float32 are from those in float64, on a CPU."""
    comparison = Comparison()
    for step in programs.steps_alike(programs.workload_named(workload), num_steps):
        single, double = (gradients_in(dtype, workload, step) for dtype in (torch.float32, torch.float64))
        comparison.add_tensors("gradient", single, double, f" in step {step}")
    return comparison.largest["gradient"][0]


def gradients_in(dtype: torch.dtype, name: str, step: int) -> dict[str, torch.Tensor | None]:
    """The gradients of a step of one process."""
    workload = programs.workload_named(name)
    handles = programs.handles_in(workload)
    for handle in programs.root_handles(handles).values():
        handle.module.to(dtype)
    batches = tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        workload.batches(step),
    )
    losses = [task.weight * programs.loss_value(task(batches[task.name])) for task in workload.tasks]
    torch.stack(losses).sum().backward()
    return {path: parameter.grad for path, parameter in programs.unique_parameters(handles).items()}


def tolerance_of(seed: int, workload: str) -> float:
    """In some workloads rounding alone is more than 1e-5 (the gradient of a bias in front of a batch norm is zero in
    exact arithmetic): there, four times the distance of one process in float32 from float64 is tolerated."""
    tolerance = TOLERANCES[dtype_of(seed)]
    return tolerance if dtype_of(seed) == "float64" else max(tolerance, 4 * rounding_error(workload, NUM_STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank reports of a run: its largest error, as a multiple of what is tolerated, and how it ran."""

    error: float
    how: str
    has_fault: bool  # whether the fault of the run could be made on this rank
    refused: Mapping[str, str]


FAULTS: dict[str, Callable[[int], Any]] = {
    "": lambda seed: nullcontext(),
    "what weight gradients read released early": released_early,
    "one dependency left out": lost_race,
    "communication that does not wait for what it sends": sent_early,
    "no event between lanes": without_events,
}


def run_on_rank(rank: int, num_ranks: int, seed: int, kind: str, pools: bool, fault: str) -> RankRun:
    """One rank of a run. Only runs that are meant to succeed have their memory filled: indices that are never written
    would end the process."""
    torch.backends.cudnn.allow_tf32 = False
    plan = f"plan {seed} weight lanes" if kind in ("weight", "slots") else f"plan {seed} lanes"
    workload = f"{'float32 ' * (dtype_of(seed) == 'float32')}random {seed % NUM_WORKLOADS}"
    variables = {GRAPHS_VARIABLE: "off" if kind == "eager" else "on"}
    is_filled = pools and not fault and kind != "eager"
    # That of the pool, where there is one; without a GPU, graphs are emulated.
    device = None if on_gpu() or not torch.cuda.is_available() else "cuda"
    with (
        mock.patch.dict(os.environ, variables),
        FAULTS[fault](seed) as made,
        delays(seed + 1000 * rank),
        poisoned(pools=pools and not fault),
        reused_at_once(255) if is_filled else nullcontext(),
    ):
        together = kind != "slots"
        run = programs.compare_steps(
            rank,
            num_ranks,
            workload,
            plan,
            NUM_STEPS,
            captures=kind != "eager",
            device=device,
            step_graphs=together,
            regions=together,
        )
    errors = [error for error, _ in run.comparison.largest.values()]
    return RankRun(
        error=math.inf if any(map(math.isnan, errors)) else max(errors) / tolerance_of(seed, workload),
        how="whole steps"
        if run.has_step_graph
        else "regions"
        if run.region_sizes
        else "slots"
        if run.captured
        else "eager",
        has_fault=is_made(made),
        refused=run.without_graph,
    )


def is_made(fault: Any) -> bool:
    """Whether there was anything to leave out or to release."""
    match fault:
        case LeftOut(edge=edge):
            return edge is not None
        case Released(count=count):
            return count > 0
        case _:
            return True


class Runs:
    """Runs in this process, or on ranks of a pool."""

    def __init__(self, ranks: Sequence[int], pool: Any) -> None:
        self._ranks, self._pool = ranks, pool
        self.counts: Counter[str] = Counter()  # by how they ran

    def num_ranks(self, seed: int) -> int:
        return self._ranks[seed % len(self._ranks)]

    def run(self, seed: int, kind: str, *, pools: bool = False, fault: str = "") -> tuple[float, bool]:
        """The largest error of a run, and whether its fault was made on any rank."""
        arguments = seed, kind, pools, fault
        if self._pool is None:
            answers = [run_on_rank(0, 1, *arguments)]
        else:
            answers = self._pool.run(self.num_ranks(seed), run_on_rank, *arguments)
        self.counts[answers[0].how] += 1
        return max(answer.error for answer in answers), any(answer.has_fault for answer in answers)

    def is_alive(self) -> bool:
        """Whether CUDA has met no error that stays. A pool starts its processes anew."""
        if self._pool is not None or not torch.cuda.is_available():
            return True
        try:
            torch.cuda.synchronize()
        except Exception as error:
            print(f"CUDA has failed: {str(error).splitlines()[0]}", flush=True)
            return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run, to resume")
    parser.add_argument("--budget-s", type=float, default=math.inf)
    parser.add_argument("--kinds", help="of weight, slots, plain, eager")
    parser.add_argument("--ranks", help="processes under NCCL, several numbers in turn (2,3); without it, this process")
    parser.add_argument("--poison", choices=["pools", "gradients"], default="pools")
    options = parser.parse_args()
    if options.ranks is None:
        kinds = (options.kinds or "weight,slots,plain").split(",")
        return run_all(Runs([1], None), kinds, options)
    from gpu.all import environment
    from pool import Pool

    # The processes of the pool must not find an installed spindle instead of this one.
    sources = str(HERE.parent.parent / "src")
    os.environ["PYTHONPATH"] = os.pathsep.join([sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [int(number) for number in options.ranks.split(",")]
    kinds = (options.kinds or "weight,plain,slots,eager").split(",")
    with environment("nccl", max(ranks)):
        pool = Pool()
        try:
            return run_all(Runs(ranks, pool), kinds, options)
        finally:
            pool.close()


def run_all(runs: Runs, kinds: Sequence[str], options: argparse.Namespace) -> int:
    began = time.monotonic()
    errors: dict[tuple[int, str], float] = {}
    for seed in range(options.first, options.first + options.runs):
        if time.monotonic() - began > 0.7 * options.budget_s:
            break
        kind = kinds[(seed + seed // NUM_WORKLOADS) % len(kinds)]  # another in each round of all workloads
        try:
            errors[seed, kind], _ = runs.run(seed, kind, pools=options.poison == "pools")
        except Exception:
            print(f"seed {seed} ({kind}, {runs.num_ranks(seed)} ranks):\n{traceback.format_exc()}", flush=True)
            errors[seed, kind] = math.inf
            if not runs.is_alive():
                break
        if errors[seed, kind] > 1:
            print(f"seed {seed} ({kind}, {dtype_of(seed)}): {errors[seed, kind]:.2g} tolerances", flush=True)
    failed = [run for run, error in errors.items() if error > 1]
    for dtype in TOLERANCES:
        of_dtype = [error for (seed, _), error in errors.items() if dtype_of(seed) == dtype]
        if of_dtype:
            num_above = sum(error > 1 for error in of_dtype)
            print(
                f"{len(of_dtype)} runs in {dtype}: error {max(of_dtype):.2g} of what is tolerated, {num_above} above",
                flush=True,
            )
    next_seed, time_s = 1 + max(seed for seed, _ in errors), time.monotonic() - began
    print(f"{dict(runs.counts)} in {time_s:.0f} s; the next one is --first {next_seed}", flush=True)
    if not runs.is_alive():
        return 1
    chosen = list(errors)[: max(6, len(errors) // 4)]
    split = [(seed, "weight") for seed in EARLY_RELEASE_SEEDS]
    faults = [("no event between lanes", chosen)]
    if options.ranks is None and "weight" in kinds:
        faults.insert(0, ("what weight gradients read released early", split))
    elif options.ranks is not None:
        faults.insert(0, ("communication that does not wait for what it sends", list(errors)))
    # Where passes are launched together, none of them can be late by itself.
    apart = [kind for kind in kinds if options.ranks is None or kind in ("slots", "eager")]
    faults[1:1] = [("one dependency left out", [run for run in errors if run[1] == kind]) for kind in apart]
    noticed = []
    for fault, of_runs in faults:
        left_s = options.budget_s - (time.monotonic() - began)
        noticed += [is_noticed(fault, runs, of_runs, left_s)] if of_runs and runs.is_alive() else []
    return 1 if failed or not all(noticed) else 0


def is_noticed(fault: str, runs: Runs, of_runs: Sequence[tuple[int, str]], left_s: float) -> bool:
    """Whether a run fails with a fault."""
    noticed: list[bool] = []
    began = time.monotonic()
    for seed, kind in of_runs:
        if time.monotonic() - began > left_s or sum(noticed) >= 3:
            break
        try:
            error, has_fault = runs.run(seed, kind, fault=fault)
            noticed += [error > 1] if has_fault else []  # else no lane of this plan waits for another
        except Exception as error:  # an index out of range, for example, made of memory not written yet
            print(f"seed {seed} with {fault}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            noticed.append(True)
            if "CUDA error" in str(error):
                break
    kinds = ", ".join(sorted({kind for _, kind in of_runs}))
    print(f"{fault} ({kinds}): {sum(noticed)} of {len(noticed)} runs fail, expected at least one", flush=True)
    return any(noticed)


if __name__ == "__main__":
    from gpu import lanes  # by this name, processes of a pool find it

    sys.exit(lanes.main())
