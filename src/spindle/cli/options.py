"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST_LANES = 4  # the default of `spindle.Planning`
_MULTIMODAL = "Options for multimodal models, planned batch by batch (vlm-s, t2v-s, omni-a, ...)"

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="What to plan: a training script (train.py, or 'train.py --its-own options'), which runs up to its first "
        "fit without weights and without a GPU; the name of a recipe; a profile.json that `spindle profile` wrote, "
        "which includes its machines; or a .json file with a workload, or with ops and their times.",
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
        help="How many devices, of no particular kind, for ops with given times.",
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="The machines: a name (a800x32) or a .toml file.", show_default=False
    ),
]
Assumptions = Annotated[
    bool, typer.Option("--assumptions", metavar="", help="List what the predicted times leave out.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object instead of tables.")]
Seed = Annotated[
    int, typer.Option("--seed", help="Random seed of the search: the same seed gives the same plan.", min=0)
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Stop the search after this time. The plan records that it was cut short.",
        min=0,
        show_default=False,
    ),
]
Evaluations = Annotated[
    int | None,
    typer.Option(
        "--evaluations",
        metavar="N",
        help="The largest number of schedules that the search tries.",
        min=1,
        show_default=False,
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        metavar="N",
        help="Microbatches per step; 32 by default.",
        min=1,
        show_default=False,
        rich_help_panel=_MULTIMODAL,
    ),
]
BatchSeed = Annotated[
    int | None,
    typer.Option(
        "--batch-seed",
        help="Seed of the batch, which is drawn to resemble the paper's data; 0 by default.",
        min=0,
        show_default=False,
        rich_help_panel=_MULTIMODAL,
    ),
]
Mix = Annotated[
    str | None,
    typer.Option(
        "--mix",
        metavar="IMAGES:TEXT",
        help="The ratio of image tokens to text tokens, for omni recipes; 5:5 by default.",
        show_default=False,
        rich_help_panel=_MULTIMODAL,
    ),
]
Samples = Annotated[
    Path | None,
    typer.Option(
        "--samples",
        metavar="LENGTHS.jsonl",
        help="Use the lengths of real samples, one JSON object per line, instead of drawn ones.",
        show_default=False,
        rich_help_panel=_MULTIMODAL,
    ),
]
