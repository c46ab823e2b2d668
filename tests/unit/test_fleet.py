"""The fleet scheduler: what is allocated to whom, and why. Names of requests elsewhere are in parentheses."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

import fleets
from spindle.artifact import from_json, to_json
from spindle.cluster import Cluster, cluster_named
from spindle.errors import FleetError, ProfileError
from spindle.fleet import (
    Cell,
    Completed,
    DeviceCount,
    Draining,
    Estimate,
    Estimated,
    Failed,
    Injection,
    LostAttempt,
    NodeJoined,
    NodeLost,
    NodeShare,
    Occupied,
    Plan,
    Progressed,
    Resize,
    Resumed,
    SchedulerOptions,
    Start,
    Started,
    State,
    StepTime,
    Stop,
    Stopped,
    Suspended,
    Team,
    Ticked,
    Trace,
    TraceJob,
    measure_fleet,
    schedule,
    simulate_fleet,
)
from spindle.fleet.deadlines import verdict
from spindle.fleet.estimates import bound_estimate, planned_estimate, workload_step
from spindle.fleet.event_log import log_lines, read_event_log, replay
from spindle.fleet.explain import explain_job, node_worths
from spindle.fleet.fleet_file import fleet_named
from spindle.fleet.job import Job
from spindle.fleet.leases import Due, check_wait
from spindle.fleet.policies import POLICIES
from spindle.graph import metagraph_of
from spindle.planners import graph_bound_s
from spindle.profile import Roofline, roofline_profile
from spindle.recipes import RECIPES

ONE_NODE = fleets.fleet({"big": [4]})
SCALES = {("big", 1): 4.0, ("big", 2): 2.1, ("big", 4): 1.1}


def test_a_job_that_arrives_on_an_idle_fleet_gets_its_fastest_cell():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
    state, actions = fleets.at(0.0, state)
    (start,) = actions
    assert isinstance(start, Start)
    assert (start.job, start.attempt, start.cell.num_devices) == ("a", 1, 4)
    assert [(share.node, share.num_devices) for share in start.nodes] == [("node0", 4)]


def test_a_running_job_shrinks_for_one_that_arrives_and_grows_back_when_it_is_done():
    """Resizing (ray #12562), growing when devices become free (kueue #9891)."""
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, fleets.submitted("b", SCALES, 1000.0))
    state, actions = fleets.at(1000.0, state)
    assert fleets.cells(state) == {"a": "2 x big", "b": "2 x big"}
    assert [type(action) for action in actions] == [Resize, Start]
    b = state.find("b")
    state, _ = fleets.after(state, Completed(time_s=2000.0, job="b", attempt=b.attempt))
    state, actions = fleets.at(2000.0, state)
    assert fleets.cells(state) == {"a": "4 x big"}
    assert isinstance(actions[0], Resize)
    assert actions[0].attempt == 3


def test_a_job_takes_any_of_several_kinds():
    """Any of several kinds (skypilot #1361)."""
    machines = fleets.fleet({"big": [4], "small": [4]})
    times = {("big", 4): 1.0, ("small", 4): 2.0}
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", times), fleets.submitted("b", times))
    state, _ = fleets.at(0.0, state)
    assert sorted(fleets.cells(state).values()) == ["4 x big", "4 x small"]


def test_a_high_priority_wins_and_an_urgent_job_preempts():
    """Priorities (ray #63790)."""
    rigid = {("big", 4): 1.0}
    state, _ = fleets.after(
        fleets.new_state(ONE_NODE),
        fleets.submitted("low", rigid, priority="low"),
        fleets.submitted("high", rigid, priority="high"),
    )
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"low": "", "high": "4 x big"}
    state, _ = fleets.after(state, fleets.submitted("urgent", rigid, 100.0, priority="urgent", num_steps=10_000_000))
    state, actions = fleets.at(100.0, state)
    assert fleets.cells(state) == {"low": "", "high": "", "urgent": "4 x big"}
    assert [type(action) for action in actions] == [Stop, Start]


def test_a_drained_node_is_left_before_it_goes():
    """Using the warning before a preemption (ray #63968)."""
    machines = fleets.fleet({"big": [4, 4]})
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", {("big", 4): 1.0}))
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, Draining(time_s=500.0, node="node0", deadline_s=800.0))
    state, actions = fleets.at(500.0, state)
    (resize,) = actions
    assert isinstance(resize, Resize)
    assert [share.node for share in resize.nodes] == ["node1"]


@pytest.mark.parametrize(
    ("within_s", "round_s"),
    [(120.0, 530.0), (60.0, 530.0), (50.0, 521.0), (30.0, 501.0), (5.0, 501.0)],
    ids=["no hurry", "just in time", "early", "at once", "too late"],
)
def test_a_drain_does_not_wait_for_the_interval_between_rounds_where_its_deadline_is_earlier(within_s, round_s):
    state, _ = fleets.after(fleets.new_state(fleets.fleet({"big": [4, 4]})), fleets.submitted("a", {("big", 4): 1.0}))
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, fleets.submitted("b", {("big", 4): 1.0}, 500.0))
    state, _ = fleets.at(500.0, state)  # the last round: the interval allows the next at 530
    state, _ = fleets.after(state, Draining(time_s=501.0, node="node0", deadline_s=501.0 + within_s, grace_s=30.0))
    assert state.next_round_s == round_s
    state, actions = fleets.after(state, Ticked(time_s=round_s))
    assert any(isinstance(action, Stop | Resize) for action in actions)
    assert not any(share.node == "node0" for job in state.jobs if job.allocation for share in job.allocation.nodes)


def test_a_second_drain_with_an_earlier_deadline_makes_the_round_earlier():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", {("big", 4): 1.0}, 500.0))
    state, _ = fleets.at(500.0, state)
    for time_s, within_s in ((501.0, 120.0), (502.0, 10.0)):
        state, _ = fleets.after(state, Draining(time_s=time_s, node="node0", deadline_s=time_s + within_s))
    state, actions = fleets.after(state, Ticked(time_s=502.0))
    assert actions == [Stop(job="a", attempt=1)]


