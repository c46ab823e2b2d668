"""A run as a folder: what was trained, planned and measured, for `spindle report` and for people.

    run.json                    what the other files are, with their digests; written last
    workload.json, profile.json what was trained, and how long its layers take
    plan.json, program.txt      the last plan, and what each rank does in it
    predicted.timeline.gz       the plan's step, simulated
    measured-42.timeline.gz     a step as it ran, on all ranks: some of the last ones of this plan
    steps.jsonl                 a line for each step, evaluation and plan
    profiler/                   traces of torch.profiler, where they were asked for

Checkpoints may be in the same folder (`step-400/`). A folder that was not written completely, or in which a file has
changed, is refused with an error of one sentence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from spindle.artifact import (
    artifact_from_json,
    json_value,
    read_bytes_file,
    read_json_file,
    read_text_file,
    write_artifact,
    write_atomically,
)
from spindle.errors import InputError, SpindleError
from spindle.plan import check, read_plan, write_plan
from spindle.profile import Profile, read_profile, write_profile
from spindle.program import Program, format_program, lower
from spindle.timeline import Timeline, read_timeline, write_timeline
from spindle.workload import Workload, write_workload

RUN, WORKLOAD, PROFILE, PLAN, PROGRAM = "run.json", "workload.json", "profile.json", "plan.json", "program.txt"
PREDICTED, STEPS, PROFILER = "predicted.timeline.gz", "steps.jsonl", "profiler"
_MEASURED = re.compile(r"measured-(\d{1,15})\.timeline\.gz")
_KIND = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """`run.json`: the run's name, the digests of the other files, and which ranks own which parameters, which is part
    of a program but not of its plan."""

    name: str
    spindle_version: str
    num_ranks: int
    sha256: dict[str, str]
    owning_ranks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The content of a run folder. `steps` are the lines of its steps, evaluations and plans, in the order of steps."""

    name: str
    profile: Profile
    program: Program
    predicted: Timeline
    measured: Mapping[int, Timeline]
    steps: Sequence[Mapping[str, Any]] = field(default=())
    notices: tuple[str, ...] = ()
    profiler_traces: tuple[str, ...] = ()


def write_run(
    folder: Path,
    name: str,
    program: Program,
    profile: Profile,
    predicted: Timeline,
    measured: Mapping[int, Timeline],
    *,
    workload: Workload | None = None,
    notices: Sequence[str] = (),
) -> None:
    """Write the files of a run's current plan, which replace those of an earlier plan; `measured` is by step.

    Without a `workload`, the existing file stays. `steps.jsonl` is written elsewhere, step by step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN).unlink(missing_ok=True)  # written last: without it, the folder is incomplete
    for old in folder.iterdir():
        if _MEASURED.fullmatch(old.name):
            old.unlink()
    if workload is not None:
        write_workload(folder / WORKLOAD, workload)
    write_profile(folder / PROFILE, profile)
    # A traced graph has whole numbers where a file has floats, and so another fingerprint.
    plan = replace(program.plan, fingerprint=read_profile(folder / PROFILE).graph.fingerprint)
    write_plan(folder / PLAN, plan)
    write_atomically(folder / PROGRAM, format_program(replace(program, plan=plan), profile))
    write_timeline(folder / PREDICTED, predicted)
    for step, timeline in measured.items():
        write_timeline(folder / f"measured-{step}.timeline.gz", timeline)
    names = [WORKLOAD, PROFILE, PLAN, PROGRAM, PREDICTED, *(f"measured-{step}.timeline.gz" for step in measured)]
    files = RunFiles(
        name=name,
        spindle_version=import_module("spindle").__version__,
        num_ranks=program.num_ranks,
        sha256={file: _digest(folder / file) for file in names if (folder / file).exists()},
        owning_ranks=program.owning_ranks,
        notices=tuple(notices),
    )
    write_artifact(folder / RUN, _KIND, files)


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises an InputError of one sentence if it is incomplete or something else."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / RUN).exists():
        raise InputError(
            f"{folder}: is no run folder, or was cut off while it was written: it has no {RUN} "
            '(spindle.Trainer(run_folder="runs/a") writes one)'
        )
    files = artifact_from_json(read_json_file(folder / RUN), str(folder / RUN), _KIND, RunFiles)
    for name, digest in files.sha256.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise InputError(f"{folder / RUN}: {name!r} is no name of a file of a run")
        if _digest(folder / name) != digest:
            raise InputError(f"{folder / name}: is not the file that the run wrote; was it cut off or changed?")
    missing = [name for name in (PROFILE, PLAN, PROGRAM, PREDICTED) if name not in files.sha256]
    if missing:
        raise InputError(f"{folder / RUN}: names no {missing[0]}")
    profile = read_profile(folder / PROFILE)
    program = _program(folder, files, profile)
    measured = {
        int(match[1]): read_timeline(folder / name) for name in files.sha256 if (match := _MEASURED.fullmatch(name))
    }
    predicted = read_timeline(folder / PREDICTED)
    for timeline in (predicted, *measured.values()):
        if timeline.instructions != program.instructions or timeline.num_ranks != program.num_ranks:
            raise InputError(f"{folder}: has a timeline of another program than {PROGRAM}")
    traces = sorted(folder.glob(f"{PROFILER}/*"))
    return Run(
        name=files.name,
        profile=profile,
        program=program,
        predicted=predicted,
        measured=dict(sorted(measured.items())),
        steps=_steps(folder / STEPS),
        notices=files.notices,
        profiler_traces=tuple(f"{PROFILER}/{path.name}" for path in traces),
    )


def _program(folder: Path, files: RunFiles, profile: Profile) -> Program:
    try:
        plan = read_plan(folder / PLAN, profile)
        check(plan, profile)
        program = lower(plan, profile, owning_ranks=dict(files.owning_ranks) or None)
    except InputError:
        raise
    except SpindleError as error:
        raise InputError(f"{folder / PLAN}: {error}") from error
    if format_program(program, profile) != read_text_file(folder / PROGRAM):
        raise InputError(f"{folder / PROGRAM}: is not the program of {PLAN}; another Spindle wrote this run")
    return program


def _steps(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines in order; if a step was trained again after a restart, the last one counts."""
    if not path.exists():
        return ()
    text = read_text_file(path)
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json_value(line)
        except (ValueError, RecursionError, InputError) as error:
            last = number == text.count("\n") + 1
            hint = "the job was killed while it wrote it: remove the line" if last else "remove or mend the line"
            raise InputError(f"{path}, line {number}: not JSON; {hint}") from error
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            raise InputError(f"{path}, line {number}: expected an object with a step, got {json.dumps(entry)[:60]}")
        kind = "plan" if "plan" in entry else "loss" if "loss" in entry else ",".join(sorted(entry))
        lines.pop((step, kind), None)
        lines[step, kind] = entry
    return tuple(sorted(lines.values(), key=lambda entry: int(entry["step"])))


def _digest(path: Path) -> str:
    return hashlib.sha256(read_bytes_file(path)).hexdigest()
