"""Laws that hold for every planner on every graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small
from spindle.errors import DoesNotFitError, ProfileError
from spindle.plan import check, forward_spans, slots_per_op, spans
from spindle.planners import PlanOptions, graph_bound_s, lp_bound, make_plan, problem_of
from spindle.planners.problem import choices_of

QUICK = PlanOptions(evaluations=2_000)
BASELINES = ("sequential", "distmm", "task-level")
ALL = ("wavefront", "paper", *BASELINES)


@given(small.graphs(), st.sampled_from(ALL))
def test_every_planners_plan_passes_check_and_lies_above_the_bound(profile, planner):
    plan = make_plan(profile, planner, QUICK)
    check(plan, profile)
    starts_s = [span.start_s for span in forward_spans(plan, profile)]
    assert starts_s == pytest.approx(sorted(starts_s), rel=1e-9)
    assert plan.folded_s == pytest.approx(max(span.end_s for span in spans(plan, profile)), rel=1e-9)
    assert plan.folded_s >= plan.bound_s * (1 - 1e-9)
    assert plan.makespan_s >= plan.bound_s * (1 - 1e-6)


@given(small.graphs())
def test_wavefront_is_never_slower_than_any_other(profile):
    ours = make_plan(profile, "wavefront", QUICK)
    for planner in ("paper", *BASELINES):
        repeated = make_plan(profile, planner)
        assert ours.folded_s <= repeated.folded_s * (1 + 1e-9)
        assert ours.makespan_s <= repeated.makespan_s * (1 + 1e-6)


@given(small.odd_graphs())
def test_wavefront_is_never_slower_where_passes_differ(profile):
    ours = make_plan(profile, "wavefront", QUICK)
    check(ours, profile)
    assert ours.makespan_s >= ours.bound_s * (1 - 1e-6)
    for planner in ("paper", *BASELINES):
        assert ours.makespan_s <= make_plan(profile, planner).makespan_s * (1 + 1e-9)


@given(small.graphs())
def test_wavefront_folded_and_simulated_time_agree(profile):
    plan = make_plan(profile, "wavefront", QUICK)
    assert plan.makespan_s == pytest.approx(plan.folded_s, rel=1e-6)


@given(small.graphs())
def test_wavefront_cuts_an_op_into_four_slots_at_most(profile):
    assert slots_per_op(make_plan(profile, "wavefront", QUICK)) <= 4


@given(small.graphs(max_ops=3, max_layers=2, max_devices=3))
@settings(max_examples=30)
def test_no_planner_beats_the_oracle_and_the_oracle_does_not_beat_the_bound(profile):
    try:
        best = make_plan(profile, "exhaustive")
    except ProfileError:
        return  # too large to try everything
    assert best.folded_s >= best.bound_s * (1 - 1e-9)
    for planner in ALL:
        assert make_plan(profile, planner, QUICK).folded_s >= best.folded_s * (1 - 1e-9)


@given(small.graphs(max_ops=3, max_layers=2, max_devices=3))
@settings(max_examples=30)
def test_wavefront_is_near_the_optimum_of_tiny_graphs(profile):
    try:
        best = make_plan(profile, "exhaustive")
    except ProfileError:
        return
    assert make_plan(profile, "wavefront", PlanOptions(evaluations=20_000)).folded_s <= best.folded_s * 1.01


@given(small.graphs(), st.sampled_from(ALL))
@settings(max_examples=15)
def test_the_same_seed_gives_the_same_plan(profile, planner):
    assert make_plan(profile, planner, QUICK) == make_plan(profile, planner, QUICK)


@given(small.graphs())
def test_the_bound_is_at_least_the_area_and_every_path_at_its_fastest(profile):
    bound_s = graph_bound_s(profile)
    problem = problem_of(profile, profile.default_setting)
    area = sum(
        layers * float((choices.num_devices * choices.layer_s).min())
        for layers, choices in zip(problem.num_layers, problem.choices, strict=True)
    )
    assert bound_s >= area / profile.cluster.num_devices * (1 - 1e-9)
    ends: dict[int, float] = {}
    for op in profile.graph.order:
        fastest = problem.num_layers[op] * float(problem.choices[op].layer_s[-1])
        ends[op] = fastest + max((ends[producer] for producer in problem.predecessors[op]), default=0.0)
    assert bound_s >= max(ends.values()) * (1 - 1e-9)
    assert lp_bound(problem).bound_s == pytest.approx(bound_s)


@given(small.graphs(max_devices=6))
def test_more_devices_never_raise_the_bound(profile):
    larger = small.abstract_on(profile, profile.cluster.num_devices + 2)
    assert graph_bound_s(larger) <= graph_bound_s(profile) * (1 + 1e-9)


@given(small.graphs())
def test_choices_are_faster_the_more_devices_they_take(profile):
    for op in range(len(profile.graph.metaops)):
        choices = choices_of(profile, profile.default_setting, op)
        assert (np.diff(choices.layer_s) < 0).all()
        assert (np.diff(choices.num_devices) > 0).all()


WORKLOADS = st.sampled_from(
    [
        {"x": ["vision", "lm"], "y": ["audio", "lm"]},
        {"x": ["vision"], "y": ["vision", "lm"], "z": ["text", "lm"]},
        {"x": ["lm", "lm"]},
    ]
)


@given(WORKLOADS, st.integers(1, 6), st.sampled_from([2, 8]), st.sampled_from(ALL))
def test_plans_of_workloads_with_bytes_are_legal_and_fit(tasks, num_devices, per_island, planner):
    profile = small.workload_profile(tasks, num_devices=num_devices, per_island=per_island, elements=20_000_000)
    plan = make_plan(profile, planner, QUICK)
    check(plan, profile)
    assert plan.makespan_s >= plan.bound_s * (1 - 1e-6)


@given(WORKLOADS, st.integers(2, 6))
@settings(max_examples=15)
def test_wavefront_is_never_slower_where_bytes_count(tasks, num_devices):
    profile = small.workload_profile(tasks, num_devices=num_devices, per_island=4, elements=20_000_000)
    ours = make_plan(profile, "wavefront", QUICK).makespan_s
    for planner in ("paper", *BASELINES):
        assert ours <= make_plan(profile, planner).makespan_s * (1 + 1e-9)


@given(WORKLOADS, st.integers(1, 4), st.sampled_from([250, 400, 600, 900]))
@settings(max_examples=25)
def test_wavefront_is_never_slower_where_memory_is_short(tasks, num_devices, limit_mb):
    profile = small.workload_profile(tasks, num_devices=num_devices, memory_bytes=limit_mb * 1_000_000)
    times = {}
    for planner in ALL:
        try:
            times[planner] = make_plan(profile, planner, QUICK).makespan_s
        except DoesNotFitError:
            times[planner] = float("inf")
    assert times["wavefront"] <= min(times.values()) * (1 + 1e-9)


@given(WORKLOADS, st.integers(1, 4), st.sampled_from([100, 150, 200, 300, 600]), st.sampled_from(ALL))
def test_a_memory_limit_is_kept_or_the_workload_is_refused(tasks, num_devices, limit_mb, planner):
    from spindle.program import lower
    from spindle.simulate import simulate

    profile = small.workload_profile(tasks, num_devices=num_devices, memory_bytes=limit_mb * 1_000_000)
    refusal = ""
    try:
        plan = make_plan(profile, planner, QUICK)
    except DoesNotFitError as error:
        refusal = str(error)
    if refusal:
        assert "bytes too many" in refusal
        assert "device" in refusal
        return
    check(plan, profile)
    assert simulate(lower(plan, profile), profile).peak_bytes().max() <= limit_mb * 1_000_000


def test_a_time_limit_cuts_the_search_and_the_plan_says_so():
    profile = small.linear_profile(small.CASE_C, num_devices=8)
    plan = make_plan(profile, "wavefront", PlanOptions(evaluations=1_000_000_000, time_limit_s=0.2))
    assert plan.cut_s is not None
    assert plan.cut_s >= 0.2
    check(plan, profile)
    assert make_plan(profile, "wavefront", QUICK).cut_s is None


def test_progress_is_reported_and_never_falls_within_an_attempt():
    heard: list[float] = []
    make_plan(
        small.linear_profile(small.CASE_C, num_devices=8), "wavefront", PlanOptions(evaluations=400_000), heard.append
    )
    assert heard
    assert heard == sorted(heard)
    assert 0 <= heard[0] <= heard[-1] <= 1
