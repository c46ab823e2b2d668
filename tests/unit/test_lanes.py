"""Lanes: slots that share a device at the same time, in plans, programs, the simulator and the planner."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from itertools import pairwise, permutations, product
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.console import Console

import small
from random_plans import contended, random_lane_plan
from spindle.cli.main import run
from spindle.display import seconds
from spindle.errors import PlanError, ProfileError
from spindle.plan import check, format_plan, parse_plan, read_plan
from spindle.planners import make_plan
from spindle.planners.lanes import with_lanes
from spindle.profile import Contention, Profile, write_profile
from spindle.program import Backward, Forward, Memory, format_program, instances_of, lower, parse_program, verify
from spindle.report.drawing import Box
from spindle.report.explain import explain, sentences
from spindle.report.figure import step_figure
from spindle.report.gantt import draw_rows, plan_chart, timeline_chart
from spindle.report.predicted_vs_measured import compare_step, step_tables
from spindle.simulate import simulate
from spindle.simulate.costs import passes_s
from sweeps import chosen

SVG = "{http://www.w3.org/2000/svg}"
TOWERS = [("vision", 16, 4, 1, 0.5), ("text", 16, 4, 1, 0.1), ("audio", 16, 2, 2, 0.2)]


def towers(by_op: dict[str, tuple[float, float]] | None = None) -> Profile:
    return contended(small.linear_profile(TOWERS, num_devices=1), by_op)


def step_s(text: str, profile: Profile) -> float:
    plan = small.plan(text, profile)
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    return simulate(program, profile).makespan_s


def test_slots_on_two_lanes_run_at_the_same_time():
    profile = towers()
    apart = [step_s(f"{name}*{layers}@0", small_one(name)) for name, _, layers, _, _ in TOWERS]
    assert step_s("vision*4@0 text*4@0|1 audio*2@0|2", profile) == pytest.approx(max(apart), rel=1e-6)
    assert step_s("vision*4@0\ntext*4@0\naudio*2@0", profile) == pytest.approx(sum(apart), rel=1e-6)


def small_one(name: str) -> Profile:
    return contended(small.linear_profile([tower for tower in TOWERS if tower[0] == name], num_devices=1))


def test_pressure_slows_others_and_fill_limits_all():
    vision_s, text_s = 0.036, 0.0104  # alone
    two = small.linear_profile(TOWERS[:2], num_devices=1)
    # While text runs, 1.5 times as long, vision runs at 1 / 1.25 of its speed.
    pressed = contended(two, {"vision": (0.5, 0.01), "text": (0.25, 0.01)})
    shared_s = 1.5 * text_s
    assert step_s("vision*4@0 text*4@0|1", pressed) == pytest.approx(vision_s + shared_s * (1 - 1 / 1.25), rel=1e-5)
    # Fills of 0.8 and 0.7 make both 1.5 times as long while they run together.
    full = contended(two, {"vision": (0.0, 0.8), "text": (0.0, 0.7)})
    assert step_s("vision*4@0 text*4@0|1", full) == pytest.approx(vision_s + shared_s * (1 - 1 / 1.5), rel=1e-5)


def test_every_lane_of_a_device_has_a_row():
    profile = towers()
    plan = small.plan("vision*4@0 text*4@0|1\naudio*2@0|1", profile)
    program = lower(plan, profile)
    for chart in (
        timeline_chart(simulate(program, profile), program, profile.graph, 60),
        plan_chart(plan, profile, 60),
    ):
        first, second = draw_rows(chart, 1).plain.splitlines()[1:3]
        assert first.split()[0] == "0"
        assert second.split()[0] == "0|1"
        assert set("AB") == {first.split()[1][0], second.split()[1][0]}


def test_a_plan_with_lanes_survives_its_text_form():
    profile = towers()
    plan = small.plan("vision*4@0 text*4@0|1\naudio*2@0|1", profile)
    assert parse_plan(format_plan(plan), profile).slots == plan.slots
    program = lower(plan, profile)
    text = format_program(program, profile)
    assert "rank 0 compute1 F1" in text
    assert format_program(parse_program(text, profile), profile) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vision*4@0 text*4@0|2\naudio*2@0", r"lane 2, and nothing is on lane 1; number lanes from 0 without gaps"),
        ("vision*4@0 text*4@0|9\naudio*2@0", "is on lane 9; a device has lanes 0 to 7"),
        ("vision*4@0 text*4@0|1 audio*2@0|1", "lane 1 of device 0 is used twice"),
    ],
)
def test_lanes_that_cannot_be_are_refused(text, message):
    profile = towers()
    with pytest.raises(PlanError, match=message):
        check(small.plan(text, profile), profile)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vision*4@0|0w2\ntext*4@0\naudio*2@0", r"lane 2, and nothing is on lane 1; number lanes from 0 without gaps"),
        ("vision*4@0|0w9\ntext*4@0\naudio*2@0", "has its weight gradients on lane 9; a device has lanes 0 to 7"),
        ("# recompute vision\nvision*4@0|0w1\ntext*4@0\naudio*2@0", "is recomputed, so its weight gradients stay"),
    ],
)
def test_weight_lanes_that_cannot_be_are_refused(text, message):
    profile = towers()
    with pytest.raises(PlanError, match=message):
        check(small.plan(text, profile), profile)


def test_weight_lanes_need_the_time_of_weight_gradients():
    profile = towers()
    curves = tuple(tuple(replace(curve, weight_s=()) for curve in choices) for choices in profile.curves)
    with pytest.raises(PlanError, match="the profile does not say how long they take"):
        check(small.plan("vision*4@0|0w1\ntext*4@0\naudio*2@0", profile), replace(profile, curves=curves))


def test_lanes_need_measured_contention():
    profile = small.linear_profile(TOWERS, num_devices=1)
    with pytest.raises(PlanError, match="the profile does not say how much they slow each other down"):
        check(small.plan("vision*4@0 text*4@0|1\naudio*2@0", profile), profile)
    plan = make_plan(profile, "sequential")
    assert with_lanes(plan, profile, 4) == plan
    with pytest.raises(PlanError, match="1 to 8 lanes, got lanes=0"):
        with_lanes(plan, profile, 0)
    with pytest.raises(ProfileError, match="pressure is between 0 and 16"):
        Contention(forward=(-1.0, 0.5), backward=(0.1, 0.5))


def shared_module() -> Profile:
    tasks = {"first": ["vision", "head"], "second": ["text", "head"]}
    return contended(small.workload_profile(tasks, num_devices=1))


def test_slots_that_train_the_same_parameters_share_a_lane():
    profile = shared_module()
    plan = make_plan(profile, "sequential")
    heads = [number for number, slot in enumerate(plan.slots) if "head" in slot.op]
    slots = [replace(slot, lane=int(number == heads[-1])) for number, slot in enumerate(plan.slots)]
    for of_weights in (None, 1):
        on_two = tuple(replace(slot, weight_lane=of_weights) for slot in slots)
        with pytest.raises(PlanError, match=r"is on lane 1 and .* on lane 0 .* both train head\.0"):
            check(replace(plan, slots=on_two), profile)
    slots = [replace(slot, weight_lane=1 if number == heads[-1] else None) for number, slot in enumerate(plan.slots)]
    with pytest.raises(PlanError, match=r"weight gradients on lane [01] .* both train head\.0, so they need one lane"):
        check(replace(plan, slots=tuple(slots)), profile)
    with_several = with_lanes(plan, profile, 4)
    assert with_several.num_lanes > 1
    assert len({slot.lane for slot in with_several.slots if "head" in slot.op}) == 1
    assert with_several.bound_s <= with_several.makespan_s < plan.makespan_s


def test_memory_of_lanes_is_that_of_all_lanes_at_their_peaks():
    profile = shared_module()
    plan = make_plan(profile, "sequential")
    with_several = with_lanes(plan, profile, 4)

    def bound(of):
        program = lower(of, profile)
        return Memory(program, profile).peaks_in_order(instances_of(program)).max()

    assert bound(with_several) >= simulate(lower(with_several, profile), profile).peak_bytes().max()
    limit = int(bound(with_several)) - 1
    tight = replace(profile, cluster=profile.cluster.with_memory(limit))
    within = with_lanes(make_plan(tight, "sequential"), tight, 4)
    assert bound(within) <= limit


def test_gradients_of_shared_parameters_are_summed_in_the_backward_passes_behind_the_first():
    profile = shared_module()
    plan = make_plan(profile, "sequential")
    graph = profile.graph
    summed = {
        parameter for op in graph.metaops if op.module == "head" for layer in op.parameters for parameter in layer
    }
    num_bytes = graph.numerics.gradient_bytes * sum(graph.parameters[number].num_elements for number in summed)
    rate = 1000 * num_bytes  # a millisecond for both heads but one
    sums = replace(profile, gradient_sum_bytes_per_s=rate)
    for planned in (plan, with_lanes(plan, profile, 4)):
        program = lower(planned, profile)
        without, with_sums = passes_s(program, profile), passes_s(program, sums)
        assert (with_sums - without).sum() == pytest.approx(1e-3)
        last = max(number for number, slot in enumerate(planned.slots) if "head" in slot.op)
        first_writer = [
            place
            for place, instruction in enumerate(program.instructions)
            if isinstance(instruction, Backward) and instruction.slot == last
        ]
        assert (with_sums == without)[first_writer].all()
    assert simulate(lower(plan, sums), sums).makespan_s == pytest.approx(plan.makespan_s + 1e-3, rel=1e-4)


def random_towers(numbers: random.Random) -> Profile:
    """Up to five towers, some under a common head, with random pressure and fill, on one device."""
    count = numbers.randint(2, 4)
    ops = [(f"m{number}", 16, numbers.randint(1, 4), numbers.uniform(0.5, 3), 0.1) for number in range(count)]
    edges = [(f"m{number}", "head") for number in range(count - 1)] if numbers.random() < 0.5 else []
    if edges:
        ops.append(("head", 16, 1, 0.5, 0.1))
    shares = {name: (numbers.uniform(0, 0.6), numbers.uniform(0.3, 1.0)) for name, *_ in ops}
    return contended(small.linear_profile(ops, edges, num_devices=1), shares)


def best_step_s(profile: Profile, most: int) -> float:
    """The oracle: the shortest step over every order of the ops that the flows allow, on every choice of lanes."""
    graph = profile.graph
    best_s = float("inf")
    for order in permutations(range(len(graph.metaops))):
        if any(order.index(producer) > order.index(consumer) for producer, consumer in graph.edges):
            continue
        for lanes in product(range(most), repeat=len(order)):
            # Lanes have no names: each is numbered by its first op.
            if any(lane > 1 + max(lanes[:place], default=-1) for place, lane in enumerate(lanes)):
                continue
            ops = [graph.metaops[op] for op in order]
            text = "\n".join(f"{op.name}*{op.num_layers}@0|{lane}" for op, lane in zip(ops, lanes, strict=True))
            best_s = min(best_s, simulate(lower(parse_plan(text, profile), profile), profile).makespan_s)
    return best_s


@pytest.mark.parametrize("seed", chosen([0, 1, 2, 157], *range(3, 157), *range(158, 200)))
def test_the_planner_finds_nearly_the_best_lanes_and_is_never_slower(seed):
    profile = random_towers(random.Random(seed))
    plan = make_plan(profile, "sequential")
    with_several = with_lanes(plan, profile, 3)
    assert with_several.makespan_s <= plan.makespan_s
    assert with_several.makespan_s <= 1.02 * best_step_s(profile, 3)


def test_weight_gradients_run_beside_input_gradients_where_that_is_faster():
    profile = contended(small.linear_profile([("vision", 16, 8, 1, 0.5)], num_devices=1), {"vision": (0.1, 0.4)})
    plan = make_plan(profile, "sequential")
    concurrent = with_lanes(plan, profile, 2)
    assert [slot.has_weight_lane for slot in concurrent.slots] == [True]
    assert concurrent.bound_s <= concurrent.makespan_s < 0.9 * plan.makespan_s
    # Two thirds are backward, half of that weight gradients: those of all chunks but one run beside input gradients.
    alone_s = simulate(lower(plan, profile), profile).makespan_s
    assert concurrent.makespan_s > (1 - 1 / 3) * alone_s
    program = lower(concurrent, profile)
    chart = timeline_chart(simulate(program, profile), program, profile.graph, 60)
    assert [row.split()[0] for row in draw_rows(chart, 1).plain.splitlines()[1:3]] == ["0", "0|1"]
    full = contended(small.linear_profile([("vision", 16, 8, 1, 0.5)], num_devices=1), {"vision": (1.0, 1.0)})
    assert not any(slot.has_weight_lane for slot in with_lanes(make_plan(full, "sequential"), full, 2).slots)


def test_a_gain_smaller_than_the_error_of_its_prediction_is_not_worth_weight_lanes(monkeypatch):
    profile = contended(small.linear_profile([("vision", 16, 8, 1, 0.5)], num_devices=1), {"vision": (0.9, 0.95)})
    plan = make_plan(profile, "sequential")
    assert with_lanes(plan, profile, 2) == plan
    monkeypatch.setattr("spindle.planners.lanes.MIN_WEIGHT_LANES_GAIN", 0.0)
    concurrent = with_lanes(plan, profile, 2)
    assert [slot.has_weight_lane for slot in concurrent.slots] == [True]
    assert 0.95 * plan.makespan_s < concurrent.makespan_s < plan.makespan_s


@pytest.mark.parametrize("seed", range(12))
def test_random_lanes_are_legal_and_cannot_deadlock(seed):
    tasks = {"first": ["vision", "head"], "second": ["text", "head"], "third": ["audio"]}
    profile = contended(small.workload_profile(tasks, num_devices=1 + seed % 4))
    plan = random_lane_plan(profile, f"plan {seed} lanes")
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    ordered = [program.compute_of_rank(rank) for rank in range(program.num_ranks)]
    for rank, numbers in enumerate(ordered):
        assert sorted(numbers) == sorted(
            number
            for lane in (0, *range(3, len(program.lanes)))
            for number in program.lanes[lane].of_rank(rank).tolist()
        )
    assert simulate(program, profile).makespan_s > 0


def test_explain_says_which_lane_an_op_has_and_what_slows_it():
    profile = towers({"vision": (0.4, 0.6), "text": (0.3, 0.6), "audio": (0.0, 0.1)})
    plan = small.plan("vision*4@0 text*4@0|1 audio*2@0|2", profile)
    by_op = {explanation.op: explanation for explanation in explain(plan, profile)}
    (share,) = by_op["vision"].lanes
    assert (share.lane, share.num_lanes, share.slowed_by) == (0, 3, ("text", "audio"))
    assert share.slowdown == pytest.approx(1.0933, abs=1e-3)  # text, which presses on it, is soon over
    about_slots, about_lanes, *_ = sentences(by_op["vision"])
    assert about_slots.endswith("; alone that takes 36.00 ms, forward and backward together.")  # the step takes 39.36
    assert about_lanes == "It runs on lane 0 of 3, slowed 1.1× by text and audio."
    assert explain(small.plan("vision*4@0\ntext*4@0\naudio*2@0", profile), profile)[0].lanes == ()


def test_predicted_and_measured_have_the_busy_time_of_each_lane():
    profile = towers()
    program = lower(small.plan("vision*4@0|0w3 text*4@0|1 audio*2@0|2", profile), profile)
    timeline = simulate(program, profile)
    measured = replace(timeline, start=3 * timeline.start, end=3 * timeline.end, posted=3 * timeline.posted)
    comparison = compare_step(timeline, measured, program, profile.graph)
    vision, text, audio, weights = comparison.lanes
    # Forward, and half of backward on either lane; the others whole.
    assert (vision + weights).predicted_s == pytest.approx(0.036, rel=1e-5)
    assert weights.predicted_s == pytest.approx(0.012, rel=1e-5)
    assert text.predicted_s == pytest.approx(0.0104, rel=1e-5)
    assert all(lane.ratio == pytest.approx(3) for lane in comparison.lanes)
    assert compare_step(*(simulate(one_lane(), profile),) * 2, one_lane(), profile.graph).lanes == ()
    assert audio.predicted_s > 0
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(*step_tables(comparison), sep="\n")
    assert "lane 3 busy" in console.file.getvalue()


def test_a_slot_without_a_graph_is_named_with_what_it_costs():
    loop = pytest.importorskip("spindle.train.loop")
    profile = towers()
    program = lower(small.plan("vision*4@0\ntext*4@0\naudio*2@0", profile), profile)
    timeline = simulate(program, profile)
    slower = replace(timeline, end=timeline.start + 3 * (timeline.end - timeline.start))
    vision = {
        number
        for number, instruction in enumerate(program.instructions)
        if isinstance(instruction, Forward | Backward) and instruction.slot == 0
    }
    result = SimpleNamespace(rank=0, measured=slower, predicted=timeline)
    text = loop._cost_text(result, vision)
    measured_s, predicted_s = (of.busy_s(0, vision) for of in (slower, timeline))
    assert measured_s == pytest.approx(3 * predicted_s)
    assert seconds(measured_s) in text
    assert f"predicted {seconds(predicted_s)}" in text
    assert loop._cost_text(SimpleNamespace(measured=None), vision) == ""


def test_lanes_written_by_hand_need_no_order_between_them():
    profile = towers()
    text = "vision*4@0\naudio*2@0|1\ntext*2@0|1\ntext*2@0|1"
    plan = small.plan(text, profile)
    check(plan, profile)
    assert parse_plan(format_plan(plan), profile) == plan


def one_lane():
    profile = towers()
    return lower(small.plan("vision*4@0\ntext*4@0\naudio*2@0", profile), profile)


def test_verbs_plan_compare_and_simulate_lanes_that_a_profile_allows(tmp_path, capsys):
    profile, planned = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    write_profile(tmp_path / "profile.json", towers({"vision": (0.2, 0.5), "text": (0.2, 0.5), "audio": (0.2, 0.5)}))

    def printed(*arguments):
        assert run([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    step_s_of = {row["planner"]: row["makespan_s"] for row in printed("compare", profile)["rows"]}
    (on_lanes,) = (name for name in step_s_of if re.fullmatch(r"sequential, \d lanes", name))
    assert step_s_of[on_lanes] < 0.8 * step_s_of["sequential"]
    assert printed("plan", profile, "--planner", "sequential", "-o", planned)["makespan_s"] == step_s_of[on_lanes]
    simulated = printed("simulate", profile, planned)
    assert simulated["makespan_s"] == step_s_of[on_lanes]
    assert simulated["bound_s"] <= simulated["makespan_s"]  # the bound of lanes, not of modules that take turns
    assert printed("plan", profile, "--planner", "sequential", "--lanes", "1")["makespan_s"] == step_s_of["sequential"]
    for lanes in ("0", "9"):
        assert run(["plan", profile, "--lanes", lanes]) == 2
        assert f"a device has 1 to 8 lanes, got lanes={lanes}" in capsys.readouterr().err


def test_a_plan_whose_bound_is_its_longest_path_is_written_drawn_and_read(tmp_path, capsys):
    profile, planned, figure = (str(tmp_path / name) for name in ("profile.json", "plan.json", "step.svg"))
    profile_of_towers = towers()  # so small a fill that the area does not count
    write_profile(tmp_path / "profile.json", profile_of_towers)
    assert run(["plan", profile, "-o", planned]) == 0
    drawn = capsys.readouterr().out
    plan = read_plan(tmp_path / "plan.json", profile_of_towers)
    assert plan.num_lanes > 1
    assert plan.bound_s == pytest.approx(0.024)  # vision without its weight gradients
    assert run(["simulate", profile, planned]) == 0
    # Folded times are those of a slot alone, so both verbs draw the simulated step.
    assert drawn.split("\ndevices ")[1].splitlines() == capsys.readouterr().out.split("\ndevices ")[1].splitlines()
    assert run(["compare", profile, "--figure", figure]) == 0

    def words():
        return [element.text for element in ElementTree.parse(figure).getroot().iter(f"{SVG}text")]

    assert {f"0|{lane}" for lane in range(plan.num_lanes)} <= set(words())
    assert run(["report", profile, planned, "-o", figure]) == 0
    assert words().count("audio") == 6  # in the legend, forward, and two layers of both parts of backward


def test_a_figure_of_lanes_is_the_simulated_step():
    profile = towers({"vision": (0.4, 0.6), "text": (0.3, 0.6), "audio": (0.1, 0.3)})
    plan = small.plan("vision*4@0|0w3 text*4@0|1 audio*2@0|2", profile)
    program = lower(plan, profile)
    timeline = simulate(program, profile)
    plan = replace(plan, makespan_s=timeline.makespan_s, bound_s=timeline.makespan_s)
    (idle, *blocks) = [shape for shape in step_figure(profile, [("lanes", plan)]).shapes if isinstance(shape, Box)]
    blocks = [box for box in blocks if box.title]
    scale = idle.width / timeline.makespan_s
    assert max(box.x + box.width for box in blocks) == pytest.approx(idle.x + idle.width)
    busy_s = [lane.predicted_s for lane in compare_step(timeline, timeline, program, profile.graph).lanes]
    assert sum(box.width for box in blocks) == pytest.approx(scale * sum(busy_s))
    heights = sorted({box.y for box in blocks})
    rows = [sorted((box.x, box.x + box.width) for box in blocks if box.y == y) for y in heights]
    assert len(rows) == 4
    assert all(end <= begin + 1e-6 for row in rows for (_, end), (begin, _) in pairwise(row))
    assert {box.title.rpartition(", ")[2] for box in blocks} == {"forward", "backward", "gradients of weights"}
