"""A module as a chain of layers.

An `nn.Sequential` is one already. Any other module is traced with `torch.fx`, its longest list of equal blocks kept
whole, and cut before the first block, between blocks and behind the last. What crosses a cut is whatever later layers
still need, batch first. A module that cannot be traced or has no such list is one layer, and `reason` says why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayer:
    """One layer: `run(*values)` gives the values that cross the cut behind it, as a tuple.

    `modules` are the user's own submodules (or the whole module) whose parameters it uses; layers of one `kind` are
    alike but for their weights.
    """

    kind: str
    run: Callable[..., tuple[Any, ...]]
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The layers of a module in order. The first takes the call's own arguments, the last gives the output alone."""

    module: nn.Module
    layers: tuple[ChainLayer, ...]
    reason: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all layers: the same as the module."""
        values = self.layers[0].run(*args, **kwargs)
        for layer in self.layers[1:]:
            values = layer.run(*values)
        return values[0]


def chain_of(module: nn.Module) -> Chain:
    """Splits a module into layers, or explains why it stays whole."""
    if isinstance(module, nn.Sequential) and len(module) > 1:
        children = list(module)
        return Chain(module=module, layers=tuple(_child_layer(child) for child in children))
    blocks = _longest_block_list(module)
    if blocks is None:
        return _whole(module, "it has no list of two or more equal blocks")
    try:
        graph = _BlockTracer(blocks).trace(module)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        return _whole(module, f"its forward cannot be traced ({type(error).__name__}: {error})")
    return _cut(module, graph, blocks)


def _whole(module: nn.Module, reason: str) -> Chain:
    layer = ChainLayer(
        kind=_signature(module), run=lambda *a, **k: (module(*a, **k),), parameters=tuple(module.parameters())
    )
    return Chain(module=module, layers=(layer,), reason=reason)


def _child_layer(child: nn.Module) -> ChainLayer:
    return ChainLayer(
        kind=_signature(child), run=lambda *a, **k: (child(*a, **k),), parameters=tuple(child.parameters())
    )


def _signature(module: nn.Module) -> str:
    """Equal for modules of the same type, settings and parameter shapes."""
    shapes = ",".join(f"{name}{tuple(parameter.shape)}" for name, parameter in module.named_parameters())
    return f"{type(module).__name__}|{module!r}|{shapes}"


def _longest_block_list(module: nn.Module) -> list[nn.Module] | None:
    """The longest list of equal blocks anywhere inside."""
    best: list[nn.Module] | None = None
    for child in module.modules():
        if child is not module and isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
            blocks = list(child)
            if len({_signature(block) for block in blocks}) == 1 and (best is None or len(blocks) > len(best)):
                best = blocks
    return best


class _BlockTracer(fx.Tracer):
    """Keeps blocks whole, and everything that holds none of them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._blocks = {id(block) for block in blocks}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._blocks or not any(id(inner) in self._blocks for inner in m.modules())


def _cut(module: nn.Module, graph: fx.Graph, blocks: list[nn.Module]) -> Chain:
    submodules = dict(module.named_modules())
    block_ids = {id(block) for block in blocks}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    is_block = [node.op == "call_module" and id(submodules[str(node.target)]) in block_ids for node in nodes]
    if sum(is_block) < 2:
        return _whole(module, "its forward calls fewer than two of its blocks one by one")
    first, last = is_block.index(True), len(is_block) - 1 - is_block[::-1].index(True)
    # Before the first block; each block with what stands between it and the next; behind the last.
    starts = [0] if first else []
    starts += [position for position in range(first, last + 1) if is_block[position]]
    starts += [last + 1] if last + 1 < len(nodes) else []
    segments = [nodes[begin:end] for begin, end in zip(starts, [*starts[1:], len(nodes)], strict=True)]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")

    layers = []
    available: list[fx.Node] = placeholders
    for number, segment in enumerate(segments):
        # The output stands behind the last layer: what it takes from the middle is handed on to there.
        later = {id(node) for rest in segments[number + 1 :] for node in rest} | {id(output)}
        needed = [node for node in [*available, *segment] if any(id(user) in later for user in node.users)]
        is_last = number == len(segments) - 1
        layers.append(_segment_layer(module, submodules, available, segment, None if is_last else needed, output))
        available = needed
    return Chain(module=module, layers=tuple(layers))


def _segment_layer(
    module: nn.Module,
    submodules: dict[str, nn.Module],
    inputs: list[fx.Node],
    segment: list[fx.Node],
    outputs: list[fx.Node] | None,
    final: fx.Node,
) -> ChainLayer:
    """A layer from some nodes of the traced forward; without `outputs` it gives the module's own output."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        default = node.args[0] if node.op == "placeholder" and node.args else None
        copies[node] = part.placeholder(node.name, default_value=default) if node.args else part.placeholder(node.name)
    for node in segment:
        copies[node] = part.node_copy(node, lambda one: copies[one])
    if outputs is None:
        result = fx.node.map_arg(final.args[0], lambda one: copies[one])
        part.output((result,))
    else:
        part.output(tuple(copies[node] for node in outputs))
    runner = fx.GraphModule(module, part)
    called = [submodules[str(node.target)] for node in segment if node.op == "call_module"]
    fetched = [operator.attrgetter(str(node.target))(module) for node in segment if node.op == "get_attr"]
    parameters = [parameter for one in called for parameter in one.parameters()]
    parameters += [one for one in fetched if isinstance(one, nn.Parameter)]
    steps = [
        _signature(submodules[str(node.target)]) if node.op == "call_module" else f"{node.op}:{node.target}"
        for node in segment
    ]
    kind = ";".join(steps)
    return ChainLayer(kind=kind, run=runner.forward, parameters=tuple(dict.fromkeys(parameters)))
