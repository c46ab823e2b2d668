"""`spindle fleet nodes`: what one more node is worth."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import STORE, EventsFile, StoreFile
from spindle.cli.options import AsJson


def nodes(
    events: EventsFile = None,
    at: Annotated[
        float | None,
        typer.Option("--at", metavar="SECONDS", help="Use this time instead of the end.", show_default=False),
    ] = None,
    store: StoreFile = STORE,
    as_json: AsJson = False,
) -> None:
    """Show the price of a device of each kind, and what one more node would add.

    The gain is given in utility, with the upper bound on the utility of all jobs together. Examples:

    spindle fleet nodes

    spindle fleet nodes events.jsonl --at 36000
    """
    from rich.table import Table

    from spindle.artifact import to_json
    from spindle.cli.fleet.replay import state_at
    from spindle.cli.terminal import show, show_json
    from spindle.fleet.explain import node_worths

    worths = node_worths(state_at(events or store, at))
    if as_json:
        show_json({"kinds": [to_json(worth) for worth in worths]})
        return
    table = Table("kind", "devices in a node", "price of a device", "one more node adds", "share", box=None)
    for worth in worths:
        table.add_row(
            worth.kind,
            str(worth.num_devices),
            f"{worth.price:.4g}",
            f"{worth.gain:.4g}",
            f"{100 * worth.share:.2f} %",
        )
    show(table)
