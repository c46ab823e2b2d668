"""Workloads on disk, so that one machine can trace a training script and another can plan it."""

from __future__ import annotations

from pathlib import Path

from spindle.artifact import read_artifact, write_artifact
from spindle.workload.workload import Workload

KIND = "workload"


def write_workload(path: Path, workload: Workload) -> None:
    write_artifact(path, KIND, workload)


def read_workload(path: Path) -> Workload:
    return read_artifact(path, KIND, Workload)
