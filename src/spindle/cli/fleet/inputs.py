"""From the arguments of `spindle fleet` to traces, fleets and steps of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from spindle.errors import FleetError, InputError

if TYPE_CHECKING:
    from spindle.fleet import Fleet, Trace, TraceJob
    from spindle.fleet.estimates import StepOn
    from spindle.profile import Profile


def load_trace(path: Path, fleet: Fleet, tables: Path | None, load: float, faster: float, seed: int) -> Trace:
    """A trace, by its suffix and its columns."""
    from spindle.artifact import read_text_file
    from spindle.fleet import arena_trace, elasticflow_trace, read_trace
    from spindle.fleet.public_traces import arena_models

    if path.suffix != ".csv":
        models = arena_models(tables) if tables is not None else None
        trace = in_kinds_of(read_trace(path, models), fleet)
        jobs = tuple(job for job in trace.jobs if _has_requested(job))
        if not jobs:
            raise InputError(f"{path}: no job has a time for what it requests; see 'requested' and 'times'")
        return replace(trace, jobs=jobs, num_excluded=len(trace.jobs) - len(jobs)).faster(faster)
    header = read_text_file(path).partition("\n")[0]
    if "model_name" in header:
        return arena_trace(path, tables).faster(faster)
    folder = tables or path.parent.parent / "arena"
    if not folder.is_dir():
        raise InputError(
            f"{path}: its jobs have no models; they are drawn from Arena's measured times, and there is no folder "
            f"{folder}; give it as --tables"
        )
    return elasticflow_trace(path, folder, fleet.cluster.num_devices, load, seed).faster(faster)


def _has_requested(job: TraceJob) -> bool:
    requested = (job.job.requested_kind, job.job.requested_devices)
    return any((time.kind, time.num_devices) == requested for time in job.times)


def excluded_note(trace: Trace) -> str:
    from spindle.display import count_of

    return f"{count_of(trace.num_excluded, 'job')} left out: there is no step time for what is requested."


def in_kinds_of(trace: Trace, fleet: Fleet) -> Trace:
    """The trace with the fleet's names of kinds where it has their beginnings (`a100` for `A100-80GB`)."""
    names: dict[str, str] = {}
    for job in trace.jobs:
        for kind in {time.kind for time in job.times} - names.keys():
            with suppress(FleetError):
                names[kind] = fleet.kinds[fleet.kind_number(kind)].name

    def renamed(job: TraceJob) -> TraceJob:
        times = tuple(replace(time, kind=names.get(time.kind, time.kind)) for time in job.times)
        requested = names.get(job.job.requested_kind, job.job.requested_kind)
        kinds = tuple(names.get(kind, kind) for kind in job.job.kinds)
        return replace(job, job=replace(job.job, requested_kind=requested, kinds=kinds), times=times)

    return replace(trace, jobs=tuple(map(renamed, trace.jobs)))


def only_first(trace: Trace, num_jobs: int | None) -> Trace:
    if num_jobs is None or num_jobs >= len(trace.jobs):
        return trace
    return replace(trace, jobs=trace.jobs[:num_jobs], notes=(*trace.notes, f"only the first {num_jobs} jobs"))


def measured_profiles(given: list[str] | None, fleet: Fleet) -> dict[str, Profile]:
    """Profiles by the fleet's names of kinds, from KIND=PROFILE.json."""
    from spindle.profile import read_profile

    profiles: dict[str, Profile] = {}
    for text in given or []:
        kind, separator, path = text.partition("=")
        if not separator or not path:
            raise InputError(f"--profile: expected KIND=PROFILE.json (a100=profile.json), got {text!r}")
        name = fleet.kinds[fleet.kind_number(kind)].name
        if name in profiles:
            raise InputError(f"--profile {text}: there is one for {name} already; give one for each kind")
        profiles[name] = read_profile(Path(path))
    return profiles


def step_on(given: str, measured: Mapping[str, Profile] = MappingProxyType({}), *, is_trial: bool = False) -> StepOn:
    """The step of a job on any cluster: a recipe, a workload (.json) or a training script, which runs once; with
    `measured` profiles by kind. Notes if the planner is not the script's, except for a single trial of a sweep."""
    from spindle.cli.script import script_words, workload_of_script
    from spindle.cli.terminal import notice
    from spindle.fleet.estimates import other_planner_note, workload_step
    from spindle.profile import Roofline
    from spindle.recipes import MODELS, RECIPES, step_of
    from spindle.workload import read_workload

    if given in MODELS:
        if measured:
            raise InputError(f"--profile is for training scripts and workloads; {given} is a recipe of a pipeline")
        return lambda cluster: step_of(MODELS[given], cluster)
    roofline = Roofline()
    words = script_words(given)
    if given in RECIPES:
        workload, roofline = RECIPES[given].workload(), RECIPES[given].roofline
    elif words is not None:
        if not Path(words[0]).exists():
            raise InputError(f"{words[0]}: no such file")
        workload = workload_of_script(*words)
    elif given.endswith(".json"):
        workload = read_workload(Path(given))
    else:
        raise InputError(
            f"{given}: expected a training script (.py), a workload (.json) or a recipe: "
            f"{', '.join([*RECIPES, *MODELS])}"
        )
    note = other_planner_note(workload)
    if note and not is_trial:
        notice(note)
    return workload_step(workload, roofline, measured)
