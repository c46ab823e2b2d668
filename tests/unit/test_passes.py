"""Plans whose passes have an order of their own: legal ones, their forms, and what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.errors import PlanError, ProgramError
from spindle.graph import metagraph_of
from spindle.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Piece,
    assemble_passes,
    check,
    format_plan,
    parse_plan,
    read_plan,
    write_plan,
)
from spindle.profile import abstract_profile, roofline_profile
from spindle.program import COPIES_AHEAD, Backward, format_program, lower, parse_program, verify
from spindle.simulate import simulate

SECOND = 10**9


def chain(num_microbatches, num_ranks, weight_s=None):
    """Microbatches that each pass a layer on every rank: forward one second, backward two."""
    ops = [
        {"name": f"m{number}", "layers": num_ranks, "forward_s": {"1": 1.0}, "backward_s": {"1": 2.0}}
        for number in range(num_microbatches)
    ]
    profile = abstract_profile({"ops": ops}, small.devices(num_ranks))
    if weight_s is None:
        return profile
    curves = tuple(tuple(replace(curve, weight_s=(weight_s,)) for curve in of_op) for of_op in profile.curves)
    return replace(profile, curves=curves)


def one_forward_one_backward(num_microbatches, num_ranks):
    """The order of 1F1B, rank by rank, put together so that it respects the flows."""
    lists = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank, num_microbatches)
        order = [(number, FORWARD) for number in range(ahead)]
        for number in range(num_microbatches):
            order.append((number, BACKWARD))
            if ahead + number < num_microbatches:
                order.append((ahead + number, FORWARD))
        lists.append(order)
    done, merged = set(), []
    while any(lists):
        for rank, order in enumerate(lists):
            while order:
                number, kind = order[0]
                before = (number, rank - 1, kind) if kind == FORWARD else (number, rank + 1, kind)
                if 0 <= before[1] < num_ranks and before not in done:
                    break
                done.add((number, rank, kind))
                merged.append((number * num_ranks + rank, kind))
                order.pop(0)
    return merged


def pipeline(num_microbatches=8, num_ranks=4, weight_s=None, order=None):
    profile = chain(num_microbatches, num_ranks, weight_s)
    pieces = [
        Piece(op=op, num_layers=1, devices=(rank,)) for op in range(num_microbatches) for rank in range(num_ranks)
    ]
    order = order or one_forward_one_backward(num_microbatches, num_ranks)
    return assemble_passes(profile, profile.default_setting, "1f1b", pieces, order), profile


def in_two_parts(order):
    """The same order with every backward in two parts, the weights' right behind the inputs'."""
    return [(slot, part) for slot, kind in order for part in ((INPUT, WEIGHT) if kind == BACKWARD else (kind,))]


@pytest.mark.parametrize(("num_microbatches", "num_ranks"), [(8, 4), (2, 4), (5, 3), (1, 1)])
def test_one_forward_one_backward_takes_its_closed_form(num_microbatches, num_ranks):
    plan, profile = pipeline(num_microbatches, num_ranks)
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    assert plan.folded_s == (num_microbatches + num_ranks - 1) * 3
    assert simulate(program, profile).end.max() == (num_microbatches + num_ranks - 1) * 3 * SECOND


def test_the_gradients_of_weights_can_wait():
    order = one_forward_one_backward(2, 2)
    split = in_two_parts(order)
    # Rank 0 (slots 0 and 2) hands nothing on in backward, so only rank 1's order matters to others.
    late = [entry for entry in split if entry != (1, WEIGHT)] + [(1, WEIGHT)]
    plan, profile = pipeline(2, 2, weight_s=1.0, order=late)
    whole, _ = pipeline(2, 2)
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    assert simulate(program, profile).end.max() == plan.folded_s * SECOND < whole.folded_s * SECOND


def test_weights_cannot_wait_where_nothing_is_known_of_their_part():
    with pytest.raises(Exception, match="does not say which part"):
        pipeline(2, 2, order=in_two_parts(one_forward_one_backward(2, 2)))


@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_forms_come_back_as_they_went(num_microbatches, num_ranks, split, data):
    order = one_forward_one_backward(num_microbatches, num_ranks)
    plan, profile = pipeline(num_microbatches, num_ranks, 0.5, in_two_parts(order) if split else order)
    recomputed = data.draw(st.lists(st.integers(0, 1), min_size=len(plan.slots), max_size=len(plan.slots)))
    order = [(pass_.slot, pass_.kind) for pass_ in plan.passes]
    position = {op.name: index for index, op in enumerate(profile.graph.metaops)}
    pieces = [
        Piece(op=position[slot.op], num_layers=1, devices=slot.devices, recomputed=again)
        for slot, again in zip(plan.slots, recomputed, strict=True)
    ]
    plan = assemble_passes(profile, profile.default_setting, "any", pieces, order)
    check(plan, profile)
    assert parse_plan(format_plan(plan), profile) == plan
    program = lower(plan, profile)
    text = format_program(program, profile)
    assert format_program(parse_program(text, profile), profile) == text
    verify(program, profile)
    assert simulate(program, profile).end.max() == pytest.approx(plan.folded_s * SECOND, abs=len(plan.passes))


def test_a_file_comes_back(tmp_path):
    plan, profile = pipeline()
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json", profile) == plan


def moved(plan, place, **changes):
    passes = list(plan.passes)
    passes[place] = replace(passes[place], **changes)
    return replace(plan, passes=tuple(passes))


def lean(plan, **changes):
    """The plan with another first slot."""
    return replace(plan, slots=(replace(plan.slots[0], **changes), *plan.slots[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, passes=plan.passes[:-1]), "expected forward and backward"),
        (lambda plan: replace(plan, passes=(*plan.passes, plan.passes[-1])), "expected forward and backward"),
        (
            lambda plan: replace(plan, passes=tuple(reversed(plan.passes))),
            "backward of m1 runs before the forward of m1",
        ),
        (lambda plan: replace(plan, passes=plan.passes[2:3] + plan.passes[:2] + plan.passes[3:]), "which feeds it"),
        (lambda plan: replace(plan, slots=(replace(plan.slots[0], recomputed=2), *plan.slots[1:])), "recomputes 2"),
        (
            lambda plan: replace(plan, slots=(replace(plan.slots[0], offloaded=1), *plan.slots[1:])),
            "bandwidth to host memory",
        ),
        (lambda plan: replace(plan, passes=(), slots=lean(plan, recomputed=1).slots), "only plans with passes can"),
        (lambda plan: replace(lean(plan, recomputed=1), recompute=("m0",)), "recomputed as a whole.*got 1 and 0"),
        (lambda plan: replace(plan, passes=plan.passes[1:-1]), "expected forward and backward|has no passes"),
        (lambda plan: moved(plan, 0, slot=99_999), r"a pass of slot 99999; slots are 0 to 3"),
        (lambda plan: moved(plan, 0, slot=-1), r"a pass of slot -1; slots are 0 to 3"),
    ],
)
def test_an_illegal_order_is_refused(change, message):
    plan, profile = pipeline(2, 2)
    with pytest.raises(PlanError, match=message):
        check(change(plan), profile)


def test_a_slot_that_nobody_waits_for_needs_its_passes_too():
    plan, profile = pipeline(2, 1)  # two ops without an edge
    with pytest.raises(PlanError, match="slot 1 has no passes"):
        check(replace(plan, passes=tuple(pass_ for pass_ in plan.passes if pass_.slot == 0)), profile)
    with pytest.raises(PlanError, match="slot 1 has no passes"):
        pipeline(2, 1, order=[(0, FORWARD), (0, BACKWARD)])


def test_a_pass_of_no_slot_is_named_with_its_line():
    _, profile = pipeline(1, 2)
    with pytest.raises(PlanError, match=r"line 3: there is a pass of slot 99999; slots are 0 to 1"):
        parse_plan("m0*1@0\nm0*1@1\n> F0 F99999 B1 B0\n", profile)


def test_only_passes_can_be_lean_in_the_text_form_too():
    _, profile = pipeline(1, 2)
    with pytest.raises(PlanError, match="line 2: layers are recomputed or offloaded, which only plans with passes"):
        parse_plan("m0*1@0\nm0*1@1r1\n", profile)


@pytest.mark.parametrize("name", [">", ">>> m", "> F0", "a>b"])
def test_a_name_that_looks_like_a_line_of_passes_comes_back(name):
    times = {"layers": 1, "forward_s": {"1": 1.0}, "backward_s": {"1": 2.0}}
    profile = abstract_profile({"ops": [{"name": name} | times, {"name": "m"} | times]}, small.devices(1))
    pieces = [Piece(op=op, num_layers=1, devices=(0,)) for op in (0, 1)]
    order = [(slot, kind) for slot in (0, 1) for kind in (FORWARD, BACKWARD)]
    plan = assemble_passes(profile, profile.default_setting, "any", pieces, order)
    assert parse_plan(format_plan(plan), profile) == plan


def offloading(host_bytes_per_s, host_memory_bytes):
    """Two layers on one device, each with a forward pass of a second and 4 MB to keep; the second one's wait on the
    host."""
    graph = metagraph_of(small.workload({"a": ["one"]}, batch_sizes={"a": 1}, num_layers=2))
    cluster = small.devices(1, 1)
    (island,) = cluster.islands
    kind = replace(island.kind, host_bytes_per_s=host_bytes_per_s, host_memory_bytes=host_memory_bytes)
    profile = roofline_profile(graph, replace(cluster, islands=(replace(island, kind=kind),)))
    curve = replace(profile.curves[0][0], num_devices=(1,), forward_s=(1.0,), backward_s=(2.0,))
    profile = replace(profile, curves=((curve,),))
    pieces = [Piece(op=0, num_layers=1, devices=(0,)), Piece(op=0, num_layers=1, devices=(0,), offloaded=1)]
    order = [(0, FORWARD), (1, FORWARD), (1, BACKWARD), (0, BACKWARD)]
    return assemble_passes(profile, profile.default_setting, "any", pieces, order), profile


def microbatches_that_offload(offloaded, copy_s, num_microbatches=6):
    """All forwards, of a second each, then all backwards, of two, on one device; some microbatches go to the host."""
    tasks = {f"m{number}": ["one"] for number in range(num_microbatches)}
    graph = metagraph_of(small.workload(tasks, batch_sizes=dict.fromkeys(tasks, 1), num_layers=1))
    cluster = small.devices(1, 1)
    (island,) = cluster.islands
    kind = replace(island.kind, host_bytes_per_s=small.COST.saved_bytes / copy_s, host_memory_bytes=1 << 30)
    profile = roofline_profile(graph, replace(cluster, islands=(replace(island, kind=kind),)))
    curve = replace(profile.curves[0][0], num_devices=(1,), forward_s=(1.0,), backward_s=(2.0,))
    profile = replace(profile, curves=((curve,),) * num_microbatches)
    numbers = range(num_microbatches)
    pieces = [Piece(op=op, num_layers=1, devices=(0,), offloaded=op in offloaded) for op in numbers]
    order = [*((op, FORWARD) for op in numbers), *((op, BACKWARD) for op in reversed(numbers))]
    plan = assemble_passes(profile, profile.default_setting, "any", pieces, order)
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    return simulate(program, profile)


@pytest.mark.parametrize("copy_s", [0.25, 2, 3, 5])
def test_copies_of_offloaded_activations_run_beside_as_many_passes_as_are_ahead(copy_s):
    # To the host beside forwards of a second, back beside backwards of two; the rest of each copy is waited for.
    waited_s = max(0, copy_s - COPIES_AHEAD) + max(0, copy_s - 2 * COPIES_AHEAD)
    took_s = [microbatches_that_offload(offloaded, copy_s).makespan_s for offloaded in ([0], [])]
    assert took_s[0] - took_s[1] == pytest.approx(waited_s)


def test_copies_in_one_direction_follow_each_other():
    # The second copy ends at 1 + 2 + 2 s; the fifth forward waits for it and would have begun at 4 s.
    took_s = [microbatches_that_offload(offloaded, 2).makespan_s for offloaded in ([0, 1], [])]
    assert took_s[0] - took_s[1] == pytest.approx(1)


def test_offloaded_activations_leave_the_device_unless_they_come_back_at_once():
    (kept,) = microbatches_that_offload([], 1).peak_bytes().tolist()
    (offloaded,) = microbatches_that_offload([0, 1], 1).peak_bytes().tolist()
    assert kept - offloaded == 2 * small.COST.saved_bytes
    (soon,) = microbatches_that_offload([5], 100).peak_bytes().tolist()
    assert soon == kept


def test_activations_that_stay_are_not_copied():
    took_s = [microbatches_that_offload(offloaded, 100).makespan_s for offloaded in ([4, 5], [])]
    assert took_s[0] == took_s[1]


def test_the_host_has_room_for_all_that_is_offloaded():
    check(*offloading(1e9, int(small.COST.saved_bytes)))
    with pytest.raises(PlanError, match=r"device 0 offloads more than the 3.8 MiB that the host has for it"):
        check(*offloading(1e9, int(small.COST.saved_bytes) - 1))


def test_what_has_come_back_from_the_host_leaves_room_for_more():
    _, profile = offloading(1e9, int(small.COST.saved_bytes))
    graph = profile.graph
    twice = replace(graph, metaops=(*graph.metaops, replace(graph.metaops[0], name="b", task="b")))
    profile = replace(profile, graph=twice, curves=profile.curves * 2)
    pieces = [Piece(op=op, num_layers=2, devices=(0,), offloaded=1) for op in (0, 1)]
    one_by_one = [(0, FORWARD), (0, BACKWARD), (1, FORWARD), (1, BACKWARD)]
    check(assemble_passes(profile, profile.default_setting, "any", pieces, one_by_one), profile)
    at_once = [(0, FORWARD), (1, FORWARD), (1, BACKWARD), (0, BACKWARD)]
    with pytest.raises(PlanError, match=r"device 0 offloads more than the 3.8 MiB .* not been copied back yet"):
        check(assemble_passes(profile, profile.default_setting, "any", pieces, at_once), profile)


def test_an_order_against_the_flow_is_refused():
    order = one_forward_one_backward(2, 2)
    with pytest.raises(PlanError, match="comes before the forward of slot 0"):
        pipeline(2, 2, order=[(1, FORWARD), *(pass_ for pass_ in order if pass_ != (1, FORWARD))])


def test_a_program_without_the_gradients_of_weights_is_refused():
    plan, profile = pipeline(2, 2, 1.0, in_two_parts(one_forward_one_backward(2, 2)))
    program = lower(plan, profile)
    whole = [
        replace(instruction, part=INPUT) if isinstance(instruction, Backward) else instruction
        for instruction in program.instructions
    ]
    with pytest.raises(ProgramError, match=r"I0\[0:1\] is listed 2 times"):
        verify(replace(program, instructions=tuple(whole)), profile)
