"""Profiles: analytic, sampled and given curves, and that none of them guesses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.cluster import cluster_named
from spindle.errors import ProfileError
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.profile import (
    Curve,
    LayerSamples,
    Roofline,
    abstract_profile,
    all_reduce_s,
    curve_from_samples,
    roofline_profile,
    sampled_profile,
    state_bytes,
)
from spindle.workload import Parameter

SHARED = Path(__file__).resolve().parents[3] / "shared"


def test_a_smaller_batch_takes_no_less_than_its_launch():
    curve = Curve(num_devices=(1, 2), forward_s=(1.0, 0.6), backward_s=(2.0, 1.2), launch_s=(0.5, 0.3))
    half, tenth = curve.scaled(0.5), curve.scaled(0.1)
    assert (half.forward_s, half.backward_s) == ((0.5, 0.5), (1.0, 0.6))
    assert (tenth.forward_s, tenth.backward_s) == ((0.5, 0.5), (0.3, 0.3))
    assert tenth.launches.forward_s == (0.5, 0.5)


def test_a_curve_refuses_a_number_of_devices_it_does_not_know():
    curve = Curve(num_devices=(1, 2, 4), forward_s=(3.0, 2.0, 1.0), backward_s=(6.0, 4.0, 2.0))
    assert curve.times_s(2) == (2.0, 4.0)
    with pytest.raises(ProfileError, match=r"no time is known for 3 devices; known: 1-2, 4"):
        curve.times_s(3)


def test_the_time_of_an_abstract_op_is_split_one_to_two():
    profile = abstract_profile({"ops": [{"name": "a", "layers": 1, "time_s": {"1": 0.3}}]}, small.devices(1))
    assert profile.curves[0][0].times_s(1) == (pytest.approx(0.1), pytest.approx(0.2))


def test_samples_are_joined_by_straight_pieces_and_not_extended():
    samples = LayerSamples(rows=(2, 4, 8), forward_s=(1.0, 1.2, 2.0), backward_s=(2.0, 2.4, 4.0))
    assert samples.at(3) == (pytest.approx(1.1), pytest.approx(2.2))
    assert samples.at(6) == (pytest.approx(1.6), pytest.approx(3.2))
    with pytest.raises(ProfileError, match=r"1 rows were not measured; measured: 2 to 8"):
        samples.at(1)


def test_a_sampled_curve_leaves_out_devices_whose_share_was_not_measured():
    samples = LayerSamples(rows=(2, 4), forward_s=(1.0, 1.5), backward_s=(2.0, 3.0))
    curve = curve_from_samples(samples, batch_size=10, max_devices=10)
    # 10 rows on n devices: 4 rows on 3 devices, 3 on 4, 2 on 5 to 9; more rows or fewer were not measured.
    assert curve.num_devices == (3, 4, 5, 6, 7, 8, 9)
    # On 4 devices, the time lies between two measurements.
    assert curve.measured == (3, 5, 6, 7, 8, 9)
    assert curve.up_to(5).measured == (3, 5)
    with pytest.raises(ProfileError, match="was measured on"):
        replace(curve, measured=(2,))


def test_a_batch_that_was_not_measured_at_all_is_refused():
    samples = LayerSamples(rows=(32, 64), forward_s=(1.0, 1.5), backward_s=(2.0, 3.0))
    with pytest.raises(ProfileError, match=r"needs 2 to 8 rows on each; measured: 32 to 64"):
        curve_from_samples(samples, batch_size=8, max_devices=4)


@pytest.mark.skipif(not SHARED.exists(), reason="the measured curves lie beside the checkout")
def test_curves_measured_on_an_h200_make_a_profile():
    measured = json.loads((SHARED / "hardware" / "h200_layer_curves.json").read_text())
    rows = (1, 2, 4, 8, 16, 32, 64)

    def samples(module: str) -> LayerSamples:
        graph_s = [measured[f"{module}/{count}"][1] * 1e-3 for count in rows]
        return LayerSamples(
            rows=rows, forward_s=tuple(t / 3 for t in graph_s), backward_s=tuple(t * 2 / 3 for t in graph_s)
        )

    graph = metagraph_of(small.workload({"x": ["vision"], "y": ["audio"]}, batch_sizes={"x": 32, "y": 64}))
    profile = sampled_profile(graph, small.devices(8), {name: samples(name) for name in ("vision", "audio")})
    assert profile.curves[0][0].times_s(8)[0] == pytest.approx(measured["vision/4"][1] * 1e-3 / 3)


def test_a_module_without_samples_is_named():
    graph = metagraph_of(small.workload({"x": ["vision"]}))
    with pytest.raises(ProfileError, match=r"no samples under its name or its module's \('vision'\)"):
        sampled_profile(graph, small.devices(2), {})


@given(st.integers(1, 40), st.integers(1, 12))
def test_the_roofline_works_on_the_largest_share_of_an_uneven_split(batch, num_devices):
    graph = metagraph_of(small.workload({"x": ["vision"]}, batch_sizes={"x": batch}))
    profile = roofline_profile(graph, small.devices(num_devices, per_island=16), Roofline(overhead_s=0.0))
    curve = profile.curves[0][0]
    assert curve.num_devices == tuple(range(1, min(batch, num_devices) + 1))
    one_row = curve.forward_s[0] / batch
    for count, forward_s in zip(curve.num_devices, curve.forward_s, strict=True):
        assert forward_s == pytest.approx(-(-batch // count) * one_row)


def test_tensor_parallel_halves_the_work_and_pays_an_all_reduce():
    graph = metagraph_of(small.workload({"x": ["vision"]}))
    profile = roofline_profile(graph, small.devices(4), Roofline(overhead_s=0.0, efficiency=0.5))
    alone, pair = profile.curves[0][0], profile.curves[0][1]
    assert pair.tensor_degree == 2
    assert pair.num_devices == (2, 4)
    link_s = all_reduce_s(16 * small.COST.tensor_bytes, 2, profile.cluster.islands[0].link)
    assert pair.times_s(2)[0] == pytest.approx(alone.times_s(1)[0] / 2 + link_s)


def test_tensor_groups_stay_inside_an_island():
    graph = metagraph_of(small.workload({"x": ["vision"]}))
    profile = roofline_profile(graph, small.devices(4, per_island=2), Roofline())
    assert [curve.tensor_degree for curve in profile.curves[0]] == [1, 2]


def test_a_slow_memory_bounds_the_roofline():
    graph = metagraph_of(small.workload({"x": ["vision"]}))
    cluster = small.devices(1)
    slow = replace(cluster.islands[0], kind=replace(cluster.islands[0].kind, memory_bytes_per_s=1e6))
    profile = roofline_profile(
        graph, replace(cluster, islands=(slow,)), Roofline(overhead_s=0.0, bandwidth_efficiency=1.0)
    )
    weights = 1_000_000 * 2
    assert profile.curves[0][0].times_s(1)[0] == pytest.approx((16 * small.COST.traffic_bytes + weights) / 1e6)


def test_every_profile_says_what_it_leaves_out():
    graph = metagraph_of(small.workload({"x": ["vision"]}))
    assert roofline_profile(graph, cluster_named("a800x8")).leaves_out
    assert small.two_towers().leaves_out


def test_a_frozen_parameter_has_no_gradient_and_no_optimizer_state():
    graph = metagraph_of(small.workload({"x": ["vision"]}))
    frozen = replace(
        graph, parameters=tuple(Parameter(name=p.name, num_elements=10, trainable=False) for p in graph.parameters)
    )
    assert state_bytes(graph, 0) == 1_000_000 * 16
    assert state_bytes(frozen, 0) == 10 * 2


def test_sharding_rounds_up():
    graph = metagraph_of(small.workload({"x": ["vision"]}, elements=5))
    assert state_bytes(graph, 0, tensor_degree=2) == 3 * 16


def test_tasks_that_are_connected_are_one():
    ops = [
        {"name": name, "layers": 1, "time_s": {"1": 0.1}, "task": task}
        for name, task in (("a", "x"), ("b", "y"), ("c", "x"))
    ]
    profile = abstract_profile({"ops": ops, "edges": [["a", "b"], ["b", "c"]]}, small.devices(2))
    assert {op.task for op in profile.graph.metaops} == {"x"}
    for planner in ("sequential", "distmm", "task-level"):
        assert make_plan(profile, planner).folded_s == pytest.approx(0.3)


def test_layers_whose_weights_differ_in_size_are_not_merged():
    workload = small.workload({"x": ["vision"]})
    bigger = (*workload.parameters[:1], *(replace(p, num_elements=9_000_000) for p in workload.parameters[1:]))
    assert [op.num_layers for op in metagraph_of(replace(workload, parameters=bigger)).metaops] == [1, 3]


def test_distmm_keeps_a_towers_devices_through_all_its_ops():
    # Towers a0 -> a1 and b: side by side they take as long as the longer; level by level, they would wait.
    ops = [
        {"name": name, "layers": layers, "task": "t", "time_s": {"1": 1.0, "2": 0.95}}
        for name, layers in (("a0", 1), ("a1", 10), ("b", 10))
    ]
    profile = abstract_profile({"ops": ops, "edges": [["a0", "a1"]]}, small.devices(2))
    assert make_plan(profile, "distmm").folded_s == pytest.approx(11.0)
