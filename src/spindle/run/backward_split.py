"""A backward pass in two parts: the gradients of inputs, which other slots wait for, and those of weights, later.

The first part runs the nodes of the autograd graph that lead to an input. Some of them, the forks, lead to weights as
well (the product of an activation and a weight); what reaches these is noted, and the second part goes on from there,
so that it runs nothing that the first one ran but for the other half of the forks.

`torch.distributed.pipelining` does the like, but goes again through all that lies between two uses of one weight,
counts a weight twice that joins two groups of others, and cannot hand on views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from spindle.run.nests import takes_gradient

Gradient = torch.Tensor | None


@dataclass(slots=True)
class _Fork:
    """A node that leads to inputs and to weights, what reached it, and its edges to weights."""

    node: Node
    edges: list[GradientEdge]
    reached: tuple[Gradient, ...] = ()

    def note(self, gradients: tuple[Gradient, ...]) -> None:
        self.reached = gradients


@dataclass(slots=True)
class WeightPart:
    """The second part of a backward pass, which runs once."""

    forks: list[_Fork] = field(default_factory=list)
    roots: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)  # that lead to weights alone

    def run(self) -> None:
        found = self.roots
        while self.forks:
            fork = self.forks.pop()
            reached = [(GradientEdge(fork.node, at), one) for at, one in enumerate(fork.reached) if one is not None]
            if reached:
                ends, gradients = zip(*reached, strict=True)
                made = torch.autograd.grad(ends, fork.edges, gradients, allow_unused=True)
                found += [(edge, one) for edge, one in zip(fork.edges, made, strict=True) if one is not None]
        if found:
            edges, gradients = zip(*found, strict=True)
            self.roots = []
            torch.autograd.backward(edges, gradients)


def run_input_part(outputs: Sequence[Any], gradients: Sequence[Gradient], inputs: Iterable[torch.Tensor]) -> WeightPart:
    """Runs the first part: `inputs`, which are leaves, have their gradients afterwards. Returns the second."""
    pairs = [
        (get_gradient_edge(leaf), gradient)
        for leaf, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]
    wanted = list(inputs)
    to_inputs = _leading({edge.node for edge, _ in pairs}, {get_gradient_edge(leaf).node for leaf in wanted})
    forks = []
    for node, leads in to_inputs.items():
        below = dict.fromkeys(node.next_functions) if leads else ()
        edges = [GradientEdge(one, place) for one, place in below if one is not None and not to_inputs[one]]
        if edges:
            forks.append(_Fork(node, edges))
    roots = [(edge, gradient) for edge, gradient in pairs if not to_inputs[edge.node]]
    now = [(edge, gradient) for edge, gradient in pairs if to_inputs[edge.node]]
    tangled = _tangled_weights(forks, [edge for edge, _ in roots])
    if tangled:
        now += [(edge, gradient) for edge, gradient in roots if not _leaves([edge]).isdisjoint(tangled)]
        roots = [(edge, gradient) for edge, gradient in roots if _leaves([edge]).isdisjoint(tangled)]
        forks = [fork for fork in forks if _leaves(fork.edges).isdisjoint(tangled)]
        wanted += [node.variable for node in tangled]  # type: ignore[attr-defined]
    if now:
        hooks = [fork.node.register_prehook(fork.note) for fork in forks]
        ends, values = zip(*now, strict=True)
        torch.autograd.backward(ends, values, retain_graph=bool(forks or roots), inputs=wanted)
        for hook in hooks:
            hook.remove()
    return WeightPart(forks, roots)


def _leading(roots: Iterable[Node], ends: set[Node]) -> dict[Node, bool]:
    """Every node below these, and whether it leads to one of the ends."""
    leads: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_below_done = stack.pop()
        if is_below_done:
            leads[node] = node in ends or any(leads[below] for below, _ in node.next_functions if below is not None)
        elif node not in leads:
            leads[node] = False  # until those below it are done
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None and below not in leads]
    return leads


def _leaves(edges: Iterable[GradientEdge]) -> set[Node]:
    """The ends of the graph below these edges."""
    return {node for node in _leading((edge.node for edge in edges), set()) if not node.next_functions}


def _tangled_weights(forks: Sequence[_Fork], roots: Sequence[GradientEdge]) -> set[Node]:
    """Weights whose gradients cannot be made from one fork after another, because what lies behind one fork is reached
    from another one, too, on a way that passes the inputs' nodes (a weight that two products take as it is). They come
    with the first part, and so do all that share a fork with them."""
    below = [set(_leading((edge.node for edge in fork.edges), set())) for fork in forks]
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
