"""Train several multimodal tasks together without leaving GPUs idle: plan, rehearse in simulation, run.

What a training script uses:

- `module(name, nn_module)` registers a module under a name that all tasks share.
- `@task(batch_size=...)` turns a function from a batch to its loss into a task; `mean(total, count)` is a loss that
  ranks sum before dividing, and `result(loss, accuracy=...)` a loss with metrics.
- `packed(values, lengths)` is an entry of a batch in which samples have different numbers of rows (patches of images).
- `Trainer(tasks, optimizer=...)` plans and trains them; `Planning(...)` controls how, `Checkpoints(...)` where and when
  state is saved. `Trainer.fit` returns a `FitResult`, `Trainer.train_state` a `TrainState`.
- `Trainer([Trial(task, optimizer), ...])` trains a sweep: trials over the same batches, which share frozen modules.
- `data.balanced(sources, max_tokens=...)` draws, packs and balances samples of several datasets.
- `hf.options(training_arguments)` converts the `TrainingArguments` of a script for `transformers.Trainer`.
- A `Callback` is called after planning, after each step (`StepRecord`) and evaluation (`EvaluationRecord`), and at the
  end of a fit. `JSONLines`, `TensorBoard`, `WeightsAndBiases` and `MLflow` are callbacks that log.

They need torch, which planning and simulating do not, so they are imported on first use. Errors that a user can cause
are in `spindle.errors`. Everything else is private. `docs/interface.md` describes all of it on one page.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spindle import data as data
    from spindle import hf as hf
    from spindle.train import (
        Callback,
        Checkpoints,
        EvaluationRecord,
        FitResult,
        JSONLines,
        MLflow,
        Planning,
        StepRecord,
        TensorBoard,
        Trainer,
        TrainState,
        Trial,
        WeightsAndBiases,
        mean,
        module,
        packed,
        result,
        task,
    )

__all__ = [
    "Callback",
    "Checkpoints",
    "EvaluationRecord",
    "FitResult",
    "JSONLines",
    "MLflow",
    "Planning",
    "StepRecord",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "Trial",
    "WeightsAndBiases",
    "__version__",
    "mean",
    "module",
    "packed",
    "result",
    "task",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("data", "hf"):
        return import_module(f"spindle.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'spindle' has no attribute {name!r}")
    if find_spec("torch") is None:
        raise ImportError(f"spindle.{name} needs torch: pip install 'spindle-train[train]'")
    from spindle.launch.folders import avoid_foreign_inductor_cache

    avoid_foreign_inductor_cache()
    return getattr(import_module("spindle.train"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
