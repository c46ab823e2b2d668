"""Measure the speed of the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from spindle.measure.timing import median_s
from spindle.run import compute_stream

_REPEATS, _REPEATS_ON_GPU = 3, 15
_MAX_ELEMENTS, _MAX_ELEMENTS_ON_GPU = 1 << 24, 1 << 27  # enough to measure, few enough to copy


def measure_update(
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    update_bytes: int,
) -> float | None:
    """Bytes per second of an optimizer step on copies of some parameters, at `update_bytes` per element.

    None if there is nothing to update, or if the optimizer fails; training will then show the error.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trained:
        return None
    device = next(iter(trained.values())).device
    is_cuda = device.type == "cuda"
    copies: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in trained.items():
        if not copies or elements + parameter.numel() <= (_MAX_ELEMENTS_ON_GPU if is_cuda else _MAX_ELEMENTS):
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad = torch.randn_like(copy)
            copies.append((name, copy))
            elements += parameter.numel()
    try:
        optimizer = make_optimizer(list(copies))
        # Back to back: the host prepares the next step while the GPU runs.
        with torch.cuda.stream(compute_stream()) if is_cuda else nullcontext():
            return elements * update_bytes / median_s(optimizer.step, _REPEATS_ON_GPU if is_cuda else _REPEATS, device)
    except Exception:
        return None
