"""What does a task do? Its function is traced once: calls of modules become calls, the code between them glue.

Glue is run where its result is needed: each call carries the nodes that compute its arguments from the batch and from
other calls' outputs, and so does the loss. Glue works on rows alone, as the design asks; a loss that does not is
computed over the whole batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from spindle.errors import WorkloadError
from spindle.train.task import Mean, ModuleHandle, TaskDefinition, called_module


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call: `arguments(batch, *outputs)` gives its arguments, over the outputs of the calls in `sources`."""

    name: str
    handle: ModuleHandle
    sources: tuple[str, ...]
    arguments: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """A task as calls in order and a loss `loss(batch, *outputs)` over the outputs of `loss_sources`."""

    definition: TaskDefinition
    calls: tuple[RecordedCall, ...]
    loss_sources: tuple[str, ...]
    loss: Callable[..., Any]
    is_mean: bool


class _TaskTracer(fx.Tracer):
    """Traces a function of the batch; a module that is called without a handle is refused."""

    def __init__(self, samples: Sequence[Any], mode: FakeTensorMode) -> None:
        super().__init__()
        self._samples, self._mode = samples, mode  # batches of different sizes, of fake tensors

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        raise WorkloadError(
            f"it calls a {type(m).__name__} that is not registered; "
            'write handle = spindle.module("name", module) once and call the handle'
        )

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, nn.Parameter):
            raise WorkloadError(
                f"it uses a parameter of shape {tuple(a.shape)} outside any module; put it in a module, "
                'spindle.module("head", head, whole_batch=True)'
            )
        if isinstance(a, ModuleHandle):
            return a
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A branch may look at shapes, as long as every number of samples takes the same way."""
        with self._mode:
            answers = [self._value_of(obj.node, sample) for sample in self._samples]
        if not answers or any(isinstance(answer, torch.Tensor) for answer in answers):
            raise WorkloadError(
                "it branches on a tensor's value, which is not known when the step is planned; use torch.where, or "
                "decide from something that is no tensor"
            )
        if len({bool(answer) for answer in answers}) > 1:
            raise WorkloadError(
                "it branches on how many samples there are, but ranks have different numbers of them; use torch.where, "
                "or decide from something else"
            )
        return bool(answers[0])

    def _value_of(self, node: fx.Node, batch: Any) -> Any:
        """What a node gives on a batch, from all that was recorded before it."""
        known: dict[fx.Node, Any] = {}
        for one in node.graph.nodes:
            args, kwargs = fx.node.map_arg((one.args, one.kwargs), lambda other: known[other])
            match one.op:
                case "placeholder":
                    known[one] = batch
                case "get_attr":  # a constant of the script
                    known[one] = getattr(self.root, one.target)
                case "call_function":
                    known[one] = one.target(*args, **kwargs)
                case "call_method":
                    known[one] = getattr(args[0], one.target)(*args[1:], **kwargs)
        return known[node]


def _proxies(example: Any, batch: Any) -> Any:
    """The batch as the function sees it: its own dicts and tuples, with a proxy for each leaf."""
    if isinstance(example, dict):
        return {key: _proxies(value, batch[key]) for key, value in example.items()}
    if isinstance(example, tuple) and hasattr(example, "_fields"):
        return type(example)(*(_proxies(value, batch[number]) for number, value in enumerate(example)))
    if isinstance(example, tuple | list):
        return type(example)(_proxies(value, batch[number]) for number, value in enumerate(example))
    return example if example is None or isinstance(example, str) else batch


def record(definition: TaskDefinition, example: Any = None) -> RecordedTask:
    """Records a task, or says what in it cannot be and on which line. An example is one of its batches: with it, the
    function may look into the batch's dicts, and at shapes."""
    samples: list[Any] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if example is not None:
        rows = definition.batch_size
        samples = [tree_map(lambda leaf: _fake(mode, leaf, rows, 0), example)]
        samples.append(tree_map(lambda leaf: _fake(mode, leaf, rows, 1), example))

    def function(batch: Any) -> Any:
        return definition.function(batch if example is None else _proxies(example, batch))

    name = f"task {definition.name!r}"
    try:
        tracer = _TaskTracer(samples, mode)
        graph = tracer.trace(function)
    except WorkloadError as error:
        raise WorkloadError(f"{name}{_line_of(error, definition)}: {error}") from None
    except fx.proxy.TraceError as error:
        raise WorkloadError(
            f"{name}{_line_of(error, definition)}: it cannot be recorded ({error}); loop over something whose length "
            "is known, and decide from something that is no tensor"
        ) from error
    except Exception as error:
        raise WorkloadError(
            f"{name}{_line_of(error, definition)}: it cannot be recorded ({type(error).__name__}: {error}). A task is "
            "recorded once, without values: it may use torch functions, x.shape and registered modules"
        ) from error
    return _read(definition, graph, tracer.root)


