"""Multimodal models on the command line: a batch of one, and planners of pipelines side by side."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spindle.cluster import Cluster
    from spindle.planners import Effort
    from spindle.profile import Profile
    from spindle.recipes.multimodal import MultimodalModel
    from spindle.recipes.pipelined import Pipelined
    from spindle.workload import Microbatch

REFERENCE = "vpp"
MICROBATCHES, BATCH_SEED = 32, 0  # unless others are asked for
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        metavar="N",
        help=f"Of a multimodal model: how many in an iteration, {MICROBATCHES} unless given.",
        min=1,
        show_default=False,
    ),
]
BatchSeed = Annotated[
    int | None,
    typer.Option(
        "--batch-seed",
        help=f"Of a multimodal model: which batch like the paper's data is drawn, {BATCH_SEED} unless given.",
        min=0,
        show_default=False,
    ),
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


def refuse_multimodal(given: str) -> None:
    """For verbs that know no batches of a multimodal model."""
    from spindle.errors import InputError

    if is_multimodal(given):
        raise InputError(
            f"{given} is a multimodal model, planned batch by batch; the verbs plan, compare, search and simulate take "
            "it"
        )


def refuse_batch_options(given: str, microbatches: int | None, batch_seed: int | None, samples: Path | None) -> None:
    """What is asked of a batch has no meaning for anything but a multimodal model."""
    from spindle.errors import InputError
    from spindle.recipes.multimodal import MODELS

    options = {"--microbatches": microbatches, "--batch-seed": batch_seed, "--samples": samples}
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} is for multimodal models ({', '.join(MODELS)}); {given} is none, leave it out")


def left_out(leaves_out: Iterable[str]) -> list[str]:
    """What times do not know, a sentence each."""
    return [f"Left out: {text}." for text in leaves_out]


def refuse_unknown_model(given: str) -> None:
    from spindle.errors import InputError
    from spindle.recipes.multimodal import MODELS

    if given not in MODELS:
        raise InputError(f"no multimodal model is called {given!r}; there are {', '.join(MODELS)}")


def refuse_unknown_planner(planner: str) -> None:
    from spindle.errors import InputError
    from spindle.recipes.pipelined import PLANNERS

    if planner not in PLANNERS:
        raise InputError(f"no planner of pipelines is called {planner!r}; there are {', '.join(PLANNERS)}")


def load_batch(
    given: str,
    devices: int | None,
    cluster_name: str | None,
    num_microbatches: int | None,
    seed: int | None,
    samples: Path | None,
) -> tuple[Pipelined, tuple[Microbatch, ...]]:
    """A model on its own cluster or a named one, and the first batch."""
    from spindle.errors import InputError
    from spindle.workload.batches import SampleError, line_of_sample

    if devices is not None:
        raise InputError(f"{given}: its times follow from the machines: give --cluster, not --devices {devices}")
    from spindle.cli.inputs import any_cluster
    from spindle.recipes.multimodal import MODELS
    from spindle.recipes.pipelined import Pipelined, batches

    model = MODELS[given]
    cluster = model.cluster if cluster_name is None else any_cluster(None, cluster_name)
    pipelined = Pipelined(model, cluster)
    _refuse_small_islands(model, cluster)
    found = batches(
        model,
        MICROBATCHES if num_microbatches is None else num_microbatches,
        BATCH_SEED if seed is None else seed,
        samples,
    )
    try:
        (microbatches,) = islice(found, 1)
    except SampleError as error:
        if samples is None:
            raise
        line = line_of_sample(samples, error.number)
        raise InputError(f"{samples}, line {line}: {error.reason} (this is {given})") from error
    return pipelined, microbatches


def _refuse_small_islands(model: MultimodalModel, cluster: Cluster) -> None:
    """Every device must be in a tensor group, and a tensor group inside an island."""
    from spindle.errors import InputError

    degree = model.tensor_degree
    if degree * len(cluster.tensor_groups(degree)) < cluster.num_devices:
        size = next(island.num_devices for island in cluster.islands if island.num_devices % degree)
        raise InputError(
            f"{model.name} has tensor groups of {degree} devices, which lie inside islands: {cluster.name} has an "
            f"island of {size}; give a cluster whose islands have a multiple of {degree} devices"
        )


def refuse_other_batch(plan_file: Path, profile: Profile) -> None:
    """Says of a plan of this model that it was made for another batch, which is all that differs."""
    from spindle.artifact import read_json_file
    from spindle.errors import InputError

    data = read_json_file(plan_file)
    if data.get("workload") == profile.graph.name and data.get("fingerprint") != profile.graph.fingerprint:
        raise InputError(
            f"{plan_file}: this plan was made for another batch of {profile.graph.name}; give --microbatches, "
            "--batch-seed, --samples and --cluster as they were when it was planned, or plan this batch"
        )


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

    from spindle.artifact import to_json, write_atomically
    from spindle.cli.terminal import notice, progress_bar, show, show_json
    from spindle.errors import DoesNotFitError
    from spindle.plan import Plan
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
    leaves_out = list(dict.fromkeys(text for _, its_profile in made.values() for text in its_profile.leaves_out))
    table = {"spindle": "comparison", "version": 1} | to_json(comparison) | {"leaves_out": leaves_out}
    if output is not None:
        write_atomically(output, json.dumps(table, indent=1) + "\n")
    if figure is not None:
        panels = [(planner, *made[planner]) for planner in (REFERENCE, "pipeline") if planner in made]
        drawn = pipeline_figure([(title, plan, its_profile.graph) for title, plan, its_profile in panels])
        write_atomically(figure, drawn)
    if as_json:
        show_json(table)
    else:
        show(pipelines_table(comparison, REFERENCE), *refusal_lines(comparison), *left_out(leaves_out))
    for path in (output, figure):
        if path is not None:
            notice(f"wrote {path}")
