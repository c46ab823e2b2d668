"""Crius (arXiv 2403.16125, now Arena), the scheduler of its §2.4, on count vectors instead of copied tables.

Gains are in normalised rate. Arrivals are fitted in order: the requested cell if it is free, else a breadth-first
search over changes of running jobs (halve the job that loses least, or move the one that gains most to another kind),
else the job waits. Then up to ten upgrades. Jobs that run while an earlier one waits are opportunistic: when the
earlier one is tried again, their devices count as free, and those that are hit are suspended.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import Columns, IntColumn
from spindle.fleet.exchange import fits_after
from spindle.fleet.free_devices import FreeDevices
from spindle.fleet.policies.crius_search import change, fit, upgrade
from spindle.fleet.policies.fixed import requests
from spindle.fleet.policies.policy import Choice, Round

_DEPTH, _SHALLOW_DEPTH, _MANY_RUNNING = 3, 2, 150
_MAX_UPGRADES = 10
_MAX_TRIALS = 100


def crius(this_round: Round) -> Choice:
    columns = this_round.columns
    cells = this_round.held.copy()
    tagged = {row for row, job in enumerate(columns.jobs) if job.is_opportunistic and cells[row] >= 0}
    lost = int(sum(job.allocation is not None for job in columns.jobs)) != int((cells >= 0).sum())
    if not (this_round.num_arrived or this_round.num_departed or lost or not this_round.allowed.all()):
        return Choice(cells=cells, opportunistic=frozenset(tagged))
    problem = _Problem(this_round)
    free: IntColumn = np.array(FreeDevices(columns, this_round.capacity, cells).left)
    num_trials, missed = 0, set()
    blocked = False
    for job in np.flatnonzero(cells < 0).tolist():
        target = int(problem.requested[job])
        if target < 0 or not this_round.allowed[target] or num_trials >= _MAX_TRIALS:
            blocked = blocked or target >= 0
            continue
        key = problem.key(job)
        if key in missed:
            blocked = True
            continue
        num_trials += 1
        hit = _suspended(columns, cells, free, target, [row for row in sorted(tagged) if row > job])
        for row in hit:
            problem.change(row, -1, cells, free)
            tagged.discard(row)
        if problem.fit(job, cells, free):
            if blocked:
                tagged.add(job)
        else:
            missed.add(key)
            blocked = True
    if not blocked:
        tagged.clear()
    else:
        first = min((row for row in np.flatnonzero((cells < 0) & (problem.requested >= 0)).tolist()), default=-1)
        tagged = {row for row in tagged if first >= 0 and row > first}  # tags drop at the head of the queue
    problem.upgrade(cells, free)
    return Choice(cells=cells, opportunistic=frozenset(tagged))


def _suspended(columns: Columns, cells: IntColumn, free: IntColumn, target: int, below: list[int]) -> list[int]:
    """Opportunistic jobs, the latest first, whose devices an earlier job's request needs and gets; none if all
    together are not enough."""
    resources = [int(columns.kind[target]), *([int(columns.limit[target])] if columns.limit[target] >= 0 else [])]
    missing = {resource: int(columns.count[target] - free[resource]) for resource in resources}
    hit: list[int] = []
    for row in reversed(below):
        of_row = {int(columns.kind[cells[row]]), int(columns.limit[cells[row]])}
        if any(missing[resource] > 0 and resource in of_row for resource in resources):
            hit.append(row)
            for resource in of_row.intersection(resources):
                missing[resource] -= int(columns.count[cells[row]])
    return hit if max(missing.values()) <= 0 else []


class _Problem:
    """Cells by job, kind and power of two, with normalised rates."""

    def __init__(self, this_round: Round) -> None:
        self.columns = this_round.columns
        self.requested = requests(this_round)
        self.share = this_round.columns.rate / this_round.columns.best_rate[this_round.columns.job_of_cell]
        self.share = np.where(this_round.allowed, self.share, -1.0)
        # A job is never halved below half of what it requested.
        count = this_round.columns.count
        self.least = np.where(self.requested >= 0, (count[np.maximum(self.requested, 0)] + 1) // 2, 1)

    def key(self, job: int) -> tuple[int, int, int, float]:
        """Jobs with the same request and the same best rate are fitted alike, if they have the same limit."""
        cell, columns = self.requested[job], self.columns
        request = int(columns.kind[cell]), int(columns.limit[cell]), int(columns.count[cell])
        return *request, float(columns.best_rate[job])

    def _arguments(self) -> tuple[np.ndarray, ...]:
        columns = self.columns
        return columns.first, columns.kind, columns.limit, columns.count, self.share, self.least

    def change(self, job: int, cell: int, cells: IntColumn, free: IntColumn) -> None:
        change(self.columns.kind, self.columns.limit, self.columns.count, cells, free, job, cell)

    def fit(self, job: int, cells: IntColumn, free: IntColumn) -> bool:
        target = int(self.requested[job])
        if fits_after(-1, target, self.columns.kind, self.columns.limit, self.columns.count, free):
            self.change(job, target, cells, free)
            return True
        depth = _SHALLOW_DEPTH if int((cells >= 0).sum()) > _MANY_RUNNING else _DEPTH
        return bool(fit(*self._arguments(), job, target, cells, free, self.columns.num_kinds, depth))

    def upgrade(self, cells: IntColumn, free: IntColumn) -> None:
        upgrade(*self._arguments(), cells, free, _MAX_UPGRADES)
