"""Cross entropies inside a model's forward: detected while its code runs, and split into a total and a count.

A mean over tokens cannot be computed over parts of a batch and averaged, because parts have different numbers of
tokens; its total and its count can be summed.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MEAN, SUM = 1, 2  # reductions, as operators have them
_SIGNATURE = inspect.signature(F.cross_entropy)
_DIVISIONS = (torch.Tensor.div, torch.Tensor.__truediv__, torch.div, torch.true_divide, torch.Tensor.true_divide)


def cross_entropy_parts(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a cross entropy, and the divisor of its mean."""
    total = torch.ops.aten.cross_entropy_loss(logits, target, weight, SUM, ignore_index, label_smoothing)
    if target.is_floating_point():  # probabilities of classes
        return total, torch.tensor(target.numel() // target.shape[1 if target.dim() > 1 else 0], device=target.device)
    counted = target != ignore_index
    return total, counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()


class CrossEntropies(TorchFunctionMode):
    """A context that records the cross entropies computed inside: means and sums in order, and sums that are
    divided."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.results: list[tuple[torch.Tensor, str]] = []  # with their reduction
        self.shapes: list[torch.Size] = []  # of the logits
        self.quotients: list[tuple[torch.Tensor, Any]] = []  # of sums, with their divisor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        if func is F.cross_entropy:
            self.note(result, _bind_arguments(args, kwargs or {}))
        elif (
            func in _DIVISIONS
            and len(args) > 1
            and any(args[0] is total for total, kind in self.results if kind == "sum")
        ):
            self.quotients.append((result, args[1]))
        return result

    def note(self, result: torch.Tensor, given: dict[str, Any]) -> None:
        self.results.append((result, given["reduction"]))
        self.shapes.append(given["input"].shape)


class CrossEntropyFoundError(Exception):
    """Ends a forward whose remainder is not needed."""

    def __init__(self, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.parts = parts


class StopAtCrossEntropy(CrossEntropies):
    """A context whose body ends at the cross entropy of this number, with its total and count."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def note(self, result: torch.Tensor, given: dict[str, Any]) -> None:
        super().note(result, given)
        if len(self.results) == self._number + 1:
            raise CrossEntropyFoundError(
                cross_entropy_parts(
                    given["input"],
                    given["target"],
                    given["weight"],
                    MEAN,
                    given["ignore_index"],
                    given["label_smoothing"],
                )
            )


def _bind_arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
