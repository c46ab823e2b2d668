"""Random layouts and items of encoders in parts, planned at every memory that admits a schedule: no deadlock.

    python -m tests.layouts                        10,000 layouts
    python -m tests.layouts --cases 2000 --first 500 --processes 8 --budget-s 300 -o layouts.json

A case is a small model, a cluster, items of random lengths, a layout and a planner, all drawn by its number. It is
planned with as much memory as it likes and then with less and less of what it took, until it is refused. The first
thousand cases and an eighth of the others are planned as users plan, some of these with a search; the rest have one
random timing of parts, where a planner takes the best of some fifty, so that orders are proved which are rarely the
best. Every plan is checked and its program verified, as planned and as the runtime lowers it, with the owners of all
weights, and with and without a sharded optimizer; `verify` proves that it neither deadlocks nor reads data that it does
not have.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spindle.cluster import cluster_named
from spindle.errors import DoesNotFitError
from spindle.plan import Plan, check
from spindle.planners import Layout, PlanOptions, make_plan, owning_ranks_in
from spindle.planners.colocate.columns import EVERYTHING, STRICT
from spindle.planners.colocate.layouts import layouts_with
from spindle.planners.colocate.planner import Rules, plan_by_rules
from spindle.planners.options import DEDICATED, FIRST, REPLICATED
from spindle.planners.pipeline.rank_parameters import held_bytes
from spindle.profile import Profile
from spindle.program import lower, posted_peaks, verify
from spindle.recipes import MultimodalModel, emulator, parts_profile
from spindle.recipes.multimodal import language_chain, vit_chain
from spindle.simulate import simulate
from spindle.workload import LANGUAGE, VISION, Microbatch

SHARES = (0.8, 0.6, 0.45, 0.3, 0.2, 0.12, 0.06, 0.03, 0.01)  # of what activations took


@dataclass(frozen=True, slots=True)
class Case:
    """A layout of a model, and a step of it."""

    number: int
    planner: str
    profile: Profile
    layout: Layout
    rules: Rules | None  # those of the planner, unless given
    evaluations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How many plans of a case there were, and at which share of its memory it was refused; or what went wrong."""

    number: int
    num_plans: int
    placement: str
    refused_at: float | None = None
    error: str | None = None


def case_of(number: int) -> Case:
    choose = random.Random(number)
    degree, num_ranks, num_replicas = (
        choose.choice([1, 1, 2, 4]),
        choose.choice([1, 2, 2, 3, 4]),
        choose.choice([1, 1, 2]),
    )
    model = MultimodalModel(
        name="small",
        description="",
        chains=(
            vit_chain(choose.randint(1, 4), 256, 1024, 8, 512),
            language_chain(choose.randint(max(2, num_ranks), 9), 512, 1024, 8, 1000),
        ),
        tensor_degree=degree,
        num_stages=num_ranks,
        cluster_name="h800x8",
    )
    num_devices = degree * num_ranks * num_replicas
    machines = cluster_named(f"h800x{8 * math.ceil(num_devices / 8)}")
    sizes = [choose.choice([4, 8]) for _ in range(num_devices)]
    islands = []
    while num_devices:  # islands that need not be full, in whole tensor groups
        islands.append(replace(machines.islands[0], num_devices=min(num_devices, max(degree, sizes.pop()))))
        num_devices -= islands[-1].num_devices
    most = choose.choice([1, 3, 8])
    batch = []
    for _ in range(choose.randint(num_replicas, 3 * num_replicas + 3)):
        lengths = tuple(
            min(16384, max(16, round(choose.lognormvariate(math.log(1500), 1)))) for _ in range(choose.randint(0, most))
        )
        batch.append(Microbatch(instances=(*(((VISION, lengths),) if lengths else ()), (LANGUAGE, (1024,)))))
    if len(batch[0].instances) == 1:  # else nothing runs in parts
        batch[0] = Microbatch(instances=((VISION, (choose.randint(16, 4096),)), (LANGUAGE, (1024,))))
    cluster = replace(machines, islands=tuple(islands))
    profile = parts_profile(model, batch, choose.choice([1, 1, 1500, 6000]), cluster, emulator(cluster))
    placements = [REPLICATED, FIRST] + [DEDICATED] * (num_ranks > 1)
    layouts = layouts_with(profile, num_ranks, (choose.choice(placements),), choose.random() < 0.5)
    planner = choose.choice(["colocate", "colocate", "upfront"])
    layout, rules = choose.choice(layouts), None
    if number >= 1000 and number % 8:
        rules = Rules(
            num_blocks=choose.choice([(1,), (2, 1), (4, 1), (EVERYTHING,)]),  # one block for few microbatches
            ahead=(choose.choice([0, 1, 2, EVERYTHING]),),
            lag=(choose.choice([0, 2, EVERYTHING]),),
            slack=(choose.choice([STRICT, 0, 1, 2, 4]),),
            num_split=(choose.choice([0, 2, EVERYTHING]),),
            longest=(choose.choice([0, 25, 50]),),
            num_relevels=choose.choice([0, 2]),
            sequence_groups=choose.random() < 0.8,
            is_in_turn=choose.random() < 0.1,
            light_ends=choose.random() < 0.5,
        )
    evaluations = 20 if number % 16 == 0 else 1
    return Case(number, planner, profile, layout, rules, evaluations)


