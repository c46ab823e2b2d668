"""`spindle plan`: which layers run where and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.options import AsJson, ClusterName, Devices, Evaluations, Input, Seed, TimeLimit


def plan(
    given: Input,
    devices: Devices = None,
    cluster: ClusterName = None,
    planner: Annotated[
        str,
        typer.Option(
            "--planner", metavar="NAME", help="wavefront, paper, sequential, distmm, task-level or exhaustive."
        ),
    ] = "wavefront",
    seed: Seed = 0,
    evaluations: Evaluations = None,
    time_limit: TimeLimit = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PLAN.json", help="Write the plan here.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a step: which layers run on which devices, and when.

    Prints the plan beside what no plan can beat, and draws it. Examples:

    spindle plan graph.json --devices 16 -o plan.json

    spindle plan clip-10 --cluster a800x32 --planner paper

    spindle plan train.py --cluster h100x16
    """
    from spindle.artifact import artifact_text
    from spindle.cli.inputs import load_profile
    from spindle.cli.terminal import notice, progress_bar, refuse_outputs, show, show_chart, show_text
    from spindle.plan import write_plan
    from spindle.planners import Effort, make_plan
    from spindle.report.compare import simulated
    from spindle.report.gantt import plan_chart
    from spindle.report.table import plan_facts, step_remarks

    refuse_outputs(output, inputs=(given, cluster))
    profile = load_profile(given, devices, cluster)
    effort = Effort(seed=seed, evaluations=evaluations, time_limit_s=time_limit)
    with progress_bar(f"planning {profile.graph.name} on {profile.cluster.name}", 1.0) as report:
        made = make_plan(profile, planner, effort, report)
        measures = simulated(made, profile)
    if output is not None:
        write_plan(output, made)
    if as_json:
        show_text(artifact_text("plan", made))
        return
    show(plan_facts(made, measures, profile), *step_remarks(made, measures, profile))
    show_chart(lambda num_columns: plan_chart(made, profile.graph, num_columns), made.num_devices)
    if output is not None:
        notice(f"wrote {output}")
