"""CUDA graphs without CUDA: what runs inside a capture is noted op by op, and replayed into the same memory.

As on a GPU, a replay knows no Python: what a capture did not see does not happen again, and code that asks for a value
ends the capture. Unlike there, ops run as they are captured, so the replay that follows a capture does nothing.

Memory is reused as early as torch's allocator may: each graph begins by filling what is free in its pool with NaN.
"""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spindle.run import graph_memory, graphs
from spindle.run.composed_graph import ComposedGraph

_NOTED: Counter[int] = Counter()  # by storage: tensors in the notes of all graphs


class Pool:
    """A memory pool of graphs: what was allocated in their captures, by storage."""

    def __init__(self) -> None:
        self.allocated: dict[int, torch.Tensor] = {}

    def take_free(self) -> list[torch.Tensor]:
        """The floating-point memory that nobody holds but notes of graphs; each once."""
        free = [storage for storage, tensor in self.allocated.items() if _num_owners(tensor) == _NOTED[storage]]
        tensors = [self.allocated.pop(storage) for storage in free]
        return [
            torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            for tensor in tensors
            if tensor.is_floating_point()
        ]


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.is_done = True  # what the next replay would do
        self._noted: Counter[int] = Counter()
        weakref.finalize(self, _NOTED.subtract, self._noted)

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.calls.append((function, args, kwargs, result))
        storages = list(map(_storage, _tensors((args, kwargs, result))))
        self._noted.update(storages)
        _NOTED.update(storages)

    def replay(self) -> None:
        if self.is_done:
            self.is_done = False
            return
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Noting(TorchDispatchMode):
    def __init__(self, graph: Graph, pool: Pool) -> None:
        super().__init__()
        self.graph, self.pool = graph, pool

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            raise RuntimeError("operation not permitted when stream is capturing")
        given = tree_map(_as_it_is, (args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if not str(function).startswith(_SHAPES):
            made = tree_map(_as_it_is, result)
            self.graph.note(function, *given, made)
            read = set(map(_storage, _tensors(given)))
            for tensor in _tensors(made):
                if _storage(tensor) not in read and tensor.untyped_storage().nbytes():
                    self.pool.allocated.setdefault(_storage(tensor), tensor)
        return result


_ORDER = random.Random(0)
_SHAPES = tuple(f"aten.{name}." for name in ("squeeze_", "unsqueeze_", "transpose_", "t_", "resize_", "set_"))


def _as_it_is(leaf: Any) -> Any:
    """The same memory; a tensor may get another shape later."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_owners(tensor: torch.Tensor) -> int:
    """How many tensors and other owners share the memory of a tensor."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # this one


@contextmanager
def capturing(graph: Graph, pool: Pool) -> Iterator[None]:
    for memory in pool.take_free():
        graph.note(torch.ops.aten.fill_.Scalar, (memory, math.nan), {}, memory.fill_(math.nan))
    with Noting(graph, pool):
        yield


def replay_children(composed: ComposedGraph, late: Collection[int] = ()) -> None:
    """Replays the graphs of a composed graph in a random order of those that their needs allow, another each time;
    `late` ones when no other can go on."""
    left, done = list(composed.children), set[int]()
    while left:
        ready = [number for number in left if composed.needs[number] <= done]
        number = _ORDER.choice([number for number in ready if number not in late] or ready)
        composed.children[number].replay()
        left.remove(number)
        done.add(number)


@contextmanager
def graphs_without_cuda() -> Iterator[None]:
    """Inside, slots can be captured on a CPU."""
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", Graph),
        mock.patch.object(torch.cuda, "graph_pool_handle", Pool),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(graph_memory, "capturing", capturing),
        mock.patch.object(ComposedGraph, "instantiate"),
        mock.patch.object(ComposedGraph, "replay", replay_children),
        mock.patch.object(graphs, "RANDOM_LAYERS", False),  # the ops here draw from one generator
    ):
        yield
