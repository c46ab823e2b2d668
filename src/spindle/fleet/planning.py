"""Plans of cells, made in a process of their own: no round waits for one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from spindle.artifact import artifact_from_json, artifact_text
from spindle.errors import SpindleError
from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.estimates import planned_cell, workload_step
from spindle.fleet.fleet import Fleet
from spindle.launch import die_with_parent
from spindle.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """The answer to a request: an estimate, and the plan with its profile as text; both empty where nothing fits."""

    job: str
    estimate: Estimate
    plan: str
    profile: str
    error: str = ""


class PlanningProcess:
    """Plans cells one after the other, in the order of requests."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._requests: dict[tuple[str, Cell], tuple[Future[PlannedCell], tuple[Any, ...]]] = {}

    def request(self, job: str, workload: dict[str, Any], fleet: Fleet, bound: Estimate) -> None:
        """Have a cell planned, unless that was asked for before."""
        if (job, bound.cell) not in self._requests:
            arguments = (job, workload, fleet, bound)
            self._requests[job, bound.cell] = self._submit(arguments), arguments

    def _submit(self, arguments: tuple[Any, ...]) -> Future[PlannedCell]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=die_with_parent)
        return self._pool.submit(plan_cell, *arguments)

    def done(self) -> Iterator[PlannedCell]:
        """Plans that were made since the last call."""
        for key, (future, arguments) in list(self._requests.items()):
            if not future.done():
                continue
            try:
                planned = future.result()
            except BrokenProcessPool:  # killed: by a user, or out of memory
                self._pool = None
                self._requests[key] = self._submit(arguments), arguments
                continue
            del self._requests[key]
            yield planned

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in list((self._pool._processes or {}).values()):
                process.kill()


def plan_cell(job: str, workload: dict[str, Any], fleet: Fleet, bound: Estimate) -> PlannedCell:
    """Plan a cell of a job; one that cannot be planned does not fit, with the reason."""
    try:
        read = artifact_from_json(workload, f"job {job!r}", "workload", Workload)
        estimate, plan, profile = planned_cell(workload_step(read), fleet, bound)
    except SpindleError as error:
        unfit = replace(bound, grade="planned", fits=False)
        return PlannedCell(job=job, estimate=unfit, plan="", profile="", error=str(error))
    if plan is None or profile is None:
        return PlannedCell(job=job, estimate=estimate, plan="", profile="")
    return PlannedCell(
        job=job, estimate=estimate, plan=artifact_text("plan", plan), profile=artifact_text("profile", profile)
    )
