"""Find the blocks of a module: the items of its lists of equal modules, such as a transformer's layers, those of an
encoder and a decoder, or the stages of a vision tower.

A list counts if at least two of its items are equal. Lists inside a block (its experts) do not count. Where no two
items of a list are equal (stages of growing width), the lists inside its items are searched instead.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeGuard

from torch import nn

from spindle.models.statements import signature_of

BlockLists = list[list[nn.Module]]


def block_lists(module: nn.Module) -> BlockLists:
    """The outermost lists of blocks. Lists whose items have submodules are preferred to lists of simple layers."""
    # Blocks are modules with submodules. A list of simple layers (linears) counts only if there are none.
    for only_composed in (True, False):
        lists = [items for child in module.children() for items in _lists_in(child, only_composed)]
        if lists:
            return lists
    return []


def towers_of(module: nn.Module) -> list[nn.Module]:
    """The towers of a composite (a vision tower, a language model): its largest submodules that have a single stack of
    blocks, or call blocks of several lists themselves.

    Several stages in one list are one stack. A module that only wraps another one (a model with adapters) has the
    towers of that one. Empty if the composite calls blocks itself.
    """
    children = list(module.children())
    if len(children) == 1 and not isinstance(children[0], nn.Sequential | nn.ModuleList | nn.ModuleDict):
        towers = towers_of(children[0])
        if towers:
            return towers
    blocks = {id(block) for items in block_lists(module) for block in items}
    stacks = {id(stack) for child in module.children() for stack in _stacks_in(child, blocks)}

    def towers_in(part: nn.Module) -> list[nn.Module] | None:
        num_stacks = sum(id(submodule) in stacks for submodule in part.modules())
        if num_stacks == 0:
            return []
        if isinstance(part, nn.ModuleList | nn.ModuleDict) and id(part) in stacks:
            return None  # its items are called by the composite itself
        calls_blocks = any(id(child) in stacks for child in part.children())
        if part is not module and (num_stacks == 1 or calls_blocks or id(part) in stacks):
            return [part]
        towers: list[nn.Module] = []
        for child in part.children():
            inner = towers_in(child)
            if inner is None:
                return None
            towers += inner
        return towers

    return towers_in(module) or []


def _stacks_in(module: nn.Module, blocks: set[int]) -> list[nn.Module]:
    """The outermost containers that contain blocks."""
    if not any(id(submodule) in blocks for submodule in module.modules()):
        return []
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return [module]
    return [stack for child in module.children() for stack in _stacks_in(child, blocks)]


def is_plain_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module is an `nn.Sequential` whose children can be its layers."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward or len(module) < 2:
        return False
    return _has_equal_items(list(module), True) or not any(_lists_in(child, True) for child in module)


def _lists_in(module: nn.Module, only_composed: bool) -> BlockLists:
    items = _items(module)
    if items is not None and _has_equal_items(items, only_composed):
        return [items]
    return [items for child in module.children() for items in _lists_in(child, only_composed)]


def _items(module: nn.Module) -> list[nn.Module] | None:
    if isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 0:
        return list(module)
    # A dict of one entry is a choice (an adapter by name), and no stack.
    return list(module.values()) if isinstance(module, nn.ModuleDict) and len(module) > 1 else None


def _has_equal_items(items: list[nn.Module], only_composed: bool) -> bool:
    if any(isinstance(item, nn.ModuleList | nn.ModuleDict) for item in items):  # containers are never called
        return False
    candidates = [
        item
        for item in items
        if any(True for _ in item.parameters()) and (not only_composed or any(True for _ in item.children()))
    ]
    counts = Counter(signature_of(candidate) for candidate in candidates)
    if any(count > 1 for count in counts.values()):
        return True
    # a list of one block that is called repeatedly (ALBERT), or of two of which the first has something extra
    same_type = len(items) == len(candidates) and len({type(item) for item in items}) == 1
    return same_type and not any(_lists_in(item, only_composed) for item in items)
