"""`spindle explain`: why did this op get these devices?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spindle.cli.options import AsJson, ClusterName, Devices, Input, Microbatches, Mix, PlanFile

if TYPE_CHECKING:
    from spindle.recipes import BatchOptions


def explain(
    given: Input,
    plan_file: PlanFile,
    devices: Devices = None,
    cluster: ClusterName = None,
    op: Annotated[
        str | None,
        typer.Option("--op", metavar="NAME", help="Only this op, or the ops of this module.", show_default=False),
    ] = None,
    microbatches: Microbatches = None,
    mix: Mix = None,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: why each op got its devices.

    For each op, it shows how its time scales around the chosen number of devices, how many devices the lower bound
    gives it, what runs at the same time, where its inputs come from, and which ops share its weights. For a multimodal
    model, it shows how evenly the modules load the devices, and how long the step would take with other placements of
    the encoders. By default, the machines are those that the plan was made for. Examples:

    spindle explain graph.json plan.json --op vision

    spindle explain clip-10 plan.json
    """
    from rich.padding import Padding
    from rich.text import Text

    from spindle.artifact import to_json
    from spindle.cli.inputs import load_plan, load_profile, machines_of_plan
    from spindle.cli.terminal import show, show_json
    from spindle.recipes import MODELS, BatchOptions
    from spindle.report import explain as explain_plan
    from spindle.report import headline, sentences

    if given in MODELS:
        batch = BatchOptions(num_microbatches=microbatches, mix=mix)
        _explain_pipeline(given, plan_file, devices, cluster, batch, as_json)
        return
    profile = load_profile(given, *machines_of_plan(plan_file, given, devices, cluster))
    plan = load_plan(plan_file, profile)
    explanations = explain_plan(plan, profile, op)
    if as_json:
        show_json(
            {
                "workload": plan.workload,
                "planner": plan.planner,
                "ops": [to_json(explanation) for explanation in explanations],
            }
        )
        return
    for explanation in explanations:
        show(
            Text(headline(explanation), style="bold"),
            *(Padding(Text(line), (0, 0, 0, 2)) for line in sentences(explanation)),
        )


def _explain_pipeline(
    given: str, plan_file: Path, devices: int | None, cluster: str | None, batch: BatchOptions, as_json: bool
) -> None:
    """How level the modules of a pipeline are, and what other placements of its encoders would take."""
    from spindle.artifact import to_json
    from spindle.cli.inputs import load_plan, load_step, profile_of_plan
    from spindle.cli.terminal import show, show_json
    from spindle.planners import compare_placements
    from spindle.report import module_load_lines, module_loads, placement_lines

    step = load_step(given, devices, cluster, batch)
    assert step.pipeline_ranks is not None
    profile = profile_of_plan(plan_file, step)
    plan = load_plan(plan_file, profile, given)
    loads = module_loads(plan, profile)
    in_parts = step.part_profiles()
    compared = compare_placements(in_parts, step.pipeline_ranks) if in_parts else []
    if as_json:
        placements = [{"placement": text, "schedule_s": time_s} for text, time_s, _ in compared]
        show_json({"planner": plan.planner, "modules": [to_json(load) for load in loads], "placements": placements})
        return
    chosen = next((text for text, _, _ in compared if plan.settings.startswith(text)), "")
    show(*module_load_lines(loads), "")
    if compared:
        show("Schedules with encoders elsewhere, parts one microbatch ahead, without transfers:")
        show(*placement_lines(compared, chosen))
