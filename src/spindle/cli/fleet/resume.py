"""`spindle fleet resume`: continue a job that was stopped."""

from __future__ import annotations

from spindle.cli.fleet.options import STORE, JobName, StoreFile


def resume(job: JobName, store: StoreFile = STORE) -> None:
    """Resume a job that `spindle fleet stop` has stopped, from its newest checkpoint.

    Example:

    spindle fleet resume my-job
    """
    from spindle.cli.fleet.request import ask

    already = {phase: f"{job}: is {phase} already" for phase in ("waiting", "starting", "running")}
    ask(store, {"command": "resume", "job": job}, f"{job}: waits for devices", job=job, already=already)
