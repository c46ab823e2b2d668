"""Quotas: lanes with SMs of their own, in plans, the simulator and the planner."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import pytest

import small
from random_plans import contended
from spindle.cli.main import run
from spindle.cluster import SmGroups
from spindle.errors import ClusterError, InputError, PlanError, ProfileError
from spindle.plan import Plan, check, format_plan, parse_plan, read_plan, write_plan
from spindle.planners import PlanOptions, make_plan
from spindle.planners.quotas import with_quotas
from spindle.profile import Profile, SmTimes, read_profile, write_profile
from spindle.program import format_program, lower, parse_program, verify
from spindle.report.explain import explain, sentences
from spindle.simulate import simulate

TOWERS = [("vision", 16, 4, 1, 0.5), ("text", 16, 4, 1, 0.1), ("audio", 16, 2, 2, 0.2)]
LANES = "vision*4@0 text*4@0|1 audio*2@0|2"
GROUPS = SmGroups(group_sms=8, num_groups=15, rest_sms=12)  # 132 SMs, as on an H100
SMS = (16, 64, 132)
LINEAR = SmTimes(num_sms=SMS, forward=(8.25, 2.0625, 1.0), backward=(8.25, 2.0625, 1.0))
SATURATED = SmTimes(num_sms=SMS, forward=(1.0, 1.0, 1.0), backward=(1.0, 1.0, 1.0))  # 16 SMs are enough


def split(profile: Profile, sm_times: dict[str, SmTimes], groups: SmGroups | None = GROUPS) -> Profile:
    """A profile with times on some of the SMs, by op."""
    curves = tuple(
        tuple(replace(curve, sm_times=sm_times.get(op.name)) for curve in choices)
        for op, choices in zip(profile.graph.metaops, profile.curves, strict=True)
    )
    islands = tuple(replace(island, kind=replace(island.kind, sm_groups=groups)) for island in profile.cluster.islands)
    return replace(profile, curves=curves, cluster=replace(profile.cluster, islands=islands))


def towers(*, contention: tuple[float, float] = (0.5, 0.9), **sm_times: SmTimes) -> Profile:
    shares = dict.fromkeys(("vision", "text", "audio"), contention)
    profile = contended(small.linear_profile(TOWERS, num_devices=1), shares)
    return split(profile, {"vision": LINEAR, "text": LINEAR, "audio": LINEAR} | sm_times)


def step_s(plan: Plan, profile: Profile) -> float:
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    return simulate(program, profile).makespan_s


def test_a_plan_without_quotas_is_written_as_before(tmp_path):
    profile = towers()
    plan = small.plan(LANES, profile)
    write_plan(tmp_path / "plan.json", plan)
    assert "quotas" not in (tmp_path / "plan.json").read_text()
    assert "quotas" not in format_plan(plan)


def test_quotas_survive_text_and_file(tmp_path):
    profile = towers()
    plan = small.plan(f"# quotas 64 16 52\n{LANES}", profile)
    assert plan.quotas == (64, 16, 52)
    assert "# quotas 64 16 52\n" in format_plan(plan)
    assert parse_plan(format_plan(plan), profile).quotas == plan.quotas
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json", profile) == plan
    text = format_program(lower(plan, profile), profile)
    assert parse_program(text, profile).plan.quotas == plan.quotas
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ("64 64", "3 lanes, expected a quota of SMs for each of them, got 64, 64"),
        ("64 16 16 16", "3 lanes, expected a quota of SMs for each of them"),
        ("64 48 16", "quotas of 64, 48, 16 SMs are more than there are: 15 groups of 8, and 12 left over"),
        ("64 30 16", "a quota of 30 SMs is not granted; expected a multiple of 8, or 12 more than one for one lane"),
        ("0 64 16", "a quota of 0 SMs is not granted"),
        ("28 28 16", "only one lane can have the 12 SMs that are left over, got 28, 28, 16"),
        ("8 64 16", "vision: no time is known for 8 SMs; measured: 16 to 132"),
    ],
)
def test_quotas_that_cannot_be_are_refused(quotas, message):
    profile = towers()
    with pytest.raises(PlanError, match=message):
        check(small.plan(f"# quotas {quotas}\n{LANES}", profile), profile)


def test_quotas_need_lanes_of_slots_whose_times_are_known():
    profile = towers()
    with pytest.raises(PlanError, match="quotas of 64 SMs and one lane"):
        check(small.plan("# quotas 64\nvision*4@0\ntext*4@0\naudio*2@0", profile), profile)
    plan = small.plan(f"# quotas 64 16 16\n{LANES}", profile)
    with pytest.raises(PlanError, match=r"does not say how the SMs of 'A800.*' can be split"):
        check(plan, split(profile, {}, groups=None))
    with pytest.raises(PlanError, match=r"text: no time is known for 16 SMs, only for whole devices(.*\n)+.*>>> text"):
        check(plan, split(profile, {"vision": LINEAR, "audio": LINEAR}))
    weights = small.plan("# quotas 64 32 16\nvision*4@0|0w2 text*4@0|1\naudio*2@0", profile)
    with pytest.raises(PlanError, match="under which they run on the SMs of their slot"):
        check(weights, profile)


@pytest.mark.parametrize("line", ["# quotas", "# quotas 64 many", "# quotas 64 -8", "# quotas 64 1.5"])
def test_text_that_is_no_quota_is_refused_with_its_line(line):
    with pytest.raises(PlanError, match="line 1: expected # quotas and the SMs of each lane"):
        parse_plan(f"{line}\n{LANES}", towers())


def test_a_file_whose_quotas_are_no_numbers_is_refused(tmp_path):
    profile, path = towers(), tmp_path / "plan.json"
    write_plan(path, small.plan(f"# quotas 64 16 52\n{LANES}", profile))
    path.write_text(path.read_text().replace("64,", '"64",', 1))
    with pytest.raises(InputError, match=r'quotas\[0\]: expected a whole number, got "64"'):
        read_plan(path, profile)


def test_numbers_of_sms_that_cannot_be_are_refused():
    with pytest.raises(ClusterError, match="group_sms must be above 0"):
        SmGroups(group_sms=0, num_groups=15)
    with pytest.raises(ProfileError, match="numbers of SMs must be increasing"):
        SmTimes(num_sms=(64, 16), forward=(1.0, 1.0), backward=(1.0, 1.0))
    with pytest.raises(ProfileError, match="one forward and one backward time"):
        SmTimes(num_sms=(16, 64), forward=(1.0,), backward=(1.0, 1.0))
    with pytest.raises(ProfileError, match="above 0"):
        SmTimes(num_sms=(16,), forward=(0.0,), backward=(1.0,))


def test_a_rest_goes_to_the_quota_that_asks_for_it():
    assert GROUPS.num_sms == 132
    assert GROUPS.parts((64, 68)) == ((8, False), (7, True))
    assert GROUPS.parts((12, 120)) == ((0, True), (15, False))
    assert SmGroups(group_sms=2, num_groups=66).parts((64, 68)) == ((32, False), (34, False))


def test_a_lane_takes_as_long_as_on_its_sms_and_is_not_slowed_by_others():
    profile = towers(contention=(0.5, 0.9))
    alone_s = {"vision": 0.036, "text": 0.0104, "audio": 0.0104}
    plan = small.plan(f"# quotas 64 16 52\n{LANES}", profile)
    timeline = simulate(lower(plan, profile), profile)
    expected = {"vision": 2.0625 * alone_s["vision"], "text": 8.25 * alone_s["text"]}
    assert timeline.makespan_s == pytest.approx(max(expected.values()), rel=1e-5)
    # Halfway between two measured numbers of SMs.
    assert LINEAR.on(40) == pytest.approx(((8.25 + 2.0625) / 2,) * 2)


def test_passes_on_other_sms_slow_a_lane_only_by_their_pressure_on_memory():
    pressed = replace(SATURATED, pressure=(0.25, 0.5))
    profile = split(contended(small.linear_profile(TOWERS[:2], num_devices=1)), {"vision": SATURATED, "text": pressed})
    plan = small.plan("# quotas 64 64\nvision*4@0 text*4@0|1", profile)
    with pytest.raises(PlanError, match="more than there are"):
        check(plan, profile)
    plan = replace(plan, quotas=(64, 56))
    # A third of each tower is forward, two thirds backward. Text is as fast as alone, and vision waits for its own
    # backward until it ends: backward of text presses on forward of vision as long as both run.
    vision_s, text_s = 0.036, 0.0104
    forward_s, backward_s = text_s / 3, 2 * text_s / 3
    lost_s = forward_s * (1 - 1 / 1.25) + backward_s * (1 - 1 / 1.5)
    assert step_s(plan, profile) == pytest.approx(vision_s + lost_s, rel=1e-5)


def best_quotas_s(plan: Plan, profile: Profile) -> float:
    """The oracle: the shortest step over every division of the SMs."""
    best_s = float("inf")
    for counts in product(range(2, 16), repeat=plan.num_lanes):
        if sum(counts) <= GROUPS.num_groups:
            for with_rest in range(plan.num_lanes):
                quotas = tuple(8 * count + 12 * (lane == with_rest) for lane, count in enumerate(counts))
                best_s = min(best_s, simulate(lower(replace(plan, quotas=quotas), profile), profile).makespan_s)
    return best_s


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_the_planner_divides_sms_as_well_as_can_be(num_lanes):
    stepped = SmTimes(
        num_sms=(16, 32, 48, 64, 112, 120, 132),
        forward=(6.0, 3.0, 2.0, 1.5, 1.5, 1.1, 1.0),
        backward=(7.0, 3.5, 2.5, 1.6, 1.6, 1.2, 1.0),
        pressure=(0.05, 0.1),
    )
    profile = towers(vision=stepped, text=SATURATED)
    text = LANES if num_lanes == 3 else "vision*4@0 text*4@0|1\naudio*2@0|1"
    plan = replace(small.plan(text, profile), makespan_s=1.0, bound_s=1.0)
    divided = with_quotas(plan, profile)
    assert len(divided.quotas) == num_lanes
    check(divided, profile)
    assert divided.makespan_s == pytest.approx(step_s(divided, profile))
    assert divided.makespan_s <= 1.01 * best_quotas_s(plan, profile)
    assert 0 < divided.bound_s <= divided.makespan_s


def test_quotas_are_taken_only_where_they_are_faster():
    # Every lane needs all SMs, and shares them well.
    shares_well = towers(contention=(0.0, 0.2))
    options = PlanOptions(lanes=3, quotas=True)
    assert make_plan(shares_well, "sequential", options).quotas == ()
    # Few SMs are enough for each, and copies that share all of them take turns.
    takes_turns = towers(contention=(1.0, 0.9), vision=SATURATED, text=SATURATED, audio=SATURATED)
    plan = small.plan(LANES, takes_turns)
    together = replace(plan, makespan_s=step_s(plan, takes_turns))
    divided = with_quotas(together, takes_turns)
    assert divided.quotas
    assert divided.makespan_s < 0.9 * together.makespan_s
    assert make_plan(takes_turns, "sequential", PlanOptions(lanes=3)).quotas == ()


def test_plans_that_cannot_have_quotas_stay_as_they_are():
    profile = towers()
    one_lane = make_plan(profile, "sequential")
    assert with_quotas(one_lane, profile) is one_lane
    weights = replace(small.plan("vision*4@0|0w1\ntext*4@0\naudio*2@0", profile), makespan_s=1.0)
    assert with_quotas(weights, profile) is weights
    unknown = split(profile, {"vision": LINEAR})
    lanes = replace(small.plan(LANES, unknown), makespan_s=1.0)
    assert with_quotas(lanes, unknown) is lanes
    few = split(profile, {"vision": LINEAR, "text": LINEAR, "audio": LINEAR}, SmGroups(group_sms=8, num_groups=5))
    assert with_quotas(lanes, few) is lanes  # three lanes of at least 16 SMs


def test_explain_says_how_many_sms_an_op_has():
    profile = towers()
    plan = small.plan(f"# quotas 64 16 52\n{LANES}", profile)
    by_op = {explanation.op: explanation for explanation in explain(plan, profile)}
    assert by_op["vision"].lanes[0].num_sms == 64
    assert any(
        line.startswith("It runs on lane 0 of 3, on 64 SMs of its own, slowed 2.1× by fewer SMs")
        for line in sentences(by_op["vision"])
    )


def test_compare_has_plans_with_quotas_where_they_are_faster(tmp_path, capsys):
    profile = towers(contention=(0.3, 0.45), vision=SATURATED, text=SATURATED, audio=SATURATED)
    curves = tuple(tuple(replace(curve, weight_s=()) for curve in choices) for choices in profile.curves)
    write_profile(tmp_path / "profile.json", replace(profile, curves=curves))
    assert run(["compare", str(tmp_path / "profile.json"), "--json"]) == 0
    step_s_of = {row["planner"]: row["makespan_s"] for row in json.loads(capsys.readouterr().out)["rows"]}
    (divided,) = (name for name in step_s_of if re.fullmatch(r"sequential, \d lanes, quotas \d+(\+\d+)+", name))
    assert step_s_of[divided] < step_s_of[divided.partition(", quotas")[0]]