def test_a_waiting_job_is_told_why_and_what_would_help():
    """Pending beside free devices without a reason (ray #24259, kueue #1476)."""
    machines = fleets.fleet({"big": [4], "small": [2]})
    rigid = {("big", 4): 1.0}
    state, _ = fleets.after(
        fleets.new_state(machines), fleets.submitted("a", rigid, priority="high"), fleets.submitted("b", rigid)
    )
    state, _ = fleets.at(0.0, state)
    explanation = explain_job(state, "b")
    assert explanation.phase == "waiting"
    assert "serve jobs that gain more per device" in explanation.reason
    assert any("small" in text for text in explanation.helps)
    assert any("lease" in text for text in explanation.helps)
    (cell,) = explanation.cells
    assert cell.cost >= cell.utility
    assert cell.rivals == ("a",)
    assert explain_job(state, "a").cells[0].is_held
    with pytest.raises(FleetError, match="no job is called 'c'; the fleet has a, b"):
        explain_job(state, "c")


@pytest.mark.parametrize(
    ("first", "claim"),
    [
        ({"deadline_s": 5000.0, "num_steps": 100}, "its deadline is promised"),
        ({"priority": "urgent"}, "urgent"),
        ({"team": "vision"}, "guaranteed to its team 'vision'"),
        ({}, "a lease, as it had waited long"),
    ],
)
def test_a_job_that_waits_for_what_others_get_first_is_told_for_whom(first, claim):
    """The waiting job would gain more per device."""
    guaranteed = (DeviceCount(kind="big", num_devices=4),) if "team" in first else ()
    machines = fleets.fleet({"big": [4]}, (Team(name="vision", guaranteed=guaranteed),))
    state = fleets.new_state(machines, starvation_s=0.0 if not first else 12 * 3600.0)
    state, _ = fleets.after(state, fleets.submitted("a", {("big", 4): 10.0}, **{"num_steps": 10**6, **first}))
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, fleets.submitted("b", {("big", 4): 1.0}, 40.0, priority="high", num_steps=500))
    state, _ = fleets.at(40.0, state)
    assert fleets.cells(state) == {"a": "4 x big", "b": ""}
    explanation = explain_job(state, "b")
    assert f"4 of 4 big devices go to jobs that come first: 4 to a ({claim})" in explanation.reason
    assert "a higher priority" not in explanation.helps
    assert explanation.cells[0].utility > 2 * explain_job(state, "a").cells[0].utility


def test_a_job_whose_team_has_as_much_as_it_may_is_told_so():
    teams = (Team(name="vision", limits=(DeviceCount(kind="big", num_devices=2),)),)
    state = fleets.new_state(fleets.fleet({"big": [4]}, teams))
    pair = {("big", 2): 1.0}
    state, _ = fleets.after(state, *(fleets.submitted(name, pair, team="vision") for name in "ab"))
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"a": "2 x big", "b": ""}
    explanation = explain_job(state, "b")
    assert explanation.reason.endswith("and its team 'vision' has as many big devices as it may")
    assert "a higher limit of team 'vision'" in explanation.helps


def test_a_job_that_has_no_place_beside_others_is_told_so():
    """Free devices that no job can use (kueue #4329)."""
    state = fleets.new_state(fleets.fleet({"big": [4, 4]}))
    jobs = [fleets.submitted(name, {("big", 3): 1.0}) for name in "ab"]
    state, _ = fleets.after(state, *jobs, fleets.submitted("c", {("big", 2): 1.0}, priority="low"))
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"a": "3 x big", "b": "3 x big", "c": ""}
    reason = explain_job(state, "c").reason
    assert reason == "2 big devices are free, but no node has 2 of them, and moving other jobs makes no room"


def test_a_job_whose_nodes_are_gone_is_told_so():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
    state, _ = fleets.after(state, NodeLost(time_s=0.0, node="node0"))
    state, _ = fleets.at(0.0, state)
    assert explain_job(state, "a").reason.endswith(
        "and the fleet can use 0 big devices now: the others are on lost or drained nodes, or held by somebody else"
    )


def test_what_is_explained_is_what_a_calculation_by_hand_gives():
    """Two kinds, three jobs; seconds and devices as in the comments, the bound by HiGHS."""
    machines = fleets.fleet({"big": [4], "small": [2]})
    times = {
        "a": {("big", 2): 2.0, ("big", 4): 1.0, ("small", 2): 4.0},  # 10,000 steps: 10,000 s at best
        "b": {("big", 4): 0.5, ("small", 2): 1.0},  # 5,000 s
        "c": {("big", 2): 1.0, ("small", 1): 2.0},  # 10,000 s
    }
    submitted = [fleets.submitted(name, times[name], num_steps=10_000) for name in times]
    state, _ = fleets.after(fleets.new_state(machines), *submitted)
    state, _ = fleets.at(0.0, state)
    later_s = 1000.0
    running = [
        Progressed(time_s=later_s, job=job.name, attempt=1, step=1000.0)
        for job in state.jobs
        if job.allocation is not None
    ]
    state, _ = fleets.after(state, *running)

    def utility(name: str, kind: str, count: int) -> float:
        job = state.find(name)
        left = 10_000 - job.step
        step_s, best_s = times[name][kind, count], min(times[name].values())
        held = job.allocation is not None and (job.allocation.cell.kind, job.allocation.cell.num_devices) == (
            kind,
            count,
        )
        cost_s = 0.0 if held else job.realloc_s
        weight = (3600.0 / (left * best_s)) ** 0.35
        return weight * best_s / step_s * (1 - cost_s / min(7200.0, cost_s + left * step_s))

    cells = [(name, kind, count) for name in times for kind, count in times[name]]
    worth = np.array([utility(*cell) for cell in cells])

    def bound(capacity: dict[str, int]) -> float:
        """By the linear program: at most one cell for each job, no device twice."""
        jobs = [[float(cell[0] == name) for cell in cells] for name in times]
        kinds = [[float(cell[2] * (cell[1] == kind)) for cell in cells] for kind in capacity]
        limits = [1.0] * len(jobs) + [float(number) for number in capacity.values()]
        return -linprog(-worth, A_ub=np.array(jobs + kinds), b_ub=limits, bounds=(0, None), method="highs").fun

    capacity = {"big": 4, "small": 2}
    prices = {node.kind: node.price for node in node_worths(state)}
    surplus = dict.fromkeys(times, 0.0)
    for name in times:
        explained = {(cell.kind, cell.num_devices): cell for cell in explain_job(state, name).cells}
        assert explained.keys() == times[name].keys()
        for (kind, count), cell in explained.items():
            assert cell.utility == pytest.approx(utility(name, kind, count), rel=1e-12)
            assert cell.cost == pytest.approx(count * prices[kind], rel=1e-12)
            surplus[name] = max(surplus[name], cell.utility - cell.cost)
    # Prices are those of the dual problem: with them, jobs and devices are worth together what the program reaches.
    dual = sum(surplus.values()) + sum(capacity[kind] * prices[kind] for kind in capacity)
    assert dual == pytest.approx(bound(capacity), rel=1e-9)
    for node in node_worths(state):
        gain = bound({**capacity, node.kind: capacity[node.kind] + node.num_devices}) - bound(capacity)
        assert gain > 0
        assert node.gain == pytest.approx(gain, rel=1e-9)
        assert node.share == pytest.approx(gain / bound(capacity), rel=1e-9)


