"""The runtime on real gloo processes: the same numbers as one process. One pool of processes serves all tests.

Tolerance: float64 to 1e-9, float32 to 1e-5.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import zoo  # noqa: E402
from backends import graphs_on_any_device, on_gpu, rank_device, to_device  # noqa: E402
from comparison import assert_close  # noqa: E402
from lane_races import edge_left_out, released_early  # noqa: E402
from programs import Run, compare_steps, executor_of, steps_alike, traced_on_rank_0  # noqa: E402
from spindle.run import MicroStep  # noqa: E402
from spindle.run.pytrees import signature_of  # noqa: E402
from sweeps import RUNS_ALL, alternating, chosen, spread  # noqa: E402
from trainings import Fit, adamw, assert_trained, sgd, train, training_of  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

STEPS = 3
REPLAYED_STEPS = 7  # one that checks losses, two launched one by one, one captured, three replayed
SMALL_CHUNKS = 1.0  # bytes: every layer's backward is a chunk of its own
NUM_RANDOM_WORKLOADS = 18
WRITTEN_WORKLOADS = [name for name in WORKLOADS if name != "everything"]
PLANNERS = ("wavefront", "paper", "sequential", "distmm", "task-level")


def assert_same(answers: list[Run]) -> None:
    assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient"))


# Below, every kind is run step by step before its slots are captured, with batches that are all alike.
@pytest.mark.parametrize("kind", spread(zoo.KINDS, 3))
def test_every_kind_of_module_gives_the_numbers_of_one_process(pool, kind):
    number = list(zoo.KINDS).index(kind)
    loss = zoo.LOSSES[number % len(zoo.LOSSES)]
    assert_same(pool.run(2 + number % 3, compare_steps, f"{kind} {loss}", f"plan {number}", STEPS, SMALL_CHUNKS))


@pytest.mark.parametrize("kind", ["in-place", "written", "normals", "unused", "shaped"])
def test_recomputed_layers_give_the_numbers_of_one_process(pool, kind):
    for plan in spread((1, 2), 2):
        assert_same(pool.run(3, compare_steps, f"{kind} tokens", f"plan {plan} recomputed", STEPS))


# Tests below have the others, replayed or trained.
@pytest.mark.parametrize("seed", chosen([6, 9, 10, 11, 14, 16, 17], *[0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 15]))
def test_random_legal_plans_give_the_numbers_of_one_process(pool, seed):
    plan = seed % 2
    num_ranks = 1 + (seed + plan) % 6
    chunk_bytes = SMALL_CHUNKS if plan else 64e6
    assert_same(pool.run(num_ranks, compare_steps, f"random {seed}", f"plan {seed + 100 * plan}", STEPS, chunk_bytes))


# Without a GPU lanes are orders: here, those that come of running each slot as early as its lane allows.
@pytest.mark.parametrize("seed", chosen([2, 5, 8], *[0, 1, 3, 4, 6, 7, *range(9, 20)]))
def test_lanes_give_the_numbers_of_one_process(pool, seed):
    plan = f"plan {seed} lanes"
    assert_same(pool.run(1 + seed % 3, compare_steps, f"random {seed % NUM_RANDOM_WORKLOADS}", plan, STEPS))


NUM_ORDERS = 20 if RUNS_ALL else 2


# And any other order in which a GPU might run them: each plan in random interleavings of its lanes.
@pytest.mark.skipif(on_gpu(), reason="a GPU chooses the order by itself")
@pytest.mark.parametrize("seed", chosen([3, 7, 10], *[0, 1, 2, 4, 5, 6, 8, 9, *range(11, 20)]))
def test_weight_lanes_give_the_numbers_of_one_process_in_any_order(pool, seed):
    workload, plan = f"random {seed % NUM_RANDOM_WORKLOADS}", f"plan {seed} weight lanes"
    for order in range(NUM_ORDERS):
        chunk_bytes = SMALL_CHUNKS if order % 2 else 64e6
        assert_same(pool.run(1 + seed % 3, compare_steps, workload, plan, 1, chunk_bytes, order=seed * 20 + order))


@pytest.mark.parametrize(
    ("workload", "num_ranks"), alternating([name for name in WORKLOADS if name != "everything"], 2, 5)
)
def test_workloads_as_people_write_them_give_the_numbers_of_one_process(pool, workload, num_ranks):
    assert_same(pool.run(num_ranks, compare_steps, workload, f"plan {num_ranks}", STEPS))


def test_the_random_workloads_have_all_there_is_between_them():
    workloads = [zoo.random_workload(seed) for seed in range(NUM_RANDOM_WORKLOADS)]
    assert {kind for workload in workloads for kind in workload.kinds} == set(zoo.KINDS)
    assert {loss for workload in workloads for loss in workload.losses} == set(zoo.LOSSES)
    assert {len(workload.tasks) for workload in workloads} == {1, 2, 3, 4}
    assert any(workload.ties for workload in workloads)
    sizes = {task.batch_size for workload in workloads for task in workload.tasks}
    assert {1, 2, 3, 5, 7, 9} <= sizes
    for workload in workloads:
        assert len({workload.batches(step)["task0"]["x"].shape for step in range(6)}) > 1


@pytest.mark.parametrize(
    ("planner", "num_ranks"), chosen(alternating(PLANNERS, 3, 6), *[(planner, 2) for planner in PLANNERS])
)
def test_every_planners_plan_gives_the_numbers_of_one_process(pool, planner, num_ranks):
    assert_same(pool.run(num_ranks, compare_steps, "everything", planner, STEPS))


@pytest.mark.parametrize(("planner", "workload"), alternating(PLANNERS, (3, 6), (5, 3)))
def test_every_planners_plan_of_a_random_workload_gives_the_numbers_of_one_process(pool, planner, workload):
    seed, num_ranks = workload
    assert_same(pool.run(num_ranks, compare_steps, f"random {seed}", planner, STEPS))


# Captured slots, replayed without CUDA. Here, because the pool knows these workloads from above.


def assert_replayed(answers: list[Run], allowed: tuple[str, ...] = ("random", "counts")) -> None:
    """As above; and some slots were captured, and all others have a reason that is allowed."""
    assert_same(answers)
    assert sum(answer.captured for answer in answers) > 0
    for answer in answers:
        for slot, reason in answer.without_graph.items():
            assert any(word in reason for word in allowed), (slot, reason)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_kind_of_module_gives_the_same_when_replayed(pool, kind):
    number = list(zoo.KINDS).index(kind)
    loss = zoo.LOSSES[number % len(zoo.LOSSES)]
    chunk_bytes = SMALL_CHUNKS if number % 2 else 64e6
    answers = pool.run(
        1 + number % 3, compare_steps, f"{kind} {loss}", f"plan {number}", REPLAYED_STEPS, chunk_bytes, captures=True
    )
    # Which expert a sample goes to is asked for on the way: that cannot be captured, and goes on as before.
    assert_replayed(answers, allowed=("random", "counts", *(("capturing",) if kind == "experts" else ())))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_custom_kernels_see_real_tensors_only(pool, num_ranks):
    """A Triton kernel on a GPU, captured; on a CPU, where a replay would not see it, a copy through addresses."""
    arguments = (num_ranks, compare_steps, "kernel tokens", "plan 3", REPLAYED_STEPS)
    if on_gpu():
        assert_replayed(pool.run(*arguments, captures=True))
    else:
        assert_same(pool.run(*arguments))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 7])  # 6 has hardly two batches of the same shapes
def test_random_workloads_give_the_same_when_replayed(pool, seed):
    chunk_bytes = SMALL_CHUNKS if seed % 2 else 64e6
    assert_replayed(
        pool.run(
            1 + seed % 4, compare_steps, f"random {seed}", f"plan {seed}", REPLAYED_STEPS, chunk_bytes, captures=True
        )
    )


@pytest.mark.parametrize("plan", ["plan 3 lanes", "plan 3 weight lanes", "plan 4"])
def test_whole_steps_of_a_rank_alone_are_one_graph(pool, plan):
    answers = pool.run(1, compare_steps, "random 4", plan, REPLAYED_STEPS, SMALL_CHUNKS, captures=True)
    assert_replayed(answers)
    assert answers[0].has_step_graph


# Weight gradients are graphs of their own, in one graph for the whole step or in one for each slot.
@pytest.mark.parametrize("step_graphs", [True, False])
@pytest.mark.parametrize("seed", chosen([0, 3, 5], *[1, 2, 4, 7, 9, 12]))
def test_weight_lanes_give_the_same_when_replayed(pool, seed, step_graphs):
    arguments = f"random {seed}", f"plan {seed} weight lanes", REPLAYED_STEPS, SMALL_CHUNKS
    answers = pool.run(1, compare_steps, *arguments, captures=True, step_graphs=step_graphs)
    assert_replayed(answers)
    assert not answers[0].has_step_graph or step_graphs


# With several ranks, or where not all slots can be captured, passes between messages are launched together.
@pytest.mark.parametrize("seed", chosen([2, 3, 4], *[0, 1, 7]))
def test_lanes_of_several_ranks_give_the_same_when_replayed_in_regions(pool, seed):
    kind = "lanes" if seed % 2 else "weight lanes"
    arguments = f"random {seed}", f"plan {seed} {kind}", REPLAYED_STEPS, SMALL_CHUNKS
    answers = pool.run(1 + seed % 3, compare_steps, *arguments, captures=True, step_graphs=False)
    assert_replayed(answers)
    assert any(answer.region_sizes for answer in answers)


def compare_with_late_instruction(rank: int, num_ranks: int, number: int, stays: bool, step_graphs: bool) -> Run:
    """Whole steps of a plan with weight lanes, as one composed graph or as regions, in which one instruction is late.
    What needs it waits only if the dependency `stays`."""
    with edge_left_out(number, stays=stays) as left_out:
        run = compare_steps(
            rank,
            num_ranks,
            "random 4",
            "plan 4 weight lanes",
            REPLAYED_STEPS,
            SMALL_CHUNKS,
            captures=True,
            step_graphs=step_graphs,
        )
    assert left_out.edge is not None
    assert run.has_step_graph == step_graphs
    return run


# Between forward passes, input and weight gradients of a chunk, and backward passes of two slots.
@pytest.mark.parametrize(("number", "step_graphs"), [(2, True), (4, True), (12, True), (2, False)])
def test_a_dependency_between_lanes_that_is_left_out_is_noticed(pool, number, step_graphs):
    if on_gpu():
        pytest.skip("tests/gpu/lanes.py does this with delays")
    (answer,) = pool.run(1, compare_with_late_instruction, number, False, step_graphs)
    errors = [error for error, _ in answer.comparison.largest.values()]
    assert any(not error < 1e-3 for error in errors)
    assert_same(pool.run(1, compare_with_late_instruction, number, True, step_graphs))


def compare_with_late_weights(rank: int, num_ranks: int, number: int, stays: bool) -> Run:
    """Whole steps of a plan with weight lanes, whose weight gradients are late. What they read is released early unless
    it `stays`."""
    with released_early(stays=stays) as released:
        arguments = f"random {number}", f"plan {number} weight lanes", REPLAYED_STEPS, SMALL_CHUNKS
        run = compare_steps(rank, num_ranks, *arguments, captures=True)
    assert run.has_step_graph
    assert released.late
    assert (released.count > 0) == (not stays)
    return run


@pytest.mark.parametrize("number", chosen([1], 0, 4))
def test_memory_of_weight_gradients_that_is_released_early_is_noticed(pool, number):
    if on_gpu():
        pytest.skip("tests/gpu/lanes.py does this with delays")
    (answer,) = pool.run(1, compare_with_late_weights, number, False)
    assert any(math.isnan(error) for error, _ in answer.comparison.largest.values())
    assert_same(pool.run(1, compare_with_late_weights, number, True))


def accumulate_over_other_tasks(rank: int, num_ranks: int, plan: str) -> tuple[bool, bool, list[str]]:
    """Micro-steps of all tasks, then of one, captured and not. Returns whether steps are graphs, and regions, and the
    gradients that differ."""
    traced = traced_on_rank_0(rank, num_ranks, "random 3", str(rank_device()))
    device = str(rank_device())
    tasks = frozenset(traced.graph.tasks)
    first = min(tasks)
    gradients: list[list[Any]] = []
    for captures in (False, True):
        executor = executor_of(traced, plan, rank, num_ranks, device)
        executor.graph_cache.is_enabled = captures
        for path, parameter in traced.bound.parameters.items():
            parameter.data.copy_(traced.weights[path])
            parameter.grad = None
        gradients.append([])
        with graphs_on_any_device() if captures and device == "cpu" else nullcontext():
            for number in steps_alike(traced.workload, REPLAYED_STEPS):
                batches = to_device(traced.workload.batches(number), device)
                signatures = {task: signature_of(batch) for task, batch in batches.items()}
                micro_steps = [(batches, signatures), ({first: batches[first]}, {first: signatures[first]})]
                for micro_step, given in enumerate(micro_steps):
                    executor.step(number, *given, micro_step=MicroStep(micro_step, 2, tasks), timed=False)
                copies = {
                    path: None if parameter.grad is None else parameter.grad.clone()
                    for path, parameter in traced.bound.parameters.items()
                }
                gradients[-1].append(copies)
    different = [
        f"{path} in step {number}"
        for number, (eager, captured) in enumerate(zip(*gradients, strict=True))
        for path, expected in eager.items()
        if (expected is None) != (captured[path] is None)
        or (expected is not None and not torch.allclose(expected, captured[path], rtol=1e-9, atol=1e-12))
    ]
    return executor.graph_cache.has_step_graph, bool(executor.graph_cache.region_sizes), different


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 3"), (2, "plan 3 weight lanes")])
def test_gradients_of_tasks_that_a_captured_micro_step_leaves_out_stay(pool, num_ranks, plan):
    kind = (True, False) if num_ranks == 1 else (False, True)
    assert pool.run(num_ranks, accumulate_over_other_tasks, plan) == [(*kind, [])] * num_ranks


def test_a_step_that_cannot_be_one_graph_has_one_for_each_slot(pool):
    # As many as with one graph: the step after the one that could not be captured captures slot by slot.
    (answer,) = pool.run(1, compare_steps, "experts tokens", "plan 3", REPLAYED_STEPS - 1, captures=True)
    assert_replayed([answer], allowed=("random", "capturing"))
    assert answer.captured
    assert not answer.has_step_graph


def test_recomputed_layers_give_the_same_when_replayed(pool):
    assert_replayed(
        pool.run(2, compare_steps, "tower tokens", "plan 3 recomputed", REPLAYED_STEPS, SMALL_CHUNKS, captures=True)
    )


def test_recomputed_layers_that_cannot_be_captured_give_the_same(pool):
    answers = pool.run(
        2, compare_steps, "experts tokens", "plan 3 recomputed", REPLAYED_STEPS, SMALL_CHUNKS, captures=True
    )
    assert_replayed(answers, allowed=("random", "counts", "capturing"))
    assert any("middle" in slot for answer in answers for slot in answer.without_graph)


def test_a_module_that_replaces_its_buffers_does_not_keep_others_from_being_captured(pool):
    answers = pool.run(1, compare_steps, "counters", "plan 1", 9, captures=True)
    assert_replayed(answers, allowed=("replaces its buffers",))
    assert all("counting" in slot for slot in answers[0].without_graph)
    assert answers[0].without_graph


# Through the public interface: a Trainer, its optimizer, its loaders.


@pytest.mark.parametrize(
    ("workload", "optimizer"), alternating([(3, 4), (8, 5), (12, 2), (13, 6), (15, 3)], adamw, sgd)
)
def test_a_trainer_leaves_the_weights_that_plain_pytorch_does(pool, workload, optimizer):
    seed, num_ranks = workload
    assert_trained(pool.run(num_ranks, train, training_of(f"random {seed}", optimizer=optimizer), f"plan {seed}"))


def test_a_trainer_alone_leaves_the_weights_that_plain_pytorch_does(pool):
    assert_trained(pool.run(1, train, training_of("everything", measures=True)))


@pytest.mark.parametrize(("seed", "num_ranks"), chosen([(8, 3), (9, 2)], (3, 4)))
def test_a_trainer_matches_plain_pytorch_in_single_precision(pool, seed, num_ranks):
    training = training_of(f"random {seed}", dtype=torch.float32)
    assert_trained(pool.run(num_ranks, train, training, f"plan {seed}"), limit=1e-5)


def test_a_trainer_matches_plain_pytorch_with_a_plan_from_a_measured_profile(pool):
    assert_trained(pool.run(4, train, training_of("everything", optimizer=adamw, measures=True)))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_second_fit_continues_where_the_first_ended(pool, optimizer):
    training = training_of("random 3", optimizer=optimizer, fits=(Fit(steps=2), Fit(steps=1)))
    assert_trained(pool.run(4, train, training, "plan 3"))


@pytest.mark.parametrize(("seed", "num_ranks", "short_rows"), chosen([(8, 5, 1), (4, 3, 4)], (3, 4, 1), (13, 6, 2)))
def test_a_short_last_batch_counts_as_in_plain_pytorch(pool, seed, num_ranks, short_rows):
    """One row or two are fewer than some slots have ranks."""
    assert_trained(pool.run(num_ranks, train, training_of(f"random {seed}", short_rows=short_rows), f"plan {seed}"))


@pytest.mark.parametrize(("seed", "num_ranks"), [(5, 2), (13, 4)])
def test_every_parameter_starts_with_the_value_of_rank_0(pool, seed, num_ranks):
    assert_trained(pool.run(num_ranks, train, training_of(f"random {seed}", own_weights=True), f"plan {seed}"))


@pytest.mark.parametrize(
    ("kind", "variant"),
    alternating(
        ["normal", "normals", "direct", "spectral", "evaluated"], ("plan 2 recomputed", False), ("plan 1", True)
    ),
)
def test_buffers_are_as_in_plain_pytorch(pool, kind, variant):
    """Running statistics are of the training steps alone: nothing that was measured or recomputed counts in them."""
    plan, measures = variant
    assert_trained(pool.run(3, train, training_of(f"{kind} tokens", measures=measures), plan))


def fail_on_rank(rank: int, num_ranks: int, failing: int | None) -> None:
    """Runs a barrier on all ranks but one, which raises."""
    if rank == failing:
        raise ValueError(f"what rank {rank} says")
    dist.barrier()


def test_a_rank_that_fails_is_reported_at_once(pool):
    """Last, because the pool has to start anew after it."""
    pool.run(2, fail_on_rank, None)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 of 2[\s\S]*ValueError: what rank 1 says"):
        pool.run(2, fail_on_rank, 1)
    assert time.monotonic() - begin < 10
