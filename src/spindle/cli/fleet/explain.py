"""`spindle fleet explain`: why a job waits, or why it has these devices."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import EventsFile
from spindle.cli.options import AsJson


def explain(
    events: EventsFile,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The name of a job.", show_default=False)],
    at: Annotated[
        float | None,
        typer.Option("--at", metavar="SECONDS", help="At this time instead of the end.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a job waits, or why it has these devices.

    Per cell what it is worth, what it costs at current prices, and the jobs that set the price; then what would help.
    Example:

    spindle fleet simulate jobs.jsonl --fleet a100x16 --events events.jsonl

    spindle fleet explain events.jsonl my-job --at 36000
    """
    from rich.table import Table

    from spindle.artifact import to_json
    from spindle.cli.fleet.replay import state_at
    from spindle.cli.terminal import show, show_json
    from spindle.display import seconds
    from spindle.fleet.explain import explain_job

    explanation = explain_job(state_at(events, at), job)
    if as_json:
        show_json(to_json(explanation))
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
    show(f"{explanation.job} is {explanation.phase}: {explanation.reason}.", table)
    if explanation.helps:
        show("What would help:", *(f"- {text}" for text in explanation.helps))
