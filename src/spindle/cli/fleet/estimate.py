"""`spindle fleet estimate`: the cells of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from spindle.cli.fleet.options import FleetName, MeasuredProfiles
from spindle.cli.options import AsJson
from spindle.cli.script import script_words

if TYPE_CHECKING:
    from rich.table import Table

    from spindle.fleet import Estimate, Fleet, Job
    from spindle.fleet.estimates import StepOn


def estimate(
    given: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A training script (train.py, or 'train.py --its-own options'), a workload (.json) or a recipe.",
            show_default=False,
        ),
    ],
    fleet: FleetName,
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="A,B", help="Only these kinds of devices.", show_default=False)
    ] = "",
    count: Annotated[
        str, typer.Option("--count", metavar="1-16", help="Only these numbers of devices.", show_default=False)
    ] = "",
    profiles: MeasuredProfiles = None,
    sweep: Annotated[
        str,
        typer.Option(
            "--sweep",
            metavar="OPTION=A,B",
            help="Values of an option of the script. Compares one job for all of them with one job each.",
            show_default=False,
        ),
    ] = "",
    planned: Annotated[
        bool, typer.Option("--planned", metavar="", help="Plan every cell, which takes seconds each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate a job on every kind and number of devices of a fleet, without running it.

    Shows a lower bound on the step time of each cell, in milliseconds. With --planned, it also simulates the plan that
    would run, and its memory. Layer times come from a roofline model, unless --profile gives measured ones. Examples:

    spindle fleet estimate train.py --fleet fleet.toml --count 1-16

    spindle fleet estimate clip-10 --fleet a100x16,h100x8 --planned

    spindle fleet estimate train.py --fleet h200x8 --profile h200=profile.json --planned

    spindle fleet estimate train.py --fleet h200x8 --sweep lr=1e-4,3e-4,1e-3
    """
    from spindle.artifact import to_json
    from spindle.cli.fleet.inputs import measured_profiles, step_on
    from spindle.cli.fleet.sweep import read_sweep
    from spindle.cli.terminal import show, show_json
    from spindle.display import num_bytes
    from spindle.errors import DoesNotFitError, InputError
    from spindle.fleet.estimates import least_memory
    from spindle.fleet.fleet_file import fleet_named
    from spindle.fleet.job import Job, read_counts

    machines = fleet_named(fleet)
    names = tuple(machines.kinds[machines.kind_number(kind)].name for kind in kinds.split(",") if kind)
    least, most = read_counts(count)
    job = Job(name=given, kinds=names, min_devices=least, max_devices=most)
    apart: list[tuple[Estimate, ...]] = []  # of a sweep's trials, each by itself
    command = given
    if sweep:
        if script_words(given) is None or profiles:
            raise InputError("--sweep is for a training script (train.py), without --profile, which is of other trials")
        option = read_sweep(sweep)
        command = option.text(given)
        for value in option.values:
            single = replace(option, values=(value,)).text(given)
            apart.append(_estimated(step_on(single, is_trial=True), machines, job, planned=planned)[1])
    bounds, estimates = _estimated(
        step_on(command, measured_profiles(profiles, machines)), machines, job, planned=planned
    )
    if as_json:
        answer = {"job": given, "fleet": machines.cluster.name, "estimates": [to_json(item) for item in estimates]}
        show_json(answer | ({"trials": [[to_json(item) for item in each] for each in apart]} if sweep else {}))
        return
    show(_table(bounds, estimates, apart, planned=planned))
    needed = least_memory(estimates)
    if needed:
        raise DoesNotFitError(
            f"{given} fits in no cell of {machines.cluster.name}; it needs at least {num_bytes(needed)} per device",
            needed,
        )


def _estimated(
    step: StepOn, machines: Fleet, job: Job, *, planned: bool
) -> tuple[tuple[Estimate, ...], tuple[Estimate, ...]]:
    """Bounds of all cells, and their plans' estimates, or the bounds again."""
    from spindle.cli.terminal import note_compilation, progress_bar
    from spindle.fleet.estimates import bound_estimates, planned_estimate

    bounds = bound_estimates(step, machines, job)
    if not planned:
        return bounds, bounds
    note_compilation(False)
    done = []
    with progress_bar(f"planning {len(bounds)} cells", len(bounds)) as report:
        for number, bound in enumerate(bounds):
            done.append(planned_estimate(step, machines, bound))
            report(number + 1)
    return bounds, tuple(done)


def _table(
    bounds: tuple[Estimate, ...], estimates: tuple[Estimate, ...], apart: list[tuple[Estimate, ...]], *, planned: bool
) -> Table:
    from rich.table import Table

    from spindle.display import num_bytes, seconds

    best_s = min((item.step_s for item in estimates if item.fits), default=0.0)
    columns = ("kind", "devices", "bound", *(("planned", "memory") if planned else ()), "of the best rate")
    table = Table(*columns, *(("one by one", "gain") if apart else ()), box=None)
    for number, (bound, item) in enumerate(zip(bounds, estimates, strict=True)):
        memory = num_bytes(item.memory_bytes) if item.memory_bytes else ""
        one_by_one_s = sum(each[number].step_s for each in apart)
        table.add_row(
            item.cell.kind,
            str(item.cell.num_devices),
            seconds(bound.step_s),
            *((seconds(item.step_s) if item.fits else "does not fit", memory) if planned else ()),
            f"{100 * best_s / item.step_s:.0f} %" if item.fits else "",
            *((seconds(one_by_one_s), f"{one_by_one_s / item.step_s:.2f}" if item.fits else "") if apart else ()),
        )
    return table
