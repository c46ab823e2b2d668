"""`spindle checkpoints`: what has a training saved, and can it be resumed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spindle.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The folder given to spindle.Checkpoints.", show_default=False)
]


def checkpoints(
    folder: Folder,
    check: Annotated[
        bool, typer.Option("--check", metavar="", help="Read every byte, to find damage inside files.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List the checkpoints of a training run, and say which are complete.

    If files of a checkpoint are missing, truncated or damaged, the table says so and the exit code is 1. Example:

    spindle checkpoints runs/a --check
    """
    from spindle.checkpoint import folder_of_step, open_checkpoint, steps_in
    from spindle.cli.terminal import progress_bar, show, show_json
    from spindle.errors import CheckpointError

    folder_of_step(folder)  # an error where there is none
    rows = []
    steps = steps_in(folder)
    with progress_bar("reading checkpoints", len(steps)) as report:
        for number, step in enumerate(steps):
            row: dict[str, object] = {"step": step, "complete": False}
            try:
                checkpoint = open_checkpoint(folder_of_step(folder, step))
                state = checkpoint.state
                row |= {"bytes": checkpoint.num_bytes, "ranks": state.num_ranks, "tasks": list(state.tasks)}
                row |= {"written_s": state.written_s}
                if check:
                    checkpoint.check()
                row["complete"] = True
            except CheckpointError as error:
                row["problem"] = str(error)
            rows.append(row)
            report(number + 1)
    if as_json:
        show_json({"folder": str(folder), "checked": check, "checkpoints": rows})
    else:
        show(_table(rows))
    return 0 if all(row["complete"] for row in rows) else 1


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    from datetime import datetime

    from rich import box
    from rich.table import Table

    from spindle.display import num_bytes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("step", "size", "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("written", no_wrap=True)
    table.add_column("")
    for row in rows:
        written = f"{datetime.fromtimestamp(row['written_s']):%Y-%m-%d %H:%M:%S}" if "written_s" in row else ""
        size = num_bytes(row["bytes"]) if "bytes" in row else ""
        table.add_row(str(row["step"]), size, str(row.get("ranks", "")), written, row.get("problem", "complete"))
    return table
