"""One round: one allocation for all jobs, its placement, and the actions that lead there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from spindle.fleet.cells import Cell
from spindle.fleet.columns import (
    HAS_PROMISE,
    IS_URGENT,
    LEASE_UNTIL_S,
    BoolColumn,
    Columns,
    FloatColumn,
    IntColumn,
)
from spindle.fleet.deadlines import may_be_reallocated
from spindle.fleet.events import Action, NodeShare, Plan, Resize, Start, Stop
from spindle.fleet.placement import Nodes, Placement, blocking_jobs, place
from spindle.fleet.policies import Choice, Round, policy_named
from spindle.fleet.state import STARTING, WAITING, Allocation, JobState, KindValue, RoundReport, State, evolve

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
    """The input of a policy for a round of this state."""
    columns = columns_of(state)
    capacity = columns.capacity()
    held = columns.held
    allowed = columns.planned.copy()
    allowed[held[held >= 0]] = True
    fixed = _keep_promises(columns, allowed, state.now_s)
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
        fixed=fixed,
        num_arrived=state.num_arrived,
        num_departed=state.num_departed,
    )


def _keep_promises(columns: Columns, allowed: BoolColumn, now_s: float) -> frozenset[int]:
    """Disallow cells in which promised jobs would miss their deadline because of reallocations. Returns the jobs that
    must not be moved, either."""
    fixed = set()
    for row in np.flatnonzero(columns.numbers[HAS_PROMISE]).tolist():
        job = columns.jobs[row]
        assert job.promised is not None
        if may_be_reallocated(job, now_s):
            continue
        fixed.add(row)
        held = job.allocation.cell if job.allocation is not None else job.promised
        for cell in range(columns.first[row], columns.first[row + 1]):
            kind, count = columns.fleet.kinds[columns.kind[cell]].name, columns.count[cell]
            if (kind, count) not in ((held.kind, held.num_devices), (job.promised.kind, job.promised.num_devices)):
                allowed[cell] = False
    return frozenset(fixed)


def run_round(state: State) -> tuple[State, tuple[Action, ...]]:
    """Reallocate: the state with the new allocation, and the actions."""
    this_round = round_of(state)
    columns = this_round.columns
    policy = policy_named(state.options.policy) if len(columns.rate) else _no_choice
    plans: list[Plan] = []
    if not columns.planned.all():
        plans = _wanted_plans(this_round, policy(replace(this_round, allowed=np.ones_like(this_round.allowed))))
    choice = policy(this_round)
    bound = choice.bound
    is_floor_first = False  # packs less well
    for last in (False,) * (_MAX_TRIES - 1) + (True,):
        placement = Placement()
        if not _changes(this_round, choice).any():
            break
        ranks = _floor_ranks(this_round, choice).tolist() if is_floor_first else ()
        placement = place(columns, choice.cells.tolist(), this_round.held.tolist(), this_round.fixed, ranks)
        if not placement.failed or last:
            break
        for job in placement.failed:
            for refused in _refused(this_round, choice, placement, job):
                this_round.allowed[choice.cells[refused]] = False
            is_floor_first = is_floor_first or _has_only_floor(choice, job)
        if len(choice.prices):
            this_round.prices = choice.prices
        choice = policy(this_round)
        bound = max(bound, choice.bound)  # a choice without refused cells bounds only allocations without them
    for job in placement.failed:
        if len(choice.utilities):
            choice.utility -= float(choice.utilities[choice.cells[job]])
        choice.cells[job] = -1
    jobs, actions = _apply(state, this_round, choice, placement)
    kinds = state.fleet.kinds
    report = RoundReport(
        time_s=state.now_s,
        utility=choice.utility,
        bound=bound,
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


def _refused(this_round: Round, choice: Choice, placement: Placement, failed: int) -> list[int]:
    """The jobs that must choose again because one has no place: itself, or jobs in its way. Those are jobs with more
    than their floor, or, if the cell is its own floor, also with one that is served later; otherwise they must be worth
    less together."""
    may_leave, cells = np.ones(len(choice.cells), dtype=bool), choice.cells.copy()
    is_owed = _has_only_floor(choice, failed)
    if len(choice.floor):
        ranks = _floor_ranks(this_round, choice)
        if is_owed:  # jobs that are placed after it took only room that was not enough for it
            counts = this_round.columns.count[cells]
            is_later = (counts < counts[failed]) | ((counts == counts[failed]) & (np.arange(len(cells)) > failed))
            cells[(cells != this_round.held) & (ranks == ranks[failed]) & is_later] = -1
        may_leave = (choice.cells != choice.floor) | (ranks < (ranks[failed] if is_owed else 0))
    elif not len(choice.utilities):
        return [failed]
    blocking = blocking_jobs(this_round.columns, cells.tolist(), placement, failed, may_leave.tolist())
    if not blocking:
        return [failed]
    worth = choice.utilities[choice.cells]
    return blocking if is_owed or worth[blocking].sum() < worth[failed] else [failed]


def _has_only_floor(choice: Choice, job: int) -> bool:
    """Whether the chosen cell of a job is its floor."""
    return bool(len(choice.floor)) and bool(choice.floor[job] == choice.cells[job])


def _floor_ranks(this_round: Round, choice: Choice) -> IntColumn:
    """The order in which `floors` serves jobs, the last first: 0 without a floor, then guarantees, leases, urgent jobs
    and promises."""
    numbers = this_round.columns.numbers
    ranks: IntColumn = np.ones(this_round.columns.num_jobs, dtype=np.int64)
    ranks[numbers[LEASE_UNTIL_S] > this_round.now_s] = 2
    ranks[list(choice.leases)] = 2
    ranks[numbers[IS_URGENT] > 0] = 3
    ranks[numbers[HAS_PROMISE] > 0] = 4
    ranks[choice.floor < 0] = 0
    return ranks


def _no_choice(this_round: Round) -> Choice:
    """No job has a cell in this fleet."""
    return Choice(cells=np.full(this_round.columns.num_jobs, -1, dtype=np.int64))


def _wanted_plans(this_round: Round, choice: Choice) -> list[Plan]:
    """Plans for the chosen cells that have only a bound, each asked for once. Bounds are optimistic, so no better
    cell is missed."""
    columns = this_round.columns
    wanted: list[Plan] = []
    for job, cell in enumerate(choice.cells.tolist()):
        if cell >= 0 and not columns.planned[cell]:
            plan = Plan(job=columns.jobs[job].name, cell=cell_of(columns, job, cell))
            if plan.cell not in columns.jobs[job].planning:
                wanted.append(plan)
    return wanted


def _with_plans(jobs: tuple[JobState, ...], plans: list[Plan]) -> tuple[JobState, ...]:
    """The jobs, with the plans that were asked for."""
    planned_cells = {plan.job: plan.cell for plan in plans}
    return tuple(
        evolve(job, planning=(*job.planning, planned_cells[job.name])) if job.name in planned_cells else job
        for job in jobs
    )


def cell_of(columns: Columns, job: int, cell: int) -> Cell:
    """The Cell of a column."""
    kind = columns.fleet.kinds[int(columns.kind[cell])].name
    count = int(columns.count[cell])
    return next(
        estimate.cell
        for estimate in columns.jobs[job].estimates
        if estimate.cell.kind == kind and estimate.cell.num_devices == count
    )


def _changes(this_round: Round, choice: Choice) -> BoolColumn:
    """Jobs that get another cell than they hold. A job that must leave a node holds none, and yet has one."""
    must_leave = (this_round.held < 0) & this_round.columns.has_devices
    changes: BoolColumn = (choice.cells != this_round.held) | must_leave
    return changes


def _apply(
    state: State, this_round: Round, choice: Choice, placement: Placement
) -> tuple[tuple[JobState, ...], list[Action]]:
    columns = this_round.columns
    cells = choice.cells
    opportunistic = choice.opportunistic or frozenset()
    rows = sorted({*np.flatnonzero(_changes(this_round, choice)).tolist(), *placement.nodes})
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
    """The job after it has released its devices, with its progress and the device time that it received."""
    assert job.allocation is not None
    return evolve(
        job,
        phase=phase,
        step=job.step_at(now_s),
        step_time_s=now_s,
        allocation=None,
        waiting_since_s=now_s,
        received_s=tuple(_added(job.received_s, job.allocation.cell.kind, now_s - job.allocated_s)),
    )


def _added(values: tuple[KindValue, ...], kind: str, amount: float) -> Iterator[KindValue]:
    if not any(entry.kind == kind for entry in values):
        yield KindValue(kind=kind, value=amount)
    for entry in values:
        yield replace(entry, value=entry.value + amount) if entry.kind == kind else entry
