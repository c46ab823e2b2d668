"""The scheduler: one pure function from a state and an event to the next state and actions.

It reads no clock, no file and no random number, so the same events always give the same actions, byte for byte. An
engine calls it with every event in order, writes the actions down, executes them, and sends `Ticked` when
`State.next_round_s` has come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from spindle.cluster import Cluster
from spindle.display import duration
from spindle.errors import FleetError
from spindle.fleet.cells import Estimate, better
from spindle.fleet.columns import Columns
from spindle.fleet.deadlines import verdict
from spindle.fleet.events import (
    Action,
    Completed,
    Draining,
    Estimated,
    Event,
    Failed,
    NodeJoined,
    NodeLost,
    NodeShare,
    Occupied,
    Progressed,
    Resumed,
    Started,
    Stop,
    Stopped,
    Submitted,
    Suspended,
    Ticked,
)
from spindle.fleet.policies import EVENT_DRIVEN, REQUESTED_COUNTS, fastest_rates
from spindle.fleet.rounds import columns_of, released, round_of, run_round
from spindle.fleet.state import (
    COMPLETED,
    FAILED,
    HOLDING,
    RUNNING,
    STARTING,
    SUSPENDED,
    WAITING,
    JobState,
    KindValue,
    State,
    evolve,
)

_OFF_ESTIMATE = 0.1  # a rate that is further off makes a round due
_REMEMBERED_COSTS = 5
_MAX_SCRIPT_FAILURES = 2


def schedule(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after an event, and the actions to execute.

    Only `Ticked` reallocates (a round); every other event is written into the state and may make a round due: at most
    every `min_interval_s`, sooner only where a drained node must be left, and at least every `max_interval_s`. Events
    of attempts that are not the newest are ignored.
    """
    if event.time_s > state.now_s:
        state = evolve(state, now_s=event.time_s)
    match event:
        case Submitted():
            return _submitted(state, event), ()
        case Estimated():
            return _estimated(state, event), ()
        case Started():
            return _of_attempt(state, event.job, event.attempt, lambda job: _started(state, job, event.paused_s)), ()
        case Progressed():
            return _progressed(state, event), ()
        case Stopped():
            return _stopped(state, event), ()
        case Completed():
            return _ended(state, event.job, event.attempt, COMPLETED, ""), ()
        case Failed():
            return _failed(state, event), ()
        case Suspended():
            return _suspended(state, event)
        case Resumed():
            return _resumed(state, event), ()
        case NodeJoined():
            return _node_joined(state, event), ()
        case NodeLost():
            return _node_lost(state, event), ()
        case Draining():
            unavailable = tuple(sorted({*state.unavailable, event.node}))
            state.fleet.node_number(event.node)
            # A round stops or moves every job on an unavailable node.
            return _due(evolve(state, unavailable=unavailable), event.deadline_s - event.grace_s), ()
        case Occupied():
            return _occupied(state, event)
        case Ticked():
            return _ticked(state)
        case _:
            assert_never(event)


def _ticked(state: State) -> tuple[State, tuple[Action, ...]]:
    if state.next_round_s is None or state.now_s < state.next_round_s:
        return state, ()
    after, actions = run_round(state)
    next_s = None if _is_settled(after, columns_of(state)) else state.now_s + state.options.max_interval_s
    after = evolve(after, last_round_s=state.now_s, next_round_s=next_s)
    return after, actions


def _is_settled(state: State, columns: Columns) -> bool:
    """Whether time alone changes nothing: the policy acts on events only, or every job runs in its fastest cell of
    those that the policy gives it."""
    if state.options.policy in EVENT_DRIVEN:
        return True
    if any(job.phase == WAITING for job in state.jobs):
        return False
    columns.update(state)
    if not columns.num_jobs:
        return True
    fastest = fastest_rates(round_of(state)) if state.options.policy in REQUESTED_COUNTS else columns.best_rate
    return bool((columns.rate[columns.held] >= fastest).all())


def _due(state: State, latest_s: float = math.inf) -> State:
    """A round is due as soon as the interval between rounds allows, and at `latest_s` even if it does not."""
    due_s = state.now_s
    if state.last_round_s is not None:
        allowed_s = state.last_round_s + state.options.min_interval_s
        due_s = max(due_s, min(allowed_s, latest_s))
    if state.next_round_s is not None and state.next_round_s <= due_s:
        return state
    return evolve(state, next_round_s=due_s)


