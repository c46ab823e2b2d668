"""Determine by trial, on small parameters, whether the user's optimizer can update parts of parameters on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from spindle.program import Slice
from spindle.run import slice_of
from spindle.train.optimizer import MakeOptimizer, Named, optimizer_of

_TRIED_SIZE, _TRIED_STEPS, _TRIED_ERROR = 4, 2, 1e-6
_MOVED = "how far it moved"


def why_not_sharded(make: MakeOptimizer, named: Sequence[Named]) -> str | None:
    """Why parts of parameters cannot be updated separately; None if they can.

    The optimizer is tried on small parameters under the user's names, whole and in two parts. Anything that it does
    only to large parameters (8-bit states, in blocks) is not detected.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, list[torch.Tensor]] = {}  # an initial value, and gradients
    for name, parameter in named:
        shape = [min(size, _TRIED_SIZE) for size in parameter.shape]
        values = torch.randn((1 + _TRIED_STEPS, *shape), generator=generator, dtype=torch.float64)
        drawn[name] = list(values.to(parameter.device))
    parts: dict[str, list[tuple[Slice, dict[str, Any]]]] = {}
    try:
        whole = _updates_and_state(make, drawn)
        for half in range(2):
            halves = {name: _half(tuple(values[0].shape), half) for name, values in drawn.items()}
            values_of_halves = {
                name: [slice_of(value, halves[name]) for value in values]
                for name, values in drawn.items()
                if halves[name].num_elements
            }
            for name, state in _updates_and_state(make, values_of_halves).items():
                parts.setdefault(name, []).append((halves[name], state))
    except Exception as error:
        return f"trying that out failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    for name, some in parts.items():
        joined = _concatenated_state(some)
        if joined.keys() != whole[name].keys() or not all(_agree(joined[key], whole[name][key]) for key in joined):
            return f"it does not update each element of {name} by itself"
    return None


def _half(shape: tuple[int, ...], half: int) -> Slice:
    size = prod(shape)
    return Slice(Slice.whole(shape).box, size * half // 2, size * (half + 1) // 2)


def _concatenated_state(parts: Sequence[tuple[Slice, Mapping[str, Any]]]) -> dict[str, Any]:
    """The state of a parameter from the states of its slices, in order. Tensors with the shapes of the slices are
    concatenated."""
    joined = dict(parts[0][1])
    for key in joined:
        values = [state.get(key) for _, state in parts]
        is_sharded = (
            isinstance(value, torch.Tensor) and tuple(value.shape) == part.shape
            for value, (part, _) in zip(values, parts, strict=True)
        )
        if all(is_sharded):
            joined[key] = torch.cat([value.reshape(-1) for value in values if value is not None])
            joined[key] = joined[key].reshape(parts[0][0].box.lengths)
    return joined


def _updates_and_state(make: MakeOptimizer, drawn: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """How far parameters have moved after some steps, and what the optimizer keeps for them."""
    named = [(name, nn.Parameter(values[0].clone())) for name, values in drawn.items()]
    optimizer = optimizer_of(make, named)
    if optimizer is None:
        return {}
    for step in range(_TRIED_STEPS):
        for name, parameter in named:
            parameter.grad = drawn[name][1 + step].clone()
        optimizer.step()
    return {
        name: {_MOVED: parameter.detach() - drawn[name][0], **optimizer.state.get(parameter, {})}
        for name, parameter in named
    }


def _agree(actual: Any, expected: Any) -> bool:
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return type(actual) is type(expected) and bool(actual == expected)
    if actual.shape != expected.shape or not actual.numel():
        return actual.shape == expected.shape
    return bool((actual.double() - expected.double()).abs().max() <= _TRIED_ERROR * expected.double().abs().max())
