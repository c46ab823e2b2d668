"""Why does a job wait, or why does it have these devices? What is one more node worth?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spindle.display import count_of, seconds
from spindle.errors import FleetError
from spindle.fleet.columns import Columns, FloatColumn, IntColumn
from spindle.fleet.deadlines import verdict
from spindle.fleet.dual_prices import descend
from spindle.fleet.floors import floors_of
from spindle.fleet.policies.policy import Round, worth_above
from spindle.fleet.rounds import round_of
from spindle.fleet.state import WAITING, JobState, State
from spindle.fleet.utility import utilities

_MAX_SWEEPS = 50
_SHOWN_RIVALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFacts:
    """One cell of a job at current prices. `rivals` are the jobs on that kind whose devices are worth least to them:
    they set the price."""

    kind: str
    num_devices: int
    step_s: float
    grade: str
    utility: float
    cost: float
    num_free: int
    is_held: bool
    rivals: tuple[str, ...]


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
    given = round_of(state)
    columns = given.columns
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
    prices, _ = _prices(given, utility, _floors(given, utility))
    free = _free(given)
    cells = _cells(given, utility, prices, free, row)
    reason, helps = _reason(state, given, row, cells)
    job = columns.jobs[row]
    return Explanation(job=name, phase=job.phase, reason=reason + _deadline(state, job), cells=cells, helps=helps)


class WaitReasons:
    """Why jobs wait: `reasons` by job and since when, as of the first round that gave them nothing."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[str, float], str] = {}

    def note(self, state: State) -> None:
        """Call this with the state after a round. Prices are those of the round: nothing is solved again."""
        new = [
            job for job in state.jobs if job.phase == WAITING and (job.name, job.waiting_since_s) not in self.reasons
        ]
        if not new:
            return
        given = round_of(state)
        rows = {job.name: row for row, job in enumerate(given.columns.jobs)}
        utility = utilities(given.columns, state.options, state.now_s)
        free = _free(given)
        for job in new:
            cells = _cells(given, utility, given.prices, free, rows[job.name])
            reason, _ = _reason(state, given, rows[job.name], cells)
            self.reasons[job.name, job.waiting_since_s] = reason


def _free(given: Round) -> np.ndarray:
    """Devices of each kind that no job holds."""
    columns = given.columns
    used = np.zeros(columns.num_kinds, dtype=np.int64)
    holding = given.held[given.held >= 0]
    np.add.at(used, columns.kind[holding], columns.count[holding])
    free: np.ndarray = given.capacity[: columns.num_kinds] - used
    return free


def _deadline(state: State, job: JobState) -> str:
    """What became of its deadline, as the end of a sentence."""
    if job.job.deadline_s is None:
        return ""
    if job.promised is not None:
        return f"; its deadline will be met in {job.promised.text}, which it gets at least"
    late_s = verdict(state, job, state.now_s).late_s
    if 0 < late_s < math.inf:
        return f"; its deadline will be missed by about {_hours(late_s)} (best effort)"
    return "; its deadline is not promised (best effort)"


def _hours(time_s: float) -> str:
    return f"{time_s / 3600:.1f} h" if time_s >= 3600 else seconds(time_s)


def _floors(given: Round, utility: FloatColumn) -> IntColumn:
    """The cell that each job gets before prices are made, or -1; only `price` has such."""
    if given.options.policy != "price":
        return np.full(given.columns.num_jobs, -1, dtype=np.int64)
    floor, _ = floors_of(given, utility)
    return floor


def _prices(given: Round, utility: FloatColumn, floor: IntColumn) -> tuple[FloatColumn, float]:
    """Prices at which jobs with a floor have it at least, over all cells, also those that are not planned yet."""
    columns = given.columns
    worth = worth_above(columns, utility, np.ones_like(given.allowed), floor)
    problem = (columns.first, columns.kind, columns.limit, columns.count, worth)
    prices, bound = descend(*problem, floor >= 0, given.capacity, given.prices, _MAX_SWEEPS)
    return prices, float(bound)


def _cells(
    given: Round, utility: FloatColumn, prices: FloatColumn, free: np.ndarray, row: int
) -> tuple[CellFacts, ...]:
    columns = given.columns
    cells = range(columns.first[row], columns.first[row + 1])
    rivals = {kind: _rivals(columns, given, utility, kind, row) for kind in {int(columns.kind[cell]) for cell in cells}}
    return tuple(_cell_facts(given, utility, prices, free, row, cell, rivals) for cell in cells)


def _cell_facts(
    given: Round,
    utility: FloatColumn,
    prices: FloatColumn,
    free: np.ndarray,
    row: int,
    cell: int,
    rivals: dict[int, tuple[str, ...]],
) -> CellFacts:
    columns = given.columns
    kind, count = int(columns.kind[cell]), int(columns.count[cell])
    price = prices[kind] + (prices[columns.limit[cell]] if columns.limit[cell] >= 0 else 0.0)
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
        cost=float(count * price),
        num_free=int(free[kind]),
        is_held=bool(given.held[row] == cell),
        rivals=rivals[kind],
    )


def _rivals(columns: Columns, given: Round, utility: FloatColumn, kind: int, row: int) -> tuple[str, ...]:
    worth = [
        (float(utility[cell] / columns.count[cell]), columns.jobs[job].name)
        for job, cell in enumerate(given.held.tolist())
        if cell >= 0 and job != row and columns.kind[cell] == kind
    ]
    return tuple(name for _, name in sorted(worth)[:_SHOWN_RIVALS])


def _reason(state: State, given: Round, row: int, cells: tuple[CellFacts, ...]) -> tuple[str, tuple[str, ...]]:
    job = given.columns.jobs[row]
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
        return (
            f"{best.num_devices} x {best.kind} is worth more than it costs; the next round decides",
            tuple(helps),
        )
    rivals = f", the least of them {', '.join(best.rivals)}" if best.rivals else ""
    helps.append("a higher priority")
    return (
        f"its best cell, {best.num_devices} x {best.kind}, is worth {best.utility:.3g} and costs {best.cost:.3g}: all "
        f"{best.kind} devices serve jobs that gain more per device{rivals}",
        tuple(helps),
    )


def _fixed_reason(state: State, job: JobState, best: CellFacts, cells: tuple[CellFacts, ...]) -> str:
    """Why a job waits under a policy that knows no prices: what it would take, and what is free."""
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
    given = round_of(state)
    columns = given.columns
    utility = utilities(columns, state.options, state.now_s)
    floor = _floors(given, utility)  # as they are now: another node takes none of them away
    prices, bound = _prices(given, utility, floor)
    worths = []
    for kind, device in enumerate(state.fleet.kinds):
        size = columns.node_size[kind]
        given.capacity[kind] += size
        _, more = _prices(given, utility, floor)
        given.capacity[kind] -= size
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
