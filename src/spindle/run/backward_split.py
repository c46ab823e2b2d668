"""A backward pass split in two: the gradients of inputs, which other slots wait for, and those of weights, later
(zero-bubble pipelines: B and W).

The first part runs the nodes of the autograd graph that lead to an input. Some of them, the forks, lead to weights as
well (the product of an activation and a weight). The gradients that reach a fork are recorded, and the second part
continues from there, so that of all nodes only the forks run twice, each time for other inputs.

`torch.distributed.pipelining` splits similarly, but runs the nodes between two uses of one weight twice, counts a
weight twice if it joins two parameter groups, and does not support views as stage outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from spindle.run.pytrees import takes_gradient

Gradient = torch.Tensor | None


@dataclass(slots=True)
class _Fork:
    """A node that leads to inputs and to weights, its edges to weights, and the gradients that reached it."""

    node: Node
    edges: list[GradientEdge]
    reached: tuple[Gradient, ...] = ()

    def record(self, gradients: tuple[Gradient, ...]) -> None:
        self.reached = gradients

    def run(self, *, keeps: bool) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Compute the gradients at its edges to weights. With `keeps`, keep what they are computed from."""
        reached = [
            (GradientEdge(self.node, output), gradient)
            for output, gradient in enumerate(self.reached)
            if gradient is not None
        ]
        if not reached:
            return []
        ends, gradients = zip(*reached, strict=True)
        computed = torch.autograd.grad(ends, self.edges, gradients, allow_unused=True, retain_graph=keeps)
        return [(edge, gradient) for edge, gradient in zip(self.edges, computed, strict=True) if gradient is not None]


@dataclass(slots=True)
class WeightPart:
    """The second part of a split backward pass, to be run once."""

    forks: list[_Fork] = field(default_factory=list)
    # Edges below which there are only weights.
    roots: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        """Accumulate the gradients of weights, and free what they are computed from."""
        pending, self.roots = self.roots, []
        while self.forks:
            pending += self.forks.pop().run(keeps=False)
        if pending:
            edges, gradients = zip(*pending, strict=True)
            torch.autograd.backward(edges, gradients)

    def gradients(self, weights: Sequence[torch.Tensor]) -> list[Gradient]:
        """The gradients of these weights, without accumulating or freeing anything."""
        pending = [*self.roots, *(root for fork in self.forks for root in fork.run(keeps=True))]
        if not pending or not weights:
            return [None] * len(weights)
        edges, gradients = zip(*pending, strict=True)
        return list(torch.autograd.grad(edges, weights, gradients, retain_graph=True, allow_unused=True))

    @property
    def sources(self) -> list[torch.Tensor]:
        """The gradients from which the gradients of weights are computed."""
        reached = [gradient for fork in self.forks for gradient in fork.reached if gradient is not None]
        return [*reached, *(gradient for _, gradient in self.roots)]


@dataclass(frozen=True, slots=True)
class _Split:
    """What the first part of a backward pass computes, and where the second part begins."""

    first_edges: list[tuple[GradientEdge, torch.Tensor]]  # the edges where the first part begins
    tangled: list[torch.Tensor]  # weights whose gradients the first part computes, too
    forks: list[_Fork]
    roots: list[tuple[GradientEdge, torch.Tensor]]


def run_input_part(outputs: Sequence[Any], gradients: Sequence[Gradient], inputs: Iterable[torch.Tensor]) -> WeightPart:
    """Run the first part, which leaves gradients in `inputs`, all of them leaves of the graph. Returns the second
    part."""
    wanted = list(inputs)
    split = _split(outputs, gradients, wanted)
    if split.first_edges:
        with _recording(split.forks):
            ends, values = zip(*split.first_edges, strict=True)
            keeps = bool(split.forks or split.roots)
            torch.autograd.backward(ends, values, retain_graph=keeps, inputs=wanted + split.tangled)
    return WeightPart(split.forks, split.roots)


