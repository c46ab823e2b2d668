"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="An abstract graph (.json with ops and their times), a workload (.json), the name of a recipe, a "
        "profile (.json) that `spindle profile` wrote, which brings its machines, or a training script (train.py, or "
        "'train.py --its-own options'), which runs up to its first fit, without weights and without a GPU.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN.json", help="A plan that `spindle plan` wrote.", show_default=False)
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        metavar="N",
        help="A number of devices of no particular kind, for an abstract graph.",
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="Machines by name (a800x32) or from a .toml file.", show_default=False
    ),
]
Assumptions = Annotated[bool, typer.Option("--assumptions", metavar="", help="List what these times leave out.")]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object instead of tables.")]
Seed = Annotated[
    int, typer.Option("--seed", help="Random seed of the search: the same seed gives the same plan.", min=0)
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="End the search after this long; the plan records that it was cut short.",
        min=0,
        show_default=False,
    ),
]
Evaluations = Annotated[
    int | None,
    typer.Option(
        "--evaluations", metavar="N", help="How many schedules the search may try.", min=1, show_default=False
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        metavar="N",
        help="Microbatches per iteration of a multimodal model; 32 by default.",
        min=1,
        show_default=False,
    ),
]
BatchSeed = Annotated[
    int | None,
    typer.Option(
        "--batch-seed",
        help="Seed of the batch of a multimodal model, drawn to resemble the paper's data; 0 by default.",
        min=0,
        show_default=False,
    ),
]
Mix = Annotated[
    str | None,
    typer.Option(
        "--mix",
        metavar="IMAGES:TEXT",
        help="Of omni recipes: tokens of images to tokens of text, 5:5 unless given.",
        show_default=False,
    ),
]
Samples = Annotated[
    Path | None,
    typer.Option(
        "--samples",
        metavar="LENGTHS.jsonl",
        help="For a multimodal model: lengths of real samples, one JSON object per line, instead of drawn ones.",
        show_default=False,
    ),
]