def test_a_job_whose_devices_others_hold_goes_elsewhere_and_the_fleet_does_without_them():
    machines = fleets.fleet({"big": [4, 4]})
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", {("big", 2): 1.0}))
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, fleets.submitted("b", {("big", 2): 1.0}, 30.0))
    state, actions = schedule(state, Ticked(time_s=30.0))  # b does not begin
    assert [action.nodes for action in actions] == [(NodeShare(node="node0", num_devices=2),)]
    state, actions = schedule(state, Occupied(time_s=90.0, node="node0", num_devices=4, jobs=("b",)))
    assert actions == (Stop(job="b", attempt=1),)
    assert fleets.cells(state) == {"a": "2 x big", "b": ""}
    assert state.occupied == (NodeShare(node="node0", num_devices=2),)  # a trains on the others
    state, actions = fleets.at(90.0, state)
    assert [(action.job, action.nodes) for action in actions] == [("b", (NodeShare(node="node1", num_devices=2),))]
    large = fleets.submitted("c", {("big", 4): 1.0}, 100.0, priority="urgent")
    state, _ = fleets.after(state, large)
    state, _ = fleets.at(130.0, state)
    assert fleets.cells(state)["c"] == "4 x big"
    assert [share.node for share in state.find("c").allocation.nodes] == ["node1"]
    assert fleets.cells(state)["b"] == ""  # nowhere
    state, _ = fleets.after(state, Occupied(time_s=200.0, node="node0", num_devices=0))
    assert state.occupied == ()
    state, _ = fleets.at(200.0, state)
    assert [share.node for share in state.find("b").allocation.nodes] == ["node0"]


def test_another_node_is_worth_something_only_where_devices_are_short():
    machines = fleets.fleet({"big": [4], "small": [2]})
    rigid = {("big", 4): 1.0}
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", rigid), fleets.submitted("b", rigid))
    state, _ = fleets.at(0.0, state)
    big, small = node_worths(state)
    assert (big.kind, big.num_devices, small.num_devices) == ("big", 4, 2)
    assert big.gain > 0
    assert small.gain == 0


def test_a_job_on_a_lost_node_resumes_elsewhere_from_its_checkpoint():
    machines = fleets.fleet({"big": [4, 2]})
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", SCALES))
    state, _ = fleets.at(0.0, state)
    lost = NodeLost(time_s=900.0, node="node0", attempts=(LostAttempt(job="a", step=70.0),))
    state, _ = fleets.after(state, lost)
    state, actions = fleets.at(900.0, state)
    (start,) = actions
    assert isinstance(start, Start)
    assert (start.attempt, start.cell.num_devices, start.nodes[0].node) == (2, 2, "node1")
    assert state.find("a").step == 70.0
    state, _ = fleets.after(state, NodeJoined(time_s=2000.0, node="node0"))
    state, _ = fleets.at(2000.0, state)
    assert fleets.cells(state) == {"a": "4 x big"}


def test_events_of_an_old_attempt_are_ignored():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
    state, _ = fleets.at(0.0, state)
    again, actions = schedule(state, Completed(time_s=10.0, job="a", attempt=0))
    assert actions == ()
    assert again.jobs == state.jobs


def test_a_script_that_fails_at_the_same_step_again_has_failed_others_are_tried_three_times():
    for by_script, num_tries in ((True, 2), (False, 3)):
        state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
        for attempt in range(1, num_tries + 1):
            assert state.find("a") is not None
            state, _ = fleets.at(state.now_s + 300.0, state)
            failed = Failed(
                time_s=state.now_s + 10, job="a", attempt=attempt, step=5.0, resume_step=0.0, by_script=by_script,
                reason="ValueError: no",
            )  # fmt: skip
            state, _ = fleets.after(state, failed)
        assert state.find("a") is None
        assert (state.ended[0].phase, state.ended[0].reason) == ("failed", "ValueError: no")


def test_a_node_that_is_new_is_used_at_the_next_round():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES), fleets.submitted("b", SCALES))
    state, _ = fleets.at(0.0, state)
    assert sorted(fleets.cells(state).values()) == ["2 x big", "2 x big"]
    with pytest.raises(FleetError, match="node 'new' is new to the fleet; its island"):
        fleets.after(state, NodeJoined(time_s=600.0, node="new"))
    state, _ = fleets.after(state, NodeJoined(time_s=600.0, node="new", island=ONE_NODE.cluster.islands[0]))
    state, _ = fleets.at(600.0, state)
    assert sorted(fleets.cells(state).values()) == ["4 x big", "4 x big"]


def test_a_job_whose_workload_changes_is_estimated_anew():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
    state, _ = fleets.at(0.0, state)
    smaller = (Estimate(cell=Cell(kind="big", num_devices=2), step_s=0.5),)
    state, _ = fleets.after(state, Estimated(time_s=500.0, job="a", estimates=smaller, replaces=True))
    state, _ = fleets.after(state, Progressed(time_s=501.0, job="a", attempt=1, step=450))
    state, _ = fleets.at(501.0, state)
    assert fleets.cells(state) == {"a": "2 x big"}
    assert state.find("a").step == 450


