"""The comparison of a run with one plain PyTorch process that all tests share.

The error of a tensor is ‖ours − reference‖ / max(‖reference‖, 1e-3·‖all references‖/√(number of tensors)). A NaN on
either side, a missing value or another shape is never close.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

LOSS_FLOOR = 1e-3  # smaller losses are compared absolutely
MISSING = math.inf  # the error of a value that only one side has, or that has another shape


@dataclass(kw_only=True)
class Comparison:
    """The largest error of each kind of value ("loss", "gradient", "parameter", "buffer"), and which value has it."""

    adam_learning_rate: float | None = None  # if set, errors of parameters have an absolute floor of 1e-6 times it
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)
    compared: dict[str, set[str]] = field(default_factory=dict)
    expected: dict[str, set[str]] = field(default_factory=dict)  # what the reference has, here or on another rank

    def add(self, kind: str, name: str, error: float) -> None:
        self.compared.setdefault(kind, set()).add(name)
        self.expected.setdefault(kind, set()).add(name)
        self.largest[kind] = worse(self.largest.get(kind, (0.0, "")), (error, name))

    def add_losses(self, ours: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]) -> None:
        """Compare the losses of every step by task."""
        if len(ours) != len(reference):
            self.add("loss", f"{len(ours)} steps, where one process has {len(reference)}", MISSING)
        for step, (losses, references) in enumerate(zip(ours, reference, strict=False)):
            for task in losses.keys() | references.keys():
                error = MISSING
                if task in losses and task in references:
                    error = abs(losses[task] - references[task]) / max(abs(references[task]), LOSS_FLOOR)
                self.add("loss", f"{task} in step {step}", error)

    def add_tensors(
        self, kind: str, ours: Mapping[str, torch.Tensor | None], reference: Mapping[str, Any], where: str = ""
    ) -> None:
        """Compare tensors by name. `ours` has those of this rank; None stands for no gradient."""
        present = {name: tensor.detach().cpu().double() for name, tensor in reference.items() if tensor is not None}
        floor = norm_floor(list(present.values()))
        self.expected.setdefault(kind, set()).update(name + where for name in present)
        for name, tensor in ours.items():
            if tensor is None and name not in present:
                continue
            error = MISSING
            if tensor is not None and name in present and tensor.shape == present[name].shape:
                error = self._tensor_error(kind, tensor.detach().cpu().double(), present[name], floor)
            self.add(kind, name + where, error)

    def _tensor_error(self, kind: str, ours: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
        error = relative_error(ours, reference, floor)
        if self.adam_learning_rate is not None and kind != "gradient" and ours.numel():
            # Adam turns gradients that are zero in exact arithmetic (a key's bias) into steps.
            absolute = 1e-9 * float((ours - reference).abs().max()) / (1e-6 * self.adam_learning_rate)
            return error if math.isnan(error) else min(error, absolute)
        return error


def worse(first: tuple[float, str], second: tuple[float, str]) -> tuple[float, str]:
    """The pair with the larger error; a NaN is larger than any number."""
    return max(first, second, key=lambda pair: (math.isnan(pair[0]), pair[0]))


def norm_floor(tensors: Sequence[torch.Tensor]) -> float:
    """The norm below which the error of a tensor is not relative to its own norm."""
    if not tensors:
        return 0.0
    return 1e-3 * float(torch.stack([tensor.norm() for tensor in tensors]).norm()) / len(tensors) ** 0.5


def relative_error(ours: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    difference, scale = float((ours - reference).norm()), max(float(reference.norm()), floor)
    if scale == 0.0:  # all references are zero
        return 0.0 if difference == 0.0 else math.nan if math.isnan(difference) else math.inf
    return difference / scale


def assert_close(
    comparisons: Sequence[Comparison], limit: float = 1e-9, kinds: Sequence[str] = ("loss", "parameter")
) -> None:
    """Every value that the reference has was compared on some rank, and no error reaches the limit."""
    for rank, comparison in enumerate(comparisons):
        for kind, (error, name) in comparison.largest.items():
            assert error < limit, f"rank {rank}: {kind} {name}: error {error:.3g}, expected less than {limit:g}"
    for kind in {*kinds, *(kind for comparison in comparisons for kind in comparison.expected)}:
        compared = set[str]().union(*(comparison.compared.get(kind, ()) for comparison in comparisons))
        expected = set[str]().union(*(comparison.expected.get(kind, ()) for comparison in comparisons))
        assert compared == expected, f"{kind}: not compared on any rank: {sorted(expected - compared)}"
        assert compared or kind not in kinds, f"no {kind} was compared"
