"""The golden values of the Spindle reference: the authors' planner on three cases, and small checks by hand."""

from __future__ import annotations

import pytest

import small
from spindle.graph import Operator, contract, metagraph_of
from spindle.planners import make_plan, paper_waves, problem_of
from spindle.planners.allocate import allocate
from spindle.planners.problem import Choices
from spindle.workload import Call, Layer, LayerCost, Module, Parameter, Task, Workload


def waves_of(profile):
    problem = problem_of(profile, profile.default_setting)
    names = [op.name for op in profile.graph.metaops]
    optima, waves = paper_waves(problem)
    return [optimum * 1e3 for optimum in optima], [
        (round(wave.time_s * 1e3, 4), sorted(f"{names[op]} {layers}@{count}" for op, count, layers in wave.entries))
        for wave in waves
    ]


def test_case_a_gives_the_optimum_allocations_and_waves_of_the_reference():
    profile = small.linear_profile(small.CASE_A, num_devices=4, divisors_only=True)
    optima, waves = waves_of(profile)
    assert optima == [pytest.approx(45.9273, abs=1e-4)]
    assert waves == [
        (6.0, ["a 2@4"]),
        (21.0, ["a 4@2", "b 7@2"]),
        (15.0, ["a 3@2", "b 3@1", "c 6@1"]),
        (5.0, ["a 1@2", "b 1@2"]),
        (2.0, ["b 1@4"]),
    ]
    problem = problem_of(profile, profile.default_setting)
    _, allocations = allocate(problem.choices, problem.num_layers, 4)
    assert [allocation.num_devices for allocation in allocations] == pytest.approx([2.2660, 1.4596, 0.2743], abs=1e-4)
    assert allocations[0].tuples == (pytest.approx((2, 7.964), abs=1e-3), pytest.approx((4, 2.036), abs=1e-3))
    assert allocations[1].tuples == (pytest.approx((1, 4.964), abs=1e-3), pytest.approx((2, 7.036), abs=1e-3))
    assert allocations[2].tuples == (pytest.approx((1, 6)),)


def test_case_a_as_a_plan_ends_when_the_reference_says():
    plan = make_plan(small.linear_profile(small.CASE_A, num_devices=4), "paper")
    assert plan.folded_s == pytest.approx(49.0e-3)
    assert [slot.wave for slot in plan.slots] == [0, 1, 1, 2, 2, 2, 3, 3, 4]


def test_case_b_has_two_levels_and_merges_its_sixth_wave():
    optima, waves = waves_of(small.linear_profile(small.CASE_B, small.CASE_B_EDGES, num_devices=8))
    assert optima == pytest.approx([72.7385, 36.2323], abs=1e-4)
    assert waves == [
        (45.9, ["yvi 17@8"]),
        (23.4, ["xau 9@2", "xtx 9@1", "ytx 12@1", "yvi 6@4"]),
        (5.2, ["xau 2@2", "xtx 2@2", "yvi 1@4"]),
        (1.8, ["xau 1@4", "xtx 1@4"]),
        (12.6, ["xlm 7@8"]),
        (23.4, ["xlm 9@4", "ylm 12@4"]),
        (5.6, ["ylm 4@8"]),
    ]


@pytest.mark.parametrize(
    ("num_devices", "optimum", "total", "num_waves", "sequential", "task_level"),
    [(8, 238.33, 258.22, 7, 325.6, 303.2), (16, 136.87, 148.50, 6, 225.2, 181.6), (32, 88.40, 96.90, 5, 175.0, 120.8)],
)
def test_case_c_on_8_16_and_32_devices(num_devices, optimum, total, num_waves, sequential, task_level):
    profile = small.linear_profile(small.CASE_C, num_devices=num_devices, divisors_only=True)
    optima, waves = waves_of(profile)
    assert optima == [pytest.approx(optimum, abs=5e-3)]
    assert sum(time for time, _ in waves) == pytest.approx(total, abs=5e-3)
    assert len(waves) == num_waves
    assert make_plan(profile, "sequential").folded_s == pytest.approx(sequential * 1e-3)
    assert make_plan(profile, "task-level").folded_s == pytest.approx(task_level * 1e-3)


