"""`spindle fleet logs`: the output of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import STORE, JobName, StoreFile


def logs(
    job: JobName,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="The rank whose output is printed.", min=0)] = 0,
    lines: Annotated[
        int | None, typer.Option("--lines", metavar="N", help="Print only the last N lines.", min=1, show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", metavar="", help="Keep printing until the job ends.")
    ] = False,
    store: StoreFile = STORE,
) -> None:
    """Print the output of a job, attempt by attempt.

    Example:

    spindle fleet logs my-job --rank 1 --follow
    """
    import time
    from pathlib import Path

    from spindle.cli.terminal import show_text
    from spindle.errors import InputError
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        path = Path(opened.submission(job).logs) / f"rank-{rank}.log"
        if not path.exists() and not follow:
            raise InputError(f"{path}: job {job!r} has no output of rank {rank} yet")
        position = 0
        while True:
            is_over = not follow or latest_state(opened).find(job) is None
            if path.exists():
                with path.open("rb") as file:
                    file.seek(position)
                    data = file.read()
                    position += len(data)
                text = data.decode(errors="replace")
                if lines is not None:
                    text, lines = "".join(text.splitlines(keepends=True)[-lines:]), None
                if text:
                    show_text(text)
            if is_over:
                return
            time.sleep(0.5)
