"""Train several multimodal tasks together without leaving GPUs idle: plan, rehearse in simulation, run.

`spindle.module`, `spindle.task`, `spindle.mean` and `spindle.Trainer` are what a training script uses. They need torch,
which planning and simulating do not, so they are imported when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spindle.train.task import mean, module, task
    from spindle.train.trainer import Trainer

__all__ = ["Trainer", "__version__", "mean", "module", "task"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'spindle' has no attribute {name!r}")
    if find_spec("torch") is None:
        raise ImportError(f"spindle.{name} needs torch: pip install 'spindle-train[train]'")
    return getattr(import_module("spindle.train"), name)
