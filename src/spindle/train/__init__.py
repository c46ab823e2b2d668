"""What does the user write? `module`, `task`, `mean` and the `Trainer`: tasks recorded, traced, bound and trained."""

from spindle.train.bind import Bound, bind, code_of, trace_all
from spindle.train.callbacks import Callback, EvaluationRecord, StepRecord
from spindle.train.config import Checkpoints, Planning
from spindle.train.packed import Packed, packed
from spindle.train.probe import Facts, probe
from spindle.train.record import RecordedCall, RecordedTask, record
from spindle.train.result import FitResult
from spindle.train.state import TrainState
from spindle.train.task import Mean, ModuleHandle, TaskDefinition, TaskResult, mean, module, result, task
from spindle.train.trainer import Trainer
from spindle.train.writers import JSONLines, MLflow, TensorBoard, WeightsAndBiases

__all__ = [
    "Bound",
    "Callback",
    "Checkpoints",
    "EvaluationRecord",
    "Facts",
    "FitResult",
    "JSONLines",
    "MLflow",
    "Mean",
    "ModuleHandle",
    "Packed",
    "Planning",
    "RecordedCall",
    "RecordedTask",
    "StepRecord",
    "TaskDefinition",
    "TaskResult",
    "TensorBoard",
    "TrainState",
    "Trainer",
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
