"""Policies that give every job what it requested, or nothing.

Jobs queue by the kind that they requested, in order of arrival, and are never preempted. `fcfs`: nobody overtakes.
`backfill` (EASY): a later job starts if it fits now and does not delay the first of its queue, by the estimates. A job
that waits for the limit of its team holds up its team alone, whose jobs for this kind are a queue of their own.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import IntColumn
from spindle.fleet.free_devices import FreeDevices, within_limits
from spindle.fleet.policies.policy import Choice, Round
from spindle.fleet.utility import remaining_steps


def fcfs(this_round: Round) -> Choice:
    cells = this_round.held.copy()
    requested = requests(this_round)
    free = FreeDevices(this_round.columns, this_round.capacity, cells)
    for kind in range(this_round.columns.num_kinds):
        waiting: set[int] = set()  # limits for which a job waits
        for job in _queue(this_round, cells, requested, kind):
            cell = int(requested[job])
            lacking = free.lacking(cell)
            if not waiting.isdisjoint(free.resources(cell)):
                continue
            if lacking == kind:
                break
            if lacking >= 0:
                waiting.add(lacking)
                continue
            cells[job] = cell
            free.take(cell)
    return Choice(cells=cells)


def backfill(this_round: Round) -> Choice:
    columns = this_round.columns
    cells = this_round.held.copy()
    requested = requests(this_round)
    free = FreeDevices(columns, this_round.capacity, cells)
    left_s = _left_s(this_round)
    # By kind or limit for which jobs wait: the first of them can start at `shadow_s`; until then others may use its
    # devices, later only `spare`.
    shadow_s: dict[int, float] = {}
    spare: dict[int, int] = {}
    for kind in range(columns.num_kinds):
        for job in _queue(this_round, cells, requested, kind):
            cell = int(requested[job])
            count = int(columns.count[cell])
            lacking = free.lacking(cell)
            if lacking >= 0:
                if lacking not in shadow_s:
                    num_free = free.left[lacking]
                    shadow_s[lacking], spare[lacking] = _shadow(this_round, cells, lacking, num_free, count, left_s)
                continue
            ends_s = left_s[job] / columns.rate[cell]
            delaying = [each for each in free.resources(cell) if each in shadow_s and ends_s > shadow_s[each]]
            if all(count <= spare[resource] for resource in delaying):
                cells[job] = cell
                free.take(cell)
                for resource in delaying:
                    spare[resource] -= count
    return Choice(cells=cells)


def _queue(this_round: Round, cells: IntColumn, requested: IntColumn, kind: int) -> list[int]:
    """Waiting jobs that requested a kind, in order of arrival."""
    columns = this_round.columns
    waits = (cells < 0) & (requested >= 0)
    waits &= columns.kind[np.maximum(requested, 0)] == kind if len(columns.kind) else False
    waits &= this_round.allowed[np.maximum(requested, 0)] if len(columns.kind) else False
    return [int(job) for job in np.flatnonzero(waits)]


def requests(this_round: Round) -> IntColumn:
    """The requested cell of each job; for one without a request its first, the smallest of the first kind. If that is
    more than its team may have: the largest of this kind that it may have, else the first of any kind."""
    columns = this_round.columns
    has_cells = columns.first[1:] > columns.first[:-1]
    requested = np.where(columns.requested >= 0, columns.requested, np.where(has_cells, columns.first[:-1], -1))
    if columns.limits:
        within = within_limits(columns, this_round.capacity)
        for job in np.flatnonzero((requested >= 0) & ~within[np.maximum(requested, 0)]).tolist():
            cells = [cell for cell in range(columns.first[job], columns.first[job + 1]) if within[cell]]
            of_kind = [cell for cell in cells if columns.kind[cell] == columns.kind[requested[job]]]
            requested[job] = max(of_kind, key=columns.count.__getitem__) if of_kind else (cells or [-1])[0]
    return requested


def _left_s(this_round: Round) -> list[float]:
    """Remaining steps of each job."""
    return [float(steps) for steps in remaining_steps(this_round.columns, this_round.now_s)]


def _shadow(
    this_round: Round, cells: IntColumn, resource: int, free: int, needed: int, left: list[float]
) -> tuple[float, int]:
    """After how long `needed` devices of a kind or limit are free by the estimates, and how many more than that."""
    columns = this_round.columns
    ends = sorted(
        (left[job] / float(columns.rate[cell]), int(columns.count[cell]))
        for job, cell in enumerate(cells.tolist())
        if cell >= 0 and resource in (columns.kind[cell], columns.limit[cell])
    )
    for end_s, count in ends:
        free += count
        if free >= needed:
            return end_s, free - needed
    return float("inf"), max(0, free - needed)