def test_a_suspended_job_holds_nothing_until_it_is_resumed():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES))
    state, _ = fleets.at(0.0, state)
    state, actions = fleets.after(
        state, Suspended(time_s=50.0, job="a"), Stopped(time_s=51.0, job="a", attempt=1, step=40)
    )
    assert actions == [Stop(job="a", attempt=1)]
    state, _ = fleets.at(400.0, state)
    assert fleets.cells(state) == {"a": ""}
    state, _ = fleets.after(state, Resumed(time_s=800.0, job="a"))
    state, _ = fleets.at(800.0, state)
    assert fleets.cells(state) == {"a": "4 x big"}
    assert state.find("a").step == 40


def test_a_measured_rate_corrects_other_cells_and_half_of_it_those_of_other_kinds():
    machines = fleets.fleet({"big": [4], "small": [4]})
    times = {("big", 2): 2.0, ("big", 4): 1.0, ("small", 4): 3.0}
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", times))
    state, _ = fleets.at(0.0, state)
    progressed = Progressed(time_s=200.0, job="a", attempt=1, step=100, step_s=2.0)
    state, _ = schedule(state, progressed)
    job = state.find("a")
    assert job.step_s(Cell(kind="big", num_devices=4)) == 2.0
    assert job.step_s(Cell(kind="big", num_devices=2)) == 4.0
    assert job.step_s(Cell(kind="small", num_devices=4)) == pytest.approx(3.0 * math.sqrt(2.0))
    assert state.next_round_s == 200.0  # far off its estimate


def test_only_chosen_cells_are_planned_and_a_job_starts_in_a_planned_cell():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES, grade="bound"))
    state, actions = fleets.at(0.0, state)
    assert actions == [Plan(job="a", cell=Cell(kind="big", num_devices=4))]
    assert fleets.cells(state) == {"a": ""}
    assert fleets.at(31.0, state)[1] == []  # it is being planned
    planned = Estimate(cell=Cell(kind="big", num_devices=4), step_s=1.5)
    state, _ = fleets.after(state, Estimated(time_s=40.0, job="a", estimates=(planned,)))
    state, actions = fleets.at(40.0, state)
    assert fleets.cells(state) == {"a": "4 x big"}
    # One that does not fit has no utility: the next best is planned.
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES, grade="bound"))
    state, _ = fleets.at(0.0, state)
    full = Estimate(cell=Cell(kind="big", num_devices=4), step_s=1.5, fits=False)
    state, _ = fleets.after(state, Estimated(time_s=40.0, job="a", estimates=(full,)))
    state, actions = fleets.at(40.0, state)
    assert actions == [Plan(job="a", cell=Cell(kind="big", num_devices=2))]


def test_idle_guarantees_are_lent_and_given_back_when_the_team_needs_them():
    teams = (Team(name="vision", guaranteed=(DeviceCount(kind="big", num_devices=2),)), Team(name="text"))
    machines = fleets.fleet({"big": [4]}, teams)
    state, _ = fleets.after(
        fleets.new_state(machines), fleets.submitted("borrower", SCALES, team="text", priority="high", num_steps=100)
    )
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"borrower": "4 x big"}
    late = fleets.submitted("owner", SCALES, 30.0, team="vision", priority="low", num_steps=10**9)
    state, _ = fleets.after(state, late)
    state, _ = fleets.at(30.0, state)
    assert fleets.cells(state) == {"borrower": "2 x big", "owner": "2 x big"}


def test_a_limit_of_a_team_is_never_exceeded():
    teams = (Team(name="vision", limits=(DeviceCount(kind="big", num_devices=2),)),)
    machines = fleets.fleet({"big": [4]}, teams)
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("a", SCALES, team="vision"))
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"a": "2 x big"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_limit_holds_under_every_policy_and_holds_up_its_own_team_alone(policy):
    teams = (Team(name="vision", limits=(DeviceCount(kind="big", num_devices=2),)),)
    rigid = {("big", 2): 1.0}
    jobs = [
        fleets.submitted("a", rigid, team="vision"),
        fleets.submitted("b", rigid, team="vision"),
        fleets.submitted(
            "c", {("big", 4): 1.0, ("big", 2): 2.0}, team="vision"
        ),  # requests more than its team may have
        fleets.submitted("d", rigid),
    ]
    state, _ = fleets.after(fleets.new_state(fleets.fleet({"big": [4]}, teams), policy=policy), *jobs)
    state, _ = fleets.at(0.0, state)
    for number in range(1, 4):
        cells = fleets.cells(state)
        of_team = [name for name in "abc" if cells.get(name)]
        assert [cells[name] for name in of_team] == ["2 x big"]
        assert cells["d"] == "2 x big"
        completed = Completed(time_s=1000.0 * number, job=of_team[0], attempt=state.find(of_team[0]).attempt)
        state, _ = fleets.after(state, completed)
        state, _ = fleets.at(1000.0 * number, state)
    assert fleets.cells(state) == {"d": "2 x big"}


def test_a_later_job_of_a_team_is_backfilled_if_the_first_that_waits_for_the_limit_is_not_delayed():
    teams = (Team(name="vision", limits=(DeviceCount(kind="big", num_devices=4),)),)
    jobs = [
        fleets.submitted("runs", {("big", 3): 1.0}, team="vision", num_steps=1000),
        fleets.submitted("waits", {("big", 2): 1.0}, team="vision"),
        fleets.submitted("long", {("big", 1): 1.0}, team="vision", num_steps=10_000),
        fleets.submitted("short", {("big", 1): 1.0}, team="vision", num_steps=100),
    ]
    for policy, expected in (("backfill", ["runs", "long"]), ("fcfs", ["runs"])):
        state, _ = fleets.after(fleets.new_state(fleets.fleet({"big": [8]}, teams), policy=policy), *jobs)
        state, _ = fleets.at(0.0, state)
        assert [name for name, cell in fleets.cells(state).items() if cell] == expected


def test_a_promised_deadline_is_kept_against_jobs_that_are_worth_more():
    promised = fleets.submitted("a", SCALES, deadline_s=30_000.0, num_steps=10_000)
    state, _ = fleets.after(fleets.new_state(ONE_NODE), promised)
    assert state.find("a").promised == Cell(kind="big", num_devices=2)  # 21,000 s; one device would take 40,000
    state, _ = fleets.at(0.0, state)
    rivals = [fleets.submitted(f"b{number}", SCALES, 10.0, priority="high", num_steps=100) for number in range(4)]
    state, _ = fleets.after(state, *rivals)
    state, _ = fleets.at(30.0, state)
    assert state.find("a").allocation.cell.num_devices >= 2
    second = fleets.submitted("c", {("big", 4): 1.0}, 60.0, deadline_s=30_000.0, num_steps=20_000)
    state, _ = fleets.after(state, second)
    assert state.find("c").promised is None  # not together with what was promised
    impossible = fleets.submitted("d", SCALES, 90.0, deadline_s=1000.0, num_steps=10_000)
    state, _ = fleets.after(state, impossible)
    assert verdict(state, state.find("d"), 90.0).late_s > 0