def _with_job(state: State, new: JobState) -> State:
    name, jobs = new.job.name, state.jobs
    for position, job in enumerate(jobs):
        if job.job.name == name:
            return evolve(state, jobs=(*jobs[:position], new, *jobs[position + 1 :]))
    raise AssertionError(f"no job {name!r}")


def _of_attempt(state: State, name: str, attempt: int, change: Callable[[JobState], JobState]) -> State:
    """The state with one job changed, if this is its newest attempt."""
    job = state.find(name)
    if job is None or job.attempt != attempt:
        return state
    return _with_job(state, change(job))


def _submitted(state: State, event: Submitted) -> State:
    job = event.job
    if any(known.job.name == job.name for known in (*state.jobs, *state.ended)):
        raise FleetError(f"a job called {job.name!r} was submitted before; give this one another name")
    state.fleet.team(job.team)
    for kind in job.kinds:
        state.fleet.kind_number(kind)
    if job.deadline_s is not None and job.deadline_s <= state.now_s:
        late = duration(state.now_s - job.deadline_s)
        raise FleetError(f"job {job.name!r}: its deadline lies {late} in the past; give a later one")
    options = state.options
    cost_s = options.realloc_s
    if cost_s is None:
        cost_s = options.base_realloc_s + job.state_bytes / state.fleet.storage_bytes_per_s
    arrived = JobState(
        job=job,
        arrival_s=state.now_s,
        estimates=better((), event.estimates),
        waiting_since_s=state.now_s,
        initial_realloc_s=cost_s,
    )
    arrived = evolve(arrived, promised=verdict(state, arrived, state.now_s).cell)
    return _due(evolve(state, jobs=(*state.jobs, arrived), num_arrived=state.num_arrived + 1))


def _estimated(state: State, event: Estimated) -> State:
    job = state.find(event.job)
    if job is None:
        return state
    changed = evolve(job, estimates=better(() if event.replaces else job.estimates, event.estimates))
    known = {estimate.cell for estimate in event.estimates if estimate.grade != "bound"}
    changed = evolve(changed, planning=tuple(cell for cell in job.planning if cell not in known))
    if event.replaces:
        changed = evolve(changed, corrections=(), planning=())
    if changed.promised is None and job.job.deadline_s is not None:
        changed = evolve(changed, promised=verdict(state, changed, state.now_s).cell)
    return _due(_with_job(state, changed))


def _started(state: State, job: JobState, paused_s: float | None) -> JobState:
    if job.phase != STARTING:
        return job
    cost_s = state.now_s - job.allocated_s if paused_s is None else paused_s
    costs = (*job.realloc_costs_s, cost_s)[-_REMEMBERED_COSTS:]
    return evolve(job, phase=RUNNING, step_time_s=state.now_s, realloc_costs_s=costs)


def _progressed(state: State, event: Progressed) -> State:
    job = state.find(event.job)
    if job is None or job.attempt != event.attempt or job.allocation is None:
        return state
    changed = evolve(job, phase=RUNNING, step=event.step, step_time_s=state.now_s)
    if not event.step_s:
        return _with_job(state, changed)
    cell = job.allocation.cell
    if job.estimate(cell) is None:
        measured = Estimate(cell=cell, step_s=event.step_s, grade="measured")
        return _due(_with_job(state, evolve(changed, estimates=better(job.estimates, (measured,)))))
    estimated_s = job.step_s(cell)
    if event.step_s == estimated_s:
        return _with_job(state, changed)
    return _measured(state, changed, event.step_s, estimated_s)


def _measured(state: State, job: JobState, step_s: float, estimated_s: float) -> State:
    """The measured step time replaces the estimate, and corrects those of other cells."""
    assert job.allocation is not None
    cell = job.allocation.cell
    old = job.estimate(cell)
    assert old is not None
    corrections = job.corrections
    if old.grade == "planned":  # a bound says nothing about plans of other cells
        corrections = (
            *(entry for entry in corrections if entry.kind != cell.kind),
            KindValue(kind=cell.kind, value=step_s / old.step_s),
        )
    new = replace(old, step_s=step_s, grade="measured")
    estimates = tuple(new if estimate is old else estimate for estimate in job.estimates)
    state = _with_job(state, evolve(job, estimates=estimates, corrections=corrections))
    return _due(state) if abs(step_s / estimated_s - 1) > _OFF_ESTIMATE else state


def _stopped(state: State, event: Stopped) -> State:
    job = state.find(event.job)
    # A stop is answered by the attempt that was current; a resize has counted on already.
    if job is None or event.attempt not in (job.attempt, job.attempt - 1) or job.phase == RUNNING:
        return state
    return _with_job(state, evolve(job, step=event.step, step_time_s=state.now_s))


