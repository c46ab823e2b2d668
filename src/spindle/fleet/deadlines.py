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
    """`cell` is the one that meets the deadline, None if none does; then it is missed by at least `late_s`."""

    cell: Cell | None
    late_s: float = 0.0


def verdict(state: State, job: JobState, now_s: float) -> Verdict:
    """Whether the deadline of a job can be promised beside those that were promised before."""
    deadline_s, num_steps = job.job.deadline_s, job.job.num_steps
    if deadline_s is None or num_steps is None:
        return Verdict(cell=None)
    fleet = state.fleet
    free = {kind.name: fleet.num_devices(number) for number, kind in enumerate(fleet.kinds)}
    for name in state.unavailable:
        node = fleet.node_number(name)
        free[fleet.kinds[fleet.kind_of_node[node]].name] -= fleet.size_of_node[node]
    for promised in state.jobs:
        if promised.promised is not None and promised.name != job.name:
            free[promised.promised.kind] -= promised.promised.num_devices
    left = num_steps - job.step
    sufficient: list[tuple[float, float, Cell]] = []
    earliest_s = float("inf")
    for estimate in job.estimates:
        cell = estimate.cell
        possible = estimate.fits and job.job.accepts(cell.kind, cell.num_devices) and estimate.grade != "bound"
        if not possible or free.get(cell.kind, 0) < cell.num_devices:
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
