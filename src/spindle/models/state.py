"""Snapshots of modules, so that a forward can be tried without leaving traces.

A snapshot covers the state of the modules themselves: their attributes (a cache filled in the first forward, a counter,
a list that grows), their hooks and the values of their buffers. It also covers the attributes of plain objects that
these refer to, including lists, dicts and sets, but nothing deeper.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

_COPIED = ("_buffers", "_forward_hooks", "_forward_pre_hooks")  # dicts that modules change in place
_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float, str, bytes)  # equal ones may be other objects
_OF_TORCH = frozenset(vars(nn.Module()))
_MAX_ITEMS = 1000  # larger lists, dicts and sets in plain objects are not compared: a dataset is not state of a forward
_DEPTH = 3  # how far references from plain object to plain object are followed


class ModuleStates:
    """The state of these modules themselves, without their submodules, at the time of construction."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._states = [_state(module) for module in self._modules]
        seen: set[int] = set()
        self._containers = [_containers(module, seen) for module in self._modules]
        self._versions = [_versions(module) for module in self._modules]

    def changed_modules(self, *, ignore_tensors: bool = False) -> list[nn.Module]:
        """Modules whose attributes, hooks or buffers are other objects now, or have changed in place. With
        `ignore_tensors`, attributes that are tensors now do not count, but buffers do: most such attributes are for
        generation (`rope_deltas`)."""
        before = zip(self._modules, self._states, self._containers, self._versions, strict=True)
        return [
            module
            for module, state, containers, versions in before
            if not _is_same_state(state, _state(module), ignore_tensors)
            or versions != _versions(module)
            or any(not _has_same_items(container, items) for container, items in containers)
        ]


class ModuleSnapshot(ModuleStates):
    """The state of modules and all their submodules at the time of construction, which can be restored."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__({id(submodule): submodule for root in modules for submodule in root.modules()}.values())
        self._buffers = [
            (buffer, buffer.clone())
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
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
        for container, items in (pair for containers in self._containers for pair in containers):
            if not _has_same_items(container, items):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(items)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.data.copy_(value)


def _state(module: nn.Module) -> dict[str, Any]:
    return {**module.__dict__, **{name: dict(module.__dict__[name]) for name in _COPIED}}


def _is_same_state(before: dict[str, Any], now: dict[str, Any], ignore_tensors: bool) -> bool:
    if ignore_tensors:
        left_out = {name for name, value in now.items() if isinstance(value, torch.Tensor)}
        before, now = ({name: each[name] for name in each.keys() - left_out} for each in (before, now))
    return (
        before.keys() == now.keys()
        and all(before[name] is now[name] for name in before if name not in _COPIED)
        and all(
            before[name].keys() == now[name].keys() and all(before[name][key] is now[name][key] for key in before[name])
            for name in _COPIED
        )
    )


def _containers(module: nn.Module, seen: set[int]) -> list[tuple[Any, Any]]:
    """Lists, dicts and sets that a module refers to, and the attributes of plain objects, each with a copy. Objects in
    `seen` are skipped."""
    attributes = [value for name, value in module.__dict__.items() if name not in _OF_TORCH]
    containers = [(value, value.copy()) for value in attributes if type(value) in _CONTAINERS]
    for _ in range(_DEPTH):
        inside = []
        for value in attributes:
            if _is_plain(value) and id(value) not in seen:
                seen.add(id(value))
                containers.append((value.__dict__, dict(value.__dict__)))
                inside += value.__dict__.values()
        small = [value for value in inside if type(value) in _CONTAINERS and len(value) <= _MAX_ITEMS]
        containers += [(value, value.copy()) for value in small]
        attributes = inside
    return containers


def _is_plain(value: Any) -> bool:
    """Whether a value is an object with attributes of its own that a forward may set: no module, tensor, class or
    function."""
    is_other = isinstance(value, nn.Module | torch.Tensor | type | ModuleType) or callable(value)
    return not is_other and type(getattr(value, "__dict__", None)) is dict


def _has_same_items(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        return all(key in items and _is_same(value, items[key]) for key, value in container.items())
    if isinstance(container, set):
        return bool(container == items)
    return all(map(_is_same, container, items))


def _is_same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and isinstance(value, _NUMBERS) and value == before)


def _versions(module: nn.Module) -> list[int]:
    """How often the buffers of a module were changed in place."""
    return [buffer._version for buffer in module._buffers.values() if buffer is not None]
