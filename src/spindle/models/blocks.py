"""Which modules inside a module are its blocks? The items of its lists of like modules: a transformer's layers, those
of encoder and decoder, the stages of a vision tower or what stands in them.

A list counts when two of its items are alike. Lists inside a block (its experts) do not; where no two items of a list
are alike (stages of growing width), what stands in them is looked at instead.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeGuard

from torch import nn

from spindle.models.recording import signature_of

BlockLists = list[list[nn.Module]]


def block_lists(module: nn.Module) -> BlockLists:
    """The outermost lists of blocks: of modules with parts, or else of any."""
    for only_composed in (True, False):
        found = [items for child in module.children() for items in _lists(child, only_composed)]
        if found:
            return found
    return []


def is_plain_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether its children, one after the other, are its layers."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward or len(module) < 2:
        return False
    return _has_alike(list(module), True) or not any(_lists(child, True) for child in module)


def _lists(module: nn.Module, only_composed: bool) -> BlockLists:
    items = _items(module)
    if items is not None and _has_alike(items, only_composed):
        return [items]
    return [found for child in module.children() for found in _lists(child, only_composed)]


def _items(module: nn.Module) -> list[nn.Module] | None:
    if isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 0:
        return list(module)
    return list(module.values()) if isinstance(module, nn.ModuleDict) and len(module) > 0 else None


def _has_alike(items: list[nn.Module], only_composed: bool) -> bool:
    if any(isinstance(item, nn.ModuleList | nn.ModuleDict) for item in items):  # which are not called themselves
        return False
    candidates = [
        item
        for item in items
        if any(True for _ in item.parameters()) and (not only_composed or any(True for _ in item.children()))
    ]
    counts = Counter(signature_of(candidate) for candidate in candidates)
    if any(count > 1 for count in counts.values()):
        return True
    # One block that is called again and again, or a first block with something more than the second and last.
    same_type = len(items) == len(candidates) and len({type(item) for item in items}) == 1
    return same_type and not any(_lists(item, only_composed) for item in items)
