"""What a module keeps beside its weights: it can be run for a trial and put back as it was.

Kept is what hangs on the module itself: its attributes (a cache that it fills in its first forward, a counter), its
hooks and the values of its buffers. What an attribute holds inside (a list that grows) is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_COPIED = ("_buffers", "_forward_hooks", "_forward_pre_hooks")  # dicts that are changed in place


class keep_state:
    """Notes the state of modules; calling it puts it back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list({id(one): one for module in modules for one in module.modules()}.values())
        self._before = [_state(module) for module in self._modules]
        self._values = [
            (buffer, buffer.clone())
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def changed(self) -> list[nn.Module]:
        """Modules whose attributes are others now."""
        return [one for one, before in zip(self._modules, self._before, strict=True) if not _alike(before, _state(one))]

    def __call__(self) -> None:
        for one, before in zip(self._modules, self._before, strict=True):
            copies = {name: before[name] for name in _COPIED}
            dicts = {name: one.__dict__[name] for name in _COPIED}
            one.__dict__.clear()
            one.__dict__.update(before)
            for name, inner in dicts.items():
                if inner.keys() != copies[name].keys() or any(inner[key] is not copies[name][key] for key in inner):
                    inner.clear()
                    inner.update(copies[name])
                one.__dict__[name] = inner
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.data.copy_(value)


def _state(module: nn.Module) -> dict[str, Any]:
    return {**module.__dict__, **{name: dict(module.__dict__[name]) for name in _COPIED}}


def _alike(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return (
        before.keys() == now.keys()
        and all(before[name] is now[name] for name in before if name not in _COPIED)
        and all(
            before[name].keys() == now[name].keys() and all(before[name][key] is now[name][key] for key in before[name])
            for name in _COPIED
        )
    )