def planned(case: Case, profile: Profile) -> Plan:
    """The plan of a case, in a profile with so much memory. `prove` checks and verifies it."""
    options = PlanOptions(layouts=(case.layout,), bound_s=1e-9, evaluations=case.evaluations, is_draft=True)
    if case.rules is None:
        return make_plan(profile, case.planner, options)
    return plan_by_rules(profile, options, case.planner, case.rules, ())


def outcome_of(number: int) -> Outcome:
    num_plans, placement, share = 0, "", 1.0
    try:
        case = case_of(number)
        layout, profile = case.layout, case.profile
        placement = layout.chains[0].placement
        held = int(held_bytes(profile, layout)[0].max())
        taken = 0
        for share in (1.0, *SHARES):
            limited = profile
            if taken:
                limited = replace(profile, cluster=profile.cluster.with_memory(held + max(1, int(share * taken))))
            try:
                plan = planned(case, limited)
            except DoesNotFitError:
                return Outcome(number=number, num_plans=num_plans, placement=placement, refused_at=share)
            peak = prove(plan, limited, layout)
            taken = taken or max(1, peak - held)
            num_plans += 1
        return Outcome(number=number, num_plans=num_plans, placement=placement)
    except Exception:
        error = f"at {share} of its memory:\n{traceback.format_exc()}"
        return Outcome(number=number, num_plans=num_plans, placement=placement, error=error)


def prove(plan: Plan, profile: Profile, layout: Layout) -> int:
    """Check a plan and verify its programs. Returns the bytes of the fullest device."""
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    owners = owning_ranks_in(profile.graph, layout)
    owned = replace(program, owning_ranks=tuple(sorted(owners.items())))
    peaks = simulate(program, profile).peak_bytes()
    peak = max(int(peaks.max()), int(posted_peaks(owned, profile, range(profile.cluster.num_devices)).max()))
    assert peak <= profile.cluster.kind.memory_bytes, f"{peak} bytes of {profile.cluster.kind.memory_bytes}"
    degrees = {degree for _, degree in plan.tensor_degrees}
    if degrees <= {1}:  # as the runtime has them so far
        verify(lower(plan, profile, owning_ranks=owners), profile)
        free = replace(profile, cluster=profile.cluster.with_memory(1 << 50))
        verify(lower(replace(plan, shard_optimizer=not plan.shard_optimizer), free, owning_ranks=owners), free)
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begins no case after it")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("forkserver").Pool(arguments.processes) as pool:
        numbers = range(arguments.first, arguments.first + arguments.cases)
        for outcome in pool.imap_unordered(outcome_of, numbers, chunksize=4):
            outcomes.append(outcome)
            if outcome.error is not None:
                print(f"case {outcome.number}, {outcome.error}", file=sys.stderr, flush=True)
            if len(outcomes) % 500 == 0:
                print(f"{len(outcomes)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if time.monotonic() - began > arguments.budget_s:
                break
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    placements = Counter(outcome.placement for outcome in outcomes)
    summary = {
        "cases": len(outcomes),
        "first": arguments.first,
        "plans": sum(outcome.num_plans for outcome in outcomes),
        "refused_at_some_memory": sum(outcome.refused_at is not None for outcome in outcomes),
        "never_planned": sum(not outcome.num_plans for outcome in outcomes),
        "placements": dict(sorted(placements.items())),
        "failed": [asdict(outcome) for outcome in failed],
        "wall_s": round(time.monotonic() - began, 1),
    }
    text = json.dumps(summary, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
