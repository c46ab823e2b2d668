"""Requests of users to the scheduler of a live fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def ask(store: Path, body: dict[str, Any], done: str, *, job: str = "", node: str = "") -> None:
    """Ask the scheduler, and print what happens. What can be refused without it is refused at once."""
    from spindle.cli.terminal import notice, show
    from spindle.fleet.live import request
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        if job:
            opened.submission(job)
        if node:
            opened.fleet.node_number(node)
        if request(opened, body):
            show(done)
        else:
            notice(f"the scheduler of {store} is down; this is done when it is back (spindle fleet up)")
