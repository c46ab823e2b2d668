"""Requests for plans: between the loop of a live fleet and its planning process.

Plan (action) ────────────▶ request ─────────────────▶ PlanningProcess ───▶ answers ───▶ Estimated (event), plans,
a job's tasks changed ────▶ check_tasks, plan_again ─┤                                   confirmed actions
a job has devices ────────▶ plan_ahead ──────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.events import Plan
from spindle.fleet.fleet import Fleet
from spindle.fleet.planning import ChangedJob, PlannedCell, PlanningProcess, tasks_of
from spindle.fleet.state import JobState, State
from spindle.fleet.store import Store, StoredPlan, Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """New estimates of a job. With `replaces`, its earlier ones are dropped, and `submission` has its new workload.
    `confirmed` are numbers of actions that are done. `message` is for the user; an answer may consist of it alone."""

    job: str
    estimates: tuple[Estimate, ...] = ()
    replaces: bool = False
    plans: tuple[StoredPlan, ...] = ()
    submission: Submission | None = None
    confirmed: tuple[int, ...] = ()
    message: str = ""


class JobPlans:
    """Requests each plan once, and drops plans of tasks that a job no longer trains."""

    def __init__(self, store: Store) -> None:
        self._store, self._process = store, PlanningProcess()
        self._actions: dict[tuple[str, Cell], int] = {}  # numbers of the actions that wait for a plan
        self._tasks: dict[str, str] = {}  # digests of what jobs train
        self._refused: dict[str, str] = {}  # digests of changes that could not be estimated
        self._ahead_of: State | None = None  # the state for which nothing is left to plan ahead

    def request(self, number: int, action: Plan, job: JobState | None, fleet: Fleet) -> bool:
        """Request the plan of a cell. Returns False if there is nothing to plan."""
        bound = None if job is None else job.estimate(action.cell)
        submission = self._store.submission(action.job)
        if bound is None or submission.workload is None:
            return False
        self._actions[action.job, action.cell] = number
        self._process.request(action.job, submission, fleet, bound)
        return True

    def plan_again(self, job: JobState | None, fleet: Fleet) -> None:
        """Request the plan of the cell that a job has, for its new tasks.

        The scheduler requests plans of cells that are estimated by a bound. It requests none if the job's steps are
        measured before its next round; the next attempt needs the plan all the same.
        """
        bound = None if job is None or job.allocation is None else job.estimate(job.allocation.cell)
        if job is not None and bound is not None:
            self._process.request(job.name, self._store.submission(job.name), fleet, bound)

    def plan_ahead(self, state: State) -> None:
        """Request the plan of one smaller cell of a running job, while no other plan is wanted.

        A job can only be shrunk to a planned cell. Without one it would be stopped, and wait for the plan.
        """
        if state is self._ahead_of or not self._process.is_idle:
            return
        for job in state.jobs:
            bound = unplanned_smaller(job)
            submission = None if bound is None else self._store.submission(job.name)
            if bound is not None and submission is not None and submission.workload is not None:
                self._process.request(job.name, submission, state.fleet, bound)
                return
        self._ahead_of = state

    def check_tasks(self, job: JobState, tasks: str, fleet: Fleet) -> None:
        """Request new estimates of a job's cells if its tasks have changed: one has ended or joined."""
        known = self._tasks_of(job.name)
        if tasks and known and tasks not in (known, self._refused.get(job.name)):
            self._process.request_bounds(job.job, self._store.submission(job.name), fleet, tasks)

    def replace_tasks(self, job: str, tasks: str) -> tuple[int, ...]:
        """Record that a job trains these tasks from now on. Returns the actions that asked for plans of the previous
        tasks."""
        self._tasks[job] = tasks
        self._refused.pop(job, None)  # a refused workload is tried again if the job returns to it
        outdated = [key for key in self._actions if key[0] == job]
        return tuple(self._actions.pop(key) for key in outdated)

    def answers(self) -> Iterator[Answer]:
        """Estimates and plans that are ready since the last call."""
        for answer in self._process.done():
            if isinstance(answer, ChangedJob):
                yield self._changed(answer)
            elif answer.tasks == self._tasks_of(answer.job):  # otherwise it is a plan of previous tasks
                yield self._planned(answer)

    def close(self) -> None:
        self._process.close()

    def _planned(self, planned: PlannedCell) -> Answer:
        cell = planned.estimate.cell
        number = self._actions.pop((planned.job, cell), None)
        answer = Answer(
            job=planned.job,
            estimates=(planned.estimate,),
            plans=(StoredPlan(cell=cell, plan=planned.plan, profile=planned.profile),) if planned.plan else (),
            confirmed=() if number is None else (number,),
        )
        if not planned.error:
            return answer
        return replace(answer, message=f"{planned.job} cannot be planned on {cell.text}: {planned.error}")

    def _changed(self, changed: ChangedJob) -> Answer:
        job = changed.job
        if changed.error:
            self._refused[job] = changed.tasks
            return Answer(
                job=job, message=f"{job} trains other tasks now, and its cells are as before: {changed.error}"
            )
        return Answer(
            job=job,
            estimates=changed.bounds,
            replaces=True,
            submission=changed.submission,
            confirmed=self.replace_tasks(job, changed.tasks),
            message=f"{job} trains other tasks now: its cells are estimated anew",
        )

    def _tasks_of(self, job: str) -> str:
        """The digest of the tasks that a job's cells are estimated for."""
        if job not in self._tasks:
            self._tasks[job] = tasks_of(self._store.submission(job))
        return self._tasks[job]


def unplanned_smaller(job: JobState) -> Estimate | None:
    """The next cell to plan ahead for a running job that may be shrunk: half of its devices (when one other job
    arrives), then the next smaller number. None if both are planned."""
    if job.allocation is None:
        return None
    cell = job.allocation.cell
    smaller = [
        estimate
        for estimate in job.estimates  # in order of their numbers of devices
        if estimate.fits and estimate.cell.kind == cell.kind and estimate.cell.num_devices < cell.num_devices
    ]
    half = [estimate for estimate in smaller if 2 * estimate.cell.num_devices <= cell.num_devices]
    return next((estimate for estimate in (*half[-1:], *smaller[-1:]) if estimate.grade == "bound"), None)