def capture_input_part(
    outputs: Sequence[Any], gradients: Sequence[Gradient], inputs: Iterable[torch.Tensor]
) -> WeightPart:
    """`run_input_part` for a CUDA graph: gradients of weights are not accumulated, because the lane of the second part
    writes all of them, and nothing is freed that the second part reads."""
    wanted = list(inputs)
    split = _split(outputs, gradients, wanted)
    if split.first_edges:
        with _recording(split.forks):
            ends, values = zip(*split.first_edges, strict=True)
            computed = torch.autograd.grad(ends, wanted + split.tangled, values, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(wanted, computed, strict=False):
            leaf.grad = gradient
        early = zip(split.tangled, computed[len(wanted) :], strict=True)
        split.roots.extend((get_gradient_edge(weight), gradient) for weight, gradient in early if gradient is not None)
    return WeightPart(split.forks, split.roots)


@contextmanager
def _recording(forks: Sequence[_Fork]) -> Iterator[None]:
    """A context in which forks record the gradients that reach them."""
    hooks = [fork.node.register_prehook(fork.record) for fork in forks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _split(outputs: Sequence[Any], gradients: Sequence[Gradient], inputs: Iterable[torch.Tensor]) -> _Split:
    pairs = [
        (get_gradient_edge(leaf), gradient)
        for leaf, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]
    to_inputs = _leads_to({edge.node for edge, _ in pairs}, {get_gradient_edge(leaf).node for leaf in inputs})
    forks = []
    for node, leads in to_inputs.items():
        below = dict.fromkeys(node.next_functions) if leads else ()
        edges = [GradientEdge(child, index) for child, index in below if child is not None and not to_inputs[child]]
        if edges:
            forks.append(_Fork(node, edges))
    roots = [(edge, gradient) for edge, gradient in pairs if not to_inputs[edge.node]]
    first_edges = [(edge, gradient) for edge, gradient in pairs if to_inputs[edge.node]]
    tangled = _weights_of_several_forks(forks, [edge for edge, _ in roots])
    if tangled:
        first_edges += [(edge, gradient) for edge, gradient in roots if not _leaves([edge]).isdisjoint(tangled)]
        roots = [(edge, gradient) for edge, gradient in roots if _leaves([edge]).isdisjoint(tangled)]
        forks = [fork for fork in forks if _leaves(fork.edges).isdisjoint(tangled)]
    weights = [node.variable for node in tangled]  # type: ignore[attr-defined]
    return _Split(first_edges, weights, forks, roots)


def _leads_to(roots: Iterable[Node], ends: set[Node]) -> dict[Node, bool]:
    """All nodes below the roots, by depth-first search, and whether each of them leads to one of `ends`."""
    leads: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, are_children_done = stack.pop()
        if are_children_done:
            leads[node] = node in ends or any(leads[below] for below, _ in node.next_functions if below is not None)
        elif node not in leads:
            leads[node] = False  # revisited when its children are done
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None and below not in leads]
    return leads


def _leaves(edges: Iterable[GradientEdge]) -> set[Node]:
    """The leaf nodes of the graph below these edges."""
    return {node for node in _leads_to((edge.node for edge in edges), set()) if not node.next_functions}


def _weights_of_several_forks(forks: Sequence[_Fork], roots: Sequence[GradientEdge]) -> set[Node]:
    """Weights whose gradients cannot be computed fork by fork, because nodes below one fork are also reached from
    another (a weight that two products use directly).

    The first part computes them, and those of all weights that share a fork with them: the closure below.
    """
    below = [set(_leads_to((edge.node for edge in fork.edges), set())) for fork in forks]
    counts: dict[Node, int] = {}
    for nodes in below:
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
    tangled: set[Node] = set()
    for fork, nodes in zip(forks, below, strict=True):
        if any(counts[edge.node] > 1 for edge in fork.edges):
            tangled |= {node for node in nodes if not node.next_functions}
    sharing = [{node for node in nodes if not node.next_functions} for nodes in below] + [
        _leaves([root]) for root in roots
    ]
    while tangled:
        more = set[Node]().union(*(leaves for leaves in sharing if not leaves.isdisjoint(tangled)))
        if more <= tangled:
            break
        tangled |= more
    return tangled
