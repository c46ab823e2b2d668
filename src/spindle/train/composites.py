"""Composites in recorded tasks: calls of CLIP or LLaVA become calls of their towers and their other parts.

A module is opened where it has two or more towers, or where a task returns the loss that it computes itself: then that
loss is the task's, and can be computed over parts of a batch like any other. A module that cannot be opened stays one
module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from spindle.models import (
    OpenedComposite,
    PartCall,
    fake_like,
    fake_mode,
    fake_output,
    matched_leaves,
    open_composite,
    towers_of,
    zero_output,
)
from spindle.models.composite import LooseParameters
from spindle.models.statements import failure_reason
from spindle.train.task import Mean, ModuleHandle, TaskResult, called_module, called_part
from spindle.train.task_errors import copy_line
from spindle.train.tracer import without_gradient

if TYPE_CHECKING:
    from spindle.train.record import RecordedTask

_LOSS = "loss_parts"  # key in the `meta` of a node: the loss as parts that can be summed over ranks


def open_graph(task: RecordedTask, example: Any) -> fx.Graph | None:
    """Replace the calls of composites in the graph of a task by calls of their parts. None if the task calls no
    composite."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(task.graph, copies))
    called = [node for node in task.graph.nodes if node.target is called_module]
    is_opened = False
    arguments = _Arguments(task, example)
    for call, node in zip(task.calls, called, strict=True):
        if not _may_open(call.handle, node):
            continue
        try:
            opened = arguments.opened(call.name)
        except Exception as error:  # The module's own code failed on fake tensors; it may still run as one module.
            opened = failure_reason(error)
        if isinstance(opened, str):
            call.handle.closed_reason = opened
            continue
        _replace(graph, copies[node], opened, call.handle)
        is_opened = True
    return graph if is_opened else None


def split_loss(graph: fx.Graph) -> tuple[fx.Graph | None, bool]:
    """A graph that returns its loss as (total, count), if the loss is a token mean inside an opened module. Also
    returns whether the losses of parts of a batch add up to the whole loss without scaling."""
    loss, metrics = _loss_and_metrics(graph)
    kind, glue, variables = loss.meta.get(_LOSS, ("", None, {})) if isinstance(loss, fx.Node) else ("", None, {})
    if kind != "mean":
        return None, kind == "sum"
    split = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    split.graph_copy(graph, copies)
    parts = split.call_function(glue.run, tuple(_copied(variables[name], copies) for name in glue.inputs))
    total, count = (split.call_function(operator.getitem, (parts, number)) for number in range(2))
    mean = split.call_function(Mean, (total, count))
    if metrics is None:
        split.output(mean)
    else:
        split.output(split.call_function(TaskResult, (mean, fx.node.map_arg(metrics, lambda node: copies[node]))))
    return split, False


def replace_in_losses(graph: fx.Graph, node: fx.Node, replacement: fx.Node) -> None:
    """Let a loss that is split later be computed from a different node."""
    for loss in graph.nodes:
        if _LOSS in loss.meta:
            kind, glue, variables = loss.meta[_LOSS]
            moved = {name: replacement if value is node else value for name, value in variables.items()}
            loss.meta[_LOSS] = (kind, glue, moved)


def _loss_and_metrics(graph: fx.Graph) -> tuple[Any, Any]:
    """The loss node that a task returns, and its metrics; None if there is no such loss."""
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    if isinstance(result, fx.Node) and result.target is TaskResult:
        return result.args[0], result.args[1]
    return result, None


def _copied(value: Any, copies: Mapping[fx.Node, fx.Node]) -> Any:
    return copies[value] if isinstance(value, fx.Node) else value


def _may_open(handle: ModuleHandle, node: fx.Node) -> bool:
    if not handle.split or handle.composite is not None:
        return False
    num_towers = len(towers_of(handle.module))
    return num_towers > 1 or (num_towers == 1 and _is_returned(node))


