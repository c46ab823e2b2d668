"""Measure the speed of the user's optimizer, and of gradients that are added to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from spindle.measure.timing import median_s
from spindle.run import compute_stream

_REPEATS, _REPEATS_ON_GPU = 3, 15
_MAX_ELEMENTS = 1 << 24  # enough to measure, few enough to copy
# On a GPU, as many as a quarter of the free memory holds with float32 states. With fewer, launches take longer than
# kernels, and whole steps are predicted too long.
_GPU_SHARE, _BYTES_PER_ELEMENT = 0.25, 16
_SUM_ELEMENTS, _SUM_ELEMENTS_ON_GPU = 1 << 22, 1 << 27  # more than caches hold


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
    max_elements = _MAX_ELEMENTS
    if is_cuda:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        free_bytes = min(free_bytes, int(total_bytes * torch.cuda.get_per_process_memory_fraction(device)))
        max_elements = max(_MAX_ELEMENTS, int(_GPU_SHARE * free_bytes) // _BYTES_PER_ELEMENT)
    copies: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in trained.items():
        if not copies or elements + parameter.numel() <= max_elements:
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad = torch.randn_like(copy)
            copies.append((name, copy))
            elements += parameter.numel()
    try:
        optimizer = make_optimizer(list(copies))
        # back to back: the host prepares the next step while the GPU runs
        with torch.cuda.stream(compute_stream()) if is_cuda else nullcontext():
            return elements * update_bytes / median_s(optimizer.step, _REPEATS_ON_GPU if is_cuda else _REPEATS, device)
    except Exception:
        return None


def measure_gradient_sum(device: torch.device, dtype: torch.dtype) -> float | None:
    """The speed, in bytes per second, at which gradients are added to others, as for parameters that several slots
    train. None if there is no memory for that."""
    elements = _SUM_ELEMENTS_ON_GPU if device.type == "cuda" else _SUM_ELEMENTS
    try:
        total, gradient = (torch.zeros(elements, dtype=dtype, device=device) for _ in range(2))
        with torch.cuda.stream(compute_stream()) if device.type == "cuda" else nullcontext():
            return gradient.nbytes / median_s(lambda: total.add_(gradient), _REPEATS, device)
    except torch.OutOfMemoryError:
        return None
