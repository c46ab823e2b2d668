"""`spindle explain`: why did this op get these devices?"""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.options import AsJson, ClusterName, Devices, Input, PlanFile


def explain(
    given: Input,
    plan_file: PlanFile,
    devices: Devices = None,
    cluster: ClusterName = None,
    op: Annotated[
        str | None,
        typer.Option("--op", metavar="NAME", help="Only this op, or the ops of this module.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: why each op got its devices.

    For each op: its curve around the chosen numbers of devices, the bound's allocation, what ran at the same time,
    where its inputs came from, and which ops share its weights. The machines are those of the plan by default.
    Examples:

    spindle explain graph.json plan.json --op vision

    spindle explain clip-10 plan.json
    """
    from rich.padding import Padding
    from rich.text import Text

    from spindle.artifact import to_json
    from spindle.cli.inputs import load_plan, load_profile, machines_of_plan
    from spindle.cli.terminal import show, show_json
    from spindle.report import explain as explain_plan
    from spindle.report import headline, sentences

    profile = load_profile(given, *machines_of_plan(plan_file, given, devices, cluster))
    made = load_plan(plan_file, profile)
    explanations = explain_plan(made, profile, op)
    if as_json:
        show_json(
            {
                "workload": made.workload,
                "planner": made.planner,
                "ops": [to_json(explanation) for explanation in explanations],
            }
        )
        return
    for explanation in explanations:
        show(
            Text(headline(explanation), style="bold"),
            *(Padding(Text(line), (0, 0, 0, 2)) for line in sentences(explanation)),
        )
