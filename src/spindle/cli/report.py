"""`spindle report`: a page, or a figure, that shows steps."""

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
    from spindle.report import StepReport


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT [INPUT]...",
            help="Run folders, which spindle.Trainer(run_folder=...) writes; or what `spindle plan` takes, alone (all "
            "planners are compared) or followed by plans.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="STEP.html",
            help="The page; or a figure, if the name ends in .svg or .png.",
            show_default=False,
        ),
    ],
    curves: Annotated[
        bool, typer.Option("--curves", metavar="", help="Of a figure: draw how modules scale, not the steps.")
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
    """Write one HTML file that shows steps device by device: it opens from disk, offline.

    Two steps are shown on one scale: predicted and measured, two planners, two runs. A gap says what it waits for; and
    the page shows where the time went, the scaling of modules, and the losses of a run. Examples:

    spindle report runs/a -o step.html

    spindle report runs/a runs/b -o both.html

    spindle report clip-10 --cluster a800x32 -o planners.html

    spindle report graph.json first.json second.json -o plans.html
    """
    from spindle.artifact import write_atomically
    from spindle.cli.terminal import notice, refuse_outputs
    from spindle.errors import InputError
    from spindle.recipes import BatchOptions
    from spindle.report import (
        curves_drawing,
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
    batch = BatchOptions(num_microbatches=microbatches, seed=batch_seed, samples=samples)
    if Path(inputs[0]).is_dir():
        others = [given for given in inputs if not Path(given).is_dir()]
        if others:
            raise InputError(f"{others[0]}: is no run folder; a report of runs has only run folders")
        if devices is not None or cluster is not None:
            raise InputError(f"{inputs[0]}: a run has the machines that it ran on; leave --devices and --cluster out")
        if len(set(inputs)) < len(inputs):
            raise InputError("the same run folder is given twice")
        made = run_report({given: read_run(Path(given)) for given in inputs})
    else:
        made = _planned_report(inputs, devices, cluster, batch, (seed, evaluations, time_limit))
    if output.suffix == ".html":
        write_atomically(output, page_html(made.title, step_page_data(made)))
    else:
        write_figure(output, curves_drawing(made) if curves else step_drawing(made))
    notice(f"wrote {output}" + ("; open it in a browser" if output.suffix == ".html" else ""))


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
