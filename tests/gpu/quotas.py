"""SM quotas on one GPU: python tests/gpu/quotas.py [--runs 12] [--budget-s 60] [--output FILE.json]

How the driver splits the SMs; on which SMs kernels of each partition run, on streams, in captured graphs, and in graphs
made of those; whether partitions run at the same time; and how long a matrix product takes on each.

Then random workloads under random lane plans with random quotas, in one graph for the step, in graphs of slots, and in
regions made of those, with random delays and all memory of graphs filled with NaN: losses and gradients must be those
of one process (float64 to 1e-9, half of the runs in float32 to 1e-5), and every instruction must run on the SMs of its
lane alone. In float32, what `lanes.tolerance_of` says is tolerated.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parent.parent / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

import programs  # noqa: E402
from lanes import NUM_STEPS, NUM_WORKLOADS, delays, dtype_of, poisoned, tolerance_of  # noqa: E402
from spindle.cluster import SmGroups  # noqa: E402
from spindle.profile import Profile, SmTimes  # noqa: E402
from spindle.run import green_contexts, partitions, sm_groups  # noqa: E402
from spindle.run.composed_graph import ComposedGraph  # noqa: E402
from spindle.run.lanes import Lanes  # noqa: E402

MAX_SMS = 1024


def seen(counters: torch.Tensor) -> frozenset[int]:
    return frozenset(torch.nonzero(counters).flatten().tolist())


def sms_in_graph(streams: Sequence[torch.cuda.Stream], *, composed: bool) -> list[frozenset[int]]:
    """The SMs of each stream in one graph, launched on another stream."""
    counters = [torch.zeros(MAX_SMS, dtype=torch.int32, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    if composed:
        whole = ComposedGraph()
        for number, (stream, counter) in enumerate(zip(streams, counters, strict=True)):
            child = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.stream(stream):
                child.capture_begin(capture_error_mode="thread_local")
                green_contexts.note_sm(counter, stream)
                child.capture_end()
            whole.add(number, child, ())
        whole.instantiate()
        whole.replay()
    else:
        captured(streams, lambda number: green_contexts.note_sm(counters[number], streams[number])).replay()
    torch.cuda.synchronize()
    return [seen(counter) for counter in counters]


def captured(streams: Sequence[torch.cuda.Stream], launch: Any) -> torch.cuda.CUDAGraph:
    """What is launched on each stream, as branches of one graph."""
    main, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(main):
        graph.capture_begin(capture_error_mode="thread_local")
        for stream in streams:
            stream.wait_stream(main)
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                launch(number)
        for stream in streams:
            main.wait_stream(stream)
        graph.capture_end()
    return graph


def products_ms(streams: Sequence[torch.cuda.Stream], size: int) -> float:
    """Ten products of matrices on each stream at once, as one graph, by ten."""
    pairs = [[torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in streams]
    torch.cuda.synchronize()

    def launch(number: int, times: int = 10) -> None:
        for _ in range(times):
            pairs[number][0] @ pairs[number][1]

    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            launch(number, 1)
    torch.cuda.synchronize()
    graph = captured(streams, launch)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / 30, 4)


def check_partitions(groups: SmGroups) -> list[str]:
    """What is wrong with partitions of this GPU."""
    wrong = []
    half = groups.num_groups // 2
    for quotas in (
        (half * groups.group_sms, half * groups.group_sms),
        ((half + 1) * groups.group_sms, (groups.num_groups - half - 1) * groups.group_sms + groups.rest_sms),
        (3 * groups.group_sms,) * 4,
    ):
        streams = [partition.stream for partition in partitions(quotas)]  # refuses what overlaps
        own = [partition.sms for partition in partitions(quotas)]
        for composed in (False, True):
            if sms_in_graph(streams, composed=composed) != own:
                wrong.append(f"quotas {quotas}: other SMs in a {'composed' if composed else 'captured'} graph")
        alone = [[products_ms([stream], size) for stream in streams] for size in (512, 4096)]
        together = [products_ms(streams, size) for size in (512, 4096)]
        print(f"quotas {quotas}: products alone {alone} ms, at once {together} ms", flush=True)
        if together[1] > 0.8 * sum(alone[1]):
            wrong.append(f"quotas {quotas}: partitions do not run at the same time")
    return wrong


@contextmanager
def random_quotas(seed: int, groups: SmGroups) -> Iterator[list[Any]]:
    """Inside, lane plans have quotas; yields a list of the plan that was made."""
    numbers, made, unlimited = random.Random(seed), [], programs.plan_named

    def with_quotas(*arguments: Any) -> Any:
        plan, profile = unlimited(*arguments)
        if plan.num_lanes > 1:
            counts = [1] * plan.num_lanes
            for _ in range(numbers.randint(0, groups.num_groups - plan.num_lanes)):
                counts[numbers.randrange(plan.num_lanes)] += 1
            rest = numbers.randrange(plan.num_lanes)
            quotas = [count * groups.group_sms + groups.rest_sms * (lane == rest) for lane, count in enumerate(counts)]
            plan, profile = replace(plan, quotas=tuple(quotas)), with_sm_times(profile, groups)
        made.append(plan)
        return plan, profile

    with mock.patch.object(programs, "plan_named", with_quotas):
        yield made


def with_sm_times(profile: Profile, groups: SmGroups) -> Profile:
    """The profile with any times on any number of SMs, which legal plans have."""
    sm_times = SmTimes(num_sms=(1, groups.num_sms), forward=(1.0, 1.0), backward=(1.0, 1.0))
    kind = replace(profile.cluster.kind, sm_groups=groups)
    islands = tuple(replace(island, kind=kind) for island in profile.cluster.islands)
    curves = tuple(tuple(replace(curve, sm_times=sm_times) for curve in choices) for choices in profile.curves)
    return replace(profile, curves=curves, cluster=replace(profile.cluster, islands=islands))


@contextmanager
def noted_sms() -> Iterator[dict[int, torch.Tensor]]:
    """Inside, each instruction of a slot notes the SMs on which its stream runs, by lane."""
    unnoted, counters = Lanes.on_stream_of, {}
    for lane in range(8):
        counters[lane] = torch.zeros(MAX_SMS, dtype=torch.int32, device="cuda")

    @contextmanager
    def noted(lanes: Lanes, position: int) -> Iterator[None]:
        with unnoted(lanes, position):
            if lanes._streams and lanes._lane_at[position] != lanes._common_lane:
                green_contexts.note_sm(counters[lanes._lane_at[position]], torch.cuda.current_stream())
            yield

    with mock.patch.object(Lanes, "on_stream_of", noted):
        yield counters


def run(seed: int, kind: str, groups: SmGroups) -> dict[str, Any]:
    """The largest error of a run, as a multiple of what is tolerated, and the SMs of its lanes."""
    workload = f"{'float32 ' * (dtype_of(seed) == 'float32')}random {seed % NUM_WORKLOADS}"
    tolerance = tolerance_of(seed, workload)
    with random_quotas(seed, groups) as made, noted_sms() as counters, delays(seed), poisoned(pools=True):
        ran = programs.compare_steps(
            0,
            1,
            workload,
            f"plan {seed} lanes",
            NUM_STEPS,
            device="cuda",
            step_graphs=kind == "whole steps",
            regions=kind == "regions",
        )
    torch.cuda.synchronize()
    (plan,) = made
    errors = [error for error, _ in ran.comparison.largest.values()]
    error = math.inf if any(map(math.isnan, errors)) else max(errors) / tolerance
    own = [partition.sms for partition in partitions(plan.quotas)] if plan.quotas else []
    return {
        "error": error,
        "tolerance": tolerance,
        "quotas": plan.quotas,
        "ran": kind if ran.captured or ran.has_step_graph else "eager",
        "other SMs": sum(seen(counters[lane]) != sms for lane, sms in enumerate(own)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run, to resume")
    parser.add_argument("--budget-s", type=float, default=math.inf)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    began = time.monotonic()
    torch.zeros(1, device="cuda")
    groups = sm_groups(torch.cuda.current_device())
    if groups is None:
        print("this driver has no green contexts")
        return 1
    print(f"{groups}, {groups.num_sms} SMs", flush=True)
    wrong = check_partitions(groups)
    runs: dict[int, dict[str, Any]] = {}
    for seed in range(options.first, options.first + options.runs):
        if time.monotonic() - began > options.budget_s:
            break
        try:
            runs[seed] = run(seed, ("whole steps", "regions", "slots")[seed % 3], groups)
        except Exception:
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
            wrong.append(f"seed {seed} failed")
            break  # CUDA may be in an error that stays
        print(f"seed {seed} ({dtype_of(seed)}): {runs[seed]}", flush=True)
    with_quotas = [result for result in runs.values() if result["quotas"]]
    wrong += [f"seed {seed}: {result}" for seed, result in runs.items() if result["error"] > 1 or result["other SMs"]]
    print(
        f"{len(with_quotas)} runs with quotas of {len(runs)}: largest error "
        f"{max((result['error'] for result in with_quotas), default=math.nan):.2g} of what is tolerated, "
        f"{sum(result['other SMs'] for result in with_quotas)} lanes on other SMs than their own",
        flush=True,
    )
    for text in wrong:
        print(f"WRONG: {text}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({"runs": runs, "wrong": wrong}, indent=1))
    return 1 if wrong or not with_quotas else 0


if __name__ == "__main__":
    sys.exit(main())
