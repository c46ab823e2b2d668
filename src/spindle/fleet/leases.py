"""Starvation-freedom: nobody waits longer than G + H times the leases ahead of it.

A job that has waited G gets a lease (`floors`): at least H of running, ahead of all but promised and urgent jobs, in
order of waiting time. A lease ends after H and those who wait are served in order, so a job with k jobs ahead of it
when it becomes due starts within k + 1 leases. The simulator checks every wait.
"""

from __future__ import annotations

from spindle.errors import FleetError
from spindle.fleet.state import SchedulerOptions, State


def are_guaranteed(options: SchedulerOptions) -> bool:
    return options.leases and options.policy == "price"


def note_due_jobs(state: State, num_ahead: dict[str, int]) -> None:
    """Enter jobs that have become due, with how many due jobs have waited longer."""
    due = sorted(
        (job.waiting_since_s, job.arrival_s, job.name)
        for job in state.jobs
        if job.allocation is None and state.now_s - job.waiting_since_s >= state.options.starvation_s
    )
    for position, (_, _, name) in enumerate(due):
        num_ahead.setdefault(name, position)


def check_wait(options: SchedulerOptions, num_ahead: int | None, wait_s: float, cost_s: float, job: str) -> None:
    """Refuse a wait that is longer than leases promise; None ahead: the job never became due."""
    slack_s = options.max_interval_s
    lease_s = options.lease_s + cost_s + slack_s
    limit_s = options.starvation_s + slack_s + (0.0 if num_ahead is None else (num_ahead + 1) * lease_s)
    if wait_s > limit_s:
        raise FleetError(
            f"job {job!r} waited {wait_s / 3600:.1f} h, longer than the {limit_s / 3600:.1f} h that leases promise "
            f"with {num_ahead or 0} jobs ahead of it"
        )
