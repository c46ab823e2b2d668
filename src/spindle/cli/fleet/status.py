"""`spindle fleet status`: jobs and machines of a live fleet."""

from __future__ import annotations

from typing import Any

from spindle.cli.fleet.options import STORE, StoreFile
from spindle.cli.options import AsJson


def status(store: StoreFile = STORE, as_json: AsJson = False) -> None:
    """Show the jobs of a fleet: where they run, how far they are, why they failed.

    Needs no scheduler; says so if there is none. `spindle fleet explain` says why a job waits. Example:

    spindle fleet status --store fleet.db
    """
    from rich.table import Table

    from spindle.cli.terminal import show, show_json
    from spindle.display import seconds
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        state = latest_state(opened)
        is_up, waits = opened.has_scheduler(), opened.waits()
        newest = {record.job: record for record in opened.attempts()}
        pending = [command.body for command in opened.pending()]
    jobs = [*state.jobs, *state.ended]
    rows: list[dict[str, Any]] = []
    for job in jobs:
        record = newest.get(job.name)
        cell = None if job.allocation is None else job.allocation.cell
        step = int(job.step) if record is None or record.step is None else max(record.step, int(job.step))
        rows.append(
            {
                "job": job.name,
                "phase": job.phase,
                "attempt": job.attempt,
                "cell": "" if cell is None else cell.text,
                "nodes": [share.node for share in job.allocation.nodes] if job.allocation is not None else [],
                "step": job.job.num_steps if job.phase == "completed" and job.job.num_steps else step,
                "num_steps": job.job.num_steps,
                "step_s": record.step_s if record is not None and cell is not None else None,
                "saved_step": None if record is None else record.saved_step,
                "reason": waits.get(job.name) or job.reason,
            }
        )
    if as_json:
        nodes = {name: name not in state.unavailable for name in state.fleet.node_names}
        show_json({"is_running": is_up, "jobs": rows, "nodes": nodes, "num_pending_commands": len(pending)})
        return
    table = Table("job", "phase", "devices", "nodes", "step", "a step takes", "checkpoint", box=None)
    for row in rows:
        length = "" if row["num_steps"] is None else f" of {row['num_steps']}"
        table.add_row(
            row["job"],
            row["phase"],
            row["cell"],
            ", ".join(row["nodes"]),
            f"{row['step']}{length}",
            seconds(row["step_s"]) if row["step_s"] else "",
            "" if row["saved_step"] is None else str(row["saved_step"]),
        )
    show(table) if rows else show("no jobs yet; spindle fleet submit train.py")
    for row in rows:
        if row["reason"] and row["phase"] != "completed":
            show(f"{row['job']}: {row['reason']}")
    away = [name for name in state.fleet.node_names if name in state.unavailable]
    if away:
        show(f"nodes that are lost or drained: {', '.join(away)}")
    if not is_up:
        waiting = f"; {len(pending)} commands wait for it" if pending else ""
        show(f"The scheduler is down: nothing is reallocated (spindle fleet up --store {store}){waiting}.")
