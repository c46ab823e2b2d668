"""Policies that give every job what it requested, or nothing.

Jobs queue by the kind that they requested, in order of arrival, and are never preempted. `fcfs`: nobody overtakes.
`backfill` (EASY): a later job starts if it fits now and does not delay the first of its queue, by the estimates.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import IntColumn
from spindle.fleet.policies.policy import Choice, Round
from spindle.fleet.utility import remaining_steps


def fcfs(this_round: Round) -> Choice:
    cells, free = _running(this_round)
    for kind in range(this_round.columns.num_kinds):
        for job in _queue(this_round, cells, kind):
            cell = _request(this_round, job)
            if this_round.columns.count[cell] > free[kind]:
                break
            cells[job] = cell
            free[kind] -= this_round.columns.count[cell]
    return Choice(cells=cells)


def backfill(this_round: Round) -> Choice:
    columns = this_round.columns
    cells, free = _running(this_round)
    left_s = _left_s(this_round)
    for kind in range(columns.num_kinds):
        queue = _queue(this_round, cells, kind)
        started = 0
        for job in queue:
            cell = _request(this_round, job)
            if columns.count[cell] > free[kind]:
                break
            cells[job] = cell
            free[kind] -= columns.count[cell]
            started += 1
        if started == len(queue):
            continue
        # The first that waits can start at `shadow_s`; until then others may use its devices, later only `spare`.
        shadow_s, spare = _shadow(
            this_round, cells, kind, free[kind], int(columns.count[_request(this_round, queue[started])])
        )
        for job in queue[started + 1 :]:
            cell = _request(this_round, job)
            count = int(columns.count[cell])
            ends_before = left_s[job] / columns.rate[cell] <= shadow_s
            if count <= free[kind] and (ends_before or count <= spare):
                cells[job] = cell
                free[kind] -= count
                if not ends_before:
                    spare -= count
    return Choice(cells=cells)


def _running(this_round: Round) -> tuple[IntColumn, list[int]]:
    """Cells that jobs hold, and free devices of each kind."""
    columns = this_round.columns
    cells = this_round.held.copy()
    free = this_round.capacity[: columns.num_kinds].copy()
    holding = cells[cells >= 0]
    np.subtract.at(free, columns.kind[holding], columns.count[holding])
    return cells, [int(count) for count in free]


def _queue(this_round: Round, cells: IntColumn, kind: int) -> list[int]:
    """Waiting jobs that requested a kind, in order of arrival."""
    columns = this_round.columns
    requested = requests(this_round)
    waits = (cells < 0) & (requested >= 0)
    waits &= columns.kind[np.maximum(requested, 0)] == kind if len(columns.kind) else False
    waits &= this_round.allowed[np.maximum(requested, 0)] if len(columns.kind) else False
    return [int(job) for job in np.flatnonzero(waits)]


def requests(this_round: Round) -> IntColumn:
    """The requested cell of each job; for one without a request its first, the smallest of the first kind."""
    columns = this_round.columns
    has_cells = columns.first[1:] > columns.first[:-1]
    return np.where(columns.requested >= 0, columns.requested, np.where(has_cells, columns.first[:-1], -1))


def _request(this_round: Round, job: int) -> int:
    requested = int(this_round.columns.requested[job])
    return requested if requested >= 0 else int(this_round.columns.first[job])


def _left_s(this_round: Round) -> list[float]:
    """Remaining steps of each job."""
    return [float(steps) for steps in remaining_steps(this_round.columns, this_round.now_s)]


def _shadow(this_round: Round, cells: IntColumn, kind: int, free: int, needed: int) -> tuple[float, int]:
    """After how long `needed` devices of a kind are free by the estimates, and how many more than that."""
    columns = this_round.columns
    left = _left_s(this_round)
    ends = sorted(
        (left[job] / float(columns.rate[cell]), int(columns.count[cell]))
        for job, cell in enumerate(cells.tolist())
        if cell >= 0 and columns.kind[cell] == kind
    )
    for end_s, count in ends:
        free += count
        if free >= needed:
            return end_s, free - needed
    return float("inf"), max(0, free - needed)
