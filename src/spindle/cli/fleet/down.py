"""`spindle fleet down`: end a live fleet."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import STORE, StoreFile


def down(
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", help="How long a job may take to save a checkpoint.", min=0),
    ] = 30.0,
    store: StoreFile = STORE,
) -> None:
    """Stop all jobs after a checkpoint, and end the machines that `up` started. The next `up` resumes the jobs.

    Also works if the scheduler is not running. Example:

    spindle fleet down
    """
    import time

    from spindle.cli.terminal import show
    from spindle.errors import FleetError
    from spindle.fleet.ask import request
    from spindle.fleet.live import LiveFleet
    from spindle.fleet.machines import open_engine
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        if opened.has_scheduler():
            if not request(opened, {"command": "down", "grace_s": grace}, limit_s=grace + 120):
                raise FleetError(f"{store}: its scheduler does not answer; end it (Ctrl-C), and run this again")
            while opened.has_scheduler():  # it ends the machines
                time.sleep(0.05)
        else:
            opened.take_lock()
            engine = open_engine(opened)
            live = LiveFleet(store=opened, engine=engine, grace_s=grace)
            try:
                live.recover()
                live.shut_down()
            finally:
                live.close()
                engine.close(end_machines=True)
    show("the fleet is down; `spindle fleet up` resumes its jobs")
