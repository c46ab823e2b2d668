"""Multimodal models on the command line: a batch of one, and planners of pipelines side by side."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spindle.planners import Effort
    from spindle.recipes.pipelined import Pipelined
    from spindle.workload import Microbatch

REFERENCE = "vpp"
Microbatches = Annotated[
    int, typer.Option("--microbatches", metavar="N", help="Of a multimodal model: how many in an iteration.", min=1)
]
BatchSeed = Annotated[
    int, typer.Option("--batch-seed", help="Of a multimodal model: which batch like the paper's data is drawn.", min=0)
]
Samples = Annotated[
    Path | None,
    typer.Option(
        "--samples",
        metavar="LENGTHS.jsonl",
        help="Of a multimodal model: lengths of real samples, one JSON object a line, in place of drawn ones.",
        show_default=False,
    ),
]


def is_multimodal(given: str) -> bool:
    from spindle.recipes.multimodal import MODELS

    return given in MODELS


def refuse_unknown_model(given: str) -> None:
    from spindle.errors import InputError
    from spindle.recipes.multimodal import MODELS

    if given not in MODELS:
        raise InputError(f"no multimodal model is called {given!r}; there are {', '.join(MODELS)}")


def load_batch(
    given: str, cluster_name: str | None, num_microbatches: int, seed: int, samples: Path | None
) -> tuple[Pipelined, tuple[Microbatch, ...]]:
    """A model on its own cluster or a named one, and the first batch."""
    from spindle.cli.inputs import any_cluster
    from spindle.recipes.multimodal import MODELS
    from spindle.recipes.pipelined import Pipelined, batches

    model = MODELS[given]
    cluster = model.cluster if cluster_name is None else any_cluster(None, cluster_name)
    pipelined = Pipelined(model, cluster)
    (microbatches,) = islice(batches(model, num_microbatches, seed, samples), 1)
    return pipelined, microbatches


def compare_pipelines(
    pipelined: Pipelined,
    microbatches: tuple[Microbatch, ...],
    effort: Effort,
    output: Path | None,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Every planner of pipelines on one batch."""
    import json

    from spindle.artifact import to_json, write_whole
    from spindle.cli.terminal import notice, progress_bar, show, show_json
    from spindle.errors import DoesNotFitError
    from spindle.plan import Plan
    from spindle.profile import Profile
    from spindle.recipes.pipelined import PLANNERS
    from spindle.report.compare import compared
    from spindle.report.pipelines import pipeline_figure, pipelines_table
    from spindle.report.table import refusal_lines

    made: dict[str, tuple[Plan, Profile]] = {}
    refusals: dict[str, str] = {}
    name = f"{pipelined.model.name} on {pipelined.cluster.name}"
    with progress_bar(f"planning {name}", len(PLANNERS)) as report:
        for number, planner in enumerate(PLANNERS):

            def tell(share: float, before: int = number) -> None:
                report(before + share)

            try:
                made[planner] = pipelined.plan(microbatches, planner, effort, tell)
            except DoesNotFitError as error:
                refusals[planner] = str(error)
            report(number + 1)
    if not made:
        raise DoesNotFitError(f"no planner has a plan for {name}: {next(iter(refusals.values()))}")
    profile = next(iter(made.values()))[1]
    comparison = compared(
        made.values(), profile, refusals, reference=REFERENCE, model_s=pipelined.mfu(microbatches, 1.0)
    )
    table = {"spindle": "comparison", "version": 1} | to_json(comparison)
    if output is not None:
        write_whole(output, json.dumps(table, indent=1) + "\n")
    if figure is not None:
        panels = [(planner, *made[planner]) for planner in (REFERENCE, "pipeline") if planner in made]
        drawn = pipeline_figure([(title, plan, its_profile.graph) for title, plan, its_profile in panels])
        write_whole(figure, drawn)
    if as_json:
        show_json(table)
    else:
        show(pipelines_table(comparison, REFERENCE), *refusal_lines(comparison))
    for path in (output, figure):
        if path is not None:
            notice(f"wrote {path}")