def _is_returned(node: fx.Node) -> bool:
    """Whether the task returns (part of) what this call returns."""
    result, _ = _loss_and_metrics(node.graph)
    while isinstance(result, fx.Node) and result is not node and _selection_of(result) is not None:
        result = result.args[0]
    return result is node


def _is_constant_or_entry(value: Any) -> bool:
    """Whether a value is a constant or an entry of the batch. Anything computed from a batch differs between parts of
    the batch."""
    while isinstance(value, fx.Node) and _selection_of(value) is not None:
        value = value.args[0]
    return not isinstance(value, fx.Node) or value.op == "placeholder"


def _selection_of(node: fx.Node) -> Callable[[Any], Any] | None:
    """The item or attribute that a node selects from its first argument; None if the node does anything else."""
    if node.target in (getattr, operator.getitem) and len(node.args) == 2 and isinstance(node.args[1], str | int):
        return lambda value: node.target(value, node.args[1])  # type: ignore[operator]
    return None


class _Arguments:
    """The arguments of a task's calls as fake tensors, for its batch and for a batch with one more sample."""

    def __init__(self, task: RecordedTask, example: Any) -> None:
        self._calls = {call.name: call for call in task.calls}
        self._modes = [fake_mode() for _ in range(2)]
        rows = task.definition.batch_size
        self._batches = [
            tree_map(lambda leaf, more=more, mode=mode: _fake(mode, leaf, rows, more), example)
            for more, mode in enumerate(self._modes)
        ]
        self._outputs: dict[tuple[str, int], Any] = {}
        self._example = example

    def opened(self, name: str) -> OpenedComposite | str:
        """A composite's call split into calls of its parts, or the reason why that is impossible."""
        module = self._calls[name].handle.module
        opened = open_composite(module, *self._of(name, 0), lambda: self._values(name))
        if isinstance(opened, str) or opened.reads_values:
            return opened
        try:
            larger = open_composite(module, *self._of(name, 1))
        except Exception:  # it may support only this number of samples
            return opened
        if isinstance(larger, str) or _recorded_texts(opened) == _recorded_texts(larger):
            return opened
        # The recorded code only holds for this number of samples. The module's own code handles any.
        return open_composite(module, *self._of(name, 0), lambda: self._values(name), records=False)

    def _of(self, name: str, which: int) -> tuple[Any, Any]:
        call = self._calls[name]
        mode = self._modes[which]
        try:
            outputs = [self._output(source, which) for source in call.sources]
            with mode:
                args, kwargs = call.arguments(self._batches[which], *outputs)
        except Exception:  # code before the call reads values, which fake tensors do not have
            if which:
                raise
            args, kwargs = tree_map(lambda leaf: fake_like(mode, leaf), self._values(name))
        return args, kwargs

    def _values(self, name: str) -> tuple[Any, Any]:
        """The arguments of a call for the real batch, with modules that return zeros."""
        call = self._calls[name]
        outputs = [zero_output(self._calls[source].handle.module, *self._values(source)) for source in call.sources]
        args, kwargs = call.arguments(self._example, *outputs)
        return args, kwargs

    def _output(self, name: str, which: int) -> Any:
        if (name, which) not in self._outputs:
            output = fake_output(self._calls[name].handle.module, *self._of(name, which))
            mode = self._modes[which]
            self._outputs[name, which] = tree_map(lambda leaf: fake_like(mode, leaf), output)
        return self._outputs[name, which]


