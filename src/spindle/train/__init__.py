"""What a user's script imports, `module`, `task`, `mean` and the `Trainer`; and how tasks are recorded, traced, planned
and trained."""

from spindle.train.bind import BoundWorkload, bind, code_of, trace_all
from spindle.train.callbacks import Callback, EvaluationRecord, StepRecord
from spindle.train.config import Checkpoints, Planning
from spindle.train.packed import Packed, packed
from spindle.train.probe import probe
from spindle.train.record import record
from spindle.train.result import FitResult
from spindle.train.state import TrainState
from spindle.train.sweep import Trial
from spindle.train.task import ModuleHandle, TaskDefinition, mean, module, result, task
from spindle.train.trainer import Trainer
from spindle.train.writers import JSONLines, MLflow, TensorBoard, WeightsAndBiases

__all__ = [
    "BoundWorkload",
    "Callback",
    "Checkpoints",
    "EvaluationRecord",
    "FitResult",
    "JSONLines",
    "MLflow",
    "ModuleHandle",
    "Packed",
    "Planning",
    "StepRecord",
    "TaskDefinition",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "Trial",
    "WeightsAndBiases",
    "bind",
    "code_of",
    "mean",
    "module",
    "packed",
    "probe",
    "record",
    "result",
    "task",
    "trace_all",
]
