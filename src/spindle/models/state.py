"""Snapshots of modules, so that a forward can be tried without leaving traces.

A snapshot covers what hangs on the modules themselves: their attributes (a cache filled in the first forward, a
counter), their hooks and the values of their buffers. It does not cover what changes inside an attribute's value (a
list that grows).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_COPIED = ("_buffers", "_forward_hooks", "_forward_pre_hooks")  # dicts that modules change in place


class ModuleSnapshot:
    """The state of modules and all their submodules at the time of construction."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list({id(submodule): submodule for root in modules for submodule in root.modules()}.values())
        self._states = [_state(module) for module in self._modules]
        self._buffers = [
            (buffer, buffer.clone())
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def changed_modules(self) -> list[nn.Module]:
        """Modules whose attributes, hooks or buffers are other objects now."""
        return [
            module
            for module, state in zip(self._modules, self._states, strict=True)
            if not _is_same_state(state, _state(module))
        ]

    def restore(self) -> None:
        for module, state in zip(self._modules, self._states, strict=True):
            dicts = {name: module.__dict__[name] for name in _COPIED}
            module.__dict__.clear()
            module.__dict__.update(state)
            # These dicts keep their identity: others may refer to them (handles of hooks do).
            for name, current in dicts.items():
                saved = state[name]
                if current.keys() != saved.keys() or any(current[key] is not saved[key] for key in current):
                    current.clear()
                    current.update(saved)
                module.__dict__[name] = current
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.data.copy_(value)


def _state(module: nn.Module) -> dict[str, Any]:
    return {**module.__dict__, **{name: dict(module.__dict__[name]) for name in _COPIED}}


def _is_same_state(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return (
        before.keys() == now.keys()
        and all(before[name] is now[name] for name in before if name not in _COPIED)
        and all(
            before[name].keys() == now[name].keys() and all(before[name][key] is now[name][key] for key in before[name])
            for name in _COPIED
        )
    )
