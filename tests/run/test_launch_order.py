"""Communication in one order for all ranks, as NCCL needs it: every legal program has one, and running by it gives the
numbers of one process. The runs are on gloo, which does not ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from spindle.cluster import cluster_named
from spindle.errors import ProgramError
from spindle.graph import metagraph_of
from spindle.planners import PlanOptions, make_plan
from spindle.profile import roofline_profile
from spindle.program import Program, launch_order, launches_collectives, lower, verify
from spindle.program.instances import needed_pairs
from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.program.program import Lane
from spindle.recipes import RECIPES
from sweeps import spread


def clip_program() -> tuple[Program, object]:
    recipe = RECIPES["clip-4"]
    profile = roofline_profile(metagraph_of(recipe.workload()), cluster_named("a800x8"), recipe.roofline)
    return lower(make_plan(profile, "paper"), profile), profile


def test_the_order_holds_every_rank_s_lanes_and_what_data_needs():
    program, _ = clip_program()
    place = launch_order(program)
    assert sorted(place.tolist()) == list(range(len(program.instructions)))
    for lane in program.lanes:
        for rank in range(program.num_ranks):
            assert (np.diff(place[lane.of_rank(rank)]) > 0).all()


def runs_one_at_a_time(program: Program) -> bool:
    """Whether all ranks get to the end if each runs its communication strictly one operation after the other, in the
    common order, and each operation waits for all its ranks."""
    place = launch_order(program)
    num_ranks = program.num_ranks
    compute = [program.lanes[COMPUTE].of_rank(rank).tolist() for rank in range(num_ranks)]
    launches = []
    for rank in range(num_ranks):
        inside = [number for number in compute[rank] if launches_collectives(program, program.instructions[number])]
        lanes = (program.lanes[lane].of_rank(rank).tolist() for lane in (TRANSFER, SYNC))
        launches.append(
            sorted((number for lane in (*lanes, inside) for number in lane), key=lambda number: place[number])
        )
    has = [set(some) | set(more) for some, more in zip(compute, launches, strict=True)]
    ranks_of = {number: [r for r in range(num_ranks) if number in has[r]] for numbers in has for number in numbers}
    needs: dict[int, list[int]] = {}
    for made, needed in needed_pairs(program).tolist():
        needs.setdefault(needed, []).append(made)
    done: list[set[int]] = [set() for _ in range(num_ranks)]

    def can_run(number: int, rank: int) -> bool:
        is_next = all(
            next((first for first in lists[rank] if first not in done[rank]), None) == number
            for lists in (compute, launches)
            if number in lists[rank]
        )
        return is_next and all(need in done[rank] for need in needs.get(number, ()) if need in has[rank])

    is_moving = True
    while is_moving:
        is_moving = False
        for number, ranks in ranks_of.items():
            meets = any(number in launches[rank] for rank in ranks)
            able = [rank for rank in ranks if number not in done[rank] and can_run(number, rank)]
            for rank in able if not meets or len(able) == len(ranks) else ():
                done[rank].add(number)
                is_moving = True
    return done == has


@pytest.mark.parametrize(
    ("name", "cluster", "planner", "shards"),
    [
        ("clip-4", "a800x8", "wavefront", False),
        ("clip-10", "a800x8", "paper", True),
        ("qwen-val-3", "a800x8", "sequential", None),  # tensor parallel
        ("ofasys-4", "a800x8", "task-level", False),
    ],
)
def test_communication_may_run_one_operation_at_a_time(name, cluster, planner, shards):
    recipe = RECIPES[name]
    profile = roofline_profile(metagraph_of(recipe.workload()), cluster_named(cluster), recipe.roofline)
    plan = make_plan(profile, planner, PlanOptions(evaluations=200, shard_optimizer=shards))
    assert runs_one_at_a_time(lower(plan, profile))


def test_two_ranks_that_sum_in_different_orders_are_refused():
    program, profile = clip_program()
    lane = program.lanes[SYNC]
    ranks = [lane.of_rank(rank) for rank in range(2)]
    first, second = [number for number in ranks[0] if number in ranks[1]][:2]
    instructions = lane.instructions.copy()
    begin, end = lane.starts[0], lane.starts[1]
    swapped = {first: second, second: first}
    instructions[begin:end] = [swapped.get(number, number) for number in instructions[begin:end]]
    wrong = Lane(starts=lane.starts, instructions=instructions)
    lanes = (*program.lanes[:SYNC], wrong, *program.lanes[SYNC + 1 :])
    with pytest.raises(ProgramError, match=r"in different orders, which can deadlock under NCCL: [SG]"):
        launch_order(replace(program, lanes=lanes))
    with pytest.raises(ProgramError):
        verify(replace(program, lanes=lanes), profile)


def test_collectives_inside_layers_have_their_place_in_it():
    recipe = RECIPES["qwen-val-3"]
    profile = roofline_profile(metagraph_of(recipe.workload()), cluster_named("a800x32"), recipe.roofline)
    program = lower(make_plan(profile, "sequential"), profile)
    assert any(launches_collectives(program, instruction) for instruction in program.instructions)
    launch_order(program)


# Runs.


def in_launch_order(rank: int, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function with communication launched as under NCCL: in one order on all ranks, each exchange whole."""
    from spindle.run import World

    with mock.patch.object(World, "launches_in_order", True):
        return function(rank, num_ranks, *arguments)


@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        *((2 + seed % 3, (f"random {seed}", f"plan {seed}", 3, 1.0)) for seed in spread(range(6), 3)),
        (4, ("everything", "plan 4", 3)),
        (3, ("everything", "paper", 3)),
    ],
)
def test_steps_launched_in_that_order_have_the_numbers_of_one_process(pool, num_ranks, arguments):
    from comparison import assert_close
    from programs import compare_steps

    answers = pool.run(num_ranks, in_launch_order, compare_steps, *arguments)
    assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient"))


def test_tensor_groups_pipelines_and_sharded_optimizers_match_when_launched_in_that_order(pool):
    from comparison import assert_close
    from microbatches import Case, run_pipeline
    from tensor_parallel import sharing
    from trainings import Fit, assert_trained, train

    fits = [Fit(steps=2, degrees={"language": degree}, plan=f"plan {seed}") for degree, seed in ((2, 7), (4, 8))]
    assert_trained(pool.run(4, in_launch_order, train, sharing("own", *fits)))
    for case in (
        Case(seed=6, num_ranks=3, steps=2, forms=False, split=0.5, lean=0.4),
        Case(seed=8, num_ranks=4, num_replicas=2, shares_order=True, shards=True, steps=2),
    ):
        answers = pool.run(case.num_ranks, in_launch_order, run_pipeline, case)
        assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient", "parameter"))
