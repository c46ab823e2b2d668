"""CUDA graphs without CUDA: what runs inside a capture is noted op by op, and replayed into the same memory.

As on a GPU, a replay knows no Python: what a capture did not see does not happen again, and code that asks for a value
ends the capture. Unlike there, ops run as they are captured, so the replay that follows a capture does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spindle.run import graphs
from spindle.run.composed_graph import ComposedGraph


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.is_done = True  # what the next replay would do

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
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            raise RuntimeError("operation not permitted when stream is capturing")
        given = tree_map(_as_it_is, (args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if not str(function).startswith(_SHAPES):
            self.graph.calls.append((function, *given, tree_map(_as_it_is, result)))
        return result


_ORDER = random.Random(0)
_SHAPES = tuple(f"aten.{name}." for name in ("squeeze_", "unsqueeze_", "transpose_", "t_", "resize_", "set_"))


def _as_it_is(leaf: Any) -> Any:
    """The same memory; a tensor may get another shape later."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def capturing(graph: Graph, pool: Any) -> Iterator[None]:
    with Noting(graph):
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
        mock.patch.object(torch.cuda, "graph_pool_handle", return_value=None),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(graphs, "capturing", capturing),
        mock.patch.object(ComposedGraph, "instantiate"),
        mock.patch.object(ComposedGraph, "replay", replay_children),
        mock.patch.object(graphs, "RANDOM_LAYERS", False),  # the ops here draw from one generator
    ):
        yield
