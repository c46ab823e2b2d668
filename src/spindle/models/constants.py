"""The value of `if tensor:` and `tensor.item()` between blocks, where it is the same for every batch.

Masks and position ids are computed from sizes and constants, and models branch on them ("is everything unmasked?").
Such a tensor is computed here for real, by running the operations that produced it back to constants and sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from spindle.models.statements import UnsupportedForwardError
from spindle.models.symbolic_values import SymbolicValues


def constant_value(values: SymbolicValues, func: Any, tensor: torch.Tensor) -> tuple[Any, bool]:
    """The value of `func`, such as `item`, of a one-element tensor that no input contributes to, or None if one does;
    and whether it depends on sizes.

    A random number is replaced by the smallest and by the largest that can be drawn. If both give the same value
    (`torch.rand(1) < 0.0`, layerdrop that is off), it does not depend on the draw.
    """
    lowest, depends_on_sizes = _evaluate(values, tensor, 0.0)
    highest, _ = _evaluate(values, tensor, 1.0 - 2.0**-24)
    if lowest is None or highest is None:
        return None, False
    with _disable_current_modes():
        if not torch.equal(lowest, highest):
            raise UnsupportedForwardError(
                "it decides by chance which blocks run (layerdrop); set that probability to 0"
            )
        return func(lowest), depends_on_sizes


def _evaluate(values: SymbolicValues, tensor: torch.Tensor, draw: float) -> tuple[torch.Tensor | None, bool]:
    """Compute a tensor from constants and sizes by running its producers, with `draw` for every `torch.rand`. Returns
    None if it depends on an input, and whether it depends on sizes."""
    info = values.tensors.get(id(tensor))
    if info is not None and info.is_constant:
        return tensor, False
    if info is None or info.producer is None:
        return None, False
    func, args, kwargs = info.producer
    leaves, spec = tree_flatten((args, kwargs))
    evaluated: list[Any] = []
    depends_on_sizes = False
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            value, depends = _evaluate(values, leaf, draw)
        else:
            value = values.to_concrete(leaf)
            depends = value is not leaf
        if value is None and leaf is not None:
            return None, False
        depends_on_sizes |= depends
        evaluated.append(value)
    args, kwargs = tree_unflatten(evaluated, spec)
    with _disable_current_modes():
        if func is torch.ops.aten.rand.default:
            return torch.full(args[0], draw, dtype=kwargs.get("dtype")), depends_on_sizes
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None, False
        result = func(*args, **kwargs)
    return (result if isinstance(result, torch.Tensor) else None), depends_on_sizes
