"""Traces: jobs that arrive over time, with their true step times, and what is injected into a simulation.

A JSONL file of one's own has one object per line, in order of arrival:

    {"name": "a", "time_s": 0, "num_steps": 1000, "requested": ["a100", 4], "times": [["a100", 4, 2.5], ["v100", 4, 6]]}

`times` lists kind, number of devices and seconds per step; instead, `model` may name an entry of a table of models.
`team`, `priority`, `deadline_s`, `kinds`, `min_devices` and `max_devices` are those of a Job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from spindle.artifact import from_json, json_value, read_integer, read_number, read_text_file, shown
from spindle.errors import FleetError, InputError
from spindle.fleet.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds per step of a cell, in truth."""

    kind: str
    num_devices: int
    step_s: float

    def __post_init__(self) -> None:
        if self.num_devices < 1 or not self.step_s > 0:
            raise FleetError(
                f"a step time needs at least 1 device and more than 0 s, got {self.num_devices} and {self.step_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job with its arrival and its true times. `num_steps` is its true length, also where the job gives none."""

    job: Job
    arrival_s: float
    num_steps: int
    times: tuple[StepTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs in order of arrival. `notes` say what was drawn or changed; `num_excluded` jobs have no time for what they
    request, and are left out for every policy."""

    name: str
    jobs: tuple[TraceJob, ...]
    notes: tuple[str, ...] = ()
    num_excluded: int = 0

    def __post_init__(self) -> None:
        if not self.jobs:
            raise FleetError(f"trace {self.name!r} has no jobs")
        for before, after in zip(self.jobs, self.jobs[1:], strict=False):
            if after.arrival_s < before.arrival_s:
                raise FleetError(
                    f"trace {self.name!r}: times must not decrease, but {after.job.name!r} at {after.arrival_s:g} s "
                    f"stands after {before.job.name!r} at {before.arrival_s:g} s; sort the trace by time"
                )
        if self.jobs[0].arrival_s < 0:
            raise FleetError(
                f"trace {self.name!r}: times must not be negative, got {self.jobs[0].arrival_s:g} s for "
                f"{self.jobs[0].job.name!r}"
            )

    def faster(self, factor: float) -> Trace:
        """The same jobs, arriving `factor` times as fast."""
        if not factor > 0:
            raise FleetError(f"arrivals can be made faster by a factor above 0, got {factor}")
        jobs = tuple(replace(job, arrival_s=job.arrival_s / factor) for job in self.jobs)
        return replace(self, jobs=jobs, notes=(*self.notes, f"arrivals x {factor:g}") if factor != 1 else self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What a simulation adds to a trace, drawn from `seed` and the same for every policy.

    `estimation_error` is the mean absolute error of estimates; `length_sigma` that of reported lengths, in the
    logarithm; `lengths` False hides them. `failures_per_hour` of nodes, each repaired after `repair_s`, with
    checkpoints every `checkpoint_s`. A share `slow_nodes` of nodes is slower by `slow_factor`.
    """

    seed: int = 0
    estimation_error: float = 0.0
    length_sigma: float = 0.0
    lengths: bool = True
    failures_per_hour: float = 0.0
    repair_s: float = 4 * 3600.0
    checkpoint_s: float = 1800.0
    slow_nodes: float = 0.0
    slow_factor: float = 1.5

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise FleetError(f"{field.name} must not be negative, got {getattr(self, field.name)}")


ModelTable = Mapping[str, tuple[StepTime, ...]]


def read_trace(path: Path, models: ModelTable | None = None) -> Trace:
    """Read a JSONL trace; the module docstring shows the format."""
    jobs = []
    for number, line in enumerate(read_text_file(path).splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                data = json_value(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{where}: not JSON ({error.msg})") from error
            jobs.append(_trace_job(data, where, models or {}))
    try:
        return Trace(name=path.stem, jobs=tuple(jobs))
    except FleetError as error:
        raise InputError(f"{path}: {error}") from error


_JOB_FIELDS = ("team", "priority", "deadline_s", "kinds", "min_devices", "max_devices", "state_bytes")
_COLUMNS = ("name", "time_s", "num_steps", "times", "model", "requested", *_JOB_FIELDS)


def _trace_job(data: Any, where: str, models: ModelTable) -> TraceJob:
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected an object with name, time_s, num_steps and times, got {shown(data)}")
    for column in ("name", "time_s", "num_steps"):
        if column not in data:
            raise InputError(f"{where}: the column {column!r} is missing")
    arrival_s = read_number(data["time_s"], f"{where}.time_s")
    if arrival_s < 0:
        raise InputError(f"{where}.time_s: times must not be negative, got {arrival_s:g}")
    times = _times(data, where, models)
    requested = data.get("requested", [times[0].kind, times[0].num_devices])
    if not isinstance(requested, list) or len(requested) != 2:
        raise InputError(f"{where}.requested: expected a kind and a number of devices, got {shown(requested)}")
    body = {name: data[name] for name in _JOB_FIELDS if name in data}
    job = from_json(
        Job,
        {
            "name": data["name"],
            "num_steps": data["num_steps"],
            "requested_kind": requested[0],
            "requested_devices": read_integer(requested[1], f"{where}.requested[1]"),
            **body,
        },
        where,
    )
    unknown = data.keys() - set(_COLUMNS)
    if unknown:
        raise InputError(f"{where}: unknown column {sorted(unknown)[0]!r}; the columns are {', '.join(_COLUMNS)}")
    assert job.num_steps is not None
    return TraceJob(job=job, arrival_s=arrival_s, num_steps=job.num_steps, times=times)


def _times(data: Mapping[str, Any], where: str, models: ModelTable) -> tuple[StepTime, ...]:
    if "times" not in data:
        model = data.get("model")
        if model is None:
            raise InputError(f"{where}: the column 'times' (kind, devices, seconds per step) or 'model' is missing")
        if not isinstance(model, str) or model not in models:
            raise InputError(f"{where}.model: unknown model {model!r}; known: {', '.join(sorted(models)) or 'none'}")
        return models[model]
    entries = from_json(tuple[tuple[str, int, float], ...], data["times"], f"{where}.times")
    if not entries:
        raise InputError(f"{where}.times: expected at least one of [kind, devices, seconds per step]")
    try:
        return tuple(StepTime(kind=kind, num_devices=count, step_s=step_s) for kind, count, step_s in entries)
    except FleetError as error:
        raise InputError(f"{where}.times: {error}") from error
