"""`spindle compare`: every planner on one workload."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spindle.cli.options import (
    MOST_LANES,
    AsJson,
    Assumptions,
    BatchSeed,
    ClusterName,
    Devices,
    Evaluations,
    Input,
    Microbatches,
    Mix,
    Samples,
    Seed,
    TimeLimit,
)

if TYPE_CHECKING:
    from spindle.plan import Plan
    from spindle.planners import PlanOptions
    from spindle.profile import Profile
    from spindle.recipes import Step


def pipelines_estimate_s(num_ops: int, num_ranks: int) -> float:
    """How long all planners of pipelines take: vlm-s 38 s, vlm-l 73 s, t2v-s 59 s on an AMD EPYC core."""
    return 5 + 0.12 * num_ops * math.sqrt(num_ranks)


def plans_of(step: Step, options: PlanOptions) -> tuple[dict[str, tuple[Plan, Profile]], dict[str, str]]:
    """The plans of all compared planners, with the profiles that they are of; and why others made none. Where layers
    were measured beside each other, also with lanes, if these are simulated to be faster; where they were measured on
    some of the SMs, also with quotas."""
    from spindle.cli.inputs import planner_input, with_sizes
    from spindle.cli.terminal import note_compilation, note_duration, progress_bar
    from spindle.errors import DoesNotFitError
    from spindle.planners import PLANNERS, make_plan, planners_of
    from spindle.planners.lanes import with_lanes
    from spindle.planners.quotas import with_quotas

    graph = step.whole.graph
    planners = [planner for planner in planners_of(step.is_pipeline) if PLANNERS[planner].is_compared]
    plans: dict[str, tuple[Plan, Profile]] = {}
    refusals: dict[str, str] = {}
    note_compilation(step.is_pipeline)
    if step.pipeline_ranks is not None:
        estimate_s = pipelines_estimate_s(len(graph.metaops), step.pipeline_ranks)
        note_duration(f"tuning {len(planners)} planners", estimate_s)
    with progress_bar(f"planning {graph.name} on {step.whole.cluster.name}", len(planners)) as report:
        for number, planner in enumerate(planners):

            def report_share(share: float, before: int = number) -> None:
                report(before + share)

            try:
                profile, planner_options = planner_input(step, PLANNERS[planner], options)
                plan = make_plan(profile, planner, planner_options, report_share)
                plans[planner] = with_sizes(plan, step, profile), profile
                on_lanes = with_lanes(plan, profile, MOST_LANES, seed=options.seed)
                if on_lanes.num_lanes > 1:
                    name = f"{planner}, {on_lanes.num_lanes} lanes"
                    plans[name] = replace(on_lanes, planner=name), profile
                divided = with_quotas(on_lanes, profile)
                if divided.quotas:
                    name += f", quotas {'+'.join(map(str, divided.quotas))}"
                    plans[name] = replace(divided, planner=name), profile
            except DoesNotFitError as error:
                refusals[planner] = str(error)
            report(number + 1)
    return plans, refusals


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
            help="Draw the step twice, as .svg or .png: one module at a time, and below it the plan of wavefront. For "
            "multimodal models: the usual schedule (vpp), and below it the faster one of pipeline and colocate.",
            show_default=False,
        ),
    ] = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    mix: Mix = None,
    assumptions: Assumptions = False,
    as_json: AsJson = False,
) -> None:
    """Compare all planners on one workload: simulated step times and the lower bound.

    Speedups are over `sequential`, which runs one module at a time on the whole cluster. A multimodal model (vlm-s) is
    planned as a pipeline for one batch, on the paper's cluster unless another is given. Its speedups are over `vpp`,
    the interleaved 1F1B of Megatron-LM. Every pipeline is tuned by simulation, and the chosen settings are listed.
    Examples:

    spindle compare graph.json --devices 16

    spindle compare clip-10 --cluster a800x32 --figure step.svg

    spindle compare vlm-s --microbatches 32
    """
    import json

    from spindle.artifact import to_json, write_atomically
    from spindle.cli.inputs import LEAVES_OUT, left_out, load_step
    from spindle.cli.terminal import fits, notice, refuse_outputs, show, show_json
    from spindle.errors import DoesNotFitError
    from spindle.planners import PlanOptions, planners_of
    from spindle.program import lower
    from spindle.recipes import BatchOptions
    from spindle.report import (
        REFERENCE,
        compared,
        comparison_figure,
        comparison_table,
        conclusion,
        idle_causes,
        idle_sentences,
        refusal_lines,
        settings_lines,
        write_figure,
    )
    from spindle.simulate import simulate

    refuse_outputs(output, figure, inputs=(given, cluster, samples))
    batch = BatchOptions(num_microbatches=microbatches, seed=batch_seed, samples=samples, mix=mix)
    step = load_step(given, devices, cluster, batch)
    options = PlanOptions(
        seed=seed, evaluations=evaluations, time_limit_s=time_limit, pipeline_ranks=step.pipeline_ranks
    )
    if step.not_own_planner:
        notice(f"the plan of the script itself is not compared: {step.not_own_planner}")
    whole = step.whole
    plans, refusals = plans_of(step, options)
    reference = REFERENCE[step.is_pipeline]
    comparison = compared(plans.values(), whole, refusals, reference=reference, model_s=step.peak_s)
    unknown: list[str] = []
    if step.is_pipeline:
        unknown = list(dict.fromkeys(text for _, profile in plans.values() for text in profile.leaves_out))
    table = {"spindle": "comparison", "version": 1} | to_json(comparison) | ({LEAVES_OUT: unknown} if unknown else {})
    if output is not None:
        write_atomically(output, json.dumps(table, indent=1) + "\n")
    if figure is not None:
        first = planners_of(step.is_pipeline)[0]
        candidates = [name for name in (first, "colocate") if name in plans]
        ours = min(candidates, key=lambda name: plans[name][0].makespan_s, default=first)
        with_lanes = [name for name in plans if name.startswith(f"{ours}, ")]  # each faster than the one before
        drawn = [name for name in (reference, *(with_lanes or [ours])[-1:]) if name in plans]
        if not drawn:
            raise DoesNotFitError(f"{figure}: not drawn, {reference} has no plan: {refusals[reference]}")
        write_figure(figure, comparison_figure([plans[planner] for planner in drawn]))
    if as_json:
        show_json(table)
    else:
        wide = comparison_table(comparison, whole, reference)
        shown = wide if fits(wide) else comparison_table(comparison, whole, reference, narrow=True)
        show(shown, *settings_lines(comparison), *refusal_lines(comparison), *left_out(unknown, assumptions))
        if comparison.plans:
            fastest, planned_from = plans[comparison.plans[0].planner]
            program = lower(fastest, planned_from)
            causes = idle_causes(simulate(program, planned_from), program, planned_from)
            show(*idle_sentences(causes, at_most=2), conclusion(comparison, reference))
    for path in (output, figure):
        if path is not None:
            notice(f"wrote {path}")
    if not plans:
        raise DoesNotFitError(f"no planner has a plan for {whole.graph.name} on {whole.cluster.name}")
