"""A process that makes plans of cells, and bounds of a job whose workload has changed. No round waits for it."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from spindle.artifact import artifact_from_json, artifact_text
from spindle.errors import SpindleError
from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.estimates import StepOn, bound_estimates, other_planner_note, planned_cell, workload_step
from spindle.fleet.fleet import Fleet
from spindle.fleet.job import Job
from spindle.fleet.store import Submission
from spindle.graph import metagraph_of
from spindle.launch import die_with_parent
from spindle.launch.agent import workload_report
from spindle.planners import PLANNERS
from spindle.profile import Profile
from spindle.workload import Workload, read_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """The answer to a request: an estimate, and the plan with its profile as text, empty if nothing fits, or if the
    script plans for itself (`planner_note`). `tasks` is the digest of the planned workload."""

    job: str
    tasks: str
    estimate: Estimate
    plan: str
    profile: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedJob:
    """A job whose tasks have changed: its new workload, and bounds of its cells. `error` says why there are none."""

    job: str
    tasks: str
    submission: Submission
    bounds: tuple[Estimate, ...] = ()
    error: str = ""


class PlanningProcess:
    """Plans one cell at a time, in the order of requests."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._requests: dict[tuple[str, str, Cell | None], tuple[Future[Any], tuple[Any, ...]]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether all requests are answered."""
        return not self._requests

    def request(self, job: str, submission: Submission, fleet: Fleet, bound: Estimate) -> None:
        """Request the plan of a cell, unless that is already requested."""
        self._ask((job, tasks_of(submission), bound.cell), (plan_cell, job, submission, fleet, bound))

    def request_bounds(self, job: Job, submission: Submission, fleet: Fleet, tasks: str) -> None:
        """Request bounds for the workload that a job now reports, unless these are already requested."""
        self._ask((job.name, tasks, None), (changed_job, job, submission, fleet, tasks))

    def _ask(self, key: tuple[str, str, Cell | None], arguments: tuple[Any, ...]) -> None:
        if key not in self._requests:
            self._requests[key] = self._submit(arguments), arguments

    def _submit(self, arguments: tuple[Any, ...]) -> Future[Any]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=die_with_parent)
        return self._pool.submit(*arguments)

    def done(self) -> Iterator[PlannedCell | ChangedJob]:
        """Answers to requests since the last call."""
        for key, (future, arguments) in list(self._requests.items()):
            if not future.done():
                continue
            try:
                answer = future.result()
            except BrokenProcessPool:  # killed: by a user, or out of memory
                self._pool = None
                self._requests[key] = self._submit(arguments), arguments
                continue
            del self._requests[key]
            yield answer

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in list((self._pool._processes or {}).values()):
                process.kill()


def tasks_of(submission: Submission) -> str:
    """The digest of a submitted script's workload; empty for any other command."""
    if submission.workload is None:
        return ""
    return artifact_from_json(submission.workload, "workload", "workload", Workload).tasks_digest


def planner_note(submission: Submission) -> str:
    """A sentence if a script's cells are not estimated with the planner that it chose; else empty."""
    if submission.workload is None:
        return ""
    return other_planner_note(artifact_from_json(submission.workload, "workload", "workload", Workload))


def changed_job(job: Job, submission: Submission, fleet: Fleet, tasks: str) -> ChangedJob:
    """Bounds for the workload that a job now reports. Measured profiles are kept if they have all of its layers."""
    unchanged = ChangedJob(job=job.name, tasks=tasks, submission=submission)
    try:
        workload = read_workload(workload_report(submission.logs))
        if workload.tasks_digest != tasks:
            return replace(unchanged, error="it has written another one since")
        graph = metagraph_of(workload)
        profiles = {}
        for kind, data in submission.profiles.items():
            with suppress(KeyError, SpindleError):
                measured = artifact_from_json(data, f"profile on {kind}", "profile", Profile).restricted(graph)
                profiles[kind] = json.loads(artifact_text("profile", measured))
        changed = replace(submission, workload=json.loads(artifact_text("workload", workload)), profiles=profiles)
        bounds = bound_estimates(submitted_step(job.name, changed), fleet, job)
    except (SpindleError, OSError) as error:
        return replace(unchanged, error=str(error))
    return replace(unchanged, submission=changed, bounds=bounds)


def submitted_step(job: str, submission: Submission) -> StepOn:
    """The step of a submitted script: from its measured profiles where it has them, else from a roofline."""
    workload = artifact_from_json(submission.workload or {}, f"job {job!r}", "workload", Workload)
    profiles = {
        kind: artifact_from_json(data, f"job {job!r}, profile on {kind}", "profile", Profile)
        for kind, data in submission.profiles.items()
    }
    return workload_step(workload, measured=profiles)


def plan_cell(job: str, submission: Submission, fleet: Fleet, bound: Estimate) -> PlannedCell:
    """Plan a cell of a job; one that cannot be planned does not fit, with the reason."""
    tasks = tasks_of(submission)
    try:
        estimate, plan, profile = planned_cell(submitted_step(job, submission), fleet, bound)
    except SpindleError as error:
        unfit = replace(bound, grade="planned", fits=False)
        return PlannedCell(job=job, tasks=tasks, estimate=unfit, plan="", profile="", error=str(error))
    plans_each_step = plan is not None and PLANNERS[plan.planner].is_pipeline  # in the script, from its microbatches
    if plan is None or profile is None or plans_each_step or planner_note(submission):
        return PlannedCell(job=job, tasks=tasks, estimate=estimate, plan="", profile="")
    return PlannedCell(
        job=job,
        tasks=tasks,
        estimate=estimate,
        plan=artifact_text("plan", plan),
        profile=artifact_text("profile", profile),
    )
