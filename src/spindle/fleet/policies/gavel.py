"""Gavel (OSDI'20): the requested number of devices on any kind, as shares of time.

x[j, k] is the share of time that job j is to spend on kind k. An LP chooses shares: `gavel` maximises the sum of
normalised rates (max-sum), `gavel-max-min` the least of them. Every round runs the jobs with the largest ratio of share
to share received so far. The LP of max-sum has one choice per job but for at most one job per kind, so our own solver
answers it in whole shares; that of max-min is solved by HiGHS, whose failure ends the run with its message.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from spindle.errors import FleetError
from spindle.fleet.columns import ARRIVAL_S, BoolColumn, FloatColumn, IntColumn
from spindle.fleet.dual_prices import FORBIDDEN
from spindle.fleet.free_devices import FreeDevices, within_limits
from spindle.fleet.policies.fixed import requests
from spindle.fleet.policies.policy import Choice, Round, largest_sum, worth_above
from spindle.fleet.state import JobState

_LEAST_RECEIVED = 1e-3  # a job that never ran on a kind has the highest priority there


def gavel(this_round: Round) -> Choice:
    usable = _requested_counts(this_round)
    return _by_priority(this_round, _max_sum_shares(this_round, usable), usable)


def gavel_max_min(this_round: Round) -> Choice:
    usable = _requested_counts(this_round)
    return _by_priority(this_round, _max_min_shares(this_round, usable), usable)


def fastest_rates(this_round: Round) -> FloatColumn:
    """The best rate of each job on as many devices as it requested; 0 without such a cell. When all jobs have theirs, a
    later round changes nothing."""
    rates = np.zeros(this_round.columns.num_jobs)
    usable = np.flatnonzero(_requested_counts(this_round))
    np.maximum.at(rates, this_round.columns.job_of_cell[usable], this_round.columns.rate[usable])
    return rates


def _requested_counts(this_round: Round) -> BoolColumn:
    """Cells with as many devices as their job requested, if its team may have them."""
    columns = this_round.columns
    requested = requests(this_round)
    count = np.where(requested >= 0, columns.count[np.maximum(requested, 0)], -1) if len(columns.count) else requested
    usable: BoolColumn = (columns.count == count[columns.job_of_cell]) & this_round.allowed
    return usable & within_limits(columns, this_round.capacity)


def _normalised(this_round: Round) -> FloatColumn:
    columns = this_round.columns
    return columns.rate / columns.best_rate[columns.job_of_cell]


def _max_sum_shares(this_round: Round, usable: BoolColumn) -> FloatColumn:
    """The largest sum of normalised rates, in whole shares."""
    columns = this_round.columns
    rates = np.where(usable, _normalised(this_round), 0.0)
    worth = worth_above(columns, rates, this_round.allowed, np.full(columns.num_jobs, -1, dtype=np.int64))
    candidates = np.flatnonzero(worth > FORBIDDEN)
    first = np.searchsorted(candidates, columns.first)
    cell_columns = (column[candidates] for column in (columns.kind, columns.limit, columns.count))
    integers = (first, *cell_columns, this_round.capacity)
    problem = (worth[candidates].tobytes(), *(column.tobytes() for column in integers))
    cells = _max_sum_cells(*problem, num_kinds=columns.num_kinds)
    shares = np.zeros(len(rates))
    shares[candidates[cells[cells >= 0]]] = 1.0
    return shares


@lru_cache(maxsize=1)
def _max_sum_cells(worth: bytes, *integers: bytes, num_kinds: int) -> IntColumn:
    """The cell of each job, or -1. Depends on neither held cells nor prices, so most rounds ask what the round before
    has asked."""
    first, kind, limit, count, capacity = (np.frombuffer(column, dtype=np.int64).copy() for column in integers)
    none = np.full(len(first) - 1, -1, dtype=np.int64)
    prices = np.zeros(len(capacity))
    columns = (first, kind, limit, count, np.frombuffer(worth).copy())
    return largest_sum(*columns, none, none, capacity, num_kinds, prices).cells


def _max_min_shares(this_round: Round, usable: BoolColumn) -> FloatColumn:
    """max t such that every job has a normalised rate of t on average."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    # Data.
    columns = this_round.columns
    cells = np.flatnonzero(usable)
    shares = np.zeros(len(usable))
    if not len(cells):
        return shares
    jobs, job = np.unique(columns.job_of_cell[cells], return_inverse=True)
    rates, num_cells, num_jobs = _normalised(this_round)[cells], len(cells), len(jobs)
    counts, limit = columns.count[cells].astype(float), columns.limit[cells]
    # Variables: the share of each cell, then t. Constraints: t - rates <= 0, shares of a job <= 1, devices <= capacity.
    column, limited = np.arange(num_cells), np.flatnonzero(limit >= 0)
    of_kinds, of_limits = 2 * num_jobs + columns.kind[cells], 2 * num_jobs + limit[limited]
    rows = [job, np.arange(num_jobs), num_jobs + job, of_kinds, of_limits]
    places = [column, np.full(num_jobs, num_cells), column, column, limited]
    values = [-rates, np.ones(num_jobs), np.ones(num_cells), counts, counts[limited]]
    shape = (2 * num_jobs + len(this_round.capacity), num_cells + 1)
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(places))), shape=shape)
    limits = np.concatenate([np.zeros(num_jobs), np.ones(num_jobs), this_round.capacity])
    # Objective: t, and a little of the sum, so that idle devices are used.
    objective = np.append(-1e-3 * rates / num_jobs, -1.0)
    # Solve.
    result = linprog(objective, A_ub=matrix.tocsr(), b_ub=limits, method="highs")
    if not result.success:
        raise FleetError(f"policy gavel-max-min: HiGHS found no time shares for {num_jobs} jobs: {result.message}")
    # Read-out.
    shares[cells] = np.maximum(result.x[:-1], 0.0)
    return shares


