"""Explains why a job waits or has its devices, and what one more node is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spindle.display import count_of, seconds
from spindle.errors import FleetError
from spindle.fleet.columns import Columns, FloatColumn, IntColumn
from spindle.fleet.deadlines import verdict
from spindle.fleet.dual_prices import FORBIDDEN
from spindle.fleet.floors import floors_of
from spindle.fleet.policies.policy import Round, worth_above
from spindle.fleet.rounds import round_of
from spindle.fleet.state import RUNNING, WAITING, JobState, State
from spindle.fleet.utility import utilities

_SHOWN_RIVALS = 3
_WHY_LATE = "its steps take longer than planned, or nodes were lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFacts:
    """One cell of a job at current prices. `rivals` are the jobs on that kind whose devices are worth least to them:
    they set the price. `limit_cost` is the part of the cost that a limit of its team makes."""

    kind: str
    num_devices: int
    step_s: float
    grade: str
    utility: float
    cost: float
    num_free: int
    is_held: bool
    rivals: tuple[str, ...]
    limit_cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    job: str
    phase: str
    reason: str
    cells: tuple[CellFacts, ...]
    helps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorth:
    """What one more node of a kind adds to the bound on utility, absolutely and as a share."""

    kind: str
    num_devices: int
    price: float
    gain: float
    share: float


def explain_job(state: State, name: str) -> Explanation:
    """Per cell its utility and its cost at current prices, the reason in a sentence, and what would help."""
    this_round = round_of(state)
    columns = this_round.columns
    rows = [row for row, job in enumerate(columns.jobs) if job.name == name]
    if not rows:
        ended = next((job for job in state.ended if job.name == name), None)
        if ended is not None:
            reason = ended.reason or "its script has ended"
            return Explanation(job=name, phase=ended.phase, reason=reason, cells=(), helps=())
        stopped = state.find(name)
        if stopped is not None:
            return Explanation(
                job=name, phase=stopped.phase, reason="a user stopped it", cells=(), helps=("resuming it",)
            )
        known = ", ".join(job.name for job in (*state.jobs, *state.ended)[:10])
        raise FleetError(f"no job is called {name!r}; the fleet has {known or 'none'}")
    row = rows[0]
    utility = utilities(columns, state.options, state.now_s)
    floors = _floors(this_round, utility)
    prices, _ = _prices(this_round, utility, floors)
    free = _free(this_round)
    cells = _cells(this_round, utility, prices, free, row)
    reason, helps = _reason(state, this_round, floors, row, cells)
    job = columns.jobs[row]
    return Explanation(job=name, phase=job.phase, reason=reason + _deadline(state, job), cells=cells, helps=helps)


class WaitReasons:
    """Why jobs wait: `reasons` by job and since when, as of the first round that gave them nothing."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[str, float], str] = {}

    def note(self, state: State) -> None:
        """Call this with the state after a round. Uses the prices of the round, so nothing is solved again."""
        new = [
            job for job in state.jobs if job.phase == WAITING and (job.name, job.waiting_since_s) not in self.reasons
        ]
        if not new:
            return
        this_round = round_of(state)
        rows = {job.name: row for row, job in enumerate(this_round.columns.jobs)}
        utility = utilities(this_round.columns, state.options, state.now_s)
        free, floors = _free(this_round), _floors(this_round, utility)
        for job in new:
            cells = _cells(this_round, utility, this_round.prices, free, rows[job.name])
            reason, _ = _reason(state, this_round, floors, rows[job.name], cells)
            self.reasons[job.name, job.waiting_since_s] = reason


def _free(this_round: Round) -> np.ndarray:
    """Devices of each kind that no job holds."""
    columns = this_round.columns
    used = np.zeros(columns.num_kinds, dtype=np.int64)
    holding = this_round.held[this_round.held >= 0]
    np.add.at(used, columns.kind[holding], columns.count[holding])
    free: np.ndarray = this_round.capacity[: columns.num_kinds] - used
    return free


def _deadline(state: State, job: JobState) -> str:
    """Whether its deadline will be met, as the end of a sentence."""
    if job.job.deadline_s is None:
        return ""
    if job.promised is not None:
        late_s = _late_s(state, job)
        if late_s > 0:
            return (
                f"; its deadline was promised in {job.promised.text}, which it gets at least, but it will be missed by "
                f"about {_hours(late_s)}: {_WHY_LATE}"
            )
        return f"; its deadline will be met in {job.promised.text}, which it gets at least"
    late_s = verdict(state, job, state.now_s).late_s
    if 0 < late_s < math.inf:
        return f"; its deadline will be missed by about {_hours(late_s)} (best effort)"
    return "; its deadline is not promised (best effort)"


