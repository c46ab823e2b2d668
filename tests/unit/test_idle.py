"""Idle devices are explained: which module others wait for, and why it does not use them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import small
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.profile import Roofline, roofline_profile
from spindle.program import lower
from spindle.report.compare import ComparedPlan, Comparison, RefusedPlan, conclusion
from spindle.report.idle import IDLE_LIMIT, IdleCause, idle_causes, idle_sentences
from spindle.simulate import simulate
from spindle.timeline import measure
from spindle.workload import ModuleRemark


def causes_of(plan, profile):
    program = lower(plan, profile)
    timeline = simulate(program, profile)
    causes = idle_causes(timeline, program, profile)
    # Nothing is lost: the causes add up to what is idle.
    assert sum(cause.share for cause in causes) == pytest.approx(measure(timeline).idle_share, abs=1e-9)
    return causes


def coupled_profile(remark: ModuleRemark):
    """Vision, then a head that couples its samples, with little between them to send."""
    workload = small.workload({"a": ["vision", "head"]})
    (task,) = workload.tasks
    vision, head = task.calls
    costs = tuple((kind, replace(cost, whole_batch=True)) for kind, cost in head.costs)
    task = replace(task, calls=(vision, replace(head, costs=costs)))
    workload = replace(workload, tasks=(task,), remarks=(remark,))
    return roofline_profile(metagraph_of(workload), small.devices(4), Roofline())


def test_a_module_that_couples_its_samples_is_named_with_the_reason():
    profile = coupled_profile(ModuleRemark(module="head", one_device="it normalises over its batch"))
    first = causes_of(make_plan(profile, "sequential"), profile)[0]
    assert first.module == "head"
    assert first.share > IDLE_LIMIT
    assert first.reason == "couples its samples (it normalises over its batch), so it runs on 1 device of 4"
    assert "a module of its own" in first.advice


def test_a_module_that_is_not_split_is_named_with_the_reason():
    remark = ModuleRemark(module="head", one_layer="it has no list of blocks", one_device="a loss inside")
    profile = coupled_profile(remark)
    first = causes_of(make_plan(profile, "sequential"), profile)[0]
    assert first.reason == "is not split, because it has no list of blocks, and couples its samples (a loss inside)"


def test_an_op_that_is_too_small_to_divide_says_its_times():
    profile = small.linear_profile([("large", 16, 4, 0, 1), ("tiny", 16, 16, 1, 0.001)], [("large", "tiny")], 4)
    first = causes_of(small.plan("large*4@0-3\ntiny*16@0", profile), profile)[0]
    assert first.module == "tiny"
    assert first.reason == "is too small to divide: a layer takes 1.016 ms on 1 device and 1.004 ms on 4"
    assert "Larger batches" in first.advice


def test_an_op_with_fewer_samples_than_devices_says_so():
    profile = small.workload_profile({"a": ["lm"]}, batch_sizes={"a": 2}).with_degrees({"lm": 1})
    first = causes_of(make_plan(profile, "sequential"), profile)[0]
    assert first.reason == "has 2 samples to divide, so it runs on 2 devices of 4"


def test_what_others_wait_for_is_named():
    profile = small.two_towers(4)
    causes = causes_of(small.plan("vision*12@0-1 text*6@2-3\nhead*1@0-3", profile), profile)
    assert causes[0].module == "vision"
    assert causes[0].reason == "runs on 2 devices of 4 for 60.00 ms; head waits for it"


def test_idle_time_below_a_fifth_is_not_explained():
    assert idle_sentences([IdleCause(module="vision", share=0.19, reason="waits")]) == []
    lines = idle_sentences(
        [
            IdleCause(module="vision", share=0.3, reason="is too small", advice="Larger batches."),
            IdleCause(module="", share=0.1, reason="nothing computes"),
            IdleCause(module="text", share=0.05, reason="is too small", advice="Larger batches."),
        ],
        at_most=2,
    )
    assert lines == [
        "Why 45.0 % of device time is idle:",
        "- 30.0 % beside vision, which is too small.",
        "- 10.0 % while nothing computes.",
        "- 5.0 % beside text.",
        "Larger batches.",
    ]


def row(planner: str, makespan_s: float) -> ComparedPlan:
    return ComparedPlan(
        planner=planner,
        makespan_s=makespan_s,
        folded_s=makespan_s,
        speedup=None,
        idle_share=0,
        transfer_share=0,
        sync_share=0,
        peak_bytes=0,
        bound_s=1,
        over_bound=makespan_s,
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [row("wavefront", 1.0), row("paper", 1.1), row("sequential", 2.0)],
            "wavefront is best: 100.0 % faster than plain data parallel (sequential), "
            "10.0 % faster than the next best (paper).",
        ),
        (
            [row("wavefront", 1.0), row("sequential", 1.01)],
            "Plain data parallel (sequential) is as good here: wavefront is 1.0 % faster.",
        ),
        (
            [row("sequential", 1.0), row("paper", 1.01)],
            "Plain data parallel (sequential) is as good here: no planner is faster.",
        ),
        ([row("wavefront", 1.0)], "Only wavefront has a plan."),
        ([], ""),
    ],
)
def test_a_comparison_ends_with_one_sentence(rows, sentence):
    refused = RefusedPlan(planner="distmm", refusal="no")
    comparison = Comparison(workload="small", cluster="test", num_devices=4, rows=(*rows, refused))
    assert conclusion(comparison, "sequential") == sentence