def test_case_c_waves_at_8_devices_last_as_long_as_the_reference_says():
    _, waves = waves_of(small.linear_profile(small.CASE_C, num_devices=8))
    assert [time for time, _ in waves] == pytest.approx([23.5, 55.2, 82.8, 53.0, 24.04, 15.8, 3.88])


def test_perfect_scaling_shares_devices_by_work():
    import numpy as np

    counts = np.arange(1, 5)
    choices = [Choices(num_devices=counts, layer_s=30 / counts), Choices(num_devices=counts, layer_s=10 / counts)]
    optimum, allocations = allocate(choices, [1, 1], 4)
    assert optimum == pytest.approx(10)
    assert [allocation.num_devices for allocation in allocations] == pytest.approx([3, 1])


def cost(tokens: int, width: int) -> LayerCost:
    return LayerCost(
        forward_flops=tokens * width,
        backward_flops=2 * tokens * width,
        traffic_bytes=0,
        saved_bytes=0,
        output_bytes=2 * tokens * width,
    )


def test_seventeen_operators_contract_into_seven_metaops():
    def module(name: str, num_layers: int) -> Module:
        return Module(
            name=name, layers=tuple(Layer(kind="block", parameters=(f"{name}.{i}",)) for i in range(num_layers))
        )

    def call(name: str, of: str, tokens: int, width: int) -> Call:
        return Call(name=name, module=of, costs=(("block", cost(tokens, width)),))

    modules = (module("audio", 3), module("text", 2), module("vision", 2), module("lm", 3))
    graph = metagraph_of(
        Workload(
            name="figure",
            modules=modules,
            parameters=tuple(
                Parameter(name=name, num_elements=1)
                for module in modules
                for layer in module.layers
                for name in layer.parameters
            ),
            tasks=(
                Task(
                    name="al",
                    batch_size=8,
                    calls=(
                        call("audio#0", "audio", 229, 768),
                        call("text#0", "text", 77, 768),
                        call("lm#0", "lm", 512, 1024),
                    ),
                    flows=(("audio#0", "lm#0"), ("text#0", "lm#0")),
                ),
                Task(
                    name="vl",
                    batch_size=4,
                    calls=(
                        call("text#0", "text", 77, 768),
                        call("vision#0", "vision", 257, 768),
                        call("vision#1", "vision", 197, 768),
                        call("lm#0", "lm", 512, 1024),
                    ),
                    flows=(("text#0", "lm#0"), ("vision#0", "lm#0"), ("vision#1", "lm#0")),
                ),
            ),
        )
    )
    assert [(op.name, op.num_layers) for op in graph.metaops] == [
        ("al/audio#0[0:3]", 3),
        ("al/text#0[0:2]", 2),
        ("al/lm#0[0:3]", 3),
        ("vl/text#0[0:2]", 2),
        ("vl/vision#0[0:2]", 2),
        ("vl/vision#1[0:2]", 2),
        ("vl/lm#0[0:3]", 3),
    ]
    assert graph.levels == (0, 0, 1, 0, 0, 0, 1)
    by_name = {op.name: op.parameters for op in graph.metaops}
    assert by_name["al/lm#0[0:3]"] == by_name["vl/lm#0[0:3]"]
    assert by_name["vl/vision#0[0:2]"] == by_name["vl/vision#1[0:2]"]


def test_operators_merge_only_along_single_edges_between_equals():
    def operators(*types):
        return [Operator(name=str(number), type=kind, input_size=1) for number, kind in enumerate(types)]

    assert contract(operators("x", "x", "x"), [(0, 1), (1, 2)]) == [[0, 1, 2]]
    assert contract(operators("x", "x", "y"), [(0, 1), (1, 2)]) == [[0, 1], [2]]
    assert contract(operators("x", "x", "x"), [(0, 1), (0, 2)]) == [[0], [1], [2]]
