"""`spindle fleet submit`: a job for a live fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.fleet.options import STORE, MeasuredProfiles, StoreFile
from spindle.cli.options import AsJson


def submit(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...",
            help="A training script with its arguments; with --time, any program with its own.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", help="What the job is called; the script's name unless given.", show_default=False)
    ] = "",
    team: Annotated[str, typer.Option("--team", help="Whose quota it uses.", show_default=False)] = "",
    priority: Annotated[str, typer.Option("--priority", help="low, normal, high or urgent.")] = "normal",
    deadline: Annotated[
        str,
        typer.Option(
            "--deadline", metavar="TIME", help="When it must be done: 6h, 90m, or 2030-01-31T18:00.", show_default=False
        ),
    ] = "",
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="A,B", help="Kinds of devices that it accepts.", show_default=False)
    ] = "",
    count: Annotated[
        str, typer.Option("--count", metavar="1-16", help="How many devices it accepts.", show_default=False)
    ] = "",
    times: Annotated[
        list[str] | None,
        typer.Option(
            "--time",
            metavar="KIND:N=SECONDS",
            help="A step time, for any command: on N devices of a kind. May be given several times.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="How many steps such a command has.", show_default=False)
    ] = None,
    profiles: MeasuredProfiles = None,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", metavar="FOLDER", help="Where its ranks write their output.", show_default=False),
    ] = None,
    store: StoreFile = STORE,
    as_json: AsJson = False,
) -> None:
    """Submit a training script to a fleet. Options go before SCRIPT; everything after it is passed to the script.

    The script runs up to its first fit, without weights, for its workload: then every kind and number of devices is
    estimated without running it, from a roofline or from what was measured (--profile). It should save checkpoints
    (`Trainer(checkpoints=...)`), from which it resumes when it is moved. With a deadline, the answer says whether that
    will be met. Examples:

    spindle fleet submit train.py --lr 1e-4

    spindle fleet submit --team vision --priority high --kinds a100,h100 --count 1-16 --deadline 6h train.py
    """
    import os

    from spindle.artifact import to_json
    from spindle.cli.fleet.inputs import measured_profiles
    from spindle.cli.fleet.submission import described_job, prepare
    from spindle.cli.terminal import notice, show, show_json
    from spindle.fleet.live import request
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        job = described_job(
            opened,
            command,
            name=name,
            team=team,
            priority=priority,
            deadline=deadline,
            kinds=kinds,
            count=count,
            steps=steps,
        )
        folder = logs or Path(f"{store}.d") / "logs" / job.name
        prepared = prepare(
            opened,
            job,
            command,
            times or [],
            str(folder.absolute()),
            os.getcwd(),
            measured_profiles(profiles, opened.fleet),
        )
        body = {
            "command": "submit",
            "job": to_json(prepared.job),
            "estimates": to_json(prepared.estimates),
            "submission": to_json(prepared.submission),
            "plans": to_json(prepared.plans),
        }
        is_done = request(opened, body)
        if as_json:
            show_json({"job": job.name, "is_accepted": is_done, "deadline": prepared.promise})
            return
        show(f"{job.name}: submitted" + (f"; {prepared.promise}" if prepared.promise else ""))
        if not is_done:
            notice(f"the scheduler of {store} is down; the job is taken up when it is back (spindle fleet up)")
