"""The jobs of a state as columns of numbers, for policies.

Cells of job j are `first[j]` to `first[j + 1]`. Columns are kept from round to round beside the state and brought up to
date where a job is another object than before; they are a function of the state alone, whatever they were before.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from spindle.fleet.events import NodeShare
from spindle.fleet.fleet import Fleet
from spindle.fleet.job import Job
from spindle.fleet.state import ACTIVE, RUNNING, JobState, State

IntColumn = np.ndarray[Any, np.dtype[np.int64]]
FloatColumn = np.ndarray[Any, np.dtype[np.float64]]
BoolColumn = np.ndarray[Any, np.dtype[np.bool_]]

# Numbers of a job, by row of `Columns.numbers`.
(
    NUM_STEPS,  # nan if the job has no length
    STEP,
    STEP_TIME_S,
    IS_RUNNING,
    REALLOC_S,
    WEIGHT,
    ARRIVAL_S,
    WAITING_SINCE_S,
    NUM_REALLOCATIONS,
    IS_URGENT,
    LEASE_UNTIL_S,  # -inf without a lease
    HAS_PROMISE,
    HAS_DEVICES,
) = range(13)


class Columns:
    """Active jobs (waiting, starting, running) in order of arrival, and free devices of each node.

    `planned` says whether a job may start in a cell: one with a bound only is planned first. `held` is the cell that a
    job has, `requested` the one that it asked for, or -1. `nodes[job]` are pairs of node and count. `size[node]` are
    the devices of a node that the fleet may use now.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.num_kinds = len(fleet.kinds)
        self.limits = [
            (team.name, fleet.kind_number(limit.kind), limit.num_devices)
            for team in fleet.teams
            for limit in team.limits
        ]
        self.node_numbers = {name: number for number, name in enumerate(fleet.node_names)}
        self.kind_numbers = {kind.name: number for number, kind in enumerate(fleet.kinds)}
        self._limit_of = {(team, kind): self.num_kinds + number for number, (team, kind, _) in enumerate(self.limits)}
        self.node_size = [fleet.node_size(kind) for kind in range(self.num_kinds)]
        self._most = [fleet.most_devices(kind) for kind in range(self.num_kinds)]
        self._unavailable: tuple[str, ...] = ()
        self._occupied: tuple[NodeShare, ...] = ()
        self.size: list[int] = []
        self._clear(list(fleet.size_of_node))

    def _clear(self, sizes: list[int]) -> None:
        self.size = sizes
        self.jobs: list[JobState] = []
        self.first: IntColumn = np.zeros(1, dtype=np.int64)
        self.kind: IntColumn = np.zeros(0, dtype=np.int64)
        self.limit: IntColumn = np.zeros(0, dtype=np.int64)
        self.count: IntColumn = np.zeros(0, dtype=np.int64)
        self.rate: FloatColumn = np.zeros(0)
        self.planned: BoolColumn = np.zeros(0, dtype=bool)
        self.numbers: FloatColumn = np.zeros((13, 0))
        self.best_rate: FloatColumn = np.zeros(0)
        self.held_offset: IntColumn = np.zeros(0, dtype=np.int64)
        self.requested_offset: IntColumn = np.zeros(0, dtype=np.int64)
        self.nodes: list[tuple[tuple[int, int], ...]] = []
        self.free: list[int] = []
        self.nodes_of_kind: list[list[int]] = [[] for _ in range(self.num_kinds)]
        for node, kind in enumerate(self.fleet.kind_of_node):
            if self.usable(node):
                self.nodes_of_kind[kind].append(node)
        devices = [sum(sizes[node] for node in nodes) for nodes in self.nodes_of_kind]
        limits = [limit for _, _, limit in self.limits]
        self._capacity: IntColumn = np.array([*devices, *limits], dtype=np.int64)

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    @property
    def held(self) -> IntColumn:
        return np.where(self.held_offset >= 0, self.first[:-1] + self.held_offset, -1)

    @property
    def has_devices(self) -> BoolColumn:
        has_devices: BoolColumn = self.numbers[HAS_DEVICES] > 0
        return has_devices

    @property
    def requested(self) -> IntColumn:
        return np.where(self.requested_offset >= 0, self.first[:-1] + self.requested_offset, -1)

    @property
    def job_of_cell(self) -> IntColumn:
        return np.repeat(np.arange(self.num_jobs), np.diff(self.first))

    def capacity(self) -> IntColumn:
        """Devices of each kind in available nodes, then limits of teams."""
        return self._capacity.copy()

    def usable(self, node: int) -> bool:
        return self.fleet.node_names[node] not in self._unavailable

    def update(self, state: State) -> None:
        """Bring the columns up to date with a state of the same fleet."""
        if state.unavailable != self._unavailable or state.occupied != self._occupied:
            self._unavailable, self._occupied = state.unavailable, state.occupied
            self._clear([state.num_usable(node) for node in range(len(self.fleet.node_names))])
        new = [job for job in state.jobs if job.phase in ACTIVE]
        rows = self._changed(new)
        if len(new) != len(self.jobs) or any(self.jobs[row].job.name != new[row].job.name for row in rows):
            self._restructure(new)
            rows = self._changed(new)
        for row in rows:
            self._refresh(row, self.jobs[row], new[row])

    def _changed(self, new: list[JobState]) -> list[int]:
        """Rows whose job is another object than before."""
        return [row for row, same in enumerate(map(operator.is_, self.jobs, new)) if not same]

    def _restructure(self, new: list[JobState]) -> None:
        """Drop rows of jobs that are gone, append new jobs."""
        keep = np.zeros(len(self.jobs), dtype=bool)
        position = 0
        for row, job in enumerate(self.jobs):
            if position < len(new) and new[position].job.name == job.job.name:
                keep[row] = True
                position += 1
        if not keep.all():
            self._drop(keep)
        self._append(new[position:])

    def _drop(self, keep: BoolColumn) -> None:
        for row in np.flatnonzero(~keep).tolist():
            self._occupy(self.nodes[row], 1)
        cells = np.repeat(keep, np.diff(self.first))
        self.first = np.concatenate([[0], np.cumsum(np.diff(self.first)[keep])])
        self.kind, self.limit, self.count = self.kind[cells], self.limit[cells], self.count[cells]
        self.rate, self.planned = self.rate[cells], self.planned[cells]
        self.numbers, self.best_rate = self.numbers[:, keep], self.best_rate[keep]
        self.held_offset, self.requested_offset = self.held_offset[keep], self.requested_offset[keep]
        self.jobs = [job for job, stays in zip(self.jobs, keep.tolist(), strict=True) if stays]
        self.nodes = [nodes for nodes, stays in zip(self.nodes, keep.tolist(), strict=True) if stays]

    def _append(self, new: list[JobState]) -> None:
        if not self.free:
            self.free = list(self.size)
        if not new:
            return
        rows = [self._cells(state) for state in new]
        self.first = np.concatenate([self.first, self.first[-1] + np.cumsum([len(row[0]) for row in rows])])
        self.kind = np.concatenate([self.kind, *(row[0] for row in rows)])
        self.limit = np.concatenate([self.limit, *(row[1] for row in rows)])
        self.count = np.concatenate([self.count, *(row[2] for row in rows)])
        self.rate = np.concatenate([self.rate, *(row[3] for row in rows)])
        self.planned = np.concatenate([self.planned, *(row[4] for row in rows)])
        self.best_rate = np.concatenate([self.best_rate, [row[3].max(initial=0.0) for row in rows]])
        self.numbers = np.concatenate([self.numbers, np.array([self._numbers(state) for state in new]).T], axis=1)
        self.requested_offset = np.concatenate(
            [self.requested_offset, [self._requested(state.job, row) for state, row in zip(new, rows, strict=True)]]
        )
        self.held_offset = np.concatenate(
            [self.held_offset, [self._held(state, row) for state, row in zip(new, rows, strict=True)]]
        )
        for state in new:
            self.jobs.append(state)
            self.nodes.append(self._nodes(state))
            self._occupy(self.nodes[-1], -1)

    def _refresh(self, row: int, before: JobState, after: JobState) -> None:
        if before.estimates is not after.estimates or before.corrections is not after.corrections:
            cells = self._cells(after)
            begin, end = int(self.first[row]), int(self.first[row + 1])
            if len(cells[0]) != end - begin:
                self._replace_cells(row, cells)
                end = begin + len(cells[0])
            self.kind[begin:end], self.limit[begin:end], self.count[begin:end] = cells[:3]
            self.rate[begin:end], self.planned[begin:end] = cells[3:]
            self.best_rate[row] = cells[3].max(initial=0.0)
            self.requested_offset[row] = self._requested(after.job, cells)
            self.held_offset[row] = self._held(after, cells)
        elif before.allocation is not after.allocation:
            cells = tuple(
                column[self.first[row] : self.first[row + 1]] for column in (self.kind, self.limit, self.count)
            )
            self.held_offset[row] = self._held(after, cells)
        if before.allocation is not after.allocation:
            self._occupy(self.nodes[row], 1)
            self.nodes[row] = self._nodes(after)
            self._occupy(self.nodes[row], -1)
        self.numbers[:, row] = self._numbers(after)
        self.jobs[row] = after

    def _replace_cells(self, row: int, cells: tuple[Any, ...]) -> None:
        begin, end = int(self.first[row]), int(self.first[row + 1])

        def spliced(column: Any, values: Any) -> Any:
            return np.concatenate([column[:begin], values, column[end:]])

        self.kind, self.limit, self.count = (
            spliced(column, values)
            for column, values in zip((self.kind, self.limit, self.count), cells[:3], strict=True)
        )
        self.rate, self.planned = spliced(self.rate, cells[3]), spliced(self.planned, cells[4])
        self.first[row + 1 :] += len(cells[0]) - (end - begin)

    def _cells(self, state: JobState) -> tuple[Any, ...]:
        """Columns of the cells of a job that it accepts, that fit its memory, and that the fleet can hold."""
        kinds, limits, counts, rates, planned = [], [], [], [], []
        for estimate in state.estimates:
            cell = estimate.cell
            kind = self.kind_numbers.get(cell.kind)
            if kind is None or not estimate.fits or not state.job.accepts(cell.kind, cell.num_devices):
                continue
            size = self.node_size[kind]
            if cell.num_devices > self._most[kind] or (cell.num_devices > size and cell.num_devices % size):
                continue
            kinds.append(kind)
            limits.append(self._limit_of.get((state.job.team, kind), -1))
            counts.append(cell.num_devices)
            correction = 1.0 if estimate.grade == "measured" else state.correction(cell.kind)
            rates.append(1.0 / (estimate.step_s * correction))
            planned.append(estimate.grade != "bound")
        return (
            np.array(kinds, dtype=np.int64),
            np.array(limits, dtype=np.int64),
            np.array(counts, dtype=np.int64),
            np.array(rates, dtype=np.float64),
            np.array(planned, dtype=bool),
        )

    def _numbers(self, state: JobState) -> tuple[float, ...]:
        job = state.job
        return (
            np.nan if job.num_steps is None else job.num_steps,
            state.step,
            state.step_time_s,
            state.phase == RUNNING,
            state.realloc_s,
            job.weight,
            state.arrival_s,
            state.waiting_since_s,
            state.num_reallocations,
            job.is_urgent,
            -np.inf if state.lease_until_s is None else state.lease_until_s,
            state.promised is not None,
            state.allocation is not None,
        )

    def _requested(self, job: Job, cells: tuple[Any, ...]) -> int:
        if not job.requested_kind or not len(cells[0]):
            return -1
        kind = self.kind_numbers.get(job.requested_kind, -1)
        offsets = np.flatnonzero((cells[0] == kind) & (cells[2] == job.requested_devices))
        return int(offsets[0]) if len(offsets) else -1

    def _held(self, state: JobState, cells: tuple[Any, ...]) -> int:
        """The cell that a job holds, or -1; -1 also if it must leave one of its nodes."""
        allocation = state.allocation
        if allocation is None or not all(share.node not in self._unavailable for share in allocation.nodes):
            return -1
        kind = self.kind_numbers.get(allocation.cell.kind, -1)
        offsets = np.flatnonzero((cells[0] == kind) & (cells[2] == allocation.cell.num_devices))
        return int(offsets[0]) if len(offsets) else -1

    def _nodes(self, state: JobState) -> tuple[tuple[int, int], ...]:
        if state.allocation is None:
            return ()
        shares = ((self.node_numbers[share.node], share.num_devices) for share in state.allocation.nodes)
        return tuple((node, count) for node, count in shares if self.usable(node))

    def _occupy(self, nodes: tuple[tuple[int, int], ...], sign: int) -> None:
        for node, count in nodes:
            self.free[node] += sign * count
