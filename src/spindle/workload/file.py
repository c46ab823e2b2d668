"""Workloads on disk; and the request that makes a training script write its workload."""

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
    """Asks a training script, through an environment variable, to write its workload instead of training."""

    output: Path

    def environment(self) -> dict[str, str]:
        return {_OUTPUT_VARIABLE: str(self.output)}


def workload_request() -> WorkloadRequest | None:
    """The request in this process's environment, if there is one."""
    output = os.environ.get(_OUTPUT_VARIABLE)
    return WorkloadRequest(output=Path(output)) if output else None
