"""Cells that jobs get at least: promised deadlines, urgent jobs, leases, guarantees of teams.

In this order, each from what is left by those before. Promises were given, so even urgent jobs share only the rest.
All floors together fit the fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spindle.fleet.columns import HAS_PROMISE, IS_URGENT, LEASE_UNTIL_S, WAITING_SINCE_S, FloatColumn, IntColumn
from spindle.fleet.free_devices import FreeDevices

if TYPE_CHECKING:
    from spindle.fleet.policies.policy import Round


def floors_of(this_round: Round, utility: FloatColumn) -> tuple[IntColumn, tuple[int, ...]]:
    """The floor of each job, or -1, and the jobs whose lease begins."""
    floors = _Floors(this_round)
    floors.add_promises()
    floors.add_urgent(utility)
    leases = floors.add_leases() if this_round.options.leases else ()
    floors.add_guarantees(utility)
    return floors.cell, leases


class _Floors:
    def __init__(self, this_round: Round) -> None:
        self.this_round, self.columns = this_round, this_round.columns
        self.cell: IntColumn = np.full(self.columns.num_jobs, -1, dtype=np.int64)
        self.free = FreeDevices(self.columns, this_round.capacity, self.cell)

    def _set(self, job: int, cell: int) -> None:
        self.cell[job] = cell
        self.free.take(cell)

    def add_promises(self) -> None:
        """The cell in which a promised job meets its deadline; in order of arrival, as promises were given."""
        for job in np.flatnonzero(self.columns.numbers[HAS_PROMISE]).tolist():
            promised = self.columns.jobs[job].promised
            assert promised is not None
            kind = self.columns.kind_numbers[promised.kind]
            for cell in range(self.columns.first[job], self.columns.first[job + 1]):
                matches = self.columns.kind[cell] == kind and self.columns.count[cell] == promised.num_devices
                if matches and self.this_round.allowed[cell] and self.free.fits(cell):
                    self._set(job, cell)

    def add_urgent(self, utility: FloatColumn) -> None:
        """Urgent jobs as if they were alone."""
        urgent = (self.columns.numbers[IS_URGENT] > 0) & (self.cell < 0)
        if urgent.any():
            self._solve(urgent, utility, np.array(self.free.left))

    def add_leases(self) -> tuple[int, ...]:
        """Jobs that have a lease keep their cell; those that have waited too long begin one, longest waits first, in
        the cell that is cheapest at the last prices.

        Of each kind, new leases leave a part of the devices alone: when many jobs are due at once they would take all,
        and every short job would wait for hours. A single lease may be larger, so one is always in progress.
        """
        now_s, columns = self.this_round.now_s, self.columns
        open_floor = self.cell < 0
        num_leased = np.zeros(columns.num_kinds)
        most_leased: FloatColumn = self.this_round.options.lease_share * self.this_round.capacity[
            : columns.num_kinds
        ].astype(float)
        leased = open_floor & (self.this_round.held >= 0) & (columns.numbers[LEASE_UNTIL_S] > now_s)
        for job in np.flatnonzero(leased).tolist():
            held = int(self.this_round.held[job])
            if self.this_round.allowed[held] and self.free.fits(held):
                self._set(job, held)
                num_leased[columns.kind[held]] += columns.count[held]
        waited_s = now_s - columns.numbers[WAITING_SINCE_S]
        due = np.flatnonzero(
            open_floor & (self.this_round.held < 0) & (waited_s >= self.this_round.options.starvation_s)
        )
        begun = []
        for job in sorted(due.tolist(), key=lambda job: (-waited_s[job], job)):
            cells = [
                cell
                for cell in range(columns.first[job], columns.first[job + 1])
                if self.this_round.allowed[cell]
                and self.free.fits(cell)
                and self._is_leasable(cell, num_leased, most_leased)
            ]
            if not cells and self._fits_empty_fleet(job):
                break  # jobs that have waited less must not take devices that become free
            if cells:
                prices = self.this_round.prices
                cost = [(columns.count[cell] * prices[columns.kind[cell]], columns.count[cell]) for cell in cells]
                cheapest = cells[min(range(len(cells)), key=cost.__getitem__)]
                self._set(job, cheapest)
                num_leased[columns.kind[cheapest]] += columns.count[cheapest]
                begun.append(job)
        return tuple(begun)

    def _is_leasable(self, cell: int, num_leased: FloatColumn, most_leased: FloatColumn) -> bool:
        kind = self.columns.kind[cell]
        return bool(num_leased[kind] == 0 or num_leased[kind] + self.columns.count[cell] <= most_leased[kind])

    def _fits_empty_fleet(self, job: int) -> bool:
        """Whether a planned cell of a job would fit the empty fleet. Other jobs must not wait for one that cannot
        start."""
        columns, capacity = self.columns, self.this_round.capacity
        cells = slice(columns.first[job], columns.first[job + 1])
        limit, count = columns.limit[cells], columns.count[cells]
        fits = (count <= capacity[columns.kind[cells]]) & ((limit < 0) | (count <= capacity[limit]))
        return bool((fits & columns.planned[cells]).any())

    def add_guarantees(self, utility: FloatColumn) -> None:
        """Each team's jobs as if they were alone on its guaranteed devices."""
        columns = self.columns
        for team in columns.fleet.teams:
            if not team.guaranteed:
                continue
            members = np.array([state.job.team == team.name for state in columns.jobs], dtype=bool)
            left = np.array(self.free.left)
            num_free = np.zeros_like(left)
            num_free[columns.num_kinds :] = left[columns.num_kinds :]
            for guarantee in team.guaranteed:
                num_free[columns.kind_numbers[guarantee.kind]] = guarantee.num_devices
            own_cells = self.cell[members & (self.cell >= 0)]
            np.subtract.at(num_free, columns.kind[own_cells], columns.count[own_cells])
            num_free = np.clip(num_free, 0, left)
            members &= self.cell < 0
            if members.any() and num_free[: columns.num_kinds].any():
                self._solve(members, utility, num_free)

    def _solve(self, members: np.ndarray, utility: FloatColumn, capacity: IntColumn) -> None:
        from spindle.fleet.policies.policy import maximise

        alone = np.where(members[self.columns.job_of_cell], utility, 0.0)
        choice = maximise(self.this_round, alone, capacity=capacity)
        for job in np.flatnonzero(choice.cells >= 0).tolist():
            self._set(job, int(choice.cells[job]))
