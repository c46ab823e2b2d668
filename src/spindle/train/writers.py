"""Callbacks that write records to files and trackers: JSON lines, TensorBoard, Weights & Biases, MLflow.

They run on rank 0. Several can be given to one Trainer. Their libraries are imported when they are made.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from spindle.errors import TrainingError
from spindle.plan import Plan
from spindle.train.callbacks import Callback, EvaluationRecord, StepRecord
from spindle.train.result import FitResult

_FIELDS = (
    "grad_norm",
    "loss_scale",
    "step_s",
    "predicted_s",
    "samples_per_s",
    "tokens_per_s",
    "mfu",
    "idle",
    "peak_bytes",
)
MAX_PENDING_METRICS = 1000  # how many steps MLflow may lag behind before a step waits for it


def step_scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a step by tag, without those that are not known."""
    scalars = {
        "loss": record.loss,
        **{f"losses/{task}": loss for task, loss in record.losses.items()},
        **record.metrics,
    }
    scalars |= {f"lr/{group}": rate for group, rate in record.learning_rates.items()}
    scalars |= {f"grad_norm/{trial}": norm for trial, norm in record.grad_norms.items()}
    scalars |= {name: getattr(record, name) for name in _FIELDS if getattr(record, name) is not None}
    return scalars


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    scalars = {f"losses/{task}": loss for task, loss in record.losses.items()} | dict(record.metrics)
    return {f"{'evaluate_ema' if record.ema else 'evaluate'}/{tag}": value for tag, value in scalars.items()}


class Writer(Callback):
    """Abstract base class of callbacks that write every `every`-th step, and all evaluations and plans, on rank 0."""

    rank_0_only = True

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise TrainingError(f"{type(self).__name__}(every={every}): must be at least 1")
        self._every = every
        self._next_step = 0

    def on_plan(self, plan: Plan) -> None:
        self.write_plan(self._next_step, plan)

    def on_step(self, record: StepRecord) -> None:
        self._next_step = record.step + 1
        if record.step % self._every == 0:
            self.write(record.step, step_scalars(record))

    def on_evaluate(self, record: EvaluationRecord) -> None:
        self.write(record.step, evaluation_scalars(record))

    def on_end(self, result: FitResult | None) -> None:
        self.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        raise NotImplementedError

    def write_plan(self, step: int, plan: Plan) -> None:
        """Write that a plan was made before this step or a later one."""

    def flush(self) -> None:
        """Write what is still in memory. The next fit may bring more."""


class JSONLines(Writer):
    """Appends one line to a file for every record, with `time` in seconds since the epoch, `step`, and the numbers of
    the record."""

    def __init__(self, path: Path | str, *, every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._file: IO[str] | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._append({"step": step, **{tag: value if math.isfinite(value) else None for tag, value in scalars.items()}})

    def write_plan(self, step: int, plan: Plan) -> None:
        self._append({"step": step, "plan": str(plan.planner), "predicted_s": plan.makespan_s})

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({"time": round(time.time(), 3), **entry}) + "\n")
        self._file.flush()  # so that a job that is killed keeps its lines

    def flush(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(Writer):
    """Writes event files for TensorBoard into a folder."""

    def __init__(self, folder: Path | str, *, every: int = 1) -> None:
        super().__init__(every)
        _require("tensorboard", "TensorBoard", "tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None

    def _event_writer(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder), flush_secs=10)
        return self._writer

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # all numbers in one event, whereas `SummaryWriter.add_scalar` makes an event of each
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(step, Summary(value=values))

    def write_plan(self, step: int, plan: Plan) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, text_pb("plan", repr(plan)))

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._event_writer().add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None  # the next fit starts another file in the same folder


class WeightsAndBiases(Writer):
    """Logs to a Weights & Biases run, on rank 0: to a run that the script has started, or to one that
    `wandb.init(**options)` starts with the first record."""

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        _require("wandb", "WeightsAndBiases", "wandb")
        self._options = options
        self._run: Any = None

    def _current_run(self) -> Any:
        import wandb

        if self._run is None:
            self._run = wandb.run if wandb.run is not None else wandb.init(**self._options)
            # evaluations have the number of a step that may be logged already
            self._run.define_metric("trainer/step")
            self._run.define_metric("*", step_metric="trainer/step")
        return self._run

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._current_run().log({"trainer/step": step, **scalars})

    def write_plan(self, step: int, plan: Plan) -> None:
        self._current_run().config.update({"plan": repr(plan)}, allow_val_change=True)


class MLflow(Writer):
    """Logs to an MLflow run, on rank 0: to the active run, or to one that `mlflow.start_run(**options)` starts with the
    first record."""

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        _require("mlflow", "MLflow", "mlflow")
        self._options, self._run_id = options, ""
        self._client: Any = None
        self._pending: deque[Any] = deque()  # metrics are sent in the background, by several threads, in any order

    def _start(self) -> None:
        import mlflow

        if self._client is None:
            run = mlflow.active_run() or mlflow.start_run(**self._options)
            self._client, self._run_id = mlflow.MlflowClient(), run.info.run_id

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._start()
        # Not `mlflow.log_metrics`: it first reads the run with all its metrics, while earlier ones are being written.
        now_ms = round(1e3 * time.time())
        metrics = [Metric(tag, value, now_ms, step) for tag, value in scalars.items()]
        self._pending.append(self._client.log_batch(self._run_id, metrics, synchronous=False))
        if len(self._pending) > MAX_PENDING_METRICS:
            self._pending.popleft().wait()

    def write_plan(self, step: int, plan: Plan) -> None:
        self._start()
        self._client.set_tag(self._run_id, "plan", repr(plan))

    def flush(self) -> None:
        while self._pending:
            self._pending.popleft().wait()


def _require(library: str, writer: str, extra: str) -> None:
    """Raise an error that says how to install a missing library, before anything is measured."""
    if find_spec(library) is None:
        raise ImportError(f"spindle.{writer} needs {library}: pip install 'spindle-train[{extra}]'")
