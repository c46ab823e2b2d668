"""Requests of users to the scheduler of a live fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


def ask(
    store: Path,
    body: dict[str, Any],
    done: str,
    *,
    job: str = "",
    node: str = "",
    already: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Ask the scheduler, and print what happens. What can be refused without it is refused at once. `already`: what is
    printed instead where the job is in these phases, and there is nothing to ask for."""
    from spindle.cli.terminal import notice, show
    from spindle.fleet.ask import request
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        if job:
            opened.submission(job)
            known = latest_state(opened).find(job)
            if known is not None and known.phase in already and not opened.pending():
                show(already[known.phase])
                return
        if node:
            opened.fleet.node_number(node)
        if request(opened, body):
            show(done)
        else:
            notice(f"the scheduler of {store} is not running; it does this when it starts (spindle fleet up)")
