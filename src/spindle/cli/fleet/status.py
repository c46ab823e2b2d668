"""`spindle fleet status`: jobs and machines of a live fleet."""

from __future__ import annotations

from typing import Any

from spindle.cli.fleet.options import STORE, StoreFile
from spindle.cli.options import AsJson


def status(store: StoreFile = STORE, as_json: AsJson = False) -> None:
    """Show the jobs of a fleet: where they run, how far they are, and why they failed.

    Also works if the scheduler is not running, and says so. `spindle fleet explain` says why a job waits. Example:

    spindle fleet status --store fleet.db
    """
    from rich.table import Table

    from spindle.cli.terminal import show, show_json
    from spindle.display import count_of, seconds
    from spindle.fleet.event_log import latest_state
    from spindle.fleet.store import Store

    with Store.open(store) as opened:
        state = latest_state(opened)
        is_up, waits = opened.has_scheduler(), opened.waits()
        records = opened.attempts()
        newest = {record.job: record for record in records}
        saving = {record.job for record in records if record.checkpoints}
        begun = {record.job for record in records if record.ready_s is not None}
        pending = [command.body for command in opened.pending()]
        unsaved = [
            job.name for job in state.jobs if job.name in begun - saving and opened.submission(job.name).is_script
        ]
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
                "saved_step": record.saved_step if record is not None and job.name in saving else None,
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
            last = "" if row["phase"] == "failed" or row["job"] in waits else "last failure: "
            show(f"{row['job']}: {last}{row['reason']}")
    for name in unsaved:
        show(f"{name}: saves no checkpoints on disk (Trainer(checkpoints=...)); after a move or a stop it begins anew")
    unavailable = [name for name in state.fleet.node_names if name in state.unavailable]
    is_down = not is_up and len(unavailable) == len(state.fleet.node_names)
    if unavailable and not is_down:
        show(f"nodes that are lost or drained: {', '.join(unavailable)}")
    for share in state.occupied:
        show(f"{share.node}: {count_of(share.num_devices, 'device')} held by others")
    if not is_up:
        waiting = f"; {count_of(len(pending), 'command')} waiting for it" if pending else ""
        what = "The fleet is down" if is_down else "The scheduler is down: nothing is reallocated"
        show(f"{what} (spindle fleet up --store {store}){waiting}.")
