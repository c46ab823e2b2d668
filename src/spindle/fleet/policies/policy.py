"""The input and the output of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spindle.fleet.columns import BoolColumn, Columns, FloatColumn, IntColumn
from spindle.fleet.dual_prices import FORBIDDEN, descend
from spindle.fleet.exchange import allocate
from spindle.fleet.state import SchedulerOptions

_MAX_SWEEPS = 20
_MAX_EXCHANGES = 2000


@dataclass(slots=True, kw_only=True)
class Round:
    """One round: jobs as columns, and which cells may be chosen.

    `allowed` is False for cells that placement refused in an earlier try of this round, for cells that are not planned
    yet, and for those in which a promised job would miss its deadline; `fixed` jobs would, if they were moved to other
    nodes. `num_arrived` and `num_departed` count since the last round; `prices` are the last round's.
    """

    columns: Columns
    options: SchedulerOptions
    now_s: float
    capacity: IntColumn
    held: IntColumn
    allowed: BoolColumn
    prices: FloatColumn
    fixed: frozenset[int] = frozenset()
    num_arrived: int = 0
    num_departed: int = 0


@dataclass(slots=True, kw_only=True)
class Choice:
    """The cell of each job, or -1. `leases` are jobs that begin one; `opportunistic` jobs run out of turn (Crius).

    `bound` is an upper bound on the utility, where the policy maximises one, and `utilities` are those of all cells.
    `floor` is the cell that each job gets at least, or -1; empty where the policy has no floors.
    """

    cells: IntColumn
    utility: float = 0.0
    bound: float = 0.0
    utilities: FloatColumn = field(default_factory=lambda: np.zeros(0))
    prices: FloatColumn = field(default_factory=lambda: np.zeros(0))
    leases: tuple[int, ...] = ()
    floor: IntColumn = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    opportunistic: frozenset[int] | None = None


Policy = Callable[[Round], Choice]


def maximise(
    this_round: Round, utility: FloatColumn, floor: IntColumn | None = None, capacity: IntColumn | None = None
) -> Choice:
    """The allocation with (nearly) the largest sum of utilities; `floor` as in `exchange`."""
    columns = this_round.columns
    if floor is None:
        floor = np.full(columns.num_jobs, -1, dtype=np.int64)
    if capacity is None:
        capacity = this_round.capacity
    worth = worth_above(columns, utility, this_round.allowed, floor)
    problem = (columns.first, columns.kind, columns.limit, columns.count, worth)
    choice = largest_sum(*problem, floor, this_round.held, capacity, columns.num_kinds, this_round.prices)
    choice.utilities = utility
    return choice


def largest_sum(
    first: IntColumn,
    kind: IntColumn,
    limit: IntColumn,
    count: IntColumn,
    worth: FloatColumn,
    floor: IntColumn,
    held: IntColumn,
    capacity: IntColumn,
    num_kinds: int,
    prices: FloatColumn,
) -> Choice:
    """Cells with (nearly) the largest sum of `worth`, from columns as in `dual_prices`. The search for prices begins at
    `prices`."""
    problem, required = (first, kind, limit, count, worth), floor >= 0
    prices, bound = descend(*problem, required, capacity, prices, _MAX_SWEEPS)
    cells, total = allocate(*problem, floor, required, held, capacity, num_kinds, prices, _MAX_EXCHANGES)
    return Choice(cells=cells, utility=float(total), bound=float(bound), prices=prices)


def worth_above(columns: Columns, utility: FloatColumn, allowed: BoolColumn, floor: IntColumn) -> FloatColumn:
    """The utilities of cells that may be chosen, and FORBIDDEN for others: a job with a floor may only do better, with
    a cell that is worth more and no slower."""
    required = floor >= 0
    worth: FloatColumn = np.where(allowed & (utility > 0), utility, FORBIDDEN)
    if required.any():
        job = columns.job_of_cell
        least = np.where(required, utility[np.maximum(floor, 0)], FORBIDDEN)[job]
        slowest = np.where(required, columns.rate[np.maximum(floor, 0)], 0.0)[job]
        worth[(worth <= least) | (columns.rate < slowest)] = FORBIDDEN
        worth[floor[required]] = np.maximum(0.0, utility[floor[required]])
    return worth
