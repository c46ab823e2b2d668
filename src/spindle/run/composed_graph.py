"""A CUDA graph made of child graphs, which are captured one by one. A child starts when those that it needs are done.

Autograd launches each node of backward on the stream of its forward. In one capture of several streams, weight
gradients would therefore stay on the lane of their slot. A child graph can be a branch of any lane.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import torch

from spindle.errors import TrainingError
from spindle.run.ipc.driver import Driver


class ComposedGraph:
    """Child graphs by number, in an order in which they may run. Keeps them and their memory alive."""

    def __init__(self) -> None:
        self.children: dict[int, torch.cuda.CUDAGraph] = {}
        self.needs: dict[int, frozenset[int]] = {}
        self._events: list[tuple[int, frozenset[int]]] = []
        self._driver: Driver | None = None
        self._executable: int | None = None

    def add(self, number: int, graph: torch.cuda.CUDAGraph, needs: Collection[int]) -> None:
        """Add a graph, captured with `keep_graph`, that starts when the graphs `needs` are done."""
        assert all(before in self.children for before in needs), "a child graph needs one that is added later"
        self.children[number], self.needs[number] = graph, frozenset(needs)

    def record_event(self, event: int, needs: Collection[int]) -> None:
        """Record an event when these graphs are done, in every replay. A stream that waits for it after a launch waits
        for that replay."""
        self._events.append((event, frozenset(needs)))

    def instantiate(self) -> None:
        self._driver = Driver()
        whole = self._driver.create_graph()
        nodes: dict[int, int] = {}
        for number, child in self.children.items():
            before = [nodes[needed] for needed in sorted(self.needs[number])]
            nodes[number] = self._driver.add_child_graph(whole, child.raw_cuda_graph(), before)
        for event, needs in self._events:
            self._driver.add_event_record(whole, event, [nodes[needed] for needed in sorted(needs)])
        self._executable = self._driver.instantiate_graph(whole)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        if self._driver is None or self._executable is None:
            raise TrainingError("this graph has not been instantiated")
        self._driver.launch_graph(self._executable, torch.cuda.current_stream().cuda_stream)

    def __del__(self) -> None:
        if self._driver is not None and self._executable is not None:
            with suppress(Exception):  # at the end of the process, CUDA may have shut down already
                self._driver.destroy_executable(self._executable)
