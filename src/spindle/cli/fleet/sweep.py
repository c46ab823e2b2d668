"""Values of one option of a training script, as trials of one job: `--sweep lr=1e-4,3e-4`.

The script takes them as a list (`parser.add_argument("--lr", nargs="+")`) and makes a `spindle.Trial` of each. So jobs
of one script that differ in nothing else declare the same frozen modules and the same data, and become one job by
taking all values.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spindle.errors import FleetError, InputError

if TYPE_CHECKING:
    from spindle.cli.fleet.submission import Prepared
    from spindle.fleet import Cell, Job, State
    from spindle.fleet.store import Store, Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOption:
    """An option of a script with the values of its trials."""

    name: str
    values: tuple[str, ...]

    def added_to(self, command: list[str]) -> list[str]:
        """A command with these values."""
        return [*command, f"--{self.name}", *self.values]

    def text(self, command: str) -> str:
        """The text of a command with these values."""
        return shlex.join(self.added_to(shlex.split(command)))


def read_sweep(text: str) -> SweepOption:
    match = re.fullmatch(r"-{0,2}([A-Za-z][\w-]*)=([^=]+)", text)
    values = tuple(value.strip() for value in match[2].split(",")) if match is not None else ()
    if match is None or not all(values):
        raise InputError(f"--sweep: expected an option of the script with its values, lr=1e-4,3e-4; got {text!r}")
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise InputError(f"--sweep {text}: the value {twice} is given twice")
    return SweepOption(name=match[1], values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A job that waits, with the trials of another one: `prepared` has all of them. On `cell` a step of it takes
    `step_s`, those of the two jobs `apart_s`. `before` is how the job was submitted."""

    prepared: Prepared
    before: Submission
    cell: Cell
    step_s: float
    apart_s: tuple[float, float]


def joined(store: Store, state: State, prepared: Prepared) -> Joined | str:
    """The job that waits and takes these trials in, too; or why there is none, which is empty where none has the same
    script, options and folder."""
    from spindle.cli.fleet.submission import prepared_script
    from spindle.fleet.estimates import bound_estimates
    from spindle.fleet.planning import submitted_step

    mine = prepared.submission
    waiting_job = next(
        (
            (waiting.job, theirs)
            for waiting in state.jobs
            if waiting.is_new and _wants_alike(waiting.job, prepared.job)
            for theirs in [store.submission(waiting.name)]
            if _is_same_script(theirs, mine)
        ),
        None,
    )
    if waiting_job is None:
        return ""
    job, before = waiting_job
    known, more = before.sweep[1:], [value for value in mine.sweep[1:] if value not in before.sweep[1:]]
    if len(more) < len(mine.sweep) - 1:
        raise InputError(
            f"job {job.name!r} waits with --{' '.join(before.sweep)}; give values that it does not have already"
        )
    option = SweepOption(name=mine.sweep[0], values=(*known, *more))
    rest = list(mine.command[: -len(mine.sweep)])
    refused = f"job {job.name!r} waits with other trials, and does not take these in: "
    try:
        both = prepared_script(store, state, job, rest, before.logs, mine.folder, {}, option)
    except FleetError as error:
        return f"{refused}{error}"
    if _num_steps(both.submission) != _num_steps(before):
        return f"{refused}together they would train for another number of steps"
    if not _shares_calls(both.submission):
        return f"{refused}together they would not run a frozen module once"
    all_bounds = []  # of all cells, by cell: of plans only a few are known
    for submission in (both.submission, before, mine):
        bounds = bound_estimates(submitted_step(job.name, submission), state.fleet, job)
        all_bounds.append({estimate.cell: estimate.step_s for estimate in bounds})
    fitting = {estimate.cell for estimate in both.estimates if estimate.fits}
    cells = [cell for cell in all_bounds[0] if cell in fitting and all(cell in bounds for bounds in all_bounds)]
    if not cells:
        return f"{refused}there is no cell in which all of them fit"
    best = min(cells, key=lambda cell: all_bounds[0][cell])
    step_s, *apart_s = (bounds[best] for bounds in all_bounds)
    if step_s >= sum(apart_s):
        return f"{refused}one job would take as long as two"
    return Joined(prepared=both, before=before, cell=best, step_s=step_s, apart_s=(apart_s[0], apart_s[1]))


def _num_steps(submission: Submission) -> int | None:
    """How many steps the script asks for, whatever length the job was given."""
    return (submission.workload or {}).get("num_steps")


def _shares_calls(submission: Submission) -> bool:
    tasks = (submission.workload or {}).get("tasks", [])
    return any(call.get("same_as") for task in tasks for call in task["calls"])


def _is_same_script(theirs: Submission, mine: Submission) -> bool:
    """Whether two sweeps of one option differ in its values alone. What was measured is of other trials."""
    if not theirs.sweep or theirs.sweep[0] != mine.sweep[0] or theirs.profiles or mine.profiles:
        return False
    scripts = [each.command[: -len(each.sweep)] for each in (theirs, mine)]
    return scripts[0] == scripts[1] and (theirs.folder, theirs.environment) == (mine.folder, mine.environment)


def _wants_alike(theirs: Job, mine: Job) -> bool:
    fields = ("team", "priority", "kinds", "min_devices", "max_devices", "num_steps")
    has_deadline = theirs.deadline_s is not None or mine.deadline_s is not None
    return not has_deadline and all(getattr(theirs, name) == getattr(mine, name) for name in fields)