def _fake(mode: FakeTensorMode, leaf: Any, batch_size: int, missing: int) -> Any:
    """A tensor of the leaf's shape, with so many rows fewer where it has the batch's."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fewer = missing if leaf.dim() and leaf.shape[0] == batch_size > 1 else 0
    return mode.from_tensor(leaf[: leaf.shape[0] - fewer] if fewer else leaf)


def _line_of(error: BaseException, definition: TaskDefinition) -> str:
    """The last line of the task's own file on the way to the error."""
    file = definition.function.__code__.co_filename
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _read(definition: TaskDefinition, graph: fx.Graph, constants: nn.Module) -> RecordedTask:
    (batch,) = (node for node in graph.nodes if node.op == "placeholder")
    output = next(node for node in graph.nodes if node.op == "output")
    calls: dict[fx.Node, str] = {}
    times: dict[str, int] = {}
    recorded = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target is called_module:
            handle = node.args[0]
            name = f"{handle.name}#{times.get(handle.name, 0)}"
            times[handle.name] = times.get(handle.name, 0) + 1
            sources, arguments = _glue(graph, constants, batch, calls, (node.args[1:], node.kwargs))
            calls[node] = name
            recorded.append(RecordedCall(name=name, handle=handle, sources=sources, arguments=arguments))
    if not recorded:
        raise WorkloadError(f"task {definition.name!r} calls no module; register one with spindle.module and call it")
    result = output.args[0]
    is_mean = isinstance(result, fx.Node) and result.target is Mean
    sources, loss = _glue(graph, constants, batch, calls, result)
    return RecordedTask(definition=definition, calls=tuple(recorded), loss_sources=sources, loss=loss, is_mean=is_mean)


def _glue(
    graph: fx.Graph, constants: nn.Module, batch: fx.Node, calls: dict[fx.Node, str], wanted: Any
) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """The nodes that compute `wanted` from the batch and from outputs of calls, as a function of these."""
    needed: set[fx.Node] = set()
    sources: list[fx.Node] = []

    def visit(node: fx.Node) -> None:
        if node in needed or node is batch:
            return
        if node in calls:
            if node not in sources:
                sources.append(node)
            return
        needed.add(node)
        fx.node.map_arg((node.args, node.kwargs), visit)

    fx.node.map_arg(wanted, visit)
    sources.sort(key=lambda node: list(calls).index(node))
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {batch: part.placeholder("batch")}
    for number, node in enumerate(sources):
        copies[node] = part.placeholder(f"output_{number}")
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, lambda one: copies[one])
    part.output(fx.node.map_arg(wanted, lambda one: copies[one]))
    runner = fx.GraphModule(constants, part)
    return tuple(calls[node] for node in sources), runner.forward


def record_all(definitions: Sequence[TaskDefinition], examples: Mapping[str, Any] | None = None) -> list[RecordedTask]:
    """Records tasks that train together; modules are told apart by their names."""
    recorded = [record(definition, (examples or {}).get(definition.name)) for definition in definitions]
    handles_of(recorded)
    return recorded


def handles_of(tasks: Sequence[RecordedTask]) -> dict[str, ModuleHandle]:
    """The modules of tasks by name; two under one name are refused."""
    handles: dict[str, ModuleHandle] = {}
    for one in tasks:
        for call in one.calls:
            known = handles.setdefault(call.handle.name, call.handle)
            if known.module is not call.handle.module:
                raise WorkloadError(
                    f"two modules are called {call.handle.name!r}; give one of them another name in spindle.module"
                )
    return handles


def parameter_names(handles: Mapping[str, ModuleHandle]) -> dict[int, str]:
    """The first name of each tensor: tied weights are one parameter."""
    names: dict[int, str] = {}
    for handle in handles.values():
        for path, parameter in handle.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{handle.name}.{path}")
    return names