def _fake(mode: FakeTensorMode, leaf: Any, rows: int, more: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not (leaf.dim() and leaf.shape[0] == rows):
        more = 0
    with mode:
        return torch.empty(
            (leaf.shape[0] + more, *leaf.shape[1:]) if leaf.dim() else (), dtype=leaf.dtype, device=leaf.device
        )


def _recorded_texts(opened: OpenedComposite) -> list[str]:
    """The recorded code as text, which must be equal for every number of samples."""
    texts = [f"{call.path} {call.glue.run.__qualname__} {call.glue.inputs} {call.is_detached}" for call in opened.calls]
    return [*texts, opened.output(opened.index).run.__qualname__]


def _replace(graph: fx.Graph, node: fx.Node, opened: OpenedComposite, handle: ModuleHandle) -> None:
    """Replace a call of a composite by calls of its parts."""
    with graph.inserting_before(node):
        variables = _input_nodes(graph, node, opened)
        for call in opened.calls:
            arguments = graph.call_function(call.glue.run, tuple(variables[name] for name in call.glue.inputs))
            called = graph.call_function(called_part, (_part(handle, call), arguments))  # type: ignore[arg-type]
            copy_line(node, called)
            variables[call.name] = graph.call_function(without_gradient, (called,)) if call.is_detached else called
            for variable, entry in (call.entries or {}).items():
                variables[variable] = graph.call_function(operator.getitem, (called, entry))
        _replace_uses(graph, node, opened, opened.index, variables)
    graph.erase_node(node)


def _part(handle: ModuleHandle, call: PartCall) -> ModuleHandle:
    module = call.module
    if isinstance(module, LooseParameters):
        known = handle.part(call.path).module if handle.has_part(call.path) else module
        if isinstance(known, LooseParameters):
            known.extend(module)
            module = known
    part = handle.part(call.path, module)
    part.whole_batch |= isinstance(module, LooseParameters)
    return part


def _input_nodes(graph: fx.Graph, node: fx.Node, opened: OpenedComposite) -> dict[str, Any]:
    """The nodes that the task passes to a composite, by variable of the recording."""
    args, kwargs = _as_plain_containers(node.args[1:]), _as_plain_containers(node.kwargs)
    leaves = matched_leaves(opened, args, kwargs)
    if leaves is None or any(
        isinstance(leaf, fx.Node) and name is None for leaf, name in zip(leaves, opened.inputs, strict=True)
    ):  # one of the arguments is a nest that another module returned

        def flattened(args: Any, kwargs: Any) -> list[Any]:
            values = matched_leaves(opened, args, kwargs)
            assert values is not None
            return values

        nest = graph.call_function(flattened, (args, kwargs))
        leaves = [graph.call_function(operator.getitem, (nest, place)) for place in range(len(opened.inputs))]
    return {name: leaf for name, leaf in zip(opened.inputs, leaves, strict=True) if name is not None}


def _as_plain_containers(nest: Any) -> Any:
    """The arguments of a node as plain tuples, lists and dicts."""
    if isinstance(nest, dict):
        return {key: _as_plain_containers(value) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(_as_plain_containers, nest))
    if isinstance(nest, list):
        return [_as_plain_containers(value) for value in nest]
    return tuple(map(_as_plain_containers, nest)) if isinstance(nest, tuple) else nest


def _replace_uses(
    graph: fx.Graph, node: fx.Node, opened: OpenedComposite, index: Any, variables: dict[str, Any]
) -> None:
    """Compute only what the users of a composite's output take from it."""
    users = list(node.users)
    accessors = [_selection_of(user) for user in users]
    if type(index) is not int and all(accessors):
        for user, accessor in zip(users, accessors, strict=True):
            assert accessor is not None
            try:
                part = accessor(index)
            except (AttributeError, KeyError, IndexError, TypeError):
                break  # a method call or a missing attribute: pass the object itself
            _replace_uses(graph, user, opened, part, variables)
            graph.erase_node(user)
        else:
            return
    users = list(node.users)
    if not users:
        return
    with graph.inserting_before(node):
        if index is None or isinstance(index, str | bool):
            value: Any = index
        else:
            glue = opened.output(index)
            value = graph.call_function(glue.run, tuple(variables[name] for name in glue.inputs))
            copy_line(node, value)
            parts = opened.loss_parts(index) if type(index) is int else None
            if parts is not None and all(_is_constant_or_entry(variables[name]) for name in parts[2]):
                value.meta[_LOSS] = (*parts[:2], dict(variables))
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
    else:
        for user in users:
            user.args, user.kwargs = fx.node.map_arg(
                (user.args, user.kwargs), lambda argument: value if argument is node else argument
            )
