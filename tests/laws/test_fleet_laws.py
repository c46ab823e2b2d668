"""Laws that hold for the fleet scheduler, for random fleets, jobs and events."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import fleets
from spindle.artifact import from_json, to_json
from spindle.fleet import (
    Completed,
    Job,
    NodeJoined,
    NodeLost,
    Occupied,
    SchedulerOptions,
    State,
    StepTime,
    Team,
    Trace,
    TraceJob,
    schedule,
    simulate_fleet,
)
from spindle.fleet.dual_prices import bound_at, descend
from spindle.fleet.event_log import action_line
from spindle.fleet.events import Ticked
from spindle.fleet.exchange import allocate
from spindle.fleet.fleet import DeviceCount
from spindle.fleet.policies import POLICIES

QUICK = settings(max_examples=1000 if os.environ.get("SPINDLE_ALL_CASES") else 25, deadline=None)


@st.composite
def problems(draw, max_jobs: int = 5, max_cells: int = 4, num_kinds: int = 2):
    """Columns of a small round: first, kind, limit, count, utility, and capacity."""
    first, kind, count, utility = [0], [], [], []
    for _ in range(draw(st.integers(1, max_jobs))):
        for _ in range(draw(st.integers(0, max_cells))):
            kind.append(draw(st.integers(0, num_kinds - 1)))
            count.append(draw(st.integers(1, 6)))
            utility.append(draw(st.floats(0.01, 3.0)))
        first.append(len(kind))
    capacity = draw(st.lists(st.integers(0, 8), min_size=num_kinds, max_size=num_kinds))
    return (
        np.array(first, dtype=np.int64),
        np.array(kind, dtype=np.int64),
        np.full(len(kind), -1, dtype=np.int64),
        np.array(count, dtype=np.int64),
        np.array(utility, dtype=np.float64),
        np.array(capacity, dtype=np.int64),
    )


def solved(first, kind, limit, count, utility, capacity):
    num_jobs = len(first) - 1
    none, free = np.full(num_jobs, -1, dtype=np.int64), np.zeros(num_jobs, dtype=bool)
    prices, bound = descend(first, kind, limit, count, utility, free, capacity, np.zeros(len(capacity)), 50)
    choice, total = allocate(
        first, kind, limit, count, utility, none, free, none, capacity, len(capacity), prices, 1000
    )
    return choice, total, bound, prices


@given(problems())
@QUICK
def test_utility_lies_between_the_bound_and_one_job_per_kind_below_the_optimum(problem):
    first, kind, _, count, utility, capacity = problem
    choice, total, bound, _ = solved(*problem)
    used = np.zeros(len(capacity), dtype=np.int64)
    for job, cell in enumerate(choice.tolist()):
        if cell >= 0:
            assert first[job] <= cell < first[job + 1]
            used[kind[cell]] += count[cell]
    assert (used <= capacity).all()
    assert total <= bound * (1 + 1e-9) + 1e-9
    best = 0.0
    for cells in itertools.product(*([-1, *range(a, b)] for a, b in itertools.pairwise(first.tolist()))):
        taken = np.zeros(len(capacity), dtype=np.int64)
        for cell in cells:
            if cell >= 0:
                taken[kind[cell]] += count[cell]
        if (taken <= capacity).all():
            best = max(best, sum(utility[cell] for cell in cells if cell >= 0))
    assert total <= best + 1e-9
    assert best <= bound * (1 + 1e-9) + 1e-9
    assert total >= best - len(capacity) * utility.max(initial=0.0) - 1e-9


@given(problems(), st.integers(0, 1), st.integers(1, 4))
@QUICK
def test_more_devices_never_lower_the_bound(problem, resource, more):
    first, kind, limit, count, utility, capacity = problem
    larger = capacity.copy()
    larger[resource] += more
    *_, prices = solved(first, kind, limit, count, utility, larger)
    free = np.zeros(len(first) - 1, dtype=bool)
    # The prices of the larger fleet bound the smaller one, too, and no more than themselves.
    at_smaller = bound_at(first, kind, limit, count, utility, free, capacity, prices)
    assert at_smaller <= bound_at(first, kind, limit, count, utility, free, larger, prices) + 1e-9
    _, total, _, _ = solved(*problem)
    assert total <= at_smaller + 1e-9


KINDS = ("big", "small")
TEAMS = (
    Team(name="owner", guaranteed=(DeviceCount(kind="big", num_devices=2),)),
    Team(name="limited", limits=(DeviceCount(kind="big", num_devices=3), DeviceCount(kind="small", num_devices=2))),
)


@st.composite
def histories(draw):
    """A fleet, and what happens to it: arrivals, completions, lost and returning nodes, with rounds in between."""
    sizes = {
        "big": draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3)),
        "small": [2] * draw(st.integers(1, 2)),
    }
    machines = fleets.fleet(sizes, TEAMS)
    steps = []
    for number in range(draw(st.integers(1, 10))):
        what = draw(st.sampled_from(["submit", "submit", "submit", "complete", "lose", "join", "occupy"]))
        wait_s = draw(st.sampled_from([1.0, 40.0, 400.0, 20_000.0]))
        if what == "submit":
            cells = draw(
                st.lists(
                    st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 4, 8])),
                    min_size=1,
                    unique=True,
                    max_size=5,
                )
            )
            times = {cell: draw(st.floats(0.1, 5.0)) for cell in cells}
            fields = {
                "priority": draw(st.sampled_from(["low", "normal", "high", "urgent"])),
                "team": draw(st.sampled_from(["", "owner", "limited"])),
                "num_steps": draw(st.sampled_from([None, 100, 100_000])),
                "deadline": draw(st.sampled_from([None, None, 50_000.0])),
            }
            steps.append((wait_s, "submit", (f"job{number}", times, fields)))
        else:
            steps.append((wait_s, what, draw(st.integers(0, 9))))
    return machines, steps


def run_history(machines, steps, policy="price", check=None):
    """Every action, as lines; `check` sees the state after each round."""
    state = fleets.new_state(machines, policy=policy, starvation_s=10_000.0)
    lines, now_s = [], 0.0
    for wait_s, what, detail in steps:
        now_s += wait_s
        while state.next_round_s is not None and state.next_round_s < now_s and len(lines) < 500:
            state, actions = fleets.after(state, Ticked(time_s=max(state.next_round_s, now_s - 1.0, state.now_s)))
            lines += map(action_line, actions)
            if check is not None:
                check(state)
        event = _event(state, what, detail, now_s)
        if event is not None:
            state, actions = fleets.after(state, event)
            lines += map(action_line, actions)
    state, actions = fleets.at(now_s, state)
    lines += map(action_line, actions)
    if check is not None:
        check(state)
    return state, lines


def _event(state, what, detail, now_s):
    names = state.fleet.node_names
    match what:
        case "submit":
            name, times, fields = detail
            deadline = fields.pop("deadline", None)
            given = {**fields, "deadline_s": None if deadline is None else now_s + deadline}
            fields["deadline"] = deadline
            return fleets.submitted(name, times, now_s, **given)
        case "complete":
            running = [job for job in state.jobs if job.allocation is not None]
            if not running:
                return None
            job = running[detail % len(running)]
            return Completed(time_s=now_s, job=job.name, attempt=job.attempt)
        case "occupy":
            starting = tuple(job.name for job in state.jobs if job.phase == "starting")
            node = names[detail % len(names)]
            return Occupied(time_s=now_s, node=node, num_devices=detail // 3, jobs=starting)
        case "lose":
            return NodeLost(time_s=now_s, node=names[detail % len(names)])
        case _:
            return NodeJoined(time_s=now_s, node=names[detail % len(names)])


def check_round(state):
    fleets.check_allocation(state)
    report = state.last_round
    if report is None:
        return
    assert report.utility <= report.bound * (1 + 1e-9) + 1e-9
    _check_promises(state)


def _check_promises(state):
    """A promised job has no slower a cell than promised, unless nodes that are lost, or devices that others hold, leave
    no place for all promises."""
    promised = [job for job in state.jobs if job.promised is not None]
    if fleets.fit_on_nodes(state, [job.promised for job in promised]):
        for job in promised:
            assert job.allocation is not None
            assert job.step_s(job.allocation.cell) <= job.step_s(job.promised) * (1 + 1e-9)


@given(histories())
@QUICK
def test_no_device_is_allocated_twice_and_every_cell_is_accepted_and_placed(history):
    run_history(*history, check=check_round)


@st.composite
def tight_deadlines(draw):
    """A job with a deadline that it meets with hardly any time to spare, and others that come and go beside it."""
    step_s = draw(st.floats(0.3, 1.0))
    shares = draw(st.tuples(st.floats(0.5, 0.95), st.floats(0.25, 0.5)))
    times = {1: step_s, 2: step_s * shares[0], 4: step_s * shares[1]}
    cost_s, interval_s = draw(st.sampled_from([30.0, 120.0, 300.0])), draw(st.sampled_from([30.0, 60.0]))
    num_steps = 10_000
    spare_s = 1.0 + num_steps * step_s * draw(st.sampled_from([0.0, 0.001, 0.01]))
    deadline_s = interval_s + cost_s + num_steps * step_s + spare_s
    jobs = [_trace_job("promised", 0.0, num_steps, times, deadline_s=deadline_s)]
    arrival_s = 0.0
    for number in range(draw(st.integers(1, 12))):
        arrival_s += draw(st.sampled_from([1.0, 100.0, 300.0, 1000.0, 2000.0]))
        scaling = draw(st.floats(0.6, 1.0))
        steps = draw(st.sampled_from([50, 200, 1000, 5000]))
        priority = draw(st.sampled_from(["normal", "high", "urgent"]))
        times = {count: count**-scaling for count in (1, 2, 4)}
        jobs.append(_trace_job(f"job{number}", arrival_s, steps, times, priority=priority))
    options = SchedulerOptions(realloc_s=cost_s, max_interval_s=interval_s)
    return Trace(name="tight", jobs=tuple(jobs)), fleets.fleet({"big": [4] * draw(st.integers(1, 2))}), options


def _trace_job(name, arrival_s, num_steps, times, **fields):
    return TraceJob(
        job=Job(name=name, num_steps=num_steps, requested_kind="big", requested_devices=1, **fields),
        arrival_s=arrival_s,
        num_steps=num_steps,
        times=tuple(StepTime(kind="big", num_devices=count, step_s=step_s) for count, step_s in times.items()),
    )


@given(tight_deadlines())
@QUICK
def test_a_promised_deadline_is_met_whatever_comes_and_goes_beside_it(case):
    trace, machines, options = case
    result = simulate_fleet(trace, machines, options)
    (job,) = [job for job in result.state.ended if job.name == "promised"]
    (record,) = [record for record in result.timeline.jobs if record.name == "promised"]
    assert job.promised is not None
    assert record.completion_s <= job.job.deadline_s


@given(histories(), st.sampled_from(sorted(POLICIES)))
@QUICK
def test_no_policy_allocates_a_device_twice_or_more_to_a_team_than_its_limit(history, policy):
    run_history(*history, policy=policy, check=fleets.check_allocation)


@given(histories())
@QUICK
def test_the_same_events_give_the_same_actions_also_from_a_state_that_was_stored(history):
    machines, steps = history
    _, lines = run_history(machines, steps)
    _, again = run_history(machines, steps)
    assert lines == again
    state, _ = run_history(machines, steps[: len(steps) // 2])
    stored = from_json(State, json.loads(json.dumps(to_json(state))), "state")
    tick = Ticked(time_s=state.now_s + 1000.0)
    assert schedule(stored, tick)[1] == schedule(state, tick)[1]
