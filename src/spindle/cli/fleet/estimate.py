"""`spindle fleet estimate`: the cells of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import FleetName, MeasuredProfiles
from spindle.cli.options import AsJson


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
    kinds: Annotated[str, typer.Option("--kinds", metavar="A,B", help="Only these kinds.", show_default=False)] = "",
    count: Annotated[
        str, typer.Option("--count", metavar="1-16", help="Only so many devices.", show_default=False)
    ] = "",
    profiles: MeasuredProfiles = None,
    planned: Annotated[bool, typer.Option("--planned", metavar="", help="Plan every cell; seconds each.")] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate a job on every kind and number of devices of a fleet, without running it.

    Bounds say what no plan can beat, in milliseconds; --planned simulates the plan that would run, with its memory.
    Times of layers are those of a roofline, or measured ones (--profile). Examples:

    spindle fleet estimate train.py --fleet fleet.toml --count 1-16

    spindle fleet estimate clip-10 --fleet a100x16,h100x8 --planned

    spindle fleet estimate train.py --fleet h200x8 --profile h200=profile.json --planned
    """
    from rich.table import Table

    from spindle.artifact import to_json
    from spindle.cli.fleet.inputs import measured_profiles, step_on
    from spindle.cli.terminal import note_compilation, progress_bar, show, show_json
    from spindle.display import num_bytes, seconds
    from spindle.errors import DoesNotFitError
    from spindle.fleet.estimates import bound_estimates, least_memory, planned_estimate
    from spindle.fleet.fleet_file import fleet_named
    from spindle.fleet.job import Job, read_counts

    machines = fleet_named(fleet)
    names = tuple(machines.kinds[machines.kind_number(kind)].name for kind in kinds.split(",") if kind)
    least, most = read_counts(count)
    job = Job(name=given, kinds=names, min_devices=least, max_devices=most)
    step = step_on(given, measured_profiles(profiles, machines))
    estimates = bound_estimates(step, machines, job)
    if planned:
        note_compilation(False)
        done = []
        with progress_bar(f"planning {len(estimates)} cells", len(estimates)) as report:
            for number, bound in enumerate(estimates):
                done.append(planned_estimate(step, machines, bound))
                report(number + 1)
        bounds, estimates = estimates, tuple(done)
    else:
        bounds = estimates
    if as_json:
        show_json({"job": given, "fleet": machines.cluster.name, "estimates": [to_json(item) for item in estimates]})
        return
    best_s = min((item.step_s for item in estimates if item.fits), default=0.0)
    table = Table("kind", "devices", "bound", *(("planned", "memory") if planned else ()), "of the best rate", box=None)
    for bound, item in zip(bounds, estimates, strict=True):
        memory = num_bytes(item.memory_bytes) if item.memory_bytes else ""
        table.add_row(
            item.cell.kind,
            str(item.cell.num_devices),
            seconds(bound.step_s),
            *((seconds(item.step_s) if item.fits else "does not fit", memory) if planned else ()),
            f"{100 * best_s / item.step_s:.0f} %" if item.fits else "",
        )
    show(table)
    needed = least_memory(estimates)
    if needed:
        raise DoesNotFitError(
            f"{given} fits in no cell of {machines.cluster.name}; the least that would do is "
            f"{num_bytes(needed)} per device",
            needed,
        )
