"""Devices that a round has not given away yet, for policies that give them job by job."""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import BoolColumn, Columns, IntColumn


class FreeDevices:
    """Free devices of each kind, then those that each limit of a team leaves: `left`, as in `Columns.capacity`."""

    def __init__(self, columns: Columns, capacity: IntColumn, cells: IntColumn) -> None:
        """What is left of a capacity by jobs in these `cells`, -1 for none."""
        self._columns = columns
        left, taken = capacity.copy(), cells[cells >= 0]
        limited = taken[columns.limit[taken] >= 0]
        np.subtract.at(left, columns.kind[taken], columns.count[taken])
        np.subtract.at(left, columns.limit[limited], columns.count[limited])
        self.left: list[int] = left.tolist()

    def resources(self, cell: int) -> tuple[int, ...]:
        """The kind of a cell, and the limit of its team for this kind, if there is one."""
        kind, limit = int(self._columns.kind[cell]), int(self._columns.limit[cell])
        return (kind,) if limit < 0 else (kind, limit)

    def lacking(self, cell: int) -> int:
        """The limit, else the kind, of which a cell needs more than is left; -1 if it fits."""
        kind, limit = int(self._columns.kind[cell]), int(self._columns.limit[cell])
        count = self._columns.count[cell]
        if limit >= 0 and count > self.left[limit]:
            return limit
        return kind if count > self.left[kind] else -1

    def fits(self, cell: int) -> bool:
        return self.lacking(cell) < 0

    def take(self, cell: int) -> None:
        for resource in self.resources(cell):
            self.left[resource] -= int(self._columns.count[cell])


def within_limits(columns: Columns, capacity: IntColumn) -> BoolColumn:
    """Cells that are not larger than what their team may have."""
    within: BoolColumn = (columns.limit < 0) | (columns.count <= capacity[columns.limit])
    return within
