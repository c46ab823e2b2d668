"""How fast does the user's optimizer move its bytes?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

_REPEATS = 3
_MOST_ELEMENTS = 1 << 24  # enough to tell, little enough to copy


def measure_update(
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    update_bytes: int,
) -> float | None:
    """Bytes per second of an optimizer step over copies of some parameters, at so many bytes an element.

    None when there is nothing to update, or the optimizer does not do it: whoever trains with it will hear why.
    """
    copies: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in parameters.items():
        if parameter.requires_grad and (not copies or elements + parameter.numel() <= _MOST_ELEMENTS):
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad = torch.zeros_like(copy)
            copies.append((name, copy))
            elements += parameter.numel()
    times = []
    try:
        optimizer = make_optimizer(list(copies))
        for _ in range(1 + _REPEATS):
            begin = time.perf_counter()
            optimizer.step()
            if copies[0][1].is_cuda:
                torch.cuda.synchronize(copies[0][1].device)
            times.append(time.perf_counter() - begin)
    except Exception:
        return None
    return elements * update_bytes / statistics.median(times[1:])
