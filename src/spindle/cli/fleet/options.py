"""Arguments and options that several verbs of `spindle fleet` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="The jobs with their arrival times: your own .jsonl file, Arena's sim_trace_1938jobs.csv, or a cluster of "
        "ElasticFlow (.csv).",
        show_default=False,
    ),
]
FleetName = Annotated[
    str,
    typer.Option(
        "--fleet",
        metavar="NAME",
        help="The machines: a name (a100x16,l40sx8 or arena) or a .toml file.",
    ),
]
Tables = Annotated[
    Path | None,
    typer.Option(
        "--tables",
        metavar="FOLDER",
        help="Arena's measured step times, for a .csv trace. By default, in the folder of the trace or in ../arena.",
        show_default=False,
    ),
]
MeasuredProfiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        metavar="KIND=PROFILE.json",
        help="A profile of the script that `spindle profile` measured on this kind of device. Can be repeated.",
        show_default=False,
    ),
]
Load = Annotated[float, typer.Option("--load", help="The offered load, for a cluster of ElasticFlow.", min=0.01)]
Faster = Annotated[
    float, typer.Option("--faster", metavar="FACTOR", help="Let jobs arrive this many times as fast.", min=0.001)
]
PolicyName = Annotated[str, typer.Option("--policy", metavar="NAME", help="The scheduling policy.")]
Objective = Annotated[
    str, typer.Option("--objective", help="What to optimise: jct (job completion time) or throughput.")
]
ReallocS = Annotated[
    float | None,
    typer.Option(
        "--reallocation",
        metavar="SECONDS",
        help="How long a reallocation takes. By default, 60 s plus the time to store the checkpoint.",
        min=0,
        show_default=False,
    ),
]
Error = Annotated[float, typer.Option("--error", help="Mean error of estimated step times (0.1 is 10 %).", min=0)]
LengthError = Annotated[
    float, typer.Option("--length-error", help="Error of reported job lengths, as the sigma of their logarithm.", min=0)
]
Failures = Annotated[float, typer.Option("--failures", help="Node failures per hour.", min=0)]
SlowNodes = Annotated[
    float, typer.Option("--slow-nodes", help="Share of nodes that are 1.5 times slower.", min=0, max=1)
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of the simulation.", min=0)]
Limit = Annotated[
    int | None, typer.Option("--jobs", metavar="N", help="Only the first N jobs.", min=1, show_default=False)
]
EVENTS_HELP = "The store of a live fleet, or the events that `spindle fleet simulate --events` wrote."
EventsFile = Annotated[Path | None, typer.Argument(metavar="[EVENTS]", help=EVENTS_HELP, show_default=False)]
StoreFile = Annotated[
    Path,
    typer.Option("--store", metavar="FILE", help="The store of the fleet.", envvar="SPINDLE_FLEET", show_envvar=True),
]
STORE = Path("fleet.db")
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The name of a job.", show_default=False)]