def _late_s(state: State, job: JobState) -> float:
    """How late a promised job will be in the cell that it has, or in its promised one."""
    assert job.promised is not None
    assert job.job.deadline_s is not None
    if job.job.num_steps is None:
        return 0.0
    cell, cost_s = job.promised, job.realloc_s
    if job.phase == RUNNING and job.allocation is not None:
        cell, cost_s = job.allocation.cell, 0.0
    if job.estimate(cell) is None:
        return 0.0
    left_s = max(0.0, job.job.num_steps - job.step_at(state.now_s)) * job.step_s(cell)
    return state.now_s + cost_s + left_s - job.job.deadline_s


def _hours(time_s: float) -> str:
    return f"{time_s / 3600:.1f} h" if time_s >= 3600 else seconds(time_s)


def _floors(this_round: Round, utility: FloatColumn) -> tuple[IntColumn, tuple[int, ...]]:
    """The cell that each job gets before prices are computed, or -1, and jobs whose lease begins; for `price` only."""
    if this_round.options.policy != "price":
        return np.full(this_round.columns.num_jobs, -1, dtype=np.int64), ()
    return floors_of(this_round, utility)


def _prices(
    this_round: Round, utility: FloatColumn, floors: tuple[IntColumn, tuple[int, ...]]
) -> tuple[FloatColumn, float]:
    """Prices of devices and limits, and the bound, of all cells, also those that are not planned yet: the linear
    program of the round, solved exactly. Rounds do with prices that are nearly as good, and much faster to find; where
    a fleet has few jobs they are several percent off."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, vstack

    # Data: cells that may be chosen. Jobs with a floor must have it at least.
    columns, (floor, _) = this_round.columns, floors
    worth = worth_above(columns, utility, np.ones_like(this_round.allowed), floor)
    cells = np.flatnonzero(worth > FORBIDDEN)
    num_cells, num_resources = len(cells), len(this_round.capacity)
    if not num_cells:
        return np.zeros(num_resources), 0.0
    # Variables: the share of each cell. Constraints: shares of a job <= 1, or = 1 with a floor; devices <= capacity.
    column, limited = np.arange(num_cells), np.flatnonzero(columns.limit[cells] >= 0)
    jobs = coo_array(
        (np.ones(num_cells), (columns.job_of_cell[cells], column)), shape=(columns.num_jobs, num_cells)
    ).tocsr()
    users = np.concatenate([column, limited])
    resources = np.concatenate([columns.kind[cells], columns.limit[cells][limited]])
    counts = columns.count[cells][users].astype(float)
    devices = coo_array((counts, (resources, users)), shape=(num_resources, num_cells)).tocsr()
    required = floor >= 0
    # Solve: the largest sum of utilities.
    result = linprog(
        -worth[cells],
        A_ub=vstack([devices, jobs[~required]]),
        b_ub=np.concatenate([this_round.capacity, np.ones(np.count_nonzero(~required))]),
        A_eq=jobs[required] if required.any() else None,
        b_eq=np.ones(np.count_nonzero(required)) if required.any() else None,
        method="highs",
    )
    if not result.success:
        raise FleetError(f"HiGHS found no prices for {count_of(columns.num_jobs, 'job')}: {result.message}")
    # Read-out.
    return np.maximum(0.0, -result.ineqlin.marginals[:num_resources]), -float(result.fun)


def _cells(
    this_round: Round, utility: FloatColumn, prices: FloatColumn, free: np.ndarray, row: int
) -> tuple[CellFacts, ...]:
    columns = this_round.columns
    cells = range(columns.first[row], columns.first[row + 1])
    rivals = {
        kind: _rivals(columns, this_round, utility, kind, row) for kind in {int(columns.kind[cell]) for cell in cells}
    }
    return tuple(_cell_facts(this_round, utility, prices, free, row, cell, rivals) for cell in cells)


def _cell_facts(
    this_round: Round,
    utility: FloatColumn,
    prices: FloatColumn,
    free: np.ndarray,
    row: int,
    cell: int,
    rivals: dict[int, tuple[str, ...]],
) -> CellFacts:
    columns = this_round.columns
    kind, count = int(columns.kind[cell]), int(columns.count[cell])
    of_limit = float(prices[columns.limit[cell]]) if columns.limit[cell] >= 0 else 0.0
    estimate = next(
        estimate
        for estimate in columns.jobs[row].estimates
        if estimate.cell.kind == columns.fleet.kinds[kind].name and estimate.cell.num_devices == count
    )
    return CellFacts(
        kind=columns.fleet.kinds[kind].name,
        num_devices=count,
        step_s=1 / float(columns.rate[cell]),
        grade=estimate.grade,
        utility=float(utility[cell]),
        cost=float(count * (prices[kind] + of_limit)),
        num_free=int(free[kind]),
        is_held=bool(this_round.held[row] == cell),
        rivals=rivals[kind],
        limit_cost=count * of_limit,
    )


def _rivals(columns: Columns, this_round: Round, utility: FloatColumn, kind: int, row: int) -> tuple[str, ...]:
    worth = [
        (float(utility[cell] / columns.count[cell]), columns.jobs[job].name)
        for job, cell in enumerate(this_round.held.tolist())
        if cell >= 0 and job != row and columns.kind[cell] == kind
    ]
    return tuple(name for _, name in sorted(worth)[:_SHOWN_RIVALS])


def _reason(
    state: State, this_round: Round, floors: tuple[IntColumn, tuple[int, ...]], row: int, cells: tuple[CellFacts, ...]
) -> tuple[str, tuple[str, ...]]:
    job = this_round.columns.jobs[row]
    if not cells:
        return "no cell that it accepts fits this fleet", ("another kind, other counts, or devices with more memory",)
    best = max(cells, key=lambda cell: cell.utility - cell.cost)
    if job.phase != WAITING:
        held = next((cell for cell in cells if cell.is_held), None)
        if held is None:
            return "it must leave its node", ()
        more = max(cells, key=lambda cell: cell.utility)
        reason = (
            f"it has {held.num_devices} x {held.kind}: worth {held.utility:.3g}, cost {held.cost:.3g} at prices now"
        )
        if more.is_held:
            return reason, ()
        gain, cost = more.utility - held.utility, more.cost - held.cost
        if more.limit_cost > held.limit_cost and cost > gain:
            return reason, (
                f"a higher limit of team {job.job.team!r}, which has as many {more.kind} devices as it may: "
                f"{more.num_devices} x {more.kind} would be worth {gain:.3g} more",
            )
        better = f"{more.num_devices} x {more.kind} would be worth {gain:.3g} more and cost {cost:.3g} more"
        if gain > cost:
            better += f"; {more.num_free} are free, and no other job loses less than that by giving up enough of them"
        return reason, (better,)
    lease_s = job.waiting_since_s + state.options.starvation_s - state.now_s
    helps = []
    if state.options.leases and state.options.policy == "price":
        helps.append(f"a lease of at least {_hours(state.options.lease_s)}, due in {_hours(max(0.0, lease_s))}")
    absent = [kind.name for kind in state.fleet.kinds if kind.name not in {cell.kind for cell in cells}]
    if absent:
        helps.append(f"accepting another kind ({', '.join(absent)})")
    smallest = min(cells, key=lambda cell: cell.cost)
    if smallest.num_devices > 1:
        helps.append(f"accepting fewer than {count_of(smallest.num_devices, 'device')}")
    if all(cell.grade == "bound" for cell in cells):
        return "its cells have bounds only; it starts as soon as one that is chosen is planned", tuple(helps)
    if state.options.policy != "price":
        return _fixed_reason(state, job, best, cells), tuple(helps)
    fitting = [cell for cell in cells if cell.num_devices <= cell.num_free]
    if best.utility > best.cost and fitting:
        if not any(_has_room(this_round.columns, cell) for cell in fitting):
            largest = max(fitting, key=lambda cell: cell.num_devices)
            return (
                f"{largest.num_free} {largest.kind} devices are free, but no node has {largest.num_devices} of them, "
                "and moving other jobs makes no room",
                tuple(helps),
            )
        return (
            f"{best.num_devices} x {best.kind} is worth more than it costs; the next round decides",
            tuple(helps),
        )
    worth = f"its best cell, {best.num_devices} x {best.kind}, is worth {best.utility:.3g}"
    if best.limit_cost:
        helps.append(f"a higher limit of team {job.job.team!r}")
        return f"{worth}, and its team {job.job.team!r} has as many {best.kind} devices as it may", tuple(helps)
    owed = _reserved_before(this_round, floors, row, best)
    if owed:
        return f"{worth}, and {owed}", tuple(helps)
    rivals = f", the least of them {', '.join(best.rivals)}" if best.rivals else ""
    helps.append("a higher priority")
    return (
        f"{worth} and costs {best.cost:.3g}: all {best.kind} devices serve jobs that gain more per device{rivals}",
        tuple(helps),
    )


def _has_room(columns: Columns, cell: CellFacts) -> bool:
    """Whether a cell has a place among free devices, as `placement` gives it: on one node, or on whole nodes."""
    kind = columns.kind_numbers[cell.kind]
    size = columns.node_size[kind]
    rooms = sum(columns.free[node] >= min(size, cell.num_devices) for node in columns.nodes_of_kind[kind])
    return rooms >= -(-cell.num_devices // size)


def _reserved_before(this_round: Round, floors: tuple[IntColumn, tuple[int, ...]], row: int, cell: CellFacts) -> str:
    """The devices that other jobs get before prices are computed, if too few are left for a cell."""
    columns, (floor, leases) = this_round.columns, floors
    kind = columns.kind_numbers[cell.kind]
    owed = {
        int(job): int(columns.count[floor[job]])
        for job in np.flatnonzero(floor >= 0)
        if job != row and columns.kind[floor[job]] == kind
    }
    num_devices = int(this_round.capacity[kind])
    if num_devices < cell.num_devices:
        usable = count_of(num_devices, f"{cell.kind} device")
        return f"the fleet can use {usable} now: the others are on lost or drained nodes, or held by somebody else"
    if num_devices - sum(owed.values()) >= cell.num_devices:
        return ""
    largest = sorted(owed, key=lambda job: (-owed[job], job))[:_SHOWN_RIVALS]
    jobs = [
        f"{owed[job]} to {name} ({_reservation_reason(columns.jobs[job], this_round.now_s, job in leases)})"
        for job, name in ((job, columns.jobs[job].name) for job in largest)
    ]
    more = f" and {count_of(len(owed) - len(jobs), 'other job')}" if len(owed) > len(jobs) else ""
    reserved = f"{sum(owed.values())} of {count_of(num_devices, f'{cell.kind} device')}"
    return f"{reserved} go to jobs that come first: {', '.join(jobs)}{more}"


def _reservation_reason(job: JobState, now_s: float, begins_lease: bool) -> str:
    """Why a job gets devices before prices are computed; in the order of `floors`."""
    if job.promised is not None:
        return "its deadline is promised"
    if job.job.is_urgent:
        return "urgent"
    if begins_lease or (job.lease_until_s is not None and job.lease_until_s > now_s):
        return "a lease, as it had waited long"
    return f"guaranteed to its team {job.job.team!r}"


def _fixed_reason(state: State, job: JobState, best: CellFacts, cells: tuple[CellFacts, ...]) -> str:
    """Why a job waits under a policy without prices: the cell that it would take, and how many devices are free."""
    requested = next(
        (
            cell
            for cell in cells
            if (cell.kind, cell.num_devices) == (job.job.requested_kind, job.job.requested_devices)
        ),
        None,
    )
    shown, what = (requested, "it requests") if requested else (best, "its best cell is")
    return (
        f"{what} {shown.num_devices} x {shown.kind}, of which {shown.num_free} are free; policy {state.options.policy} "
        "gives the others to other jobs"
    )


def node_worths(state: State) -> tuple[NodeWorth, ...]:
    """What one more node of each kind would be worth now."""
    this_round = round_of(state)
    columns = this_round.columns
    utility = utilities(columns, state.options, state.now_s)
    floors = _floors(this_round, utility)  # as they are now: another node takes none of them away
    prices, bound = _prices(this_round, utility, floors)
    worths = []
    for kind, device in enumerate(state.fleet.kinds):
        size = columns.node_size[kind]
        this_round.capacity[kind] += size
        _, more = _prices(this_round, utility, floors)
        this_round.capacity[kind] -= size
        gain = max(0.0, more - bound)
        worths.append(
            NodeWorth(
                kind=device.name,
                num_devices=size,
                price=float(prices[kind]),
                gain=gain,
                share=gain / bound if bound else 0.0,
            )
        )
    return tuple(worths)
