"""Plans: what makes one legal, and that its forms come back as they went."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.errors import InputError, PlanError
from spindle.plan import check, format_plan, parse_plan, read_plan, slots_per_op, write_plan
from spindle.planners import make_plan

LEGAL = "vision*12@0-2 text*6@3\nhead*1@0-3"


def test_a_legal_plan_passes():
    profile = small.two_towers()
    check(small.plan(LEGAL, profile), profile)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vision*12@0-3 text*6@3\nhead*1@0-3", r"wave 0: device 3 is used twice"),
        ("vision*11@0-2 text*6@3\nhead*1@0-3", r"op 'vision' has 12 layers, this plan runs 11"),
        ("vision*12@0-2\ntext*6@3-4\nhead*1@0-3", r"there is no device 4, only 0 to 3"),
        ("vision*12@0-2 text*6@3 head*1@0", r"head takes data from its own wave|device 0 is used twice"),
        ("vision*12@0,0,1 text*6@3\nhead*1@0-3", r"vision names a device twice"),
        ("head*1@0-3\nvision*12@0-2 text*6@3", r"head runs before vision, which feeds it"),
    ],
)
def test_an_illegal_plan_is_refused_with_the_place(text, message):
    profile = small.two_towers()
    with pytest.raises(PlanError, match=message):
        check(small.plan(text, profile), profile)


def test_the_error_of_a_plan_prints_it_with_the_slot_marked():
    profile = small.two_towers()
    with pytest.raises(PlanError, match=r">>> text\*6@3 <<<"):
        check(small.plan("vision*12@0-3 text*6@3\nhead*1@0-3", profile), profile)


def test_a_number_of_devices_that_has_no_time_is_refused():
    profile = small.linear_profile([("a", 16, 2, 1, 1)], num_devices=4, divisors_only=True)
    with pytest.raises(PlanError, match=r"line 1: a: no time is known for 3 devices; known: 1-2, 4"):
        small.plan("a*2@0-2", profile)


def test_a_plan_stays_legal_when_its_curves_are_measured_again():
    profile = small.two_towers()
    plan = small.plan(LEGAL, profile)
    slower = [tuple(curve.scaled(1.0 + number) for curve in curves) for number, curves in enumerate(profile.curves)]
    check(plan, replace(profile, curves=tuple(slower)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch": 1}, "is of microbatch 0, its slot says 1"),
        ({"lane": 1}, r"does not say how much they slow each other down; .*\n(.*\n)*.*@0-2\|1 <<<"),
    ],
)
def test_a_slot_of_another_microbatch_or_lane_is_refused(change, message):
    profile = small.two_towers()
    plan = small.plan(LEGAL, profile)
    with pytest.raises(PlanError, match=message):
        check(replace(plan, slots=(replace(plan.slots[0], **change), *plan.slots[1:])), profile)


def test_neighbouring_pieces_on_the_same_devices_are_one_slot():
    profile = small.two_towers()
    wavy = small.plan("vision*5@0-2 text*6@3\nvision*7@0-2\nhead*1@0-3", profile)
    assert slots_per_op(wavy) == 1.0


@given(small.graphs(), st.sampled_from(["paper", "sequential", "distmm", "task-level"]))
def test_the_text_form_of_a_plan_comes_back_the_same(profile, planner):
    plan = make_plan(profile, planner)
    back = parse_plan(format_plan(plan), profile)
    assert format_plan(back) == format_plan(plan)
    assert back.folded_s == pytest.approx(plan.folded_s)
    assert [(s.op, s.first, s.last, s.devices, s.wave) for s in back.slots] == [
        (s.op, s.first, s.last, s.devices, s.wave) for s in plan.slots
    ]


def test_a_plan_comes_back_from_its_file_equal(tmp_path):
    profile = small.two_towers()
    plan = make_plan(profile, "paper")
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json", profile) == plan


def test_a_plan_comes_back_from_its_text_file_and_a_mistake_in_it_is_named(tmp_path):
    profile, path = small.two_towers(), tmp_path / "plan.txt"
    plan = make_plan(profile, "paper")
    write_plan(path, plan)
    assert path.read_text() == format_plan(plan)
    assert read_plan(path, profile).slots == plan.slots
    path.write_text(path.read_text().replace("*", "*9", 1))
    with pytest.raises(PlanError, match=r"plan\.txt, line 2: "):
        read_plan(path, profile)


def test_the_waves_of_a_text_need_not_follow_start_order_which_depends_on_measured_times():
    for num_layers, order in (((4, 1), "abdc"), ((1, 4), "abcd")):
        ops = [(name, 4, count, 1, 1) for name, count in zip("abcd", (*num_layers, 1, 1), strict=True)]
        profile = small.linear_profile(ops, [("a", "c"), ("b", "d")], num_devices=2)
        text = "a*{}@0 b*{}@1\nc*1@0\nd*1@1".format(*num_layers)
        plan = small.plan(text, profile)
        check(plan, profile)
        assert "".join(slot.op for slot in plan.slots) == order
        with pytest.raises(PlanError, match="wave 0: device 1 is used twice"):
            check(small.plan(text.replace("@0 ", "@1 "), profile), profile)


def test_a_plan_for_another_workload_is_refused(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan(small.two_towers(), "sequential"))
    other = small.linear_profile(small.CASE_A, num_devices=4)
    with pytest.raises(PlanError, match="made for another workload"):
        read_plan(tmp_path / "plan.json", other)


def test_a_plan_file_that_was_cut_off_is_refused_with_the_place(tmp_path):
    profile = small.two_towers()
    write_plan(tmp_path / "plan.json", make_plan(profile, "sequential"))
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match=r"plan\.json, line \d+"):
        read_plan(tmp_path / "plan.json", profile)
