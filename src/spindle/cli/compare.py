"""`spindle compare`: every planner on one workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.options import AsJson, ClusterName, Devices, Evaluations, Input, Seed, TimeLimit
from spindle.cli.pipelines import BatchSeed, Microbatches, Samples

PLANNERS = ("wavefront", "paper", "sequential", "distmm", "task-level")


def compare(
    given: Input,
    devices: Devices = None,
    cluster: ClusterName = None,
    seed: Seed = 0,
    evaluations: Evaluations = None,
    time_limit: TimeLimit = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="TABLE.json", help="Write the table here.", show_default=False),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            metavar="STEP.svg",
            help="Draw a step one task at a time above the same in waves; of a multimodal model, the pipeline as "
            "others have it above ours.",
            show_default=False,
        ),
    ] = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    as_json: AsJson = False,
) -> None:
    """Compare all planners on one workload, simulated, beside the bound.

    Speedups are over `sequential`: every module on the whole cluster in turn. A multimodal model (vlm-s) is compared
    as a pipeline on one batch, on the paper's cluster unless another is given; there, speedups are over `vpp`,
    interleaved 1F1B of Megatron-LM. Examples:

    spindle compare graph.json --devices 16

    spindle compare clip-10 --cluster a800x32 --figure step.svg

    spindle compare vlm-s --microbatches 32
    """
    import json

    from spindle.artifact import to_json, write_atomically
    from spindle.cli.inputs import load_profile
    from spindle.cli.pipelines import compare_pipelines, is_multimodal, load_batch, refuse_batch_options
    from spindle.cli.terminal import fits, notice, progress_bar, refuse_outputs, show, show_json
    from spindle.errors import DoesNotFitError
    from spindle.plan import Plan
    from spindle.planners import Effort, make_plan
    from spindle.report.compare import comparison_of
    from spindle.report.figure import step_figure
    from spindle.report.table import comparison_table, refusal_lines

    refuse_outputs(output, figure, inputs=(given, cluster, samples))
    effort = Effort(seed=seed, evaluations=evaluations, time_limit_s=time_limit)
    if is_multimodal(given):
        compare_pipelines(
            *load_batch(given, devices, cluster, microbatches, batch_seed, samples), effort, output, figure, as_json
        )
        return
    refuse_batch_options(given, microbatches, batch_seed, samples)
    profile = load_profile(given, devices, cluster)
    plans: dict[str, Plan] = {}
    refusals: dict[str, str] = {}
    with progress_bar(f"planning {profile.graph.name} on {profile.cluster.name}", len(PLANNERS)) as report:
        for number, planner in enumerate(PLANNERS):

            def report_share(share: float, before: int = number) -> None:
                report(before + share)

            try:
                plans[planner] = make_plan(profile, planner, effort, report_share)
            except DoesNotFitError as error:
                refusals[planner] = str(error)
            report(number + 1)
    comparison = comparison_of(profile, plans.values(), refusals)
    table = {"spindle": "comparison", "version": 1} | to_json(comparison)
    if output is not None:
        write_atomically(output, json.dumps(table, indent=1) + "\n")
    if figure is not None:
        panels = [("One task at a time", "sequential"), ("In waves", "wavefront")]
        missing = [planner for _, planner in panels if planner not in plans]
        if missing:
            raise DoesNotFitError(f"{figure}: not drawn, {missing[0]} has no plan: {refusals[missing[0]]}")
        write_atomically(figure, step_figure(profile.graph, [(title, plans[planner]) for title, planner in panels]))
    if as_json:
        show_json(table)
    else:
        whole = comparison_table(comparison, profile)
        shown = whole if fits(whole) else comparison_table(comparison, profile, narrow=True)
        show(shown, *refusal_lines(comparison))
    for path in (output, figure):
        if path is not None:
            notice(f"wrote {path}")
    if not plans:
        raise DoesNotFitError(f"no planner has a plan for {profile.graph.name} on {profile.cluster.name}")
