"""What does the user write? `module`, `task` and `mean`, recorded and bound to a workload. The Trainer is to come."""

from spindle.train.bind import Bound, bind, code_of
from spindle.train.record import RecordedCall, RecordedTask, record
from spindle.train.task import Mean, ModuleHandle, TaskDefinition, mean, module, task

__all__ = [
    "Bound",
    "Mean",
    "ModuleHandle",
    "RecordedCall",
    "RecordedTask",
    "TaskDefinition",
    "bind",
    "code_of",
    "mean",
    "module",
    "record",
    "task",
]
