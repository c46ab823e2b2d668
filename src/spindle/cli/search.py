"""`spindle search`: how the best plan of a batch improves with evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.options import AsJson, ClusterName, Evaluations, Seed, TimeLimit
from spindle.cli.pipelines import BatchSeed, Microbatches, Samples


def search(
    given: Annotated[
        str, typer.Argument(metavar="MODEL", help="A multimodal model of `spindle recipes`.", show_default=False)
    ],
    cluster: ClusterName = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    seed: Seed = 0,
    evaluations: Evaluations = None,
    time_limit: TimeLimit = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PLAN.json", help="Write the best plan here.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search the pipeline schedule of one batch, and show how the best plan improves.

    Times are those of the search: passes and what lies between ranks, without the optimizer's step. Examples:

    spindle search vlm-s

    spindle search t2v-s --samples lengths.jsonl --evaluations 20000 -o plan.json
    """
    from spindle.cli.pipelines import left_out, load_batch, refuse_unknown_model
    from spindle.cli.terminal import notice, progress_bar, refuse_outputs, show, show_json
    from spindle.plan import write_plan
    from spindle.planners import Effort
    from spindle.report.pipelines import search_table

    refuse_outputs(output, inputs=(cluster, samples))
    refuse_unknown_model(given)
    pipelined, batch = load_batch(given, None, cluster, microbatches, batch_seed, samples)
    effort = Effort(seed=seed, evaluations=evaluations, time_limit_s=time_limit)
    with progress_bar(f"searching {given} on {pipelined.cluster.name}", 1.0) as report:
        made, profile, found = pipelined.search(batch, effort, report)
    if output is not None:
        write_plan(output, made)
    if as_json:
        show_json(
            {
                "workload": profile.graph.name,
                "cluster": profile.cluster.name,
                "makespan_s": made.makespan_s,
                "bound_s": made.bound_s,
                "evaluations": made.evaluations,
                "cut_s": made.cut_s,
                "replicas": [
                    {
                        "natural_s": one.natural_ns * 1e-9,
                        "bound_s": one.bound_ns * 1e-9,
                        "improvements": [[count, makespan * 1e-9] for count, makespan in one.improvements],
                    }
                    for one in found
                ],
                "leaves_out": list(profile.leaves_out),
            }
        )
    else:
        for number, one in enumerate(found):
            replica = f", replica {number}" if len(found) > 1 else ""
            show(search_table(f"{profile.graph.name} on {profile.cluster.name}{replica}", one))
        show(
            f"The iteration takes {made.makespan_s:.3f} s with the optimizer's step, "
            f"{made.makespan_s / made.bound_s:.3f} × its bound; {made.evaluations:,} schedules were tried"
            + ("." if made.cut_s is None else f", cut at {made.cut_s:g} s."),
            *left_out(profile.leaves_out),
        )
    if output is not None:
        notice(f"wrote {output}")
