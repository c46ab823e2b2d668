"""Arguments and options that several verbs of `spindle fleet` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="Jobs with their arrivals: a .jsonl of one's own, Arena's sim_trace_1938jobs.csv, or a cluster of "
        "ElasticFlow (.csv).",
        show_default=False,
    ),
]
FleetName = Annotated[
    str,
    typer.Option(
        "--fleet",
        metavar="NAME",
        help="Machines by name (a100x16,l40sx8; arena), or from a .toml file.",
    ),
]
Tables = Annotated[
    Path | None,
    typer.Option(
        "--tables",
        metavar="FOLDER",
        help="Arena's measured step times; for a .csv, unless they are in its folder or in ../arena beside it.",
        show_default=False,
    ),
]
MeasuredProfiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        metavar="KIND=PROFILE.json",
        help="What `spindle profile` measured for the script on devices of a kind. May be given several times.",
        show_default=False,
    ),
]
Load = Annotated[float, typer.Option("--load", help="Of a cluster of ElasticFlow: offered load.", min=0.01)]
Faster = Annotated[float, typer.Option("--faster", metavar="FACTOR", help="Arrivals so many times as fast.", min=0.001)]
PolicyName = Annotated[str, typer.Option("--policy", metavar="NAME", help="Which policy decides.")]
Objective = Annotated[str, typer.Option("--objective", help="jct or throughput.")]
ReallocS = Annotated[
    float | None,
    typer.Option(
        "--reallocation",
        metavar="SECONDS",
        help="What a reallocation costs; unless given, 60 s plus the checkpoint over the storage's bandwidth.",
        min=0,
        show_default=False,
    ),
]
Error = Annotated[float, typer.Option("--error", help="Mean error of estimates (0.1 is 10 %).", min=0)]
LengthError = Annotated[
    float, typer.Option("--length-error", help="Sigma of reported lengths, in the logarithm.", min=0)
]
Failures = Annotated[float, typer.Option("--failures", help="Failures of nodes per hour.", min=0)]
SlowNodes = Annotated[
    float, typer.Option("--slow-nodes", help="Share of nodes that are 1.5 times slower.", min=0, max=1)
]
Seed = Annotated[int, typer.Option("--seed", help="Of everything that is drawn.", min=0)]
Limit = Annotated[
    int | None, typer.Option("--jobs", metavar="N", help="Only the first N jobs.", min=1, show_default=False)
]
EventsFile = Annotated[
    Path,
    typer.Argument(
        metavar="EVENTS",
        help="The store of a live fleet, or events that `spindle fleet simulate --events` wrote.",
        show_default=False,
    ),
]
StoreFile = Annotated[
    Path,
    typer.Option("--store", metavar="FILE", help="The store of the fleet.", envvar="SPINDLE_FLEET", show_envvar=True),
]
STORE = Path("fleet.db")
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The name of a job.", show_default=False)]
