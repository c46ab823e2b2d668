"""The graph that planners work on: MetaOps (runs of identical layers) and the data flow between them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from spindle.artifact import json_text
from spindle.errors import WorkloadError
from spindle.workload import LayerCost, ModuleRemark, Numerics, Parameter

Node = TypeVar("Node", int, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaOp:
    """A run of identical layers in one call of one module by one task.

    An op of an abstract graph has no module, no cost and no parameters: only its curve is known. `microbatch` is 0
    unless the graph is of a step whose batch is cut into several. `parameters` holds, for each layer, the positions of
    its parameters in the graph's list.

    A *part* is some items (images, clips) of one item call of a microbatch, as a call of its own: `vision.2` of task
    `m03`. `items` are their numbers among all items of that call, from 0; parts of a call have each item once between
    them. Empty for ops that are not parts.
    """

    name: str
    num_layers: int
    task: str
    microbatch: int = 0
    batch_size: int | None = None
    module: str | None = None
    call: str | None = None
    first_layer: int = 0  # in its module's chain
    cost: LayerCost | None = None
    parameters: tuple[tuple[int, ...], ...] = ()
    items: tuple[int, ...] = ()

    @property
    def whole_call(self) -> str:
        """The name of its call; for a part, of the call that it is a part of."""
        return (self.call or "").rpartition(".")[0] if self.items else self.call or ""

    def __post_init__(self) -> None:
        if len(set(self.items)) < len(self.items):
            raise WorkloadError(f"op {self.name!r}: a part has each of its items once, got {list(self.items)[:12]}")
        if self.num_layers < 1:
            raise WorkloadError(f"op {self.name!r}: needs at least one layer, got layers={self.num_layers}")
        if self.batch_size is not None and self.batch_size < 1:
            raise WorkloadError(f"op {self.name!r}: batch must be at least 1, got {self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class MetaGraph:
    """MetaOps and edges `(producer, consumer)` by position, without cycles.

    `order_edges` carry no data: the second op needs the state (running statistics) that the first one has changed.
    """

    name: str
    metaops: tuple[MetaOp, ...]
    edges: tuple[tuple[int, int], ...]
    parameters: tuple[Parameter, ...] = ()
    numerics: Numerics = Numerics()
    remarks: tuple[ModuleRemark, ...] = field(default=(), compare=False)
    order_edges: tuple[tuple[int, int], ...] = ()
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)  # topological, stable
    levels: tuple[int, ...] = field(init=False, repr=False, compare=False)  # longest path from a source, in edges

    def __post_init__(self) -> None:
        if not self.metaops:
            raise WorkloadError(f"graph {self.name!r} has no ops; it needs at least one")
        names = [op.name for op in self.metaops]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise WorkloadError(f"two ops are called {repeated!r}; give tasks and calls different names")
        self._refuse_positions()
        predecessors: list[list[int]] = [[] for _ in self.metaops]
        successors: list[list[int]] = [[] for _ in self.metaops]
        for producer, consumer in self.all_edges:
            predecessors[consumer].append(producer)
            successors[producer].append(consumer)
        order = topological_order(names, predecessors, successors)
        levels = [0] * len(self.metaops)
        for position in order:
            levels[position] = max((levels[producer] + 1 for producer in predecessors[position]), default=0)
        object.__setattr__(self, "predecessors", tuple(map(tuple, predecessors)))
        object.__setattr__(self, "successors", tuple(map(tuple, successors)))
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "levels", tuple(levels))

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the graph; does not depend on times. Computed on first use, because graphs of single steps are
        large and ranks that do not plan never need it."""
        body: tuple[object, ...] = (self.metaops, self.edges, self.parameters, self.numerics)
        body += (self.order_edges,) if self.order_edges else ()
        return hashlib.sha256(json_text(body).encode()).hexdigest()[:16]

    def _refuse_positions(self) -> None:
        """Refuse edges to ops that do not exist, and layers with parameters that do not exist. Negative positions are
        refused, too: Python would count them from the end."""
        for edge in self.all_edges:
            if edge[0] == edge[1] or not all(0 <= position < len(self.metaops) for position in edge):
                raise WorkloadError(f"edge {list(edge)}: expected two ops, 0 to {len(self.metaops) - 1}")
        for op in self.metaops:
            if op.parameters and len(op.parameters) != op.num_layers:
                raise WorkloadError(
                    f"op {op.name!r}: expected the parameters of {op.num_layers} layers, got them for "
                    f"{len(op.parameters)}"
                )
            positions = [position for layer in op.parameters for position in layer]
            if positions and not 0 <= min(positions) <= max(positions) < len(self.parameters):
                got = min(positions) if min(positions) < 0 else max(positions)
                raise WorkloadError(
                    f"op {op.name!r}: there is no parameter {got}, the graph has {len(self.parameters)}, from 0"
                )

    @cached_property
    def positions(self) -> dict[str, int]:
        """Op name → position in `metaops`."""
        return {op.name: position for position, op in enumerate(self.metaops)}

    @property
    def all_edges(self) -> tuple[tuple[int, int], ...]:
        """Edges that carry data, and those that do not."""
        return (*self.edges, *self.order_edges)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.task for op in self.metaops))

    @property
    def task_groups(self) -> dict[str, str]:
        """Task → the first task of its group; tasks are grouped if edges connect their ops, directly or through other
        tasks."""
        first = {task: task for task in self.tasks}
        for producer, consumer in self.all_edges:
            names = {first[self.metaops[position].task] for position in (producer, consumer)}
            if len(names) > 1:
                joined = next(task for task in first if task in names)
                first = {task: joined if name in names else name for task, name in first.items()}
        return first

    def repeated(self, count: int) -> MetaGraph:
        """The graph of a step of `count` batches of each task: its ops once for each, as a microbatch."""
        starts = [number * len(self.metaops) for number in range(count)]
        return MetaGraph(
            name=self.name,
            metaops=tuple(
                replace(
                    op,
                    name=microbatch_name(op.name, number),
                    task=microbatch_name(op.task, number),
                    microbatch=number,
                )
                for number in range(count)
                for op in self.metaops
            ),
            edges=tuple((start + a, start + b) for start in starts for a, b in self.edges),
            parameters=self.parameters,
            numerics=self.numerics,
            remarks=self.remarks,
            order_edges=tuple((start + a, start + b) for start in starts for a, b in self.order_edges),
        )

    def source_name(self, producer: int, consumer: int) -> str:
        """The name by which a consumer refers to the call of its producer: with the task in front if that differs."""
        op = self.metaops[producer]
        return op.whole_call if op.task == self.metaops[consumer].task else f"{op.task}/{op.whole_call}"

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.module for op in self.metaops if op.module is not None))


