"""From the arguments of `spindle fleet submit` to a job: checked as a whole before anything is written."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from spindle.display import duration
from spindle.errors import FleetError, InputError
from spindle.fleet import Cell, Estimate, Fleet, Job, JobState, State
from spindle.fleet.cells import check_limits
from spindle.fleet.deadlines import Verdict, keeps_deadlines, share_of_kind, verdict
from spindle.fleet.state import evolve
from spindle.fleet.store import Store, StoredPlan, Submission

if TYPE_CHECKING:
    from spindle.cli.fleet.sweep import SweepOption
    from spindle.profile import Profile

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STATE_BYTES = 12  # of a trained element: itself and two moments of Adam, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that is submitted. `promise` says whether a deadline will be met."""

    job: Job
    estimates: tuple[Estimate, ...]
    submission: Submission
    plans: tuple[StoredPlan, ...] = ()
    promise: str = ""


def described_job(
    store: Store,
    command: list[str],
    *,
    name: str,
    team: str,
    priority: str,
    deadline: str,
    kinds: str,
    count: str,
    steps: int | None,
) -> Job:
    """The job that the options describe, with the fleet's names of kinds."""
    from spindle.fleet.job import read_counts

    fleet = store.fleet
    least, most = read_counts(count)
    fleet.team(team)
    job_name = name or Path(command[0]).stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", job_name):
        raise InputError(f"--name: expected letters, digits, dots, dashes and underscores, got {job_name!r}")
    return Job(
        name=job_name,
        command=tuple(command),
        team=team,
        priority=priority,
        num_steps=steps,
        deadline_s=read_deadline(deadline, store.origin_unix_s) if deadline else None,
        kinds=tuple(fleet.kinds[fleet.kind_number(kind.strip())].name for kind in kinds.split(",") if kind.strip()),
        min_devices=least,
        max_devices=most,
    )


def read_deadline(text: str, origin_unix_s: float, now_unix_s: float | None = None) -> float:
    """A deadline on the fleet's clock: of a duration (`6h`, `1d12h`) or a time (`2030-01-31T18:00`)."""
    now_unix_s = time.time() if now_unix_s is None else now_unix_s
    parts = re.fullmatch(r"(?:\d+(?:\.\d+)?[smhd])+", text)
    if parts is not None:
        pairs = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
        end_s = now_unix_s + sum(float(number) * _UNITS_S[unit] for number, unit in pairs)
    else:
        try:
            end_s = datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise InputError(
                f"--deadline: expected a duration (6h, 90m) or a time (2030-01-31T18:00), got {text!r}"
            ) from None
    if end_s <= now_unix_s:
        raise InputError(f"--deadline: {text} lies {duration(now_unix_s - end_s)} in the past; give a later one")
    return end_s - origin_unix_s


def prepare(
    store: Store,
    job: Job,
    command: list[str],
    times: list[str],
    logs: str,
    folder: str,
    measured: Mapping[str, Profile] = MappingProxyType({}),
    sweep: SweepOption | None = None,
) -> Prepared:
    """Everything that a job needs to be scheduled. Runs its script up to the first fit. `measured`: profiles of the
    script by kind of device. `sweep` is an option of the script that `command` lacks."""
    from spindle.fleet.event_log import latest_state

    state = latest_state(store)
    # Nothing is recorded while a fleet is idle, so the last event may be old.
    state = evolve(state, now_s=max(state.now_s, time.time() - store.origin_unix_s))
    if job.name in _known_names(store, state):
        raise InputError(f"a job called {job.name!r} was submitted before; give this one another --name")
    if times and measured:
        raise InputError("give --time, for any command, or --profile, for a training script; not both")
    if times:
        estimates = tuple(_given_time(text, store.fleet, job) for text in times)
        check_limits(store.fleet, job, [estimate.cell for estimate in estimates])
        submission = Submission(command=tuple(command), is_script=False, folder=folder, logs=logs, environment={})
        return _promised(state, Prepared(job=job, estimates=estimates, submission=submission))
    return prepared_script(store, state, job, command, logs, folder, measured, sweep)


def _known_names(store: Store, state: State) -> set[str]:
    waiting = [command.body for command in store.pending() if command.body.get("command") == "submit"]
    return {*(each.name for each in (*state.jobs, *state.ended)), *(body["job"]["name"] for body in waiting)}


def free_name(store: Store, name: str) -> str:
    """A name that no job has: this one, or with a number."""
    from spindle.fleet.event_log import latest_state

    known = _known_names(store, latest_state(store))
    return next(free for free in chain([name], (f"{name}-{number}" for number in count(2))) if free not in known)


def _given_time(text: str, fleet: Fleet, job: Job) -> Estimate:
    match = re.fullmatch(r"(.+):(\d{1,6})=(\d+(?:\.\d+)?(?:e-?\d+)?)", text)
    if match is None:
        raise InputError(f"--time: expected KIND:N=SECONDS (a100:4=0.5), got {text!r}")
    kind, count, step_s = fleet.kinds[fleet.kind_number(match[1])].name, int(match[2]), float(match[3])
    if count < 1 or not fleet.can_hold(fleet.kind_number(kind), count):
        raise InputError(f"--time {text}: no node or whole nodes of the fleet have {count} devices of {kind}")
    if not (step_s > 0 and math.isfinite(step_s)):
        raise InputError(f"--time {text}: a step takes more than 0 s; expected KIND:N=SECONDS (a100:4=0.5)")
    if not job.accepts(kind, count):
        raise InputError(f"--time {text}: the job does not accept that (--kinds, --count)")
    return Estimate(cell=Cell(kind=kind, num_devices=count), step_s=step_s)


