"""The simulator: times that can be worked out by hand, contention, memory, and agreement with folded time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.cluster import cluster_named
from spindle.errors import ProgramError
from spindle.graph import metagraph_of
from spindle.plan import check, parse_plan
from spindle.planners import PlanOptions, graph_bound_s, make_plan, step_bound_s
from spindle.profile import roofline_profile, state_bytes
from spindle.program import Backward, Exchange, Forward, OptimizerStep, SyncGradients, lower, parse_program, verify
from spindle.program.text import format_program
from spindle.recipes import RECIPES
from spindle.simulate import accumulated, simulate, simulate_step
from spindle.timeline import chrome_trace, measure


def spans(timeline, kind):
    """(rank, start, end) of all instructions of a kind."""
    numbers = [number for number, instruction in enumerate(timeline.instructions) if isinstance(instruction, kind)]
    chosen = np.isin(timeline.instruction, numbers)
    return sorted(
        zip(timeline.rank[chosen].tolist(), timeline.start[chosen].tolist(), timeline.end[chosen].tolist(), strict=True)
    )


def run(text, profile):
    program = lower(parse_plan(text, profile), profile)
    return program, simulate(program, profile)


@given(small.graphs(), st.sampled_from(["sequential", "distmm", "task-level"]))
def test_folded_time_and_the_simulated_step_agree_when_every_op_has_the_same_ratio(profile, planner):
    plan = make_plan(profile, planner)
    assert plan.makespan_s == pytest.approx(plan.folded_s, rel=1e-6)


def test_folded_time_and_step_differ_when_the_ratios_differ():
    times = {"forward_s": {"1": 0.9}, "backward_s": {"1": 0.1}}, {"forward_s": {"1": 0.1}, "backward_s": {"1": 0.9}}
    from spindle.profile import abstract_profile

    graph = {"ops": [{"name": n, "layers": 1, **t} for n, t in zip("ab", times, strict=True)], "edges": [["a", "b"]]}
    profile = abstract_profile(graph, small.devices(2))
    plan = make_plan(profile, "sequential")
    assert plan.makespan_s == pytest.approx(2.0)
    _, timeline = run("a*1@0 \nb*1@1", profile)
    assert spans(timeline, Forward) == [(0, 0, 900_000_000), (1, 900_000_000, 1_000_000_000)]
    assert spans(timeline, Backward) == [(0, 1_900_000_000, 2_000_000_000), (1, 1_000_000_000, 1_900_000_000)]


def test_a_transfer_takes_latency_and_bytes_over_the_link():
    profile = small.workload_profile({"x": ["vision", "lm"]}, num_devices=2)
    _, timeline = run("x/vision#0[0:4]*4@0\nx/lm#1[0:4]*4@1", profile)
    link = profile.cluster.islands[0].link
    num_bytes = 16 * small.COST.output_bytes
    for _, start, end in spans(timeline, Exchange):
        assert end - start == pytest.approx((num_bytes / link.bytes_per_s + link.latency_s) * 1e9, abs=2)
    forward = spans(timeline, Forward)
    gap = forward[1][1] - forward[0][2]
    assert gap == pytest.approx((num_bytes / link.bytes_per_s + link.latency_s) * 1e9, abs=2)


def test_two_transfers_into_one_port_take_twice_as_long():
    profile = small.workload_profile({"x": ["vision", "lm"]}, num_devices=4)
    _, alone = run("x/vision#0[0:4]*4@0\nx/lm#1[0:4]*4@1", profile)
    _, split = run("x/vision#0[0:4]*4@0-1\nx/lm#1[0:4]*4@2", profile)
    lengths = {end - start for _, start, end in spans(split, Exchange)}
    durations = {end - start for _, start, end in spans(alone, Exchange)}
    # Half the bytes each, at half the rate each: as long as all of them alone.
    assert max(lengths) == pytest.approx(max(durations), abs=4)


def test_transfers_between_islands_share_the_uplink():
    near = small.workload_profile({"x": ["vision", "lm"]}, num_devices=4, per_island=4)
    far = small.workload_profile({"x": ["vision", "lm"]}, num_devices=4, per_island=2)
    text = "x/vision#0[0:4]*4@0-1\nx/lm#1[0:4]*4@2-3"
    inside = max(end - start for _, start, end in spans(run(text, near)[1], Exchange))
    across = max(end - start for _, start, end in spans(run(text, far)[1], Exchange))
    uplink = far.cluster.islands[0].uplink
    assert across == pytest.approx((16 * small.COST.output_bytes / uplink.bytes_per_s + uplink.latency_s) * 1e9, abs=4)
    assert across > inside


def test_synchronisation_overlaps_backward_and_ends_before_the_update():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=2, elements=64_000_000)
    _, timeline = run("x/vision#0[0:4]*4@0-1", profile)
    syncs, backwards, updates = (spans(timeline, kind) for kind in (SyncGradients, Backward, OptimizerStep))
    assert len(backwards) == 8  # four chunks on each rank
    assert min(start for _, start, _ in syncs) < max(end for _, _, end in backwards)
    assert max(end for _, _, end in syncs) <= min(start for _, start, _ in updates)


def test_an_update_takes_its_bytes_over_the_memory_bandwidth():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=1)
    _, timeline = run("x/vision#0[0:4]*4@0", profile)
    ((_, start, end),) = spans(timeline, OptimizerStep)
    assert end - start == pytest.approx(4 * 1_000_000 * 28 / 2e12 * 1e9, abs=1)


@pytest.mark.parametrize("shards", [False, True])
def test_a_step_of_several_micro_steps_synchronises_and_updates_once(shards):
    profile = small.workload_profile({"x": ["vision"]}, num_devices=2)
    plan = replace(parse_plan("x/vision#0[0:4]*4@0-1", profile), shard_optimizer=shards)
    once, peak_bytes = simulate_step(plan, profile, 1)
    forward_s, backward_s = profile.curve(0, profile.default_setting).times_s(2)
    for count in (2, 3, 9):
        step_s, repeated_bytes = simulate_step(plan, profile, count)
        assert step_s == pytest.approx(once + (count - 1) * 4 * (forward_s + backward_s), rel=1e-6)
        assert repeated_bytes == peak_bytes
    repeated = accumulated(plan, profile, 3)
    check(*repeated)
    program = lower(*repeated)
    verify(program, repeated[1])
    kinds = Counter(type(instruction) for instruction in program.instructions)
    alone = Counter(type(instruction) for instruction in lower(plan, profile).instructions)
    for kind in (Forward, Backward):
        assert kinds.pop(kind) == 3 * alone.pop(kind)
    assert kinds == alone


@given(small.graphs(), st.sampled_from(["sequential", "distmm", "task-level"]), st.integers(2, 6))
def test_micro_steps_take_no_less_than_their_bounds_and_no_more_than_whole_steps(profile, planner, count):
    plan = make_plan(profile, planner)
    step_s, _ = simulate_step(plan, profile, count)
    assert count * graph_bound_s(profile) * (1 - 1e-6) <= step_s <= count * plan.makespan_s * (1 + 1e-6)


def test_peak_memory_is_state_and_activations_and_one_layers_working_space():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=1)
    _, timeline = run("x/vision#0[0:4]*4@0", profile)
    state = sum(state_bytes(profile.graph, parameter) for parameter in range(4))
    assert timeline.peak_bytes().tolist() == [state + 16 * (4 + 1) * int(small.COST.saved_bytes)]
    assert timeline.memory_of(0)[1][-1] == state


def test_recomputation_keeps_only_inputs_and_pays_the_forward_again():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=1)
    _, plain = run("x/vision#0[0:4]*4@0", profile)
    _, again = run("# recompute x/vision#0[0:4]\nx/vision#0[0:4]*4@0", profile)
    forward = spans(plain, Forward)[0]
    assert again.makespan_ns - plain.makespan_ns == pytest.approx(forward[2] - forward[1], abs=4)
    saved = 16 * 4 * int(small.COST.saved_bytes - small.COST.output_bytes)
    run_again = 16 * small.COST.saved_bytes / 2  # what a layer's backward takes more, when the layer runs again in it
    assert plain.peak_bytes()[0] - again.peak_bytes()[0] == saved - run_again


@given(small.graphs(max_devices=6))
def test_memory_returns_to_its_state_after_every_step(profile):
    timeline = simulate(lower(make_plan(profile, "paper"), profile), profile)
    assert (timeline.end >= timeline.start).all()
    for rank in range(timeline.num_ranks):
        assert timeline.memory_of(rank)[1][-1] == timeline.static_bytes[rank]


def test_busy_neighbours_slow_each_other_and_running_work_is_timed_again():
    ops = [("a", 1, 1, 0, 30), ("b", 1, 1, 0, 15)]
    profile = replace(small.linear_profile(ops, num_devices=2), host_rates=(1.0, 0.5))
    _, timeline = run("a*1@0 b*1@1", profile)
    # Forward passes of 10 and 5 ms at half rate until b's forward is over at 10 ms; then its backward of 10 ms runs at
    # half rate too, to 30 ms. a: 10 ms of forward until 20, then 20 ms of backward: half rate until 30, then alone.
    assert spans(timeline, Forward) == [(0, 0, 20_000_000), (1, 0, 10_000_000)]
    assert spans(timeline, Backward) == [(0, 20_000_000, 45_000_000), (1, 10_000_000, 30_000_000)]


def test_idle_neighbours_make_a_device_faster_than_its_curve():
    ops = [("a", 1, 1, 0, 30), ("b", 1, 1, 0, 15)]
    profile = replace(small.linear_profile(ops, num_devices=2), host_rates=(2.0, 1.0))
    _, timeline = run("a*1@0 b*1@1", profile)
    # Curves hold while both are busy. b is done at 15 ms; 15 ms of a's backward are left then, at twice the rate.
    assert spans(timeline, Forward) == [(0, 0, 10_000_000), (1, 0, 5_000_000)]
    assert spans(timeline, Backward) == [(0, 10_000_000, 22_500_000), (1, 5_000_000, 15_000_000)]


def test_gradients_on_their_way_and_compute_slow_each_other_where_a_device_does_both():
    def timeline(**slower):
        workload = small.workload_profile({"x": ["vision"]}, num_devices=2, elements=64_000_000)
        return run("x/vision#0[0:4]*4@0-1", replace(workload, **slower))[1]

    def total_ns(kind, **slower):
        return sum(end - start for _, start, end in spans(timeline(**slower), kind))

    # All but the last of four exchanges run beside compute.
    exchange_ns, backward_ns = total_ns(SyncGradients), total_ns(Backward)
    assert total_ns(SyncGradients, exchange_overlap=3.0) == pytest.approx(exchange_ns * (1 + 3 * 3) / 4, rel=0.03)
    assert total_ns(Backward, exchange_overlap=3.0) == pytest.approx(backward_ns)
    assert total_ns(SyncGradients, overlap=2.0) == pytest.approx(exchange_ns, rel=0.03)
    assert total_ns(Backward, overlap=2.0) > backward_ns
    assert timeline(overlap=2.0).makespan_s > timeline().makespan_s


def test_idle_neighbours_make_a_device_faster_also_where_gradients_could_slow_it():
    ops = [("a", 1, 1, 0, 30), ("b", 1, 1, 0, 15)]
    profile = replace(small.linear_profile(ops, num_devices=2), host_rates=(2.0, 1.0), overlap=1.5, exchange_overlap=3)
    _, timeline = run("a*1@0 b*1@1", profile)
    assert spans(timeline, Backward) == [(0, 10_000_000, 22_500_000), (1, 5_000_000, 15_000_000)]


def test_a_measured_collective_takes_what_was_measured_beside_its_bytes():
    def step(collective_s):
        profile = small.workload_profile({"x": ["vision"]}, num_devices=2)
        island = profile.cluster.islands[0]
        island = replace(island, link=replace(island.link, collective_s=collective_s))
        profile = replace(profile, cluster=replace(profile.cluster, islands=(island,)))
        return run("x/vision#0[0:4]*4@0-1", profile)

    (program, slow), (_, fast) = step(0.5), step(0.0)
    # One after another, and far longer than all compute.
    assert slow.makespan_s - fast.makespan_s == pytest.approx(0.5 * len(program.buckets), rel=0.05)


@given(small.graphs(), st.lists(st.floats(0.2, 3.0), min_size=8, max_size=8))
def test_no_step_is_below_the_bound_however_neighbours_matter(profile, rates):
    count = profile.cluster.num_devices
    profile = replace(profile, host_rates=tuple(sorted(rates, reverse=True))[:count])
    for planner in ("sequential", "paper"):
        step_s = simulate(lower(make_plan(profile, planner), profile), profile).makespan_s
        assert step_s >= graph_bound_s(profile) * (1 - 1e-6)


@pytest.mark.parametrize("shards", [False, True])
def test_no_step_is_below_the_bound_with_the_optimizer_s_update(shards):
    recipe = RECIPES["clip-4"]
    profile = roofline_profile(metagraph_of(recipe.workload()), cluster_named("a800x8"), recipe.roofline)
    assert step_bound_s(profile) > graph_bound_s(profile)
    for planner in ("sequential", "paper", "task-level"):
        plan = make_plan(profile, planner, PlanOptions(shard_optimizer=shards))
        assert simulate(lower(plan, profile), profile).makespan_s >= step_bound_s(profile)


def test_a_deadlock_is_reported_by_the_simulator_too():
    profile = small.two_towers()
    program = lower(small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile), profile)
    text = format_program(program, profile).replace("rank 3 compute F1 F2", "rank 3 compute F2 F1")
    with pytest.raises(ProgramError, match="deadlock"):
        simulate(parse_program(text, profile), profile)


def test_shares_of_the_step_add_up():
    profile = small.workload_profile({"x": ["vision", "lm"], "y": ["audio", "lm"]}, num_devices=4, elements=64_000_000)
    measures = measure(simulate(lower(make_plan(profile, "task-level"), profile), profile))
    total = measures.compute_share + measures.transfer_share + measures.sync_share + measures.idle_share
    assert total == pytest.approx(1.0)
    assert 0 < measures.compute_share <= 1


def test_the_simulation_repeats_to_the_nanosecond():
    profile = small.workload_profile({"x": ["vision", "lm"], "y": ["audio", "lm"]}, num_devices=4)
    program = lower(make_plan(profile, "paper"), profile)
    first, second = simulate(program, profile), simulate(program, profile)
    assert (first.start == second.start).all()
    assert (first.end == second.end).all()


def test_the_chrome_trace_holds_every_span():
    import json

    profile = small.two_towers()
    _, timeline = run("vision*12@0-2 text*6@3\nhead*1@0-3", profile)
    events = json.loads(chrome_trace(timeline, lambda instruction: type(instruction).__name__))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(timeline.rank)
