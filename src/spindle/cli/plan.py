"""`spindle plan`: which layers run where and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.options import AsJson, ClusterName, Devices, Evaluations, Input, Seed, TimeLimit
from spindle.cli.pipelines import BatchSeed, Microbatches, Samples


def plan(
    given: Input,
    devices: Devices = None,
    cluster: ClusterName = None,
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner",
            metavar="NAME",
            help="wavefront (the default), paper, sequential, distmm, task-level or exhaustive; of a multimodal model "
            "pipeline (the default), optimus, static, zb-h1, vpp or 1f1b.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    evaluations: Evaluations = None,
    time_limit: TimeLimit = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PLAN.json", help="Write the plan here.", show_default=False),
    ] = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    as_json: AsJson = False,
) -> None:
    """Plan a step: which layers run on which devices, and when.

    Prints the plan beside what no plan can beat, and draws it. Examples:

    spindle plan graph.json --devices 16 -o plan.json

    spindle plan clip-10 --cluster a800x32 --planner paper

    spindle plan train.py --cluster h100x16

    spindle plan vlm-s --microbatches 16
    """
    import json

    from spindle.artifact import artifact_text
    from spindle.cli.inputs import LEAVES_OUT, load_profile
    from spindle.cli.pipelines import is_multimodal, left_out, load_batch, refuse_batch_options, refuse_unknown_planner
    from spindle.cli.terminal import notice, progress_bar, refuse_outputs, show, show_chart, show_json, show_text
    from spindle.plan import write_plan
    from spindle.planners import Effort, make_plan
    from spindle.report.compare import simulated
    from spindle.report.gantt import plan_chart
    from spindle.report.table import plan_facts, step_remarks

    refuse_outputs(output, inputs=(given, cluster, samples))
    effort = Effort(seed=seed, evaluations=evaluations, time_limit_s=time_limit)
    if is_multimodal(given):
        pipelined, batch = load_batch(given, devices, cluster, microbatches, batch_seed, samples)
        refuse_unknown_planner(planner or "pipeline")
        with progress_bar(f"planning {given} on {pipelined.cluster.name}", 1.0) as report:
            made, profile = pipelined.plan(batch, planner or "pipeline", effort, report)
            measures = simulated(made, profile)
    else:
        refuse_batch_options(given, microbatches, batch_seed, samples)
        profile = load_profile(given, devices, cluster)
        with progress_bar(f"planning {profile.graph.name} on {profile.cluster.name}", 1.0) as report:
            made = make_plan(profile, planner or "wavefront", effort, report)
            measures = simulated(made, profile)
    if output is not None:
        write_plan(output, made)
    is_model = is_multimodal(given)
    if as_json and is_model:
        show_json(json.loads(artifact_text("plan", made)) | {LEAVES_OUT: list(profile.leaves_out)})
        return
    if as_json:
        show_text(artifact_text("plan", made))
        return
    unknown = left_out(profile.leaves_out) if is_model else []
    show(plan_facts(made, measures, profile), *step_remarks(made, measures, profile), *unknown)
    show_chart(lambda num_columns: plan_chart(made, profile.graph, num_columns), made.num_devices)
    if output is not None:
        notice(f"wrote {output}")
