"""Deadlines: will it be met?

Met means that all promised jobs, each in its least sufficient cell, fit the fleet together until their deadlines. A
promised job never gets less than that cell; any other is best effort.
"""

from __future__ import annotations

from dataclasses import dataclass

from spindle.fleet.cells import Cell
from spindle.fleet.state import JobState, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`cell` is the one that meets the deadline, None if none does; then it is missed by about `late_s`."""

    cell: Cell | None
    late_s: float = 0.0


def verdict(state: State, job: JobState, now_s: float) -> Verdict:
    """Whether the deadline of a job can be promised beside those that were promised before."""
    deadline_s, num_steps = job.job.deadline_s, job.job.num_steps
    if deadline_s is None or num_steps is None:
        return Verdict(cell=None)
    fleet = state.fleet
    others = [other for other in state.jobs if other.promised is not None and other.name != job.name]
    promised = [other.promised for other in others if other.promised is not None]
    of_team = [other.promised for other in others if other.promised is not None and other.job.team == job.job.team]
    left = num_steps - job.step_at(now_s)
    sufficient: list[tuple[float, float, Cell]] = []
    earliest_s = float("inf")
    for estimate in job.estimates:
        cell = estimate.cell
        possible = estimate.fits and job.job.accepts(cell.kind, cell.num_devices) and estimate.grade != "bound"
        if not possible or not _fit_together(state, [*promised, cell]):
            continue
        if not _is_within_limits(state, job.job.team, [*of_team, cell]):
            continue
        # A round may start `max_interval_s` after the job arrived.
        end_s = now_s + state.options.max_interval_s + job.realloc_s + left * job.step_s(cell)
        earliest_s = min(earliest_s, end_s)
        if end_s <= deadline_s:
            share = cell.num_devices / max(1, fleet.num_devices(fleet.kind_number(cell.kind)))
            sufficient.append((share, end_s, cell))
    if sufficient:
        return Verdict(cell=min(sufficient, key=lambda entry: (entry[0], entry[1], entry[2].kind))[2])
    return Verdict(cell=None, late_s=earliest_s - deadline_s)


def _is_within_limits(state: State, team: str, cells: list[Cell]) -> bool:
    """Whether a team may have all these cells at once."""
    return all(
        sum(cell.num_devices for cell in cells if cell.kind == limit.kind) <= limit.num_devices
        for entry in state.fleet.teams
        if entry.name == team
        for limit in entry.limits
    )


def _fit_together(state: State, cells: list[Cell]) -> bool:
    """Whether the available nodes hold all these cells at once, the largest placed first."""
    fleet = state.fleet
    free = [
        0 if name in state.unavailable else size
        for name, size in zip(fleet.node_names, fleet.size_of_node, strict=True)
    ]
    numbers = {kind.name: number for number, kind in enumerate(fleet.kinds)}
    for cell in sorted(cells, key=lambda cell: -cell.num_devices):
        kind = numbers.get(cell.kind)
        if kind is None or not fleet.can_hold(kind, cell.num_devices):
            return False
        size = fleet.node_size(kind)
        share = min(size, cell.num_devices)
        rooms = sorted(
            (room, node) for node, room in enumerate(free) if fleet.kind_of_node[node] == kind and room >= share
        )
        needed = max(1, cell.num_devices // size)
        if len(rooms) < needed:
            return False
        for _, node in rooms[:needed]:
            free[node] -= share
    return True
