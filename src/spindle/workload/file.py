"""Workloads as files, so that what a training script trains can be asked for and planned elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spindle.artifact import read_artifact, write_artifact
from spindle.workload.workload import Workload

KIND = "workload"
_OUTPUT_VARIABLE = "SPINDLE_WORKLOAD"


def write_workload(path: Path, workload: Workload) -> None:
    write_artifact(path, KIND, workload)


def read_workload(path: Path) -> Workload:
    return read_artifact(path, KIND, Workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """Asks a training script, through its environment, to write what it would train, and neither measure nor train."""

    output: Path

    def environment(self) -> dict[str, str]:
        return {_OUTPUT_VARIABLE: str(self.output)}


def workload_request() -> WorkloadRequest | None:
    """What this process is asked for, if anything."""
    output = os.environ.get(_OUTPUT_VARIABLE)
    return WorkloadRequest(output=Path(output)) if output else None
