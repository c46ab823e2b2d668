"""Placement: islands, data, weights, and what happens when memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

import small
from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import metagraph_of
from spindle.plan import check
from spindle.planners import PlanOptions, make_plan
from spindle.planners.baselines import schedule_sequential
from spindle.planners.build import realise
from spindle.planners.finish import cut_for_gathers, scored
from spindle.planners.placement import place
from spindle.planners.problem import Timed, problem_of
from spindle.profile import Roofline, roofline_profile
from spindle.program import lower
from spindle.simulate import simulate


def timed(op, num_devices, start, end, num_layers=4, **kwargs):
    return Timed(op=op, num_layers=num_layers, num_devices=num_devices, start_s=start, end_s=end, **kwargs)


def devices_of(profile, pieces):
    return [piece.devices for piece in place(profile, profile.default_setting, pieces)]


def test_a_piece_goes_on_where_its_data_is():
    profile = small.workload_profile({"x": ["vision", "lm"], "y": ["audio", "lm"]}, num_devices=8, per_island=4)
    placed = devices_of(profile, [timed(0, 2, 0, 1), timed(2, 2, 0, 1), timed(1, 2, 1, 2), timed(3, 2, 1, 2)])
    assert placed[0] == placed[2]
    assert placed[1] == placed[3]


def test_a_piece_stays_inside_one_island_when_one_has_room():
    profile = small.workload_profile({"x": ["vision"], "y": ["audio"]}, num_devices=8, per_island=4)
    first, second = devices_of(profile, [timed(0, 3, 0, 1), timed(1, 3, 0, 1)])
    assert {device // 4 for device in first} != {device // 4 for device in second}
    assert len({device // 4 for device in first}) == len({device // 4 for device in second}) == 1


def test_shared_parameters_come_together():
    profile = small.workload_profile({"x": ["lm"], "y": ["lm"]}, num_devices=8, per_island=4)
    first, second = devices_of(profile, [timed(0, 2, 0, 1), timed(1, 2, 1, 2)])
    assert first == second


def test_growing_keeps_rows_where_they_are():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=4)
    narrow, wide = devices_of(profile, [timed(0, 2, 0, 1, num_layers=2), timed(0, 4, 1, 2, num_layers=2)])
    # Rows 0-7 were on the first device, 8-15 on the second: their first halves stay.
    assert wide.index(narrow[0]) in (0, 1)
    assert wide.index(narrow[1]) in (2, 3)


def test_a_full_device_is_passed_over():
    # Each module's state is 4 x 16 MB; a device holds one of them with its activations, not two.
    profile = small.workload_profile({"x": ["a"], "y": ["b"]}, num_devices=2, memory_bytes=460_000_000)
    first, second = devices_of(profile, [timed(0, 1, 0, 1), timed(1, 1, 1, 2)])
    assert first != second


def test_earlier_pieces_are_placed_again_when_a_later_one_finds_no_room():
    # A task needs 64 MB of state and 5 MB of activations for each of its 4 layers, its working space and each row;
    # x and y together fill a device, z needs one alone. Near its data, y/b would follow x/a's free device.
    profile = small.workload_profile(
        {"x": ["a"], "y": ["b"], "z": ["c"]},
        num_devices=2,
        batch_sizes={"x": 4, "y": 4, "z": 16},
        memory_bytes=420_000_000,
    )
    first, second, third = devices_of(profile, [timed(0, 1, 0, 1), timed(1, 1, 0, 1), timed(2, 1, 1, 2)])
    assert first == second
    assert third != first


def test_rounds_make_a_workload_fit_that_does_not_fit_at_once():
    tasks = {"x": ["a"], "y": ["b"], "z": ["c"], "w": ["d"]}
    # Activations of all tasks are about 4 x 320 MB on one device, the state 256 MB.
    plan = make_plan(small.workload_profile(tasks, num_devices=1, memory_bytes=1_000_000_000), "sequential")
    assert plan.num_rounds > 1 or plan.recompute
    free = make_plan(small.workload_profile(tasks, num_devices=1), "sequential")
    assert free.num_rounds == 1
    assert plan.makespan_s >= free.makespan_s


def test_a_module_larger_than_a_device_is_sharded():
    profile = small.workload_profile({"x": ["lm"]}, num_devices=4, elements=20_000_000, memory_bytes=1_300_000_000)
    plan = make_plan(profile, "sequential", PlanOptions(shard_optimizer=False))
    assert dict(plan.tensor_degrees)["lm"] > 1


def test_a_workload_that_cannot_fit_is_refused_with_device_and_bytes():
    profile = small.workload_profile({"x": ["vision", "lm"]}, num_devices=2, memory_bytes=50_000_000)
    with pytest.raises(
        DoesNotFitError, match=r"device \d would need .* [GM]iB but has .* [GM]iB \([\d,]+ bytes too many\)"
    ):
        make_plan(profile, "wavefront")


def test_a_team_keeps_its_devices():
    profile = small.workload_profile({"x": ["a", "b"], "y": ["c", "d"]}, num_devices=4, flows=False)
    first, other, second = devices_of(
        profile, [timed(0, 2, 0, 1, team="x"), timed(2, 2, 0, 1, team="y"), timed(1, 2, 1, 2, team="x")]
    )
    assert set(first) == set(second)
    assert not set(first) & set(other)


def uneven(*sizes, **kwargs):
    """A workload on islands of these sizes."""
    profile = small.workload_profile({"x": ["lm"]}, num_devices=sum(sizes), per_island=sum(sizes), **kwargs)
    islands = tuple(replace(profile.cluster.islands[0], num_devices=size) for size in sizes)
    cluster = replace(profile.cluster, islands=islands)
    return roofline_profile(profile.graph, cluster, Roofline())


def test_tensor_groups_are_counted_where_they_have_room():
    profile = uneven(3, 2)
    assert profile.cluster.tensor_groups(2) == ((0, 1), (3, 4))
    assert profile.curves[0][1].num_devices == (2, 4)


def test_one_more_device_does_not_stop_a_module_from_being_sharded():
    for sizes in ((4,), (4, 1), (3, 2)):
        profile = uneven(*sizes, elements=20_000_000, memory_bytes=1_300_000_000)
        plan = make_plan(profile, "sequential", PlanOptions(shard_optimizer=False))
        check(plan, profile)
        assert dict(plan.tensor_degrees)["lm"] > 1


def tied(degrees: dict[str, int]):
    """Two modules that share a parameter."""
    workload = small.workload({"x": ["a"], "y": ["b"]})
    shared = workload.modules[0].layers[0].parameters
    layers = (replace(workload.modules[1].layers[0], parameters=shared), *workload.modules[1].layers[1:])
    workload = replace(workload, modules=(workload.modules[0], replace(workload.modules[1], layers=layers)))
    profile = roofline_profile(metagraph_of(workload), small.devices(4), Roofline())
    return profile, profile.setting(degrees)


def test_modules_that_share_weights_are_sharded_alike():
    profile, setting = tied({"a": 2})
    assert profile.family_of("b") == {"a", "b"}
    assert set(setting.tensor_degrees) == {2}


def test_different_degrees_for_shared_weights_are_refused():
    profile, _ = tied({})
    plan = make_plan(profile, "sequential")
    with pytest.raises(
        PlanError, match=r"'a' and 'b' share weights, so their tensor degrees must be equal, got 2 and 1"
    ):
        check(replace(plan, tensor_degrees=(("a", 2), ("b", 1))), profile)


def test_working_space_is_counted_once_and_not_for_every_op():
    # Eight one-layer modules: what they keep adds up, what one backward works with does not.
    tasks = {f"t{number}": [f"m{number}"] for number in range(8)}
    profile = small.workload_profile(tasks, num_devices=1, num_layers=1)
    peak = int(simulate(lower(make_plan(profile, "sequential"), profile), profile).peak_bytes().max())
    tight = small.workload_profile(tasks, num_devices=1, num_layers=1, memory_bytes=peak)
    plan = make_plan(tight, "sequential")
    assert plan.num_rounds == 1
    assert not plan.recompute


def test_slots_that_wait_for_gathered_parameters_are_cut_and_the_step_starts_sooner():
    profile = small.workload_profile(
        {"x": ["vision"], "y": ["audio"]}, num_devices=4, num_layers=12, elements=50_000_000
    )
    plan = realise(
        profile,
        replace(profile.default_setting, shard_optimizer=True),
        "wavefront",
        schedule_sequential(problem_of(profile, profile.default_setting)),
    )
    cut = cut_for_gathers(plan, profile)
    check(cut, profile)
    assert cut.slots[0].num_layers == 1
    assert scored(cut, profile).makespan_s < scored(plan, profile).makespan_s
    unsharded = replace(plan, shard_optimizer=False)
    assert cut_for_gathers(unsharded, profile) is unsharded


def test_a_sharded_optimizer_is_chosen_where_it_is_faster_though_memory_is_not_short():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=4, num_layers=12, elements=50_000_000)
    chosen = make_plan(profile, "wavefront", PlanOptions(evaluations=2_000))
    unsharded = make_plan(profile, "wavefront", PlanOptions(evaluations=2_000, shard_optimizer=False))
    assert chosen.shard_optimizer
    assert chosen.makespan_s < unsharded.makespan_s
