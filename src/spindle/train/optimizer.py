"""The user's optimizer over what one rank holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import nn

from spindle.errors import TrainingError

NamedParameters = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]


def optimizer_of(make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
    """The user's optimizer over what this rank holds and trains; none where that is nothing."""
    if not named:
        return None
    optimizer = make(list(named))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainingError(f"Trainer(optimizer=...) must return a torch optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise TrainingError(
            f"{type(optimizer).__name__} updates all parameters together, but each rank holds only some; use an "
            "optimizer that updates each parameter by itself (SGD, Adam, AdamW, ...)"
        )
    mine = {id(parameter) for _, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in mine:
                raise TrainingError(
                    "Trainer(optimizer=...) made an optimizer of parameters that were not given to it; use the "
                    "names and parameters of its argument: each rank holds only some"
                )
    return optimizer
