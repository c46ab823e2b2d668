"""`spindle fleet stop`: suspend a job."""

from __future__ import annotations

from spindle.cli.fleet.options import STORE, JobName, StoreFile


def stop(job: JobName, store: StoreFile = STORE) -> None:
    """Stop a job after a checkpoint; `spindle fleet resume` continues it.

    Example:

    spindle fleet stop my-job
    """
    from spindle.cli.fleet.request import ask

    already = {"suspended": f"{job}: is stopped already"}
    ask(store, {"command": "stop", "job": job}, f"{job}: stops after a checkpoint", job=job, already=already)
