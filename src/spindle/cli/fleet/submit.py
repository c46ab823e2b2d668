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
            help="A training script and its arguments; with --time, any program and its arguments.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", help="The name of the job. By default, that of the script.", show_default=False)
    ] = "",
    team: Annotated[str, typer.Option("--team", help="The team whose quota the job uses.", show_default=False)] = "",
    priority: Annotated[str, typer.Option("--priority", help="low, normal, high or urgent.")] = "normal",
    deadline: Annotated[
        str,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="When the job must be done: 6h, 90m, or 2030-01-31T18:00.",
            show_default=False,
        ),
    ] = "",
    kinds: Annotated[
        str,
        typer.Option("--kinds", metavar="A,B", help="The kinds of devices that the job accepts.", show_default=False),
    ] = "",
    count: Annotated[
        str, typer.Option("--count", metavar="1-16", help="How many devices the job accepts.", show_default=False)
    ] = "",
    times: Annotated[
        list[str] | None,
        typer.Option(
            "--time",
            metavar="KIND:N=SECONDS",
            help="The step time of any program on N devices of a kind. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", help="With --time: how many steps the program takes.", show_default=False),
    ] = None,
    profiles: MeasuredProfiles = None,
    sweep: Annotated[
        str,
        typer.Option(
            "--sweep",
            metavar="OPTION=A,B",
            help="Values of an option of the script, which makes a spindle.Trial of each. Passes --lr A B to it.",
            show_default=False,
        ),
    ] = "",
    logs: Annotated[
        Path | None,
        typer.Option("--logs", metavar="FOLDER", help="The folder for the output of its ranks.", show_default=False),
    ] = None,
    store: StoreFile = STORE,
    as_json: AsJson = False,
) -> None:
    """Submit a training script to a fleet. Options go before SCRIPT; everything after SCRIPT is passed to it.

    The script first runs up to its first fit, without weights, to learn its workload. From that, its step time on every
    kind and number of devices is estimated, by a roofline model or from measured layers (--profile). The script should
    save checkpoints (`Trainer(checkpoints=...)`), so that it can be moved. With a deadline, the answer says whether it
    will be met.

    With --sweep, the values of one option become trials of one job. They join a waiting job that differs only in the
    values of this option, if a joint step is predicted to be shorter than the separate steps together. Examples:

    spindle fleet submit train.py --lr 1e-4

    spindle fleet submit --sweep lr=1e-4,3e-4 train.py --steps 1000

    spindle fleet submit --team vision --priority high --kinds a100,h100 --count 1-16 --deadline 6h train.py
    """
    import os

    from spindle.artifact import to_json
    from spindle.cli.fleet.inputs import measured_profiles
    from spindle.cli.fleet.submission import described_job, free_name, prepare
    from spindle.cli.fleet.sweep import Joined, joined, read_sweep
    from spindle.cli.terminal import notice, show, show_json
    from spindle.display import seconds
    from spindle.errors import InputError
    from spindle.fleet.ask import JOINED, ask
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.planning import planner_note
    from spindle.fleet.store import Join, Store

    option = read_sweep(sweep) if sweep else None
    if option is not None and times:
        raise InputError("give --sweep, for a training script, or --time, for any command; not both")

    with Store.open(store) as opened:
        job = described_job(
            opened,
            command if option is None else option.added_to(command),
            name=name or (free_name(opened, Path(command[0]).stem) if option is not None else ""),
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
            option,
        )
        into = "" if option is None else joined(opened, latest_state(opened), prepared)
        body = {
            "command": "submit",
            "job": to_json(prepared.job),
            "estimates": to_json(prepared.estimates),
            "submission": to_json(prepared.submission),
            "plans": to_json(prepared.plans),
        }
        if isinstance(into, Joined):
            both = into.prepared
            join = Join(
                job=both.job.name,
                before=into.before,
                submission=both.submission,
                estimates=both.estimates,
                plans=both.plans,
            )
            body["join"] = to_json(join)
        if note := planner_note(prepared.submission):
            notice(note)
        answer = ask(opened, body)
        is_done = answer is not None
        taken = (answer or "").removeprefix(JOINED) if (answer or "").startswith(JOINED) else ""
        if as_json:
            job_name = taken or job.name
            show_json({"job": job_name, "is_accepted": is_done, "deadline": prepared.promise, "is_joined": bool(taken)})
            return
        if isinstance(into, Joined) and (taken or not is_done):
            both, (first_s, second_s) = into.prepared, into.apart_s
            show(
                f"{both.job.name}: {'takes' if taken else 'is to take'} these trials in, "
                f"--{' '.join(both.submission.sweep)}; on {into.cell.text} a step of all takes {seconds(into.step_s)}, "
                f"those of two jobs {seconds(first_s)} and {seconds(second_s)} (bounds)"
            )
            if not is_done:
                notice(f"the scheduler of {store} is not running; it does this when it starts (spindle fleet up)")
            return
        if isinstance(into, str) and into:
            notice(into)
        show(f"{job.name}: submitted" + (f"; {prepared.promise}" if prepared.promise else ""))
        if not is_done:
            notice(f"the scheduler of {store} is not running; the job waits until it starts (spindle fleet up)")