def test_explain_says_what_became_of_a_deadline():
    state, _ = fleets.after(
        fleets.new_state(ONE_NODE),
        fleets.submitted("met", SCALES, deadline_s=30_000.0, num_steps=10_000),
        fleets.submitted("missed", SCALES, deadline_s=1000.0, num_steps=10_000),
    )
    assert explain_job(state, "met").reason.endswith("; its deadline will be met in 2 x big, which it gets at least")
    # Beside what was promised two devices are left: 300 s until a round, 60 s to start, 21,000 s of steps.
    assert explain_job(state, "missed").reason.endswith("; its deadline will be missed by about 5.7 h (best effort)")


def test_explain_says_that_a_promised_deadline_will_be_missed():
    state, _ = fleets.after(
        fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES, deadline_s=30_000.0, num_steps=10_000)
    )
    state, _ = fleets.at(0.0, state)
    assert "its deadline will be met in 2 x big" in explain_job(state, "a").reason
    slow = Progressed(time_s=100.0, job="a", attempt=1, step=20, step_s=4.4)  # four times what was planned
    state, _ = fleets.after(state, slow)
    # 9,980 steps take 43,912 s, from 100 s on; the deadline is at 30,000 s.
    assert (
        "its deadline was promised in 2 x big, which it gets at least, but it will be missed by about 3.9 h: its steps "
        "take longer than planned"
    ) in explain_job(state, "a").reason


def test_a_running_job_that_its_teams_limit_keeps_small_is_told_so():
    teams = (Team(name="text", limits=(DeviceCount(kind="big", num_devices=2),)),)
    state, _ = fleets.after(
        fleets.new_state(fleets.fleet({"big": [4]}, teams)), fleets.submitted("a", SCALES, team="text")
    )
    state, _ = fleets.at(0.0, state)
    explanation = explain_job(state, "a")
    assert fleets.cells(state) == {"a": "2 x big"}
    (helps,) = explanation.helps
    assert helps.startswith("a higher limit of team 'text', which has as many big devices as it may: 4 x big would be")


def test_a_job_that_saves_its_last_checkpoint_is_not_moved():
    """Its last report is a step before the end; by now it should be done, and another cell is a little faster."""
    times = {("big", 2): 1.0, ("big", 4): 0.9}
    machines = fleets.fleet({"big": [4]})
    state, _ = fleets.after(fleets.new_state(machines), fleets.submitted("first", times, num_steps=1000))
    state, _ = fleets.after(state, fleets.submitted("second", times, num_steps=1000))
    state, _ = schedule(state, Ticked(time_s=0.0))
    assert fleets.cells(state) == {"first": "2 x big", "second": "2 x big"}
    state, _ = fleets.after(state, *(Started(time_s=60.0, job=name, attempt=1) for name in ("first", "second")))
    done = Completed(time_s=1060.0, job="second", attempt=1)
    state, _ = fleets.after(state, Progressed(time_s=1050.0, job="first", attempt=1, step=999), done)
    state, actions = fleets.at(1060.0, state)
    assert actions == []
    # What reports nothing any more is past its length, and may have as much ahead as behind.
    state, actions = fleets.at(1400.0, state)
    assert [type(action) for action in actions] == [Resize]


def test_the_prices_that_are_explained_leave_urgent_jobs_their_devices():
    """Four short jobs together are worth more than the urgent one, and get nothing."""
    urgent = fleets.submitted("urgent", {("big", 4): 1.0}, priority="urgent", num_steps=100_000_000)
    short = [fleets.submitted(f"short{number}", {("big", 1): 1.0}, num_steps=1000) for number in range(4)]
    state, _ = fleets.after(fleets.new_state(ONE_NODE), urgent, *short)
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state)["urgent"] == "4 x big"
    (cell,) = explain_job(state, "short0").cells
    assert cell.cost == pytest.approx(cell.utility, rel=1e-3)
    (worth,) = node_worths(state)
    assert worth.gain == pytest.approx(4 * cell.utility, rel=1e-3)  # all of them would run
    assert worth.price == pytest.approx(cell.utility, rel=1e-3)


def test_no_deadline_is_promised_beyond_the_limit_of_a_team():
    teams = (Team(name="vision", limits=(DeviceCount(kind="big", num_devices=2),)),)
    state = fleets.new_state(fleets.fleet({"big": [4, 4]}, teams))
    needs_two = {"deadline_s": 30_000.0, "num_steps": 10_000, "team": "vision"}
    state, _ = fleets.after(
        state, fleets.submitted("a", SCALES, **needs_two), fleets.submitted("b", SCALES, **needs_two)
    )
    assert state.find("a").promised == Cell(kind="big", num_devices=2)
    assert state.find("b").promised is None


@pytest.mark.parametrize(
    ("fields", "start_s"),
    [
        ({"deadline_s": 5000.0, "num_steps": 1000}, 40.0),
        ({"priority": "urgent"}, 40.0),
        ({}, 40.0 + 12 * 3600.0),  # a lease
    ],
)
def test_what_a_job_gets_at_least_is_placed_even_where_free_devices_do_not_pack(fields, start_s):
    threes = [fleets.submitted(f"t{number}", {("big", 3): 1.0}, num_steps=10**6) for number in range(4)]
    state, _ = fleets.after(fleets.new_state(fleets.fleet({"big": [8, 8]})), *threes)
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, fleets.submitted("late", {("big", 4): 1.0}, 40.0, **fields))  # two free on each node
    state, _ = fleets.at(start_s, state)
    fleets.check_allocation(state)
    assert fleets.cells(state)["late"] == "4 x big"
    assert sorted(fleets.cells(state).values()) == ["", "3 x big", "3 x big", "3 x big", "4 x big"]


