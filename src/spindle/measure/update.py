"""How fast does the user's optimizer move its bytes?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from spindle.measure.timing import median_s
from spindle.run.world import compute_stream

_REPEATS, _REPEATS_ON_GPU = 3, 15
_MOST_ELEMENTS, _MOST_ELEMENTS_ON_GPU = 1 << 24, 1 << 27  # enough to tell, little enough to copy


def measure_update(
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    update_bytes: int,
) -> float | None:
    """Bytes per second of an optimizer step over copies of some parameters, at so many bytes an element.

    None when there is nothing to update, or the optimizer does not do it: whoever trains with it will hear why.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trained:
        return None
    device = next(iter(trained.values())).device
    is_cuda = device.type == "cuda"
    copies: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in trained.items():
        if not copies or elements + parameter.numel() <= (_MOST_ELEMENTS_ON_GPU if is_cuda else _MOST_ELEMENTS):
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad = torch.randn_like(copy)
            copies.append((name, copy))
            elements += parameter.numel()
    try:
        optimizer = make_optimizer(list(copies))
        # One straight after another: a GPU is left to itself while the next step is made ready.
        with torch.cuda.stream(compute_stream()) if is_cuda else nullcontext():
            return elements * update_bytes / median_s(optimizer.step, _REPEATS_ON_GPU if is_cuda else _REPEATS, device)
    except Exception:
        return None
