"""Starvation-freedom: nobody waits longer than G + H times the leases ahead of it.

A job that has waited G gets a lease (`floors`): at least H of running, ahead of all but promised and urgent jobs, in
order of waiting time, as soon as leases have less than their share of the fleet. A lease ends after H and those who
wait are served in order, so a job with k jobs ahead of it when it becomes due starts within k + 1 leases, not counting
the time in which promised or urgent jobs hold devices. The simulator checks every wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from spindle.errors import FleetError
from spindle.fleet.state import JobState, SchedulerOptions, State


def are_guaranteed(options: SchedulerOptions) -> bool:
    return options.leases and options.policy == "price"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A job that has become due: how many due jobs had waited longer, and for how long jobs that go ahead of leases had
    held devices until then."""

    num_ahead: int
    ahead_s: float


def precedes_leases(job: JobState) -> bool:
    """Whether a job gets devices before those that are due a lease."""
    return job.job.is_urgent or job.promised is not None


def record_due_jobs(state: State, due_jobs: dict[str, Due], ahead_s: float) -> None:
    """Enter jobs that have become due. `ahead_s` is how long jobs that go ahead of leases have held devices so far."""
    due = [
        job
        for job in state.jobs
        if job.allocation is None and state.now_s - job.waiting_since_s >= state.options.starvation_s
    ]
    # Of jobs that have waited equally long, leases begin with the first, as in `floors`.
    for position, job in enumerate(sorted(due, key=lambda job: job.waiting_since_s)):
        due_jobs.setdefault(job.name, Due(num_ahead=position, ahead_s=ahead_s))


def check_wait(
    options: SchedulerOptions, due: Due | None, wait_s: float, ahead_s: float, cost_s: float, job: str
) -> None:
    """Refuse a wait that is longer than leases promise; None: the job never became due. `ahead_s` as in
    `record_due_jobs`, until now."""
    slack_s = options.max_interval_s
    lease_s = options.lease_s + cost_s + slack_s
    limit_s = options.starvation_s + slack_s
    if due is not None:
        limit_s += (due.num_ahead + 1) * lease_s + ahead_s - due.ahead_s
    if wait_s > limit_s:
        raise FleetError(
            f"job {job!r} waited {wait_s / 3600:.1f} h, longer than the {limit_s / 3600:.1f} h that leases promise "
            f"with {0 if due is None else due.num_ahead} jobs ahead of it"
        )