def test_a_promised_job_is_placed_before_urgent_ones_and_others_fall_back_to_their_promise():
    """By their numbers, the devices would be enough for all; they do not pack."""
    state = fleets.new_state(fleets.fleet({"big": [2, 4, 2]}))
    urgent = fleets.submitted("urgent", {("big", 3): 1.0}, priority="urgent")
    state, _ = fleets.after(state, urgent)
    state, _ = fleets.at(0.0, state)
    first = fleets.submitted("first", {("big", 3): 1.0}, 30.0, deadline_s=5000.0, num_steps=1000)
    state, _ = fleets.at(30.0, fleets.after(state, first)[0])
    assert fleets.cells(state) == {"urgent": "", "first": "3 x big"}
    state, _ = fleets.after(state, Completed(time_s=40.0, job="first", attempt=1))
    state, _ = fleets.after(state, Completed(time_s=40.0, job="urgent", attempt=1))
    second = fleets.submitted("second", {("big", 2): 2.0, ("big", 4): 1.0}, 60.0, deadline_s=25_000.0, num_steps=10_000)
    state, _ = fleets.at(60.0, fleets.after(state, second)[0])
    assert state.find("second").promised == Cell(kind="big", num_devices=2)
    assert fleets.cells(state)["second"] == "4 x big"
    third = fleets.submitted("third", {("big", 4): 1.0}, 90.0, deadline_s=5000.0, num_steps=1000)
    state, _ = fleets.at(90.0, fleets.after(state, third)[0])
    assert {name: cell for name, cell in fleets.cells(state).items() if cell} == {
        "second": "2 x big",
        "third": "4 x big",
    }


def test_a_promised_job_gets_its_place_though_another_promised_one_would_fit_beside_what_is_there():
    """The smaller one, which is placed after it, fits on the node that the larger one needs and others leave."""
    first = fleets.submitted("first", {("big", 2): 1.0})
    other = fleets.submitted("other", {("big", 3): 0.1})
    state, _ = fleets.after(fleets.new_state(fleets.fleet({"big": [2, 4, 2]})), first, other)
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"first": "2 x big", "other": "3 x big"}
    large = fleets.submitted("large", {("big", 4): 1.0}, 100.0, deadline_s=5000.0, num_steps=1000)
    small = fleets.submitted("small", {("big", 1): 1.0}, 100.0, deadline_s=5000.0, num_steps=1000)
    state, _ = fleets.at(100.0, fleets.after(state, large, small)[0])
    assert fleets.cells(state) | {"first": ""} == {"first": "", "other": "", "large": "4 x big", "small": "1 x big"}


def test_a_promised_job_is_not_reallocated_if_that_would_cost_it_the_deadline():
    """It could grow while it is alone, and would have to shrink again for another job: two reallocations of 60 s."""
    tight = fleets.submitted("tight", SCALES, deadline_s=10_000 * 4.0 + 300 + 60 + 50, num_steps=10_000)
    loose = fleets.submitted("loose", SCALES, deadline_s=10_000 * 4.0 + 300 + 60 + 200, num_steps=10_000)
    for job, grown in ((tight, "1 x big"), (loose, "4 x big")):
        state, _ = fleets.after(fleets.new_state(ONE_NODE), job)
        assert state.find(job.job.name).promised == Cell(kind="big", num_devices=1)
        state, _ = schedule(state, Ticked(time_s=300.0))
        assert fleets.cells(state) == {job.job.name: grown}
        state, _ = schedule(state, Started(time_s=360.0, job=job.job.name, attempt=1))
        assert schedule(state, Ticked(time_s=600.0))[1] == ()


def test_only_the_policy_that_keeps_deadlines_promises_them():
    job = fleets.submitted("a", SCALES, deadline_s=30_000.0, num_steps=10_000)
    for policy in POLICIES:
        state, _ = fleets.after(fleets.new_state(ONE_NODE, policy=policy), job)
        assert (state.find("a").promised is not None) == (policy == "price")


def test_where_cells_do_not_pack_the_job_that_is_worth_less_waits():
    """A node of four devices: for three of them, worth 40 times as much as the job that could use all four."""
    small = fleets.submitted("small", {("big", 1): 1.0})
    worth_more = fleets.submitted("more", {("big", 3): 1.0}, num_steps=10)
    worth_less = fleets.submitted("less", {("big", 4): 1.0}, priority="low")
    state, _ = fleets.after(fleets.new_state(fleets.fleet({"big": [2, 4, 2]})), small, worth_more, worth_less)
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"small": "1 x big", "more": "3 x big", "less": ""}
    report = state.last_round
    assert report.bound > report.utility + 0.07  # of an allocation by numbers alone, in which all would run


def test_a_job_that_its_teams_limit_keeps_out_forever_blocks_no_lease():
    teams = (Team(name="vision", limits=(DeviceCount(kind="big", num_devices=2),)),)
    state = fleets.new_state(fleets.fleet({"big": [4]}, teams))
    never = fleets.submitted("never", {("big", 4): 1.0}, team="vision")
    long = fleets.submitted("long", {("big", 4): 1.0}, num_steps=10**9, priority="low")
    high = fleets.submitted("high", {("big", 4): 1.0}, num_steps=10**6, priority="high")
    state, _ = fleets.after(state, high)
    state, _ = fleets.at(0.0, state)
    state, _ = fleets.after(state, never, long)
    state, _ = fleets.at(30.0, state)
    assert fleets.cells(state) == {"high": "4 x big", "never": "", "long": ""}
    state, _ = fleets.at(12 * 3600.0, state)
    assert fleets.cells(state) == {"high": "", "never": "", "long": "4 x big"}


def test_a_stopped_job_is_explained():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES), Suspended(time_s=1.0, job="a"))
    explanation = explain_job(state, "a")
    assert (explanation.phase, explanation.reason) == ("suspended", "a user stopped it")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": "huge"}, "unknown priority 'huge'; expected one of low, normal, high, urgent"),
        ({"team": "nobody"}, "unknown team 'nobody'; the fleet has none"),
        ({"kinds": ("tpu",)}, "unknown kind of device 'tpu'; the fleet has big"),
        ({"min_devices": 0}, "needs at least 1 device, got a count of 0"),
        ({"deadline_s": -5.0}, "its deadline lies 5 s in the past"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(FleetError, match=message):
        fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES, **fields))


