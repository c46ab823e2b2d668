"""Outputs of modules as zeros: their shapes, without computing them. Unlike fake tensors, zeros have values to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from spindle.models.fake import FakeWeights, as_when_compiling, device_of, fake_like, fake_mode, without_caches
from spindle.models.intercept import intercepted_calls


def zero_output(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output of a module as zeros.

    It runs on fake tensors. If it reads values, its own code runs for real, and its parts return zeros.
    """
    mode = fake_mode()
    device = device_of((args, kwargs))
    fakes = tree_map(lambda leaf: fake_like(mode, leaf), (args, kwargs))
    try:
        with FakeWeights(module, mode, device), as_when_compiling(), without_caches(module), mode:
            result = module(*fakes[0], **fakes[1])
        return tree_map(zeros_like, result)
    except Exception:
        parts = parts_of(module)
    try:
        with zero_weights(module, device), without_caches(module), zero_outputs(parts):
            return module(*args, **kwargs)
    except Exception:  # a part does more than return tensors
        with torch.no_grad(), without_caches(module):
            return tree_map(zeros_like, module(*args, **kwargs))


def zero_outputs(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """A context in which these modules return zeros."""
    return intercepted_calls(list(modules), lambda module, run, args, kwargs: zero_output(module, args, kwargs))


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The outermost submodules that have parameters and a forward of their own."""
    parts: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            parts += parts_of(child)
        elif any(True for _ in child.parameters()):
            parts.append(child)
    return parts


def zeros_like(leaf: Any) -> Any:
    """Zeros like a tensor, which may be fake; anything else is returned as it is."""
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def zero_weights(module: nn.Module, device: torch.device) -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """A context in which parameters, and buffers without values, are zeros that take no memory; yields them by owner
    and name. All are on this device, whatever device the module is still on."""
    zeros: dict[tuple[int, str], torch.Tensor] = {}
    with ExitStack() as stack:
        for submodule in module.modules():
            groups: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
            for tensors in groups:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if tensors is submodule._buffers and not tensor.is_meta:
                        if tensor.device != device:
                            stack.callback(tensors.__setitem__, name, tensor)
                            tensors[name] = tensor.to(device)
                        continue
                    zero = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                    zeros[id(submodule), name] = zero
                    stack.callback(tensors.__setitem__, name, tensor)
                    tensors[name] = nn.Parameter(zero, False) if isinstance(tensor, nn.Parameter) else zero
        yield zeros
