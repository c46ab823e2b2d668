"""Whether the deadline of a job will be met.

Met means that all promised jobs, each in its least sufficient cell, fit the fleet together until their deadlines. A
promised job never gets less than that cell, and is not reallocated if the reallocation would cost it the deadline; any
other is best effort. Only policy `price` knows deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle.fleet.cells import Cell
from spindle.fleet.fleet import Fleet
from spindle.fleet.state import JobState, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`cell` is the one that meets the deadline, None if none does; then it is missed by about `late_s`."""

    cell: Cell | None
    late_s: float = 0.0


def verdict(state: State, job: JobState, now_s: float) -> Verdict:
    """Whether the deadline of a job can be promised beside those that were promised before."""
    deadline_s, num_steps = job.job.deadline_s, job.job.num_steps
    if deadline_s is None or num_steps is None or not keeps_deadlines(state):
        return Verdict(cell=None)
    fleet = state.fleet
    others = [other for other in state.jobs if other.promised is not None and other.name != job.name]
    of_team = [other.promised for other in others if other.promised is not None and other.job.team == job.job.team]
    left = num_steps - job.step_at(now_s)
    sufficient: list[tuple[float, float, Cell]] = []
    earliest_s = float("inf")
    for estimate in job.estimates:
        cell = estimate.cell
        possible = estimate.fits and job.job.accepts(cell.kind, cell.num_devices) and estimate.grade != "bound"
        if not possible or not _fit_together(state, others, cell):
            continue
        if not _is_within_limits(state, job.job.team, [*of_team, cell]):
            continue
        # A round may start `max_interval_s` after the job arrived.
        end_s = now_s + state.options.max_interval_s + job.realloc_s + left * job.step_s(cell)
        earliest_s = min(earliest_s, end_s)
        if end_s <= deadline_s:
            sufficient.append((share_of_kind(fleet, cell), end_s, cell))
    if sufficient:
        return Verdict(cell=min(sufficient, key=lambda entry: (entry[0], entry[1], entry[2].kind))[2])
    return Verdict(cell=None, late_s=earliest_s - deadline_s)


def share_of_kind(fleet: Fleet, cell: Cell) -> float:
    """How much of its kind a cell takes; the least sufficient cell takes least."""
    return cell.num_devices / max(1, fleet.num_devices(fleet.kind_number(cell.kind)))


def _is_within_limits(state: State, team: str, cells: list[Cell]) -> bool:
    """Whether a team may have all these cells at once."""
    return all(
        sum(cell.num_devices for cell in cells if cell.kind == limit.kind) <= limit.num_devices
        for entry in state.fleet.teams
        if entry.name == team
        for limit in entry.limits
    )


def keeps_deadlines(state: State) -> bool:
    """Whether the policy of a fleet knows deadlines."""
    return state.options.policy == "price"


def slack_s(job: JobState, now_s: float) -> float:
    """How long a promised job could stand still, and still meet its deadline in its promised cell; infinite if it has
    no length or no estimate there any more."""
    assert job.promised is not None
    assert job.job.deadline_s is not None
    if job.job.num_steps is None or job.estimate(job.promised) is None:
        return float("inf")
    left = max(0.0, job.job.num_steps - job.step_at(now_s))
    return job.job.deadline_s - now_s - left * job.step_s(job.promised)


def may_be_reallocated(job: JobState, now_s: float) -> bool:
    """Whether a promised job may leave the cell that it holds, or start in another than the promised one: it must be
    able to pay for this reallocation and for the one back. One that will miss its deadline where it is may, too."""
    slack = slack_s(job, now_s)
    return slack >= 2 * job.realloc_s or _is_late(job, now_s, slack)


def _is_late(job: JobState, now_s: float, slack: float) -> bool:
    """Whether a promised job will miss its deadline, where it is or in its promised cell."""
    if job.allocation is None:
        return slack < job.realloc_s
    if slack >= 0 or job.estimate(job.allocation.cell) is None:
        return False
    assert job.job.num_steps is not None
    assert job.job.deadline_s is not None
    left = max(0.0, job.job.num_steps - job.step_at(now_s))
    return now_s + left * job.step_s(job.allocation.cell) > job.job.deadline_s


def _fit_together(state: State, promised: Sequence[JobState], new: Cell) -> bool:
    """Whether the available nodes hold the cells of promised jobs and a new one at once. Jobs that run in their
    promised cell stay where they are: a move could cost them the deadline. The largest of the others is placed
    first."""
    fleet = state.fleet
    free = [state.num_usable(node) for node in range(len(fleet.node_names))]
    numbers = {kind.name: number for number, kind in enumerate(fleet.kinds)}
    cells = [new]
    for job in promised:
        assert job.promised is not None
        if job.allocation is not None and is_same_size(job.allocation.cell, job.promised):
            for share in job.allocation.nodes:
                free[fleet.node_number(share.node)] -= share.num_devices
        else:
            cells.append(job.promised)
    for cell in sorted(cells, key=lambda cell: -cell.num_devices):
        kind = numbers.get(cell.kind)
        if kind is None or not fleet.can_hold(kind, cell.num_devices):
            return False
        size = fleet.node_size(kind)
        share_size = min(size, cell.num_devices)
        rooms = sorted(
            (num_free, node)
            for node, num_free in enumerate(free)
            if fleet.kind_of_node[node] == kind and num_free >= share_size
        )
        needed = max(1, cell.num_devices // size)
        if len(rooms) < needed:
            return False
        for _, node in rooms[:needed]:
            free[node] -= share_size
    return True


def is_same_size(cell: Cell, other: Cell) -> bool:
    """Whether two cells of a job are the same number of devices of a kind."""
    return (cell.kind, cell.num_devices) == (other.kind, other.num_devices)