def _trace(num_jobs: int, num_steps: int = 3000, gap_s: float = 600.0) -> Trace:
    times = tuple(StepTime(kind="big", num_devices=count, step_s=4 / count**0.8) for count in (1, 2, 4))
    times += tuple(StepTime(kind="small", num_devices=count, step_s=9 / count**0.7) for count in (1, 2))
    jobs = tuple(
        TraceJob(
            job=Job(
                name=f"job{number}",
                num_steps=num_steps * (1 + number % 5),
                requested_kind=("big", "small")[number % 2],
                requested_devices=2,
            ),
            arrival_s=number * gap_s,
            num_steps=num_steps * (1 + number % 5),
            times=times,
        )
        for number in range(num_jobs)
    )
    return Trace(name="test", jobs=jobs)


MIXED = fleets.fleet({"big": [4, 4], "small": [2, 2]})


@pytest.mark.parametrize("policy", ["gavel", "gavel-max-min"])
def test_gavel_has_no_rounds_while_every_job_has_its_fastest_cell_of_the_requested_size(policy):
    machines = fleets.fleet({"big": [4], "small": [4]})
    times = {("big", 2): 1.0, ("small", 2): 2.0, ("big", 4): 0.5}
    state, _ = fleets.after(fleets.new_state(machines, policy=policy), fleets.submitted("a", times))
    state, _ = fleets.at(0.0, state)
    assert fleets.cells(state) == {"a": "2 x big"}
    assert state.next_round_s is None
    others = [fleets.submitted(name, times, 10.0) for name in "bc"]
    state, _ = fleets.at(10.0, fleets.after(state, *others)[0])
    assert "2 x small" in fleets.cells(state).values()  # one of them is not where it is fastest, and takes turns
    assert state.next_round_s is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_every_job_through_errors_and_faults(policy):
    injection = Injection(
        seed=1, estimation_error=0.2, length_sigma=0.5, failures_per_hour=0.3, repair_s=1800.0, slow_nodes=0.3
    )
    options = SchedulerOptions(policy=policy, realloc_s=60.0)
    trace = _trace(20)
    timeline, seen = _observed(trace, options, injection)
    assert sum(isinstance(event, Completed) for event, _ in seen) == 20
    assert measure_fleet(timeline).realloc_device_h > 0
    _check_spans(timeline)
    # Work is conserved: what was trained, less what faults lost, is as long as the job.
    for job in trace.jobs:
        best_s = min(time.step_s for time in job.times)
        trained_s = sum(
            (span.end_s - span.ready_s - span.lost_s) * span.rate_share
            for span in timeline.spans
            if span.job == job.job.name
        )
        assert trained_s == pytest.approx(job.num_steps * best_s)


def _check_spans(timeline) -> None:
    """No node has more devices in use than it has."""
    sizes = dict(zip(MIXED.node_names, MIXED.size_of_node, strict=True))
    changes = []
    for span in timeline.spans:
        assert span.start_s <= span.ready_s <= span.end_s
        for share in span.nodes:
            changes += [
                (span.end_s, 0, share.node, -share.num_devices),
                (span.start_s, 1, share.node, share.num_devices),
            ]
    used = dict.fromkeys(sizes, 0)
    for _, _, node, change in sorted(changes):
        used[node] += change
        assert used[node] <= sizes[node]


def _observed(trace, options, injection):
    seen = []
    result = simulate_fleet(trace, MIXED, options, injection, lambda *entry: seen.append(entry))
    return result.timeline, seen


def test_a_simulation_is_the_same_bytes_every_time_and_its_events_replay(tmp_path):
    options = SchedulerOptions(realloc_s=60.0)
    injection = Injection(seed=3, estimation_error=0.1, failures_per_hour=0.2)
    texts = []
    for _ in range(2):
        timeline, seen = _observed(_trace(12), options, injection)
        texts.append((json.dumps(to_json(timeline)), "\n".join(log_lines(MIXED, options, seen))))
    assert texts[0] == texts[1]
    path = tmp_path / "events.jsonl"
    path.write_text(texts[0][1])
    replayed = replay(read_event_log(path))
    assert replayed.difference == ""
    assert replayed.num_actions > 12
    path.write_text(texts[0][1].replace('"action":"Start"', '"action":"Stop"', 1))
    assert "event" in replay(read_event_log(path)).difference


def test_nobody_starves_with_leases():
    """Short jobs without end would keep a long one waiting; the simulator checks every wait itself."""
    times = (StepTime(kind="big", num_devices=4, step_s=1.0),)
    long = TraceJob(job=Job(name="long", num_steps=500_000), arrival_s=0.0, num_steps=500_000, times=times)
    short = tuple(
        TraceJob(
            job=Job(name=f"s{number}", num_steps=3600), arrival_s=1.0 + 3600.0 * number, num_steps=3600, times=times
        )
        for number in range(60)
    )
    trace = Trace(name="starving", jobs=(long, *short))
    waits = {}
    for leases in (True, False):
        options = SchedulerOptions(realloc_s=60.0, starvation_s=4 * 3600.0, lease_s=3600.0, leases=leases)
        timeline = simulate_fleet(trace, ONE_NODE, options).timeline
        waits[leases] = timeline.jobs[0].longest_wait_s / 3600
    assert waits[True] < 12
    assert waits[False] > 20


def test_of_jobs_that_have_waited_equally_long_the_first_is_due_first():
    """The simulator checks every wait: it must count the jobs that are ahead as leases serve them, not by name."""
    times = (StepTime(kind="big", num_devices=4, step_s=1.0),)
    jobs = tuple(
        TraceJob(job=Job(name=f"job{number}", num_steps=50_000), arrival_s=0.0, num_steps=50_000, times=times)
        for number in range(12)
    )
    options = SchedulerOptions(realloc_s=0.0, starvation_s=3600.0, lease_s=1800.0)
    timeline = simulate_fleet(Trace(name="at once", jobs=jobs), ONE_NODE, options).timeline
    assert all(job.completion_s > 0 for job in timeline.jobs)


