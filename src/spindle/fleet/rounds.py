"""One round: one allocation for all jobs, its placement, and the actions that lead there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from spindle.fleet.cells import Cell
from spindle.fleet.columns import BoolColumn, Columns, FloatColumn
from spindle.fleet.events import Action, NodeShare, Plan, Resize, Start, Stop
from spindle.fleet.placement import Nodes, Placement, in_the_way, place
from spindle.fleet.policies import Choice, Round, policy_named
from spindle.fleet.state import RUNNING, STARTING, WAITING, Allocation, JobState, KindValue, RoundReport, State, evolve

_MAX_TRIES = 8  # of choosing again where cells did not pack


def columns_of(state: State) -> Columns:
    """The jobs of a state as columns, brought up to date."""
    columns: Columns | None = state.columns
    if columns is None or columns.fleet is not state.fleet:
        columns = Columns(state.fleet)
        object.__setattr__(state, "columns", columns)
    columns.update(state)
    return columns


def round_of(state: State) -> Round:
    """What a policy is given in a round of this state."""
    columns = columns_of(state)
    capacity = columns.capacity()
    held = columns.held
    allowed = columns.planned.copy()
    allowed[held[held >= 0]] = True
    prices: FloatColumn = np.zeros(len(capacity))
    if len(state.prices) == len(capacity):
        prices = np.array(state.prices)
    return Round(
        columns=columns,
        options=state.options,
        now_s=state.now_s,
        capacity=capacity,
        held=held,
        allowed=allowed,
        prices=prices,
        num_arrived=state.num_arrived,
        num_departed=state.num_departed,
    )


def run_round(state: State) -> tuple[State, tuple[Action, ...]]:
    """Reallocate: the state with the new allocation, and the actions."""
    given = round_of(state)
    columns = given.columns
    policy = policy_named(state.options.policy) if len(columns.rate) else _nothing
    plans: list[Plan] = []
    if not columns.planned.all():
        plans = _wanted_plans(given, policy(replace(given, allowed=np.ones_like(given.allowed))))
    choice = policy(given)
    for last in (False,) * (_MAX_TRIES - 1) + (True,):
        placement = Placement()
        if not _changes(given, choice).any():
            break
        placement = place(columns, choice.cells.tolist(), given.held.tolist())
        if not placement.failed or last:
            break
        for job in placement.failed:
            for refused in _refused(columns, choice, placement, job):
                given.allowed[choice.cells[refused]] = False
        if len(choice.prices):
            given.prices = choice.prices
        choice = policy(given)
    for job in placement.failed:
        choice.cells[job] = -1
    jobs, actions = _apply(state, given, choice, placement)
    kinds = state.fleet.kinds
    report = RoundReport(
        time_s=state.now_s,
        utility=choice.utility,
        bound=choice.bound,
        prices=tuple(KindValue(kind=kind.name, value=float(price)) for kind, price in zip(kinds, choice.prices)),  # noqa: B905
    )
    after = evolve(
        state,
        jobs=_with_plans(jobs, plans) if plans else jobs,
        prices=tuple(choice.prices.tolist()) if len(choice.prices) else state.prices,
        last_round=report,
        num_arrived=0,
        num_departed=0,
    )
    return after, (*plans, *actions)


def _refused(columns: Columns, choice: Choice, placement: Placement, failed: int) -> list[int]:
    """The jobs that must choose again because one has no place: itself, or, if the cell is its floor, jobs without a
    floor that are in its way."""
    floor = choice.floor
    if not len(floor) or floor[failed] != choice.cells[failed]:
        return [failed]
    return in_the_way(columns, choice.cells.tolist(), placement, failed, (floor >= 0).tolist()) or [failed]


def _nothing(given: Round) -> Choice:
    """No job has a cell in this fleet."""
    return Choice(cells=np.full(given.columns.num_jobs, -1, dtype=np.int64))


def _wanted_plans(given: Round, choice: Choice) -> list[Plan]:
    """Plans for the chosen cells that have only a bound, each asked for once. Bounds are optimistic, so no better
    cell is missed."""
    columns = given.columns
    wanted: list[Plan] = []
    for job, cell in enumerate(choice.cells.tolist()):
        if cell >= 0 and not columns.planned[cell]:
            plan = Plan(job=columns.jobs[job].name, cell=cell_of(columns, job, cell))
            if plan.cell not in columns.jobs[job].planning:
                wanted.append(plan)
    return wanted


def _with_plans(jobs: tuple[JobState, ...], plans: list[Plan]) -> tuple[JobState, ...]:
    """The jobs, with the plans that were asked for."""
    asked = {plan.job: plan.cell for plan in plans}
    return tuple(evolve(job, planning=(*job.planning, asked[job.name])) if job.name in asked else job for job in jobs)


def cell_of(columns: Columns, job: int, cell: int) -> Cell:
    """The Cell of a column."""
    kind = columns.fleet.kinds[int(columns.kind[cell])].name
    count = int(columns.count[cell])
    return next(
        estimate.cell
        for estimate in columns.jobs[job].estimates
        if estimate.cell.kind == kind and estimate.cell.num_devices == count
    )


def _changes(given: Round, choice: Choice) -> BoolColumn:
    """Jobs that get another cell than they hold. A job that must leave a node holds none, and yet has one."""
    must_leave = (given.held < 0) & given.columns.has_devices
    changes: BoolColumn = (choice.cells != given.held) | must_leave
    return changes


def _apply(
    state: State, given: Round, choice: Choice, placement: Placement
) -> tuple[tuple[JobState, ...], list[Action]]:
    columns = given.columns
    cells = choice.cells
    opportunistic = choice.opportunistic or frozenset()
    rows = sorted({*np.flatnonzero(_changes(given, choice)).tolist(), *placement.nodes})
    if not rows and choice.opportunistic is None:
        return state.jobs, []
    replaced: dict[str, JobState] = {}
    stops: list[Action] = []
    starts: list[Action] = []
    for row in rows:
        job = columns.jobs[row]
        cell = int(cells[row])
        if cell < 0:
            if job.allocation is not None:
                stops.append(Stop(job=job.name, attempt=job.attempt))
                replaced[job.name] = released(job, state.now_s)
            continue
        allocation = Allocation(cell=cell_of(columns, row, cell), nodes=_shares(columns, placement.nodes[row]))
        kind = Resize if job.allocation is not None else Start
        before = released(job, state.now_s) if job.allocation is not None else job
        started = evolve(
            before,
            phase=STARTING,
            attempt=job.attempt + 1,
            allocation=allocation,
            allocated_s=state.now_s,
            num_reallocations=job.num_reallocations + 1,
            is_opportunistic=row in opportunistic,
        )
        if row in choice.leases:
            lease_until_s = state.now_s + job.realloc_s + state.options.lease_s
            started = evolve(started, lease_until_s=lease_until_s)
        replaced[job.name] = started
        starts.append(kind(job=job.name, attempt=started.attempt, cell=allocation.cell, nodes=allocation.nodes))
    if choice.opportunistic is not None:
        for row, job in enumerate(columns.jobs):
            current = replaced.get(job.name, job)
            if current.is_opportunistic != (row in opportunistic):
                replaced[job.name] = evolve(current, is_opportunistic=row in opportunistic)
    return tuple(replaced.get(job.job.name, job) for job in state.jobs), [*stops, *starts]


def _shares(columns: Columns, nodes: Nodes) -> tuple[NodeShare, ...]:
    names = columns.fleet.node_names
    return tuple(NodeShare(node=names[node], num_devices=count) for node, count in nodes)


def released(job: JobState, now_s: float, phase: str = WAITING) -> JobState:
    """The job without its devices, with what it did on them."""
    assert job.allocation is not None
    trained_s = max(0.0, now_s - job.step_time_s) if job.phase == RUNNING else 0.0
    return evolve(
        job,
        phase=phase,
        step=job.step_at(now_s),
        step_time_s=now_s,
        allocation=None,
        waiting_since_s=now_s,
        trained_s=job.trained_s + trained_s,
        received_s=tuple(_added(job.received_s, job.allocation.cell.kind, now_s - job.allocated_s)),
    )


def _added(values: tuple[KindValue, ...], kind: str, amount: float) -> Iterator[KindValue]:
    if not any(entry.kind == kind for entry in values):
        yield KindValue(kind=kind, value=amount)
    for entry in values:
        yield replace(entry, value=entry.value + amount) if entry.kind == kind else entry
