"""Programs: resharding, lowering, and what `verify` finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.errors import DoesNotFitError, ProgramError
from spindle.plan import parse_plan
from spindle.planners import make_plan
from spindle.program import (
    Backward,
    Flows,
    Memory,
    SlotShape,
    format_program,
    instances_of,
    lower,
    moves_between,
    moving_s,
    parse_program,
    state_sharding,
    verify,
)
from spindle.program.row_flows import flows_between, share_bounds
from spindle.simulate import simulate


def shape(ranks, num_rows, degree=1):
    return SlotShape(
        op=0, ranks=np.array(ranks), bounds=share_bounds(num_rows, len(ranks) // degree), tensor_degree=degree
    )


def rows_held(shape: SlotShape) -> dict[int, set[int]]:
    held = {}
    for place, rank in enumerate(shape.ranks.tolist()):
        replica = place // shape.tensor_degree
        held[rank] = set(range(shape.bounds[replica], shape.bounds[replica + 1]))
    return held


@st.composite
def shapes(draw, num_rows):
    degree = draw(st.sampled_from([1, 2]))
    replicas = draw(st.integers(1, min(5, num_rows)))
    units = draw(st.permutations(range(6)))[:replicas]
    return shape([unit * degree + member for unit in units for member in range(degree)], num_rows, degree)


@given(st.data(), st.integers(1, 13))
def test_after_resharding_every_rank_has_exactly_its_rows(data, num_rows):
    giver, taker = data.draw(shapes(num_rows)), data.draw(shapes(num_rows))
    flows = flows_between(giver, taker)
    before, wanted = rows_held(giver), rows_held(taker)
    got = {rank: before.get(rank, set()) & rows for rank, rows in wanted.items()}
    for source, destination, first, last in zip(
        flows.source.tolist(), flows.destination.tolist(), flows.first.tolist(), flows.last.tolist(), strict=True
    ):
        moved = set(range(first, last))
        assert source != destination
        assert moved <= before[source]
        assert not moved & got[destination]
        got[destination] |= moved
    assert got == wanted


def test_a_batch_that_does_not_divide_gives_the_first_shares_one_row_more():
    assert share_bounds(10, 4).tolist() == [0, 3, 6, 8, 10]


def test_staying_on_the_same_devices_moves_nothing():
    assert len(flows_between(shape([3, 1, 2], 10), shape([3, 1, 2], 10)).source) == 0


def test_a_row_goes_to_every_member_of_a_tensor_group_from_one_member():
    flows = flows_between(shape([0, 1], 4, degree=2), shape([2, 3, 4, 5], 4, degree=2))
    received = dict.fromkeys((2, 3, 4, 5), 0)
    for rank, first, last in zip(flows.destination.tolist(), flows.first.tolist(), flows.last.tolist(), strict=True):
        received[rank] += last - first
    assert received == {2: 2, 3: 2, 4: 2, 5: 2}


def test_a_small_model_is_handed_on_in_a_few_chunks_and_alone_in_one():
    def num_chunks(num_devices: int) -> int:
        profile = small.workload_profile({"x": ["vision"]}, num_devices=num_devices)
        program = lower(parse_plan(f"x/vision#0[0:4]*4@0-{num_devices - 1}", profile), profile)
        return sum(isinstance(instruction, Backward) for instruction in program.instructions)

    assert num_chunks(2) == 4
    assert num_chunks(1) == 1


@given(small.graphs(), st.sampled_from(["paper", "sequential", "distmm", "task-level"]))
def test_the_text_form_of_a_program_comes_back_the_same(profile, planner):
    text = format_program(lower(make_plan(profile, planner), profile), profile)
    assert format_program(parse_program(text, profile), profile) == text


def test_backward_mirrors_forward_on_every_rank():
    profile = small.two_towers()
    program = lower(small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile), profile)
    text = format_program(program, profile)
    assert "rank 0-2 compute F0 F2 B2[0:1] B0[0:12]" in text
    assert "rank 3 compute F1 F2 B2[0:1] B1[0:6]" in text


def test_rounds_run_both_passes_one_after_another():
    profile = small.linear_profile([("a", 4, 2, 1, 1, "x"), ("b", 4, 2, 1, 1, "y")], num_devices=2)
    program = lower(parse_plan("a*2@0-1\nb*2@0-1~1", profile), profile)
    assert "rank 0-1 compute F0 B0[0:2] F1 B1[0:2]" in format_program(program, profile)


def shared_profile():
    return small.workload_profile({"x": ["vision", "lm"], "y": ["audio", "lm"]}, num_devices=4)


def test_gradients_of_a_shared_module_are_synchronised_over_every_device_that_uses_it():
    profile = shared_profile()
    program = lower(
        parse_plan("x/vision#0[0:4]*4@0-1 y/audio#0[0:4]*4@2-3\nx/lm#1[0:4]*4@0-1\ny/lm#1[0:4]*4@2-3", profile), profile
    )
    names = {
        tuple(bucket.ranks.tolist()): sorted(
            {profile.graph.parameters[p].name.split(".")[0] for p in bucket.parameters}
        )
        for bucket in program.buckets
    }
    assert names == {(0, 1): ["vision"], (2, 3): ["audio"], (0, 1, 2, 3): ["lm"]}


def test_a_parameter_on_one_device_alone_is_not_synchronised():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=2)
    assert lower(parse_plan("x/vision#0[0:4]*4@0", profile), profile).buckets == ()


def test_tensor_shards_are_synchronised_apart():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=4)
    program = lower(parse_plan("# tensor vision 2\nx/vision#0[0:4]*4@0-3", profile), profile)
    assert {tuple(bucket.ranks.tolist()) for bucket in program.buckets} == {(0, 2), (1, 3)}
    assert sum(bucket.num_bytes for bucket in program.buckets) == 2 * 4 * 500_000 * 2


@given(small.graphs(), st.sampled_from(["paper", "sequential", "distmm", "task-level"]))
def test_every_planners_program_is_verified(profile, planner):
    verify(lower(make_plan(profile, planner), profile), profile)


def two_tower_program():
    profile = small.two_towers()
    return profile, format_program(lower(small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile), profile), profile)


def test_verify_names_the_circle_of_a_deadlock():
    profile, text = two_tower_program()
    with pytest.raises(ProgramError, match=r"deadlock(.|\n)*rank 0 F2\n    rank 0 F0"):
        verify(parse_program(text.replace("rank 0-2 compute F0 F2", "rank 0-2 compute F2 F0"), profile), profile)


def test_verify_finds_transfers_in_different_orders():
    profile = small.linear_profile(
        [("a", 4, 1, 1, 1), ("b", 4, 1, 1, 1), ("c", 4, 1, 1, 1), ("d", 4, 1, 1, 1)], [("a", "c"), ("b", "d")], 2
    )
    text = format_program(lower(small.plan("a*1@0 b*1@1\nd*1@0 c*1@1", profile), profile), profile)
    assert "rank 0-1 transfer X0 X1" in text
    swapped = text.replace("rank 0-1 transfer X0 X1", "rank 0 transfer X0 X1\nrank 1 transfer X1 X0", 1)
    lines = [line for line in swapped.splitlines() if "transfer" in line]
    rest = lines[1].removeprefix("rank 1 transfer X1 X0")
    swapped = swapped.replace(lines[0], lines[0] + rest)
    with pytest.raises(ProgramError, match="deadlock"):
        verify(parse_program(swapped, profile), profile)


def test_verify_finds_a_missing_partner():
    profile, text = two_tower_program()
    lines = [
        line.replace("X1", "").replace("X0", "") if line.startswith("rank 0 transfer") else line
        for line in text.splitlines()
    ]
    lines = [line.replace("rank 0-3 transfer X1 X0", "rank 1-3 transfer X1 X0") for line in lines]
    broken = "\n".join(line for line in lines if line.split()[:2] != ["rank", "0"] or "transfer" not in line) + "\n"
    with pytest.raises(ProgramError, match=r"rank 0 takes part in [XY]\d but does not run it"):
        verify(parse_program(broken, profile), profile)


def test_verify_finds_an_instruction_that_stands_twice():
    profile, text = two_tower_program()
    with pytest.raises(ProgramError, match="rank 3 runs F1 twice on its compute lane"):
        verify(parse_program(text.replace("rank 3 compute F1", "rank 3 compute F1 F1"), profile), profile)


def with_link(program, **changes):
    link = replace(program.links[0], **changes)
    return replace(program, links=(link, *program.links[1:]))


def test_verify_finds_rows_that_never_arrive():
    profile, text = two_tower_program()
    program = parse_program(text, profile)
    nothing = np.zeros(0, dtype=np.int64)
    empty = Flows(source=nothing, destination=nothing, first=nothing, last=nothing)
    with pytest.raises(ProgramError, match=r"link 0: rank \d needs"):
        verify(with_link(program, forward=empty), profile)


def test_verify_finds_the_wrong_rows_though_their_number_is_right():
    profile = small.linear_profile([("a", 4, 1, 1, 1), ("b", 4, 1, 1, 1)], [("a", "b")], 4)
    program = lower(small.plan("a*1@0-1\nb*1@2-3", profile), profile)
    flows = program.links[0].forward
    assert flows.destination.tolist() == [2, 3]
    swapped = replace(flows, destination=flows.destination[::-1].copy())
    with pytest.raises(ProgramError, match=r"link 0: rank \d needs other rows"):
        verify(with_link(program, forward=swapped), profile)


def test_verify_finds_a_sender_that_does_not_hold_the_rows():
    profile = small.linear_profile([("a", 4, 1, 1, 1), ("b", 4, 1, 1, 1)], [("a", "b")], 4)
    program = lower(small.plan("a*1@0-1\nb*1@2-3", profile), profile)
    flows = program.links[0].forward
    lying = replace(flows, source=flows.source[::-1].copy())
    with pytest.raises(ProgramError, match=r"rank \d sends rows that it does not hold"):
        verify(with_link(program, forward=lying), profile)


def test_verify_finds_a_flow_without_a_link():
    profile, text = two_tower_program()
    program = parse_program(text, profile)
    with pytest.raises(ProgramError, match=r"there is no link from slot \d to slot 2"):
        verify(replace(program, links=program.links[1:]), profile)


def shared_program():
    profile = shared_profile()
    plan = parse_plan("x/vision#0[0:4]*4@0-1 y/audio#0[0:4]*4@2-3\nx/lm#1[0:4]*4@0-1 y/lm#1[0:4]*4@2-3", profile)
    return profile, lower(plan, profile)


def test_verify_finds_gradients_that_are_not_summed():
    profile, program = shared_program()
    verify(program, profile)
    with pytest.raises(
        ProgramError, match=r"the gradient of \w+\.\d is not reduced once over exactly the ranks that hold it"
    ):
        verify(replace(program, buckets=program.buckets[1:]), profile)
    short = replace(program.buckets[-1], ranks=program.buckets[-1].ranks[:-1])
    with pytest.raises(ProgramError, match=r"is not reduced once"):
        verify(replace(program, buckets=(*program.buckets[:-1], short)), profile)


def test_verify_finds_a_synchronisation_that_does_not_wait():
    profile, program = shared_program()
    early = replace(program.buckets[0], after=())
    with pytest.raises(ProgramError, match=r"is not reduced after every backward"):
        verify(replace(program, buckets=(early, *program.buckets[1:])), profile)


def test_verify_finds_a_rank_that_never_updates():
    profile, program = shared_program()
    text = format_program(program, profile)
    lazy = "\n".join(
        line.removesuffix(" U") if line.startswith("rank 0-1 compute") else line for line in text.splitlines()
    )
    with pytest.raises(ProgramError, match="rank 0 runs no optimizer step"):
        verify(parse_program(lazy + "\n", profile), profile)


def test_a_missing_backward_is_found():
    profile, text = two_tower_program()
    program = parse_program(text, profile)
    without = tuple(
        instruction
        for instruction in program.instructions
        if not (type(instruction).__name__ == "Backward" and instruction.slot == 1)
    )
    with pytest.raises(ProgramError, match=r"backward of slot 1 \(text\)"):
        verify(replace(program, instructions=without), profile)


def test_verify_refuses_a_program_that_needs_more_memory_than_a_device_has():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=2)
    program = lower(parse_plan("x/vision#0[0:4]*4@0-1", profile), profile)
    verify(program, profile)
    tight = small.workload_profile({"x": ["vision"]}, num_devices=2, memory_bytes=200_000_000)
    with pytest.raises(DoesNotFitError, match=r"device 0 would need .* \([\d,]+ bytes too many\)"):
        verify(program, tight)


@given(st.sampled_from(["paper", "sequential", "distmm", "task-level"]), st.integers(1, 5))
def test_memory_in_program_order_is_never_more_than_simulated_memory(planner, num_devices):
    profile = small.workload_profile({"x": ["vision", "lm"], "y": ["audio", "lm"]}, num_devices=num_devices)
    program = lower(make_plan(profile, planner), profile)
    in_order = Memory(program, profile).peaks_in_order(instances_of(program))
    assert (in_order <= simulate(program, profile).peak_bytes()).all()


def two_tasks_then_one():
    profile = small.workload_profile({"x": ["vision"], "y": ["audio"]}, num_devices=4, per_island=2)
    left = small.workload_profile({"x": ["vision"]}, num_devices=4, per_island=2)
    old = lower(parse_plan("x/vision#0[0:4]*4@0-1 y/audio#0[0:4]*4@2-3", profile), profile)
    new = lower(parse_plan("x/vision#0[0:4]*4@0-3", left), left)
    before = state_sharding(old, profile.graph)
    return profile, before, left, state_sharding(new, left.graph, before)


def test_between_plans_a_parameter_moves_only_to_ranks_that_did_not_hold_it():
    profile, before, left, after = two_tasks_then_one()
    assert moves_between(before, before, profile.graph, profile.cluster) == ()
    moves = moves_between(before, after, left.graph, left.cluster)
    state_bytes = 4 * 1_000_000 * (2 + 12)
    for rank, expected in enumerate([0, 0, state_bytes, state_bytes]):
        assert sum(move.num_bytes for move in moves if move.destination == rank) == expected
    # Two ranks send as much each; all of it goes through one uplink of 50 GB/s.
    for rank in (0, 1):
        assert sum(move.num_bytes for move in moves if move.source == rank) == state_bytes
    assert moving_s(moves, left.cluster) == pytest.approx(2 * state_bytes / 50e9)


def test_what_no_task_uses_stays_with_one_rank_until_it_is_wanted_again():
    profile, before, _, after = two_tasks_then_one()
    assert set(after.weights["audio.0"]) == set(after.optimizer["audio.0"]) == {2}
    moves = moves_between(after, before, profile.graph, profile.cluster)
    assert {(move.source, move.destination) for move in moves} == {(2, 3)}


def test_a_parameter_comes_from_the_same_island_if_it_is_there():
    profile = small.workload_profile({"x": ["vision"]}, num_devices=4, per_island=2)
    before, after = (
        state_sharding(lower(parse_plan(f"x/vision#0[0:4]*4@{devices}", profile), profile), profile.graph)
        for devices in ("0-2", "0-3")
    )
    moves = moves_between(before, after, profile.graph, profile.cluster)
    assert {(move.source, move.destination) for move in moves} == {(2, 3)}
