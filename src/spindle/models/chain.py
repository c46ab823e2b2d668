"""A module as a chain of layers.

An `nn.Sequential` is one already. Any other module is traced with `torch.fx`, its longest list of equal blocks kept
whole, and cut before the first block, between blocks and behind the last. What crosses a cut is whatever later layers
still need, batch first. A module that cannot be traced or has no such list is one layer, and `reason` says why.

A trace follows one way through the code. Arguments that are no tensors (a flag, a mask that is left out) decide that
way, so a call that gives others has a chain of its own.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from spindle.errors import WorkloadError
from spindle.models.state import keep_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayer:
    """One layer: `run(*values)` gives the values that cross the cut behind it, as a tuple.

    Layers of one `kind` are alike but for their weights. Layers with the same `settings`, where there are any, do the
    same with them.
    """

    kind: str
    run: Callable[..., tuple[Any, ...]]
    parameters: tuple[nn.Parameter, ...]
    find_buffers: Callable[[], Iterable[torch.Tensor]] = tuple
    settings: str = ""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What it may change beside its output, as it is now: moving a module to a device replaces its buffers."""
        return list(dict.fromkeys(self.find_buffers()))


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


def chain_of(module: nn.Module, fixed: Mapping[str, Any] | None = None) -> Chain:
    """Splits a module into layers, or explains why it stays whole.

    `fixed` has arguments of `forward` that are no tensors, by name, with their values in the calls that this is for.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return whole_chain(module, "it has hooks, which run around all of it")
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 1:
        return Chain(module=module, layers=tuple(map(_module_layer, module)))
    blocks = _longest_block_list(module)
    if blocks is None:
        return whole_chain(module, "it has no list of two or more equal blocks")
    before, put_back = _random_state(), keep_state([module])
    try:
        try:
            graph = _BlockTracer(blocks, fixed or {}).trace(module)
        finally:
            keeps_state = put_back()
        if _random_state() != before:
            return whole_chain(module, "its forward draws random numbers outside its blocks")
        if keeps_state:
            return whole_chain(module, "its forward keeps something on the module itself")
        return _cut(module, graph, blocks)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        return whole_chain(module, f"its forward cannot be traced ({type(error).__name__}: {error})")


def whole_chain(module: nn.Module, reason: str) -> Chain:
    """A module as one layer."""
    return Chain(module=module, layers=(_module_layer(module),), reason=reason)


def _module_layer(module: nn.Module) -> ChainLayer:
    return ChainLayer(
        kind=_signature(module),
        run=lambda *a, **k: (module(*a, **k),),
        parameters=tuple(module.parameters()),
        find_buffers=module.buffers,
    )


def _random_state() -> tuple[bytes, object]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


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


class GradientTracer(fx.Tracer):
    """Records what `torch.no_grad()` means: what is computed under it takes no gradient. Other contexts that change
    what code computes are refused."""

    def __init__(self) -> None:
        super().__init__()
        self._outside = self._context()

    @staticmethod
    def _context() -> tuple[bool, bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _recorded_whole():
            return super().trace(root, concrete_args)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        context = self._context()
        if context == self._outside or not kind.startswith("call_"):
            return proxy
        if context[1:] != self._outside[1:]:
            raise WorkloadError(
                "it switches torch.autocast on or off, which is not recorded; do it inside the forward of a module "
                "without a list of blocks, or around the whole training"
            )
        return super().create_proxy("call_function", without_gradient, (proxy,), {})


@contextmanager
def _recorded_whole() -> Iterator[None]:
    """What a trace would see through, or stumble over, is recorded as one call: a custom autograd function, whose
    backward is its own; functions that make a tensor of a size."""
    inner = torch.autograd.Function.__dict__["apply"]
    makers = {name: getattr(torch, name) for name in ("ones", "zeros", "full", "empty", "rand", "randn", "eye")}

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = _first_proxy((args, kwargs))
        if proxy is None:
            return inner.__func__(cls, *args, **kwargs)

        def applied(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        applied.__name__ = applied.__qualname__ = f"apply_{cls.__name__}"
        return proxy.tracer.create_proxy("call_function", applied, args, kwargs)

    def making(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            proxy = _first_proxy((args, kwargs))
            if proxy is None:
                return make(*args, **kwargs)
            return proxy.tracer.create_proxy("call_function", make, args, kwargs)

        return made

    try:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        for name, make in makers.items():
            setattr(torch, name, making(make))
        yield
    finally:
        torch.autograd.Function.apply = inner  # type: ignore[method-assign]
        for name, make in makers.items():
            setattr(torch, name, make)


def _first_proxy(value: Any) -> fx.Proxy | None:
    found: list[fx.Proxy] = []
    fx.node.map_aggregate(value, lambda leaf: found.append(leaf) if isinstance(leaf, fx.Proxy) else None)
    return found[0] if found else None


def without_gradient(value: Any) -> Any:
    """The same values, cut off from what made them."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


