"""`spindle fleet explain`: why a job waits, or why it has these devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.fleet.options import EVENTS_HELP, STORE, StoreFile
from spindle.cli.options import AsJson

_PHASES = {
    "waiting": "is waiting",
    "starting": "is starting",
    "running": "is running",
    "suspended": "is suspended",
    "completed": "has completed",
    "failed": "has failed",
}


def explain(
    events: Annotated[str, typer.Argument(metavar="[EVENTS]", help=EVENTS_HELP, show_default=False)],
    job: Annotated[str, typer.Argument(metavar="JOB", help="The name of a job.", show_default=False)] = "",
    at: Annotated[
        float | None,
        typer.Option("--at", metavar="SECONDS", help="Explain this time instead of the end.", show_default=False),
    ] = None,
    store: StoreFile = STORE,
    as_json: AsJson = False,
) -> None:
    """Explain why a job waits, or why it has these devices.

    For each cell (kind and number of devices): what it is worth to the job, what it costs at current prices, and which
    jobs set the price. Then what would help the job. Examples:

    spindle fleet explain my-job

    spindle fleet simulate jobs.jsonl --fleet a100x16 --events events.jsonl

    spindle fleet explain events.jsonl my-job --at 36000
    """
    from rich.table import Table

    from spindle.artifact import to_json
    from spindle.cli.fleet.replay import state_at
    from spindle.cli.terminal import show, show_json
    from spindle.display import seconds
    from spindle.fleet.explain import explain_job
    from spindle.fleet.planning import planner_note
    from spindle.fleet.store import Store, is_store

    # A single argument is the job.
    path, name = (Path(events), job) if job else (store, events)
    explanation = explain_job(state_at(path, at), name)
    note = ""
    if explanation.cells and is_store(path):
        with Store.open(path) as opened:
            note = planner_note(opened.submission(name))
    if as_json:
        show_json(to_json(explanation) | ({"planner": note} if note else {}))
        return
    table = Table("kind", "devices", "step", "grade", "worth", "cost", "free", "who sets the price", box=None)
    for cell in explanation.cells:
        table.add_row(
            ("> " if cell.is_held else "") + cell.kind,
            str(cell.num_devices),
            seconds(cell.step_s),
            cell.grade,
            f"{cell.utility:.3g}",
            f"{cell.cost:.3g}",
            str(cell.num_free),
            ", ".join(cell.rivals),
        )
    show(
        f"{explanation.job} {_PHASES[explanation.phase]}: {explanation.reason}.",
        *([table] if explanation.cells else []),
    )
    if note:
        show(f"{note[0].upper()}{note[1:]}.")
    if explanation.helps:
        show("What would help:", *(f"- {text}" for text in explanation.helps))
