"""`spindle simulate`: what would happen under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.options import AsJson, BatchSeed, ClusterName, Devices, Input, Microbatches, Mix, PlanFile, Samples


def simulate(
    given: Input,
    plan_file: PlanFile,
    devices: Devices = None,
    cluster: ClusterName = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="TRACE.json",
            help="Write a trace for ui.perfetto.dev here; compressed if the name ends in .gz.",
            show_default=False,
        ),
    ] = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    mix: Mix = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one step of a plan: forward, backward, transfers, gradient reduction, optimizer.

    Checks the plan, then simulates exactly the program that training would run. By default, the machines are those that
    the plan was made for. Examples:

    spindle simulate graph.json plan.json

    spindle simulate clip-10 plan.json --trace trace.json

    spindle simulate vlm-s plan.json --microbatches 16
    """
    import spindle.simulate
    from spindle.artifact import to_json
    from spindle.cli.inputs import load_plan, load_step, machines_of_plan, profile_of_plan
    from spindle.cli.terminal import notice, refuse_outputs, show, show_chart, show_json
    from spindle.planners import step_bound_s
    from spindle.planners.lanes import lanes_bound_s
    from spindle.program import lower, refuse_overfull, verify
    from spindle.recipes import BatchOptions
    from spindle.report import measure_facts, timeline_chart, write_trace
    from spindle.timeline import measure

    refuse_outputs(trace, inputs=(given, plan_file, cluster, samples))
    batch = BatchOptions(num_microbatches=microbatches, seed=batch_seed, samples=samples, mix=mix)
    step = load_step(given, *machines_of_plan(plan_file, given, devices, cluster), batch)
    profile = profile_of_plan(plan_file, step)
    plan = load_plan(plan_file, profile, given)
    if plan.num_devices < profile.cluster.num_devices:
        notice(f"{plan_file} was planned for {plan.num_devices} of the {profile.cluster.num_devices} devices")
    program = lower(plan, profile)
    verify(program, profile)
    timeline = spindle.simulate.simulate(program, profile)
    measures = measure(timeline)
    bound_s = plan.bound_s if step.is_pipeline else step_bound_s(profile)
    if plan.num_lanes > 1:
        bound_s = lanes_bound_s(plan, profile, bound_s)
    if trace is not None:
        write_trace(trace, timeline, program)
    if as_json:
        facts = {"workload": plan.workload, "cluster": profile.cluster.name, "num_devices": profile.cluster.num_devices}
        plan_facts = {"planner": plan.planner, "folded_s": plan.folded_s, "bound_s": bound_s}
        show_json(facts | plan_facts | {"instructions": program.num_instructions} | to_json(measures))
    else:
        show(measure_facts(plan, measures, profile, bound_s))
        show_chart(
            lambda num_columns: timeline_chart(timeline, program, profile.graph, num_columns),
            profile.cluster.num_devices,
        )
    if trace is not None:
        notice(f"wrote {trace}; open it at https://ui.perfetto.dev")
    refuse_overfull(timeline.peak_bytes(), profile)
