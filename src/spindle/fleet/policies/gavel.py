"""Gavel (OSDI'20): the requested number of devices on any kind, as shares of time.

x[j, k] is the share of time that job j is to spend on kind k. An LP chooses shares: `gavel` maximises the sum of
normalised rates (max-sum), `gavel-max-min` the least of them. Every round runs the jobs with the largest ratio of share
to share received so far. The LP of max-sum has one choice per job but for at most one job per kind, so our own solver
answers it in whole shares; that of max-min is solved by HiGHS, whose failure ends the run with its message.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import FleetError
from spindle.fleet.columns import ARRIVAL_S, BoolColumn, FloatColumn
from spindle.fleet.policies.fixed import requests
from spindle.fleet.policies.policy import Choice, Round, maximise

_LEAST_RECEIVED = 1e-3  # a job that never ran on a kind has the highest priority there


def gavel(given: Round) -> Choice:
    usable = _requested_counts(given)
    rates = np.where(usable, _normalised(given), 0.0)
    choice = maximise(given, rates)
    shares = np.zeros(len(rates))
    shares[choice.cells[choice.cells >= 0]] = 1.0
    return _by_priority(given, shares, usable)


def gavel_max_min(given: Round) -> Choice:
    usable = _requested_counts(given)
    return _by_priority(given, _max_min_shares(given, usable), usable)


def _requested_counts(given: Round) -> BoolColumn:
    """Cells with as many devices as their job requested."""
    columns = given.columns
    requested = requests(given)
    count = np.where(requested >= 0, columns.count[np.maximum(requested, 0)], -1) if len(columns.count) else requested
    usable: BoolColumn = (columns.count == count[columns.job_of_cell]) & given.allowed
    return usable


def _normalised(given: Round) -> FloatColumn:
    columns = given.columns
    return columns.rate / columns.best_rate[columns.job_of_cell]


def _max_min_shares(given: Round, usable: BoolColumn) -> FloatColumn:
    """max t such that every job has a normalised rate of t on average."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    # Data.
    columns = given.columns
    cells = np.flatnonzero(usable)
    shares = np.zeros(len(usable))
    if not len(cells):
        return shares
    jobs, job = np.unique(columns.job_of_cell[cells], return_inverse=True)
    rates, num_cells, num_jobs = _normalised(given)[cells], len(cells), len(jobs)
    # Variables: the share of each cell, then t. Constraints: t - rates <= 0, shares of a job <= 1, devices <= capacity.
    column = np.arange(num_cells)
    rows = [job, np.arange(num_jobs), num_jobs + job, 2 * num_jobs + columns.kind[cells]]
    places = [column, np.full(num_jobs, num_cells), column, column]
    values = [-rates, np.ones(num_jobs), np.ones(num_cells), columns.count[cells].astype(float)]
    shape = (2 * num_jobs + columns.num_kinds, num_cells + 1)
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(places))), shape=shape)
    limits = np.concatenate([np.zeros(num_jobs), np.ones(num_jobs), given.capacity[: columns.num_kinds]])
    # Objective: t, and a little of the sum, so that idle devices are used.
    objective = np.append(-1e-3 * rates / num_jobs, -1.0)
    # Solve.
    result = linprog(objective, A_ub=matrix.tocsr(), b_ub=limits, method="highs")
    if not result.success:
        raise FleetError(f"policy gavel-max-min: HiGHS found no time shares for {num_jobs} jobs: {result.message}")
    # Read-out.
    shares[cells] = np.maximum(result.x[:-1], 0.0)
    return shares


def _by_priority(given: Round, shares: FloatColumn, usable: BoolColumn) -> Choice:
    """Jobs in order of share over share received, each on that kind, as long as there are devices."""
    columns = given.columns
    job_of = columns.job_of_cell
    free = given.capacity.copy()
    cells = np.full(columns.num_jobs, -1, dtype=np.int64)
    age_s = np.maximum(given.now_s - columns.numbers[ARRIVAL_S], 1.0)
    received = np.zeros(len(shares))
    candidates = np.flatnonzero(usable)
    for cell in np.flatnonzero(usable & (shares > 0)).tolist():
        state = columns.jobs[job_of[cell]]
        kind = columns.fleet.kinds[columns.kind[cell]].name
        seconds = sum(entry.value for entry in state.received_s if entry.kind == kind)
        if state.allocation is not None and state.allocation.cell.kind == kind:
            seconds += given.now_s - state.allocated_s
        received[cell] = seconds / age_s[job_of[cell]]
    priority = shares / np.maximum(received, _LEAST_RECEIVED)
    # Jobs without a share use what is left, first those that hold it.
    held = np.zeros(len(shares), dtype=bool)
    held[given.held[given.held >= 0]] = True
    ordered = candidates[np.lexsort((candidates, ~held[candidates], -priority[candidates]))]
    rooms = free.tolist()
    entries = zip(
        ordered.tolist(),
        job_of[ordered].tolist(),
        columns.kind[ordered].tolist(),
        columns.count[ordered].tolist(),
        strict=True,
    )
    taken: set[int] = set()
    for cell, job, kind_number, count in entries:
        if count <= rooms[kind_number] and job not in taken:
            taken.add(job)
            cells[job] = cell
            rooms[kind_number] -= count
    return Choice(cells=cells)
