"""`spindle report`: a page, or a figure, that shows steps; or a page that shows a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spindle.cli.options import (
    BatchSeed,
    ClusterName,
    Devices,
    Evaluations,
    Microbatches,
    Samples,
    Seed,
    TimeLimit,
)

if TYPE_CHECKING:
    from spindle.plan import Plan
    from spindle.profile import Profile
    from spindle.recipes import BatchOptions
    from spindle.report import FleetReport, StepReport


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT [INPUT]...",
            help="Run folders that spindle.Trainer(run_folder=...) wrote; an input of `spindle plan`, alone (compares "
            "all planners) or followed by plans; timelines (-o) or events (--events) of `spindle fleet simulate`; or "
            "the store of a live fleet.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="STEP.html",
            help="Write the page here, or a figure if the name ends in .svg or .png.",
            show_default=False,
        ),
    ],
    curves: Annotated[
        bool, typer.Option("--curves", metavar="", help="As a figure, draw how modules scale instead of the steps.")
    ] = False,
    devices: Devices = None,
    cluster: ClusterName = None,
    seed: Seed = 0,
    evaluations: Evaluations = None,
    time_limit: TimeLimit = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
) -> None:
    """Write an HTML page that shows steps, or a fleet, device by device.

    The page is a single file that opens offline. It shows two steps on one scale: predicted and measured, two planners,
    or two runs. Click a gap to see what the device waits for. The page also shows where the time went, how modules
    scale, and the losses of a run. Examples:

    spindle report runs/a -o step.html

    spindle report runs/a runs/b -o both.html

    spindle report clip-10 --cluster a800x32 -o planners.html

    spindle report graph.json first.json second.json -o plans.html

    spindle report price.json sia.json -o fleet.html
    """
    from spindle.artifact import write_atomically
    from spindle.cli.terminal import notice, refuse_outputs
    from spindle.errors import InputError
    from spindle.recipes import BatchOptions
    from spindle.report import (
        curves_drawing,
        fleet_page_data,
        page_html,
        read_run,
        run_report,
        step_drawing,
        step_page_data,
        write_figure,
    )

    if output.suffix not in (".html", ".svg", ".png"):
        raise InputError(f"{output}: expected the name of a page or a figure, ending in .html, .svg or .png")
    refuse_outputs(output, inputs=(*inputs, cluster, samples))
    if any(map(_is_of_fleet, inputs)):
        if output.suffix != ".html" or devices is not None or cluster is not None:
            raise InputError(f"{inputs[0]}: a report of a fleet is a page (.html), of the machines that the fleet has")
        fleet = _fleet_report(inputs)
        write_atomically(output, page_html(fleet.title, fleet_page_data(fleet)))
        notice(f"wrote {output}; open it in a browser")
        return
    batch = BatchOptions(num_microbatches=microbatches, seed=batch_seed, samples=samples)
    if Path(inputs[0]).is_dir():
        not_folders = [given for given in inputs if not Path(given).is_dir()]
        if not_folders:
            raise InputError(f"{not_folders[0]}: is no run folder; a report of runs has only run folders")
        if devices is not None or cluster is not None:
            raise InputError(f"{inputs[0]}: a run has the machines that it ran on; leave --devices and --cluster out")
        if len(set(inputs)) < len(inputs):
            raise InputError("the same run folder is given twice")
        shown = run_report({given: read_run(Path(given)) for given in inputs})
    else:
        shown = _planned_report(inputs, devices, cluster, batch, (seed, evaluations, time_limit))
    if output.suffix == ".html":
        write_atomically(output, page_html(shown.title, step_page_data(shown)))
    else:
        write_figure(output, curves_drawing(shown) if curves else step_drawing(shown))
    notice(f"wrote {output}" + ("; open it in a browser" if output.suffix == ".html" else ""))


def _is_of_fleet(given: str) -> bool:
    """Whether a file holds the timeline or the events of a fleet, or is the store of a live one: its first bytes say
    so."""
    from spindle.fleet.store import is_store

    path = Path(given)
    if not path.is_file():
        return False
    if is_store(path):
        return True
    with path.open("rb") as file:
        return b'"spindle":"fleet-' in file.read(64).replace(b" ", b"").replace(b"\n", b"")


def _fleet_report(inputs: list[str]) -> FleetReport:
    """Timelines of fleets under the names of their policies, or of their files where two have the same policy."""
    from spindle.artifact import read_artifact
    from spindle.errors import InputError
    from spindle.fleet import FleetTimeline
    from spindle.fleet.event_log import read_event_log
    from spindle.fleet.history import timeline_of_log
    from spindle.fleet.store import is_store
    from spindle.report import FleetReport

    timelines: dict[str, FleetTimeline] = {}
    for given in inputs:
        path = Path(given)
        if not _is_of_fleet(given):
            raise InputError(
                f"{given}: is no timeline, event log or store of a fleet; a report of a fleet has only those"
            )
        if given in timelines:
            raise InputError(f"{given}: is given twice")
        if is_store(path) or path.suffix == ".jsonl":
            timelines[given] = timeline_of_log(read_event_log(path), path.name)
        else:
            timelines[given] = read_artifact(path, "fleet-timeline", FleetTimeline)
        if not timelines[given].jobs:
            raise InputError(f"{given}: no job was submitted yet, so there is nothing to show")
    policies = [timeline.policy for timeline in timelines.values()]
    if len(set(policies)) == len(policies):
        timelines = dict(zip(policies, timelines.values(), strict=True))
    first = next(iter(timelines.values()))
    return FleetReport(title=f"{first.trace} on {first.fleet}", timelines=timelines)


def _planned_report(
    inputs: list[str],
    devices: int | None,
    cluster: str | None,
    batch: BatchOptions,
    search: tuple[int, int | None, float | None],
) -> StepReport:
    """The simulated steps of plans: those that are given, or those of all planners, the fastest first."""
    from spindle.cli.compare import plans_of
    from spindle.cli.inputs import load_plan, load_step, machines_of_plan, profile_of_plan
    from spindle.errors import DoesNotFitError
    from spindle.planners import PlanOptions
    from spindle.program import lower, verify
    from spindle.report import REFERENCE, ShownTimeline, StepReport
    from spindle.simulate import simulate

    given, *plan_files = inputs
    plans: dict[str, tuple[Plan, Profile]] = {}
    refusals: dict[str, str] = {}
    if plan_files:
        step = load_step(given, *machines_of_plan(Path(plan_files[0]), given, devices, cluster), batch)
        for name in plan_files:
            profile = profile_of_plan(Path(name), step)
            plans[name if len(plan_files) > 1 else "simulated"] = load_plan(Path(name), profile, given), profile
    else:
        step = load_step(given, devices, cluster, batch)
        seed, evaluations, time_limit = search
        options = PlanOptions(
            seed=seed, evaluations=evaluations, time_limit_s=time_limit, pipeline_ranks=step.pipeline_ranks
        )
        plans, refusals = plans_of(step, options)
        if not plans:
            raise DoesNotFitError(f"no planner has a plan for {step.whole.graph.name} on {step.whole.cluster.name}")
    shown = []
    for name, (plan, profile) in plans.items():
        program = lower(plan, profile)
        verify(program, profile)
        shown.append(ShownTimeline(name=name, timeline=simulate(program, profile), program=program, profile=profile))
    if not plan_files:
        # The reference first, then from the fastest on: the two that a reader compares are shown when it opens.
        reference = REFERENCE[step.is_pipeline]
        shown.sort(key=lambda entry: (entry.name != reference, entry.timeline.makespan_ns))
    whole = step.whole
    return StepReport(
        title=f"{whole.graph.name} on {whole.cluster.name}",
        timelines=tuple(shown),
        notes=tuple(f"Planner {planner} has no plan: {text}" for planner, text in refusals.items()),
    )