def _by_priority(this_round: Round, shares: FloatColumn, usable: BoolColumn) -> Choice:
    """Jobs in order of share over share received, each on that kind, as long as there are devices."""
    columns = this_round.columns
    job_of = columns.job_of_cell
    cells = np.full(columns.num_jobs, -1, dtype=np.int64)
    free = FreeDevices(columns, this_round.capacity, cells)
    age_s = np.maximum(this_round.now_s - columns.numbers[ARRIVAL_S], 1.0)
    received = np.zeros(len(shares))
    candidates = np.flatnonzero(usable)
    kinds, jobs = [kind.name for kind in columns.fleet.kinds], columns.jobs
    wanted = np.flatnonzero(usable & (shares > 0))
    pairs = zip(job_of[wanted].tolist(), columns.kind[wanted].tolist(), strict=True)
    received[wanted] = [_received_s(jobs[job], kinds[kind], this_round.now_s) for job, kind in pairs]
    received /= age_s[job_of]
    priority = shares / np.maximum(received, _LEAST_RECEIVED)
    # Jobs without a share use what is left, first those that hold it.
    held = np.zeros(len(shares), dtype=bool)
    held[this_round.held[this_round.held >= 0]] = True
    ordered = candidates[np.lexsort((candidates, ~held[candidates], -priority[candidates]))]
    started: set[int] = set()
    for cell, job in zip(ordered.tolist(), job_of[ordered].tolist(), strict=True):
        if job not in started and free.fits(cell):
            started.add(job)
            cells[job] = cell
            free.take(cell)
    return Choice(cells=cells)


def _received_s(job: JobState, kind: str, now_s: float) -> float:
    """How long a job has had devices of a kind."""
    received_s = 0.0
    for entry in job.received_s:
        if entry.kind == kind:
            received_s += entry.value
    if job.allocation is not None and job.allocation.cell.kind == kind:
        received_s += now_s - job.allocated_s
    return received_s
