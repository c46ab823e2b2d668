"""What are we training? Tasks, modules (chains of layers), flows and batch sizes, as values. Knows no machine."""

from spindle.workload.file import WorkloadRequest, read_workload, workload_request, write_workload
from spindle.workload.workload import Call, Layer, LayerCost, Module, Numerics, Parameter, Task, Workload

__all__ = [
    "Call",
    "Layer",
    "LayerCost",
    "Module",
    "Numerics",
    "Parameter",
    "Task",
    "Workload",
    "WorkloadRequest",
    "read_workload",
    "workload_request",
    "write_workload",
]
