"""Side effects of calling a module: whether it draws random numbers, or changes the module's state.

Code that runs several times in a step (`composite`, `replay`) must not call such a module: every call would draw other
numbers and update the state again.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spindle.models.state import ModuleStates


@dataclass(slots=True)
class Effects:
    """The side effects of calls of a module."""

    draws_random_numbers: bool = False
    changes_module: bool = False


class EffectsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether operations draw random numbers, on fake tensors too, and which storages they write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.written |= {tensor.untyped_storage()._cdata for tensor in written_tensors(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to: in place, or given as `out=`."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [argument.name for argument in schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [
        values.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def recording_effects(module: nn.Module, run: Callable[[Any, Any], Any], effects: Effects) -> Callable[[Any, Any], Any]:
    """A function that calls a module like `run`, and adds its effects to `effects`."""

    def call(args: Any, kwargs: Any) -> Any:
        before, mode = ModuleStates(module.modules()), EffectsMode()
        own = {tensor.untyped_storage()._cdata for part in module.modules() for tensor in _tensors_of(part)}
        with mode:
            result = run(args, kwargs)
        effects.draws_random_numbers |= mode.has_drawn
        effects.changes_module |= bool(before.changed_modules()) or not own.isdisjoint(mode.written)
        return result

    return call


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    values = [*module._buffers.values(), *module.__dict__.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def host_random_state() -> bytes:
    """The states of Python's and numpy's random generators, which recorded or captured torch operations do not
    advance."""
    return pickle.dumps((random.getstate(), numpy.random.get_state()))
