"""`spindle fleet drain`: empty a node."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import STORE, StoreFile


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of a node.", show_default=False)],
    within: Annotated[
        float, typer.Option("--within", metavar="SECONDS", help="How much time the jobs have to leave the node.", min=0)
    ] = 120.0,
    ends: Annotated[bool, typer.Option("--end", metavar="", help="Put the node back into use.")] = False,
    store: StoreFile = STORE,
) -> None:
    """Empty a node: its jobs save checkpoints and leave, and no job starts there.

    Examples:

    spindle fleet drain node3

    spindle fleet drain node3 --end
    """
    from spindle.cli.fleet.request import ask

    text = f"{node}: is used again" if ends else f"{node}: its jobs leave"
    ask(store, {"command": "drain", "node": node, "within_s": within, "ends": ends}, text, node=node)