def microbatch_name(name: str, number: int) -> str:
    """The name of a microbatch of a task, or of its ops, in the graph of a step."""
    return f"{name}@{number}"


def topological_order(names: list[str], predecessors: list[list[int]], successors: list[list[int]]) -> list[int]:
    """A topological order, lowest position first. Raises a WorkloadError that shows a cycle, if there is one."""
    num_waiting = [len(producers) for producers in predecessors]
    ready = [position for position, count in enumerate(num_waiting) if count == 0]
    order: list[int] = []
    while ready:
        position = ready.pop(0)
        order.append(position)
        for consumer in successors[position]:
            num_waiting[consumer] -= 1
            if num_waiting[consumer] == 0:
                ready.append(consumer)
    if len(order) < len(names):
        raise WorkloadError(f"the flows form a cycle: {' -> '.join(_find_cycle(names, predecessors, set(order)))}")
    return order


def _find_cycle(names: list[str], predecessors: list[list[int]], done: set[int]) -> list[str]:
    position = next(position for position in range(len(names)) if position not in done)
    path: list[int] = []
    while position not in path:
        path.append(position)
        position = next(producer for producer in predecessors[position] if producer not in done)
    cycle = [*path[path.index(position) :], position]
    return [names[position] for position in reversed(cycle)]
