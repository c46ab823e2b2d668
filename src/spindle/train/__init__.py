"""What does the user write? `module`, `task`, `mean` and the `Trainer`: tasks recorded, traced, bound and trained."""

from spindle.train.bind import Bound, bind, code_of, trace_all
from spindle.train.config import Checkpoints, Planning
from spindle.train.probe import Facts, probe
from spindle.train.record import RecordedCall, RecordedTask, record
from spindle.train.result import FitResult
from spindle.train.state import TrainState
from spindle.train.task import Mean, ModuleHandle, TaskDefinition, mean, module, task
from spindle.train.trainer import Trainer

__all__ = [
    "Bound",
    "Checkpoints",
    "Facts",
    "FitResult",
    "Mean",
    "ModuleHandle",
    "Planning",
    "RecordedCall",
    "RecordedTask",
    "TaskDefinition",
    "TrainState",
    "Trainer",
    "bind",
    "code_of",
    "mean",
    "module",
    "probe",
    "record",
    "task",
    "trace_all",
]