def prepared_script(
    store: Store,
    state: State,
    job: Job,
    command: list[str],
    logs: str,
    folder: str,
    measured: Mapping[str, Profile],
    sweep: SweepOption | None = None,
) -> Prepared:
    """What a training script needs to be scheduled; a job that fits in no cell is refused."""
    import json

    from spindle.artifact import artifact_text
    from spindle.cli.script import workload_of_script
    from spindle.fleet.estimates import bound_estimates, workload_step

    script = Path(command[0])
    if script.suffix != ".py":
        raise InputError(f"{script}: expected a training script (.py), or --time KIND:N=SECONDS for any other command")
    if not script.is_file():
        raise InputError(f"{script}: no such file")
    command = command if sweep is None else sweep.added_to(command)
    workload = workload_of_script(str(script), *command[1:])
    trained = sum(parameter.num_elements for parameter in workload.parameters if parameter.trainable)
    job = replace(job, num_steps=job.num_steps or workload.num_steps, state_bytes=_STATE_BYTES * trained)
    step_on = workload_step(workload, measured=measured)
    bounds = bound_estimates(step_on, store.fleet, job)
    check_limits(store.fleet, job, [bound.cell for bound in bounds])
    submission = Submission(
        command=(str(script.absolute()), *command[1:]),
        is_script=True,
        folder=folder,
        logs=logs,
        environment={},
        workload=json.loads(artifact_text("workload", workload)),
        profiles={kind: json.loads(artifact_text("profile", profile)) for kind, profile in measured.items()},
        sweep=() if sweep is None else (sweep.name, *sweep.values),
    )
    return fitting(state, Prepared(job=job, estimates=bounds, submission=submission))


def fitting(state: State, prepared: Prepared) -> Prepared:
    """Plan the largest cell of a kind that fits, so that a job that fits nowhere is refused now; with a deadline, the
    cells that might meet it, the smallest first, so that no larger one is promised than it needs."""
    from spindle.display import num_bytes
    from spindle.fleet.cells import better
    from spindle.fleet.estimates import least_memory
    from spindle.fleet.planning import plan_cell

    bounds = prepared.estimates
    largest = {bound.cell.kind: bound for bound in sorted(bounds, key=lambda bound: bound.cell.num_devices)}
    tried: list[Estimate] = []
    errors: list[str] = []

    def planned(bound: Estimate) -> Estimate:
        nonlocal prepared
        cell = plan_cell(prepared.job.name, prepared.submission, state.fleet, bound)
        if cell.plan:
            stored = StoredPlan(cell=cell.estimate.cell, plan=cell.plan, profile=cell.profile)
            prepared = replace(prepared, plans=(*prepared.plans, stored))
        prepared = replace(prepared, estimates=better(prepared.estimates, (cell.estimate,)))
        tried.append(cell.estimate)
        if cell.error:
            errors.append(cell.error)
        return cell.estimate

    if not any(planned(bound).fits for bound in largest.values()):
        needed = least_memory(tuple(tried))
        raise FleetError(
            f"job {prepared.job.name!r} fits in no cell of {state.fleet.cluster.name} that it accepts"
            + (f"; it needs at least {num_bytes(needed)} per device" if needed else "")
            + (f"; it cannot be planned: {errors[0]}" if errors else "")
        )
    if prepared.job.deadline_s is None:
        return prepared
    done = {estimate.cell for estimate in tried}
    for bound in sorted(bounds, key=lambda bound: share_of_kind(state.fleet, bound.cell)):
        promised = _verdict(state, prepared).cell
        if promised is not None and share_of_kind(state.fleet, promised) <= share_of_kind(state.fleet, bound.cell):
            break
        optimistic = replace(prepared, estimates=(replace(bound, grade="planned"),))
        if bound.cell not in done and _verdict(state, optimistic).cell is not None:
            planned(bound)
    return _promised(state, prepared)


def _verdict(state: State, prepared: Prepared) -> Verdict:
    now_s = state.now_s
    cost_s = state.options.realloc_s
    if cost_s is None:
        cost_s = state.options.base_realloc_s + prepared.job.state_bytes / state.fleet.storage_bytes_per_s
    arrived = JobState(job=prepared.job, arrival_s=now_s, estimates=prepared.estimates, initial_realloc_s=cost_s)
    return verdict(state, arrived, now_s)


def _promised(state: State, prepared: Prepared) -> Prepared:
    if prepared.job.deadline_s is None:
        return prepared
    with suppress(FleetError):
        answer = _verdict(state, prepared)
        if answer.cell is not None:
            return replace(prepared, promise=f"the deadline will be met, on {answer.cell.text} or better")
        if prepared.job.num_steps is None:
            return replace(prepared, promise="the deadline cannot be promised: the job has no length (--steps)")
        if not keeps_deadlines(state):
            reason = f"policy {state.options.policy!r} knows none"
            return replace(prepared, promise=f"the deadline cannot be promised: {reason} (best effort)")
        if math.isinf(answer.late_s):
            reason = "promised deadlines of other jobs, or its team's limit, leave it no devices"
            return replace(prepared, promise=f"the deadline cannot be promised: {reason} (best effort)")
        return replace(prepared, promise=f"the deadline will be missed by about {duration(answer.late_s)}: best effort")
    return prepared
