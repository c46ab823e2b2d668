"""Policies that give every job what it requested, or nothing.

Jobs queue by the kind that they requested, in order of arrival, and are never preempted. `fcfs`: nobody overtakes.
`backfill` (EASY): a later job starts if it fits now and does not delay the first of its queue, by the estimates.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import IntColumn
from spindle.fleet.policies.policy import Choice, Round
from spindle.fleet.utility import remaining_steps


def fcfs(given: Round) -> Choice:
    cells, free = _running(given)
    for kind in range(given.columns.num_kinds):
        for job in _queue(given, cells, kind):
            cell = _request(given, job)
            if given.columns.count[cell] > free[kind]:
                break
            cells[job] = cell
            free[kind] -= given.columns.count[cell]
    return Choice(cells=cells)


def backfill(given: Round) -> Choice:
    columns = given.columns
    cells, free = _running(given)
    left_s = _left_s(given)
    for kind in range(columns.num_kinds):
        queue = _queue(given, cells, kind)
        started = 0
        for job in queue:
            cell = _request(given, job)
            if columns.count[cell] > free[kind]:
                break
            cells[job] = cell
            free[kind] -= columns.count[cell]
            started += 1
        if started == len(queue):
            continue
        # The first that waits can start at `shadow_s`; until then others may use its devices, later only `spare`.
        shadow_s, spare = _shadow(given, cells, kind, free[kind], int(columns.count[_request(given, queue[started])]))
        for job in queue[started + 1 :]:
            cell = _request(given, job)
            count = int(columns.count[cell])
            ends_before = left_s[job] / columns.rate[cell] <= shadow_s
            if count <= free[kind] and (ends_before or count <= spare):
                cells[job] = cell
                free[kind] -= count
                if not ends_before:
                    spare -= count
    return Choice(cells=cells)


def _running(given: Round) -> tuple[IntColumn, list[int]]:
    """Cells that jobs hold, and free devices of each kind."""
    columns = given.columns
    cells = given.held.copy()
    free = given.capacity[: columns.num_kinds].copy()
    holding = cells[cells >= 0]
    np.subtract.at(free, columns.kind[holding], columns.count[holding])
    return cells, [int(count) for count in free]


def _queue(given: Round, cells: IntColumn, kind: int) -> list[int]:
    """Waiting jobs that requested a kind, in order of arrival."""
    columns = given.columns
    requested = requests(given)
    waits = (cells < 0) & (requested >= 0)
    waits &= columns.kind[np.maximum(requested, 0)] == kind if len(columns.kind) else False
    waits &= given.allowed[np.maximum(requested, 0)] if len(columns.kind) else False
    return [int(job) for job in np.flatnonzero(waits)]


def requests(given: Round) -> IntColumn:
    """The requested cell of each job; for one without a request its first, the smallest of the first kind."""
    columns = given.columns
    has_cells = columns.first[1:] > columns.first[:-1]
    return np.where(columns.requested >= 0, columns.requested, np.where(has_cells, columns.first[:-1], -1))


def _request(given: Round, job: int) -> int:
    requested = int(given.columns.requested[job])
    return requested if requested >= 0 else int(given.columns.first[job])


def _left_s(given: Round) -> list[float]:
    """Remaining steps of each job."""
    return [float(steps) for steps in remaining_steps(given.columns, given.now_s)]


def _shadow(given: Round, cells: IntColumn, kind: int, free: int, needed: int) -> tuple[float, int]:
    """After how long `needed` devices of a kind are free by the estimates, and how many more than that."""
    columns = given.columns
    left = _left_s(given)
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