def _ended(state: State, name: str, attempt: int, phase: str, reason: str) -> State:
    job = state.find(name)
    if job is None or job.attempt != attempt:
        return state
    if job.allocation is not None:
        job = released(job, state.now_s, phase)
    job = evolve(job, phase=phase, reason=reason)
    return _due(
        evolve(
            state,
            jobs=tuple(known for known in state.jobs if known.job.name != name),
            ended=(*state.ended, job),
            num_departed=state.num_departed + 1,
        )
    )


def _failed(state: State, event: Failed) -> State:
    """Resume from the newest checkpoint, unless the same step fails again or nothing was gained several times."""
    job = state.find(event.job)
    if job is None or job.attempt != event.attempt:
        return state
    progressed = event.step > job.failed_step
    num_failures = 1 if progressed else job.num_failures + 1
    limit = _MAX_SCRIPT_FAILURES if event.by_script else state.options.max_failures
    if num_failures >= limit:
        return _ended(state, event.job, event.attempt, FAILED, event.reason)
    if job.allocation is not None:
        job = released(job, state.now_s)
    resumed = evolve(
        job,
        phase=WAITING,
        step=event.resume_step,
        step_time_s=state.now_s,
        num_failures=num_failures,
        failed_step=max(job.failed_step, event.step),
        reason=event.reason,
    )
    return _due(_with_job(state, resumed))


def _suspended(state: State, event: Suspended) -> tuple[State, tuple[Action, ...]]:
    job = state.find(event.job)
    if job is None or job.phase == SUSPENDED:
        return state, ()
    if job.allocation is None:
        return _due(_with_job(state, evolve(job, phase=SUSPENDED))), ()
    stopped = released(job, state.now_s, SUSPENDED)
    return _due(_with_job(state, stopped)), (Stop(job=job.name, attempt=job.attempt),)


def _resumed(state: State, event: Resumed) -> State:
    job = state.find(event.job)
    if job is None or job.phase != SUSPENDED:
        return state
    return _due(_with_job(state, evolve(job, phase=WAITING, waiting_since_s=state.now_s)))


def _node_joined(state: State, event: NodeJoined) -> State:
    fleet = state.fleet
    if event.node not in fleet.node_names:
        if event.island is None:
            raise FleetError(f"node {event.node!r} is new to the fleet; its island (kind, devices, links) is missing")
        cluster = Cluster(name=fleet.cluster.name, islands=(*fleet.cluster.islands, event.island))
        fleet = replace(fleet, cluster=cluster, node_names=(*fleet.node_names, event.node))
    unavailable = tuple(name for name in state.unavailable if name != event.node)
    return _due(evolve(state, fleet=fleet, unavailable=unavailable))


def _node_lost(state: State, event: NodeLost) -> State:
    """Jobs on the node wait, at the step of their newest checkpoint."""
    state.fleet.node_number(event.node)
    checkpoints = {attempt.job: attempt.step for attempt in event.attempts}
    jobs = []
    for job in state.jobs:
        if job.phase in HOLDING and job.allocation and any(share.node == event.node for share in job.allocation.nodes):
            step = checkpoints.get(job.name, job.step)
            job = evolve(released(job, state.now_s), step=step)
        jobs.append(job)
    unavailable = tuple(sorted({*state.unavailable, event.node}))
    return _due(evolve(state, jobs=tuple(jobs), unavailable=unavailable))


def _occupied(state: State, event: Occupied) -> tuple[State, tuple[Action, ...]]:
    """Exclude devices that processes outside the fleet hold, but never those of the fleet's own jobs. Jobs that wait
    for these devices release their cells."""
    node = state.fleet.node_number(event.node)
    waiting = [state.find(name) for name in event.jobs]
    leaving = {job.name: job for job in waiting if job is not None and job.phase == STARTING}
    jobs = tuple(released(job, state.now_s) if job.name in leaving else job for job in state.jobs)
    num_own = sum(
        share.num_devices
        for job in jobs
        for share in (job.allocation.nodes if job.allocation is not None else ())
        if share.node == event.node
    )
    num_occupied = min(event.num_devices, state.fleet.size_of_node[node] - num_own)
    known = {share.node: share.num_devices for share in state.occupied} | {event.node: num_occupied}
    occupied = tuple(NodeShare(node=name, num_devices=known[name]) for name in sorted(known) if known[name] > 0)
    stops = tuple(Stop(job=job.name, attempt=job.attempt) for job in leaving.values())
    return _due(evolve(state, occupied=occupied, jobs=jobs)), stops
