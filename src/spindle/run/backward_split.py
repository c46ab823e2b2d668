"""A backward pass split in two: first the gradients of inputs, which other slots wait for, later those of weights (B
and W of zero-bubble pipelines).

The first part runs the nodes of the autograd graph that lead to an input. Some of them, the forks, lead to weights as
well (the product of an activation and a weight). The gradients of a fork's outputs are recorded, and the second part
continues from there. So only the forks run twice, the second time for the weights.

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
    """A node that leads to inputs and to weights, its edges to weights, and the gradients of its outputs."""

    node: Node
    edges: list[GradientEdge]
    grad_outputs: tuple[Gradient, ...] = ()

    def record(self, gradients: tuple[Gradient, ...]) -> None:
        self.grad_outputs = gradients

    def run(self, *, retain_graph: bool) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Compute the gradients at its edges to weights."""
        grad_outputs = [
            (GradientEdge(self.node, output), gradient)
            for output, gradient in enumerate(self.grad_outputs)
            if gradient is not None
        ]
        if not grad_outputs:
            return []
        outputs, gradients = zip(*grad_outputs, strict=True)
        computed = torch.autograd.grad(outputs, self.edges, gradients, allow_unused=True, retain_graph=retain_graph)
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
            pending += self.forks.pop().run(retain_graph=False)
        if pending:
            edges, gradients = zip(*pending, strict=True)
            torch.autograd.backward(edges, gradients)

    def gradients(self, weights: Sequence[torch.Tensor]) -> list[Gradient]:
        """The gradients of these weights, without accumulating or freeing anything."""
        pending = [*self.roots, *(root for fork in self.forks for root in fork.run(retain_graph=True))]
        if not pending or not weights:
            return [None] * len(weights)
        edges, gradients = zip(*pending, strict=True)
        return list(torch.autograd.grad(edges, weights, gradients, retain_graph=True, allow_unused=True))

    @property
    def sources(self) -> list[torch.Tensor]:
        """The gradients from which the gradients of weights are computed."""
        grad_outputs = [gradient for fork in self.forks for gradient in fork.grad_outputs if gradient is not None]
        return [*grad_outputs, *(gradient for _, gradient in self.roots)]


@dataclass(frozen=True, slots=True)
class _Split:
    """What the first part of a backward pass computes, and where the second part begins."""

    first_edges: list[tuple[GradientEdge, torch.Tensor]]  # the edges where the first part begins
    early_weights: list[torch.Tensor]  # weights whose gradients the first part computes, too
    forks: list[_Fork]
    roots: list[tuple[GradientEdge, torch.Tensor]]


def run_input_part(outputs: Sequence[Any], gradients: Sequence[Gradient], inputs: Iterable[torch.Tensor]) -> WeightPart:
    """Compute the gradients of `inputs`, which are leaves of the graph, into their `grad`. Returns the second part."""
    wanted = list(inputs)
    split = _split(outputs, gradients, wanted)
    if split.first_edges:
        with _recording(split.forks):
            edges, values = zip(*split.first_edges, strict=True)
            retain_graph = bool(split.forks or split.roots)
            torch.autograd.backward(edges, values, retain_graph=retain_graph, inputs=wanted + split.early_weights)
    return WeightPart(split.forks, split.roots)


def capture_input_part(
    outputs: Sequence[Any], gradients: Sequence[Gradient], inputs: Iterable[torch.Tensor]
) -> WeightPart:
    """`run_input_part` for a CUDA graph. It accumulates no gradients of weights, because the lane of the second part
    writes them, and frees nothing that the second part reads."""
    wanted = list(inputs)
    split = _split(outputs, gradients, wanted)
    if split.first_edges:
        with _recording(split.forks):
            edges, values = zip(*split.first_edges, strict=True)
            computed = torch.autograd.grad(
                edges, wanted + split.early_weights, values, retain_graph=True, allow_unused=True
            )
        for leaf, gradient in zip(wanted, computed, strict=False):
            leaf.grad = gradient
        early = zip(split.early_weights, computed[len(wanted) :], strict=True)
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
    early_weights = _weights_of_several_forks(forks, [edge for edge, _ in roots])
    if early_weights:
        first_edges += [(edge, gradient) for edge, gradient in roots if not _leaves([edge]).isdisjoint(early_weights)]
        roots = [(edge, gradient) for edge, gradient in roots if _leaves([edge]).isdisjoint(early_weights)]
        forks = [fork for fork in forks if _leaves(fork.edges).isdisjoint(early_weights)]
    weights = [node.variable for node in early_weights]  # type: ignore[attr-defined]
    return _Split(first_edges, weights, forks, roots)


def _leads_to(roots: Iterable[Node], targets: set[Node]) -> dict[Node, bool]:
    """All nodes below the roots, by depth-first search, and whether each of them leads to one of `targets`."""
    leads: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, are_children_done = stack.pop()
        if are_children_done:
            leads[node] = node in targets or any(leads[below] for below, _ in node.next_functions if below is not None)
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

    The first part computes them, and those of all weights that share a fork with them, directly or through others.
    """
    below = [set(_leads_to((edge.node for edge in fork.edges), set())) for fork in forks]
    counts: dict[Node, int] = {}
    for nodes in below:
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
    early_weights: set[Node] = set()
    for fork, nodes in zip(forks, below, strict=True):
        if any(counts[edge.node] > 1 for edge in fork.edges):
            early_weights |= {node for node in nodes if not node.next_functions}
    sharing = [{node for node in nodes if not node.next_functions} for nodes in below] + [
        _leaves([root]) for root in roots
    ]
    while early_weights:
        more = set[Node]().union(*(leaves for leaves in sharing if not leaves.isdisjoint(early_weights)))
        if more <= early_weights:
            break
        early_weights |= more
    return early_weights
