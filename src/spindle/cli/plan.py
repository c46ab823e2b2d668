"""`spindle plan`: which layers run where and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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


def plan(
    given: Input,
    devices: Devices = None,
    cluster: ClusterName = None,
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner",
            metavar="NAME",
            help="wavefront (the default, unless the script names another), paper, sequential, distmm, task-level or "
            "exhaustive. For multimodal models: pipeline (the default), colocate, upfront, stage-0, dedicated, "
            "optimus, static, static-sorted, zb-h1, vpp or 1f1b.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    evaluations: Evaluations = None,
    time_limit: TimeLimit = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            "--lanes",
            metavar="N",
            help="How many modules may run on a device at the same time, at most 8, "
            f"{MOST_LANES} by default. Needs a profile that has measured "
            "how much they slow each other down. 1: one module at a time.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PLAN.json",
            help="Write the plan here; PLAN.txt: as text that can be edited.",
            show_default=False,
        ),
    ] = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    mix: Mix = None,
    show_search: Annotated[
        bool,
        typer.Option("--show-search", metavar="", help="Show how the search of planner pipeline improved its plan."),
    ] = False,
    assumptions: Assumptions = False,
    as_json: AsJson = False,
) -> None:
    """Plan a step: which layers run on which devices, and when.

    Prints and draws the plan, with a lower bound that no plan can beat. Examples:

    spindle plan graph.json --devices 16 -o plan.json

    spindle plan clip-10 --cluster a800x32 --planner paper

    spindle plan train.py --cluster h100x16

    spindle plan vlm-s --microbatches 16 --show-search
    """
    import json

    from spindle.artifact import artifact_text
    from spindle.cli.inputs import LEAVES_OUT, SEARCH, left_out, load_step, planner_input, refuse_planner, with_sizes
    from spindle.cli.terminal import note_compilation, notice, progress_bar, refuse_outputs, show, show_chart, show_text
    from spindle.display import seconds
    from spindle.errors import InputError
    from spindle.plan import write_plan
    from spindle.planners import PLANNERS, PlanOptions, SearchResult, make_plan, planners_of
    from spindle.planners.lanes import can_share_devices
    from spindle.program import lower
    from spindle.recipes import BatchOptions
    from spindle.report import (
        Chart,
        idle_causes,
        idle_sentences,
        plan_chart,
        plan_facts,
        search_json,
        search_tables,
        timeline_chart,
    )
    from spindle.simulate import simulate, simulate_step
    from spindle.timeline import measure

    refuse_outputs(output, inputs=(given, cluster, samples))
    batch = BatchOptions(num_microbatches=microbatches, seed=batch_seed, samples=samples, mix=mix)
    step = load_step(given, devices, cluster, batch)
    name = planner or (planners_of(is_pipeline=True)[0] if step.is_pipeline else step.planner)
    refuse_planner(name, given, step)
    chosen = PLANNERS[name]
    if show_search and chosen.search is None:
        raise InputError(f"--show-search: planner {name!r} keeps no record of its search, leave it out")
    name_of_step = f"{step.whole.graph.name} on {step.whole.cluster.name}"
    options = PlanOptions(
        seed=seed,
        evaluations=evaluations,
        time_limit_s=time_limit,
        pipeline_ranks=step.pipeline_ranks,
        lanes=MOST_LANES if lanes is None else lanes,
        quotas=True,  # where a profile has times on some of the SMs
    )
    if planner is None and step.not_own_planner:
        notice(f"planned with {name!r}: {step.not_own_planner}")
    note_compilation(step.is_pipeline)
    with progress_bar(f"planning {name_of_step}", 1.0) as report:
        profile, options = planner_input(step, chosen, options)
        results: list[SearchResult] = []
        if show_search and chosen.search is not None:
            new_plan, results = chosen.search(profile, options, report)
        else:
            new_plan = make_plan(profile, name, options, report)
        new_plan = with_sizes(new_plan, step, profile)
        program = lower(new_plan, profile)
        timeline = simulate(program, profile)
    if output is not None:
        write_plan(output, new_plan)
    if as_json:
        remarks: dict[str, Any] = {LEAVES_OUT: list(profile.leaves_out)} if step.is_pipeline else {}
        if show_search:
            remarks[SEARCH] = search_json(results)
        text = artifact_text("plan", new_plan)
        show_text(json.dumps(json.loads(text) | remarks, indent=1) + "\n" if remarks else text)
        return
    unknown = left_out(profile.leaves_out, assumptions) if step.is_pipeline else []
    show(plan_facts(new_plan, measure(timeline), profile), *unknown)
    if step.num_micro_steps > 1:
        step_s, _ = simulate_step(new_plan, profile, step.num_micro_steps)
        show(
            f"The script accumulates gradients over {step.num_micro_steps} batches of each task. The plan is for one "
            f"of them; with it, a step takes {seconds(step_s)}, with one synchronisation and one update."
        )
    if show_search:
        show(*search_tables(name_of_step, results))

    def chart(num_columns: int) -> Chart:
        if new_plan.num_lanes == 1:
            return plan_chart(new_plan, profile, num_columns)
        return timeline_chart(timeline, program, profile.graph, num_columns)  # slots of lanes slow each other down

    show_chart(chart, new_plan.num_devices)
    show(*idle_sentences(idle_causes(timeline, program, profile)))
    if lanes is not None and lanes > 1 and not new_plan.passes and not can_share_devices(new_plan, profile):
        notice(
            "one lane on each device: nothing says how much these layers slow each other down when they share one; "
            "`spindle profile` measures it for a script on one GPU"
        )
    if output is not None:
        notice(f"wrote {output}")
