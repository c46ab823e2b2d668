"""Tensors that a module computes but does not return, and that its caller uses (router logits, attention weights).

Code around a block may get such tensors through a hook, or through a list that both share. They are outputs of
submodules of the block, identified by the submodule's path, the number of its call inside the block, and the leaf of
its output. `call_with_inner_outputs` makes them further outputs of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from spindle.errors import GuardError

Reference = ref[torch.Tensor]
InnerOutput = tuple[str, int, int]  # path of a submodule, number of its call, leaf of its output


def call_with_inner_outputs(module: nn.Module, wanted: Sequence[InnerOutput], /, *args: Any, **kwargs: Any) -> Any:
    """What a module returns, followed by outputs of calls inside it. Bypasses `torch.compile`, which would recompile
    for the hooks of every call."""
    outputs: dict[tuple[str, int], list[Any]] = {}
    num_calls: Counter[str] = Counter()
    handles = []
    for path in dict.fromkeys(path for path, _, _ in wanted):

        def keep(submodule: nn.Module, given: Any, output: Any, path: str = path) -> None:
            outputs[path, num_calls[path]] = tree_leaves(output)
            num_calls[path] += 1

        handles.append(module.get_submodule(path).register_forward_hook(keep, prepend=True))
    try:
        result = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    for path, number, _ in wanted:
        if (path, number) not in outputs:
            raise GuardError(
                module,
                f"{type(module).__name__} called its {path} {number + 1} times for the first batch, and "
                f"{num_calls[path]} times for this one: its forward takes a different branch. Register it with "
                "spindle.module(..., split=False)",
            )
    return (result, *(outputs[path, number][leaf] for path, number, leaf in wanted))


@contextmanager
def inner_outputs(module: nn.Module) -> Iterator[dict[int, tuple[Reference, InnerOutput]]]:
    """The tensors that calls inside a module return while the context lasts, by id; where one is freed, its reference
    is empty."""
    paths = {id(submodule): path for path, submodule in module.named_modules() if path}
    num_calls: Counter[str] = Counter()
    tensors: dict[int, tuple[Reference, InnerOutput]] = {}

    def keep(submodule: nn.Module, given: Any, output: Any) -> None:
        path = paths.get(id(submodule))
        if path is None:
            return
        for number, leaf in enumerate(tree_leaves(output)):
            is_known = id(leaf) in tensors and tensors[id(leaf)][0]() is leaf
            if isinstance(leaf, torch.Tensor) and not is_known:
                tensors[id(leaf)] = (ref(leaf), (path, num_calls[path], number))
        num_calls[path] += 1

    handle = register_module_forward_hook(keep)
    try:
        yield tensors
    finally:
        handle.remove()