def test_leases_leave_devices_to_short_jobs_and_one_lease_is_always_in_progress():
    machines = fleets.fleet({"big": [4, 4]})
    times = {("big", 1): 1.0}
    state = fleets.new_state(machines, starvation_s=3600.0, lease_s=3600.0, lease_share=0.5)
    holding = [fleets.submitted(f"short{number}", times, num_steps=1_000_000, priority="high") for number in range(8)]
    state, _ = fleets.after(state, *holding, Ticked(time_s=0.0))
    waiting = [fleets.submitted(f"long{number}", times, time_s=1.0, priority="low") for number in range(8)]
    state, _ = fleets.after(state, *waiting)
    state, _ = fleets.after(state, Ticked(time_s=3700.0))
    leased = [job.name for job in state.jobs if job.lease_until_s is not None]
    assert leased == ["long0", "long1", "long2", "long3"]  # half of eight devices

    whole = fleets.submitted("whole", {("big", 8): 1.0}, time_s=0.0, priority="low")
    state = fleets.new_state(machines, starvation_s=3600.0, lease_s=3600.0, lease_share=0.5)
    state, _ = fleets.after(state, *holding, whole, Ticked(time_s=0.0))
    state, _ = fleets.after(state, Ticked(time_s=3700.0))
    assert state.find("whole").lease_until_s is not None  # larger than the share, and the only one


def test_fewer_reallocations_where_they_cost_more():
    counts = [
        measure_fleet(simulate_fleet(_trace(15), MIXED, SchedulerOptions(realloc_s=cost_s)).timeline).num_reallocations
        for cost_s in (0.0, 600.0)
    ]
    assert counts[1] < counts[0]


def test_cells_are_planned_from_a_measured_profile_and_beyond_it_as_much_slower_as_was_measured():
    workload, machines = RECIPES["clip-4"].workload(), fleet_named("h100x16,a100x8")
    described = workload_step(workload)
    slower = Roofline(efficiency=0.25, bandwidth_efficiency=0.4, overhead_s=600e-6)
    measured = roofline_profile(metagraph_of(workload), cluster_named("h100x4"), slower)
    step_on = workload_step(workload, measured={"H100-SXM": measured})

    def bound_s(step, kind, count):
        return bound_estimate(step, machines, Cell(kind=kind, num_devices=count)).step_s

    for count in (1, 2, 4):
        assert bound_s(step_on, "H100-SXM", count) == graph_bound_s(measured.up_to(count))
    assert bound_s(step_on, "H100-SXM", 8) == pytest.approx(2 * bound_s(described, "H100-SXM", 8), rel=0.02)
    assert bound_s(step_on, "A100-80GB", 8) == bound_s(described, "A100-80GB", 8)  # nothing was measured there
    with pytest.raises(ProfileError, match="the profile on H100-SXM was measured for other tasks"):
        workload_step(RECIPES["clip-7"].workload(), measured={"H100-SXM": measured})


def test_small_jobs_share_gpus_and_a_share_has_a_part_of_the_memory():
    machines = fleet_named("h200x8,h200/8x16")
    share = machines.kind_number("h200/8")
    assert machines.kinds[share].num_shares == 8
    assert machines.kind_number("h200") != share
    assert list(machines.counts(share)) == [1]  # who needs more takes whole GPUs
    workload = RECIPES["clip-4"].workload()
    step_on = workload_step(workload)
    cells = [Cell(kind=machines.kinds[number].name, num_devices=1) for number in range(2)]
    bounds = [bound_estimate(step_on, machines, cell) for cell in cells]
    assert 4 < bounds[1].step_s / bounds[0].step_s <= 8  # a layer's overhead stays
    whole, part = (planned_estimate(step_on, machines, bound) for bound in bounds)
    assert whole.fits
    assert not part.fits  # clip-4 takes more than an eighth of the memory
    assert part.memory_bytes > machines.kinds[share].memory_bytes

    # Neighbours are other jobs: a measured share is no faster because they may be idle.
    cluster = Cluster(name="one GPU", islands=(replace(machines.cluster_of(share, 8).islands[0], num_devices=8),))
    measured = replace(
        roofline_profile(metagraph_of(workload), cluster), host_rates=tuple(1.4 - k / 20 for k in range(8))
    )
    shared_step = workload_step(workload, measured={machines.kinds[share].name: measured})
    assert shared_step(machines.cluster_of(share, 1)).whole.host_rates == ()


def test_small_jobs_start_at_once_on_shares_of_one_gpu():
    machines = fleet_named("h200/8x8")
    kind = machines.kinds[0].name
    jobs = [fleets.submitted(f"job{number}", {(kind, 1): 1.0}) for number in range(9)]
    state, actions = fleets.after(fleets.new_state(machines), *jobs, Ticked(time_s=0.0))
    assert sum(isinstance(action, Start) for action in actions) == 8
    assert sum(job.allocation is None for job in state.jobs) == 1


def test_a_state_survives_its_json():
    state, _ = fleets.after(fleets.new_state(ONE_NODE), fleets.submitted("a", SCALES), fleets.submitted("b", SCALES))
    state, _ = fleets.at(0.0, state)
    assert from_json(State, json.loads(json.dumps(to_json(state))), "state") == state


def test_waits_are_checked_beside_urgent_jobs_but_for_the_time_that_those_hold_devices():
    times = (StepTime(kind="big", num_devices=4, step_s=1.0),)
    arrivals = {"urgent": 0.0, "first": 10.0, "second": 20.0, "third": 30.0}
    jobs = tuple(
        TraceJob(
            job=Job(name=name, num_steps=36_000, requested_kind="big", requested_devices=4, priority=priority),
            arrival_s=arrival_s,
            num_steps=36_000,
            times=times,
        )
        for name, arrival_s in arrivals.items()
        for priority in ("urgent" if name == "urgent" else "normal",)
    )
    options = SchedulerOptions(realloc_s=60.0, starvation_s=3600.0, lease_s=3600.0)
    simulate_fleet(Trace(name="urgent", jobs=jobs), ONE_NODE, options)  # an error where a job waits too long
    due = Due(num_ahead=0, ahead_s=100.0)
    limit_s = 3600.0 + 3600.0 + 60.0 + 2 * options.max_interval_s
    check_wait(options, due, limit_s + 500.0, 600.0, 60.0, "a")
    with pytest.raises(FleetError, match=r"job 'a' waited 2.3 h, longer than the 2.3 h that leases promise with 0"):
        check_wait(options, due, limit_s + 501.0, 600.0, 60.0, "a")