class _BlockTracer(GradientTracer):
    """Keeps blocks whole, and everything that holds none of them."""

    proxy_buffer_attributes = True  # as they are when it runs, not when it is traced

    def __init__(self, blocks: Sequence[nn.Module], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self._blocks = {id(block) for block in blocks}
        self._fixed = fixed

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """A placeholder for each argument that is not fixed."""
        signature = inspect.signature(self.root.forward)
        names = [name for name in signature.parameters if name not in self._fixed]
        for name in names:
            if signature.parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise WorkloadError(f"it takes any number of tensors as {signature.parameters[name]}")

        def call(module: nn.Module, *values: Any) -> Any:
            given = {**self._fixed, **dict(zip(names, values, strict=True))}
            bound = inspect.BoundArguments(signature, OrderedDict((name, given[name]) for name in signature.parameters))
            return root_fn(module, *bound.args, **bound.kwargs)

        return call, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._blocks or not any(id(inner) in self._blocks for inner in m.modules())


def _cut(module: nn.Module, graph: fx.Graph, blocks: list[nn.Module]) -> Chain:
    submodules = dict(module.named_modules())
    block_ids = {id(block) for block in blocks}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    is_block = [node.op == "call_module" and id(submodules[str(node.target)]) in block_ids for node in nodes]
    if sum(is_block) < 2:
        return whole_chain(module, "its forward calls fewer than two of its blocks one by one")
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
    names = [str(node.target) for node in placeholders]
    return Chain(module=module, layers=(_called_like(module, names, layers[0]), *layers[1:]))


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
    copies: dict[fx.Node, fx.Node] = {node: part.placeholder(node.name) for node in inputs}
    for node in segment:
        copies[node] = part.node_copy(node, lambda one: copies[one])
    if outputs is None:
        result = fx.node.map_arg(final.args[0], lambda one: copies[one])
        part.output((result,))
    else:
        part.output(tuple(copies[node] for node in outputs))
    # On the module itself, not on a copy of what it had: moving it to a device replaces its buffers.
    run = partial(type(fx.GraphModule(module, part)).forward, module)
    called = [submodules[str(node.target)] for node in segment if node.op == "call_module"]
    paths = [str(node.target) for node in segment if node.op == "get_attr"]

    def fetched() -> list[torch.Tensor]:
        return [operator.attrgetter(path)(module) for path in paths]

    def find_buffers() -> list[torch.Tensor]:
        own = [one for one in fetched() if not isinstance(one, nn.Parameter)]
        return [*(buffer for one in called for buffer in one.buffers()), *own]

    parameters = [parameter for one in called for parameter in one.parameters()]
    parameters += [one for one in fetched() if isinstance(one, nn.Parameter)]

    steps = [
        _signature(submodules[str(node.target)]) if node.op == "call_module" else f"{node.op}:{node.target}"
        for node in segment
    ]
    kind = ";".join(steps)
    settings = ""
    if [node.op for node in segment] == ["call_module"] and outputs is not None:
        names = {node: str(number) for number, node in enumerate([*inputs, *segment])}
        given, used = fx.node.map_arg((segment[0].args, segment[0].kwargs, outputs), lambda one: names[one]), called[0]
        settings = f"{given} {_settings(used)}"
    return ChainLayer(
        kind=kind,
        run=run if outputs is None else _without_sizes(run),
        parameters=tuple(dict.fromkeys(parameters)),
        find_buffers=find_buffers,
        settings=settings,
    )


def _settings(module: nn.Module) -> str:
    """Equal for modules of the same type with the same attributes all through, but for the values of their tensors."""
    parts = []
    for path, one in module.named_modules():
        own = {
            name: value if isinstance(value, bool | int | float | str | tuple | None) else id(value)
            for name, value in vars(one).items()
            if name not in _TENSORS and not (isinstance(value, dict | set | None) and not value)
        }
        tensors = [
            (name, each.shape, each.dtype)
            for group in _TENSORS[:2]
            for name, each in vars(one)[group].items()
            if each is not None
        ]
        parts.append((path, type(one), own, tensors))
    return repr(parts)


_TENSORS = ("_parameters", "_buffers", "_modules")


def _without_sizes(run: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A shape that crosses a cut is a tuple of numbers, of which one may be a number of rows."""
    return lambda *values: tuple(tuple(one) if isinstance(one, torch.Size) else one for one in run(*values))


def _called_like(module: nn.Module, names: Sequence[str], layer: ChainLayer) -> ChainLayer:
    """A module's first layer, which takes the arguments of its forward and uses those of these names."""
    signature = inspect.signature(module.forward)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return layer.run(*(given.arguments[name] for name in names))

    return replace(layer, run=run)
