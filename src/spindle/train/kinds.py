"""Describe what an op computes as text: ops with equal texts run the same code, so a time measured for one holds for
the other.

A layer is identified by its module (classes with their sources, settings and shapes) and its position there. Left out:
functions of the script that a module's forward calls, and what its attributes hold inside.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from spindle.graph import MetaGraph
from spindle.measure import Kind
from spindle.train.bind import BoundWorkload

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_VALUES = 64  # the largest number of elements whose values are part of a text


def kinds_of(bound: BoundWorkload, graph: MetaGraph) -> list[Kind]:
    """The kind of each op, by position in the graph."""
    modules = {name: _module_text(handle.module) for name, handle in bound.handles.items()}
    kinds = []
    for op in graph.metaops:
        recorded = bound.tasks[op.task].recorded
        call = next((call for call in recorded.calls if call.name == op.call), None)
        if call is None:
            kinds.append(Kind(layer="loss", glue=graph_text(recorded.loss)))
            continue
        called_with, only_picks = graph_text(call.arguments), _only_picks(call.arguments)
        layer = (
            f"layer {op.first_layer} of {len(call.chain.layers)}, {modules[call.handle.name]}, "
            f"called with {_constants(call.arguments)}: {_plain(call.chain.layers[op.first_layer].kind)}"
        )
        if call.handle.compile is not None:
            layer += f", compiled with {_plain(str(sorted(call.handle.compile.items(), key=str)))}"
        kinds.append(Kind(layer=layer, glue="" if op.first_layer or only_picks else called_with))
    return kinds


def _module_text(module: nn.Module) -> str:
    """The class of a module, and a digest of everything that defines it except the values of its weights."""
    parts = [_plain(repr(module))]
    for path, part in module.named_modules():
        settings = {name: _setting(value) for name, value in vars(part).items() if not name.startswith("_")}
        parts.append(f"{path} {type(part).__qualname__} {settings}")
    parts += _sources({kind for part in module.modules() for kind in type(part).__mro__})
    digest = hashlib.blake2b("\n".join(parts).encode(errors="replace"), digest_size=8).hexdigest()
    return f"{type(module).__qualname__} {digest}"


def _setting(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return _plain(repr(value))


def _sources(classes: Iterable[type]) -> list[str]:
    """The source text of classes that are not part of torch; torch's version is part of the key anyway."""
    named = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}
    own = {name: cls for name, cls in named.items() if name.split(".")[0] not in ("torch", "builtins")}
    return [f"{name} {_source(own[name])}" for name in sorted(own)]


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # a class that was typed at a prompt has no source
        functions = [value for value in vars(cls).values() if inspect.isfunction(value)]
        return str([(function.__code__.co_code.hex(), function.__code__.co_names) for function in functions])


def _nodes_of(function: Any) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The nodes of recorded code, which is the forward of a GraphModule."""
    runner = function.__self__
    assert isinstance(runner, fx.GraphModule)
    return runner, list(runner.graph.nodes)


def graph_text(function: Any, *, values: bool = False) -> str:
    """Recorded code as text, with numbers instead of names, because names depend on what else was recorded. Constant
    tensors appear by shape, or with `values` by value."""
    runner, nodes = _nodes_of(function)
    number = {node: f"%{place}" for place, node in enumerate(nodes)}
    lines = []
    for node in nodes:
        target = node.target
        if node.op == "placeholder":
            target = "input"
        elif node.op == "get_attr":  # a constant of the script
            constant = operator.attrgetter(str(target))(runner)
            target = tensor_text(constant) if values and isinstance(constant, torch.Tensor) else _setting(constant)
        elif callable(target):
            target = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: number[source])
        lines.append(f"{number[node]} {node.op} {target} {arguments}")
    return _plain("\n".join(lines))


def tensor_text(tensor: torch.Tensor) -> str:
    """A tensor with its values, or with a digest of them if there are many."""
    shape = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return shape
    flat = tensor.detach().cpu().reshape(-1)
    if flat.numel() <= _MOST_VALUES:
        return f"{shape} {flat.tolist()}"
    data = flat.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{shape} {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _only_picks(function: Any) -> bool:
    picks = ("placeholder", "output")
    return all(
        node.op in picks or (node.target is operator.getitem and isinstance(node.args[1], str | int))
        for node in _nodes_of(function)[1]
    )


def _constants(function: Any) -> str:
    """The arguments of a call that are not tensors."""
    output = _nodes_of(function)[1][-1]
    return _plain(str(fx.node.map_arg(output.args[0], lambda _: "tensor")))


def _plain(text: str) -> str:
    return _ADDRESS.sub("", text)
