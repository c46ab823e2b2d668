"""Record a task: its function is traced once; calls of modules become `RecordedCall`s, the code between them glue.

Glue is run where its result is needed: each call carries the nodes that compute its arguments from the batch and from
other calls' outputs, and so does the loss. Glue must compute each row by itself; a loss that does not is
computed over the whole batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import WorkloadError
from spindle.launch import is_debugging, is_users
from spindle.models import (
    NEEDS_VALUES,
    Chain,
    ModuleSnapshot,
    as_when_compiling,
    device_of,
    fake_like,
    fake_mode,
    whole_chain,
    without_torch_logs,
    zero_output,
    zeros_like,
)
from spindle.run import on_device, pytree_meta
from spindle.train.composites import open_graph, split_loss
from spindle.train.draws import draw_once, draws_recorded
from spindle.train.items import Entries, entries_of_call, with_two_items
from spindle.train.packed import Packed, entries_of, unpack
from spindle.train.packed_parts import pad_packed_outputs
from spindle.train.recorded_lines import RecordedLines, recorded_lines
from spindle.train.recording_notices import INSTEAD, note_method, prints_noticed
from spindle.train.task import (
    HandleAttributeError,
    Mean,
    ModuleHandle,
    TaskDefinition,
    TaskResult,
    all_registered,
    called_module,
    called_part,
    recording,
)
from spindle.train.task_errors import line_of, line_of_node, mark_line
from spindle.train.tracer import GradientTracer
from spindle.train.unchanged import unchanged

Handles = dict[str, ModuleHandle]  # modules by name


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call of a module. `arguments(batch, *outputs)` computes its arguments from the batch and from the outputs of
    the calls in `sources`. `chain` has the layers that run for these arguments."""

    name: str
    handle: ModuleHandle
    chain: Chain
    sources: tuple[str, ...]
    arguments: Callable[..., Any]
    line: str = ""  # the line of the task's code that makes the call
    # The item entries that it reads, directly or through its sources; None if it reads anything else.
    items: Entries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """A recorded task: its calls in order, and a loss `loss(batch, *outputs)` of the outputs of `loss_sources`."""

    definition: TaskDefinition
    calls: tuple[RecordedCall, ...]
    loss_sources: tuple[str, ...]
    loss: Callable[..., Any]
    is_mean: bool
    metrics: tuple[str, ...] = ()  # their names: `loss` then returns the loss and a tuple of metrics
    # Outcomes of branches on shapes, and lengths of loops; a batch with others is another variant.
    decisions: tuple[int, ...] = ()
    is_sum: bool = False  # whether the losses of parts of a batch add up to the whole loss without scaling
    # Used in place of `loss` if the samples of a loss found inside a module are coupled.
    whole_loss: Callable[..., Any] | None = None
    # What was recorded, before composites were opened. Recorded again, the task must have the same.
    lines: RecordedLines = field(default=(), repr=False)
    graph: fx.Graph = field(repr=False)  # everything that was recorded, with its constants
    constants: nn.Module = field(repr=False)

    @property
    def reads_values(self) -> bool:
        """Whether code between towers or blocks reads values of tensors, on which shapes may depend."""
        return any(call.chain.reads_values for call in self.calls) or any(
            getattr(node.target, "reads_values", False) for node in self.graph.nodes
        )


# Operations that may return a view of another tensor.
_PARTS = """getitem getattr view view_as reshape flatten unflatten transpose swapaxes swapdims movedim permute t squeeze
    unsqueeze expand expand_as broadcast_to chunk split tensor_split unbind narrow select diagonal detach"""


def _is_shared(node: fx.Node) -> bool:
    """Whether another tensor may share memory with this one, so that an in-place change would be visible there."""
    return node.op == "placeholder" or getattr(node.target, "__name__", node.target) in _PARTS.split()


def _writes(kind: str, target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation writes to its first argument or to `out`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    # A name such as `and_` ends in an underscore because of Python's keyword.
    is_keyword = target in (operator.and_, operator.or_, operator.not_)
    # A method of a tensor that is not recorded: entries of a recorded one have no such method.
    is_assignment = name == "__setitem__"
    in_name = is_assignment or (name.endswith("_") and not name.startswith("_") and not is_keyword)
    in_options = kwargs.get("inplace") is True or _is_out_given(target, kwargs)
    return kind in ("call_method", "call_function") and (in_name or in_options)


def _is_out_given(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation of torch writes to `out`. (A module may have an argument of that name.)"""
    return isinstance(target, BuiltinFunctionType) and kwargs.get("out") is not None


_DATA: Any = torch.Tensor.data  # the property
_NO_VALUES = ("requires_grad_", "detach_", "share_memory_")  # methods of a tensor that do not change its values


class _WeightsRefused(TorchFunctionMode):
    """Refuses code of a task that changes a weight of a registered module, also through `.data`: it has no recorded
    argument, so it would only run while the task is recorded."""

    def __init__(self, tracer: _TaskTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_foreach = name.startswith("_foreach_") and name.endswith("_")
        is_write = _writes("call_function", func, kwargs) or is_foreach or func == _DATA.__set__
        if is_write and name not in _NO_VALUES and not self._tracer.is_evaluating:
            weight = next(filter(None, map(_weight_in, tree_leaves((args[:1], kwargs.get("out"))))), None)
            if weight is not None:
                raise WorkloadError(
                    f"it changes the weight {weight!r} in place, which would only happen while the task is recorded; "
                    "limit a weight in the forward of its module (self.logit_scale.clamp(max=4.6))"
                )
        return func(*args, **kwargs)


def _weight_in(tensor: Any) -> str | None:
    """The name of the weight of a registered module whose memory this is."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    memory = tensor.untyped_storage()._cdata
    named = (
        (f"{handle.name}.{path}", weight)
        for handle in all_registered()
        for path, weight in handle.module.named_parameters()
    )
    return next((name for name, weight in named if weight.untyped_storage()._cdata == memory), None)


def _distributed_function(target: Any) -> str:
    """The name of a function of torch.distributed, or of an autograd function of it; empty for anything else."""
    owner = getattr(target, "__self__", target)  # of a method `apply`
    is_distributed = str(getattr(owner, "__module__", "")).startswith("torch.distributed")
    name = str(getattr(owner, "__name__", type(owner).__name__))
    return name.removeprefix("apply_").lstrip("_") if is_distributed else ""


class _Sized:
    """A recorded value with a length, where that is the same for every rank's share of a batch."""

    __array_priority__ = torch.Tensor.__array_priority__  # a number of numpy times this is up to this, too

    def __len__(self) -> int:
        assert isinstance(self, fx.Proxy)
        assert isinstance(self.tracer, _TaskTracer)
        return self.tracer.length(self)

    def __getattr__(self, name: str) -> Any:
        assert isinstance(self, fx.Proxy)
        return _AttributeProxy(self, name)


class _TaskProxy(_Sized, fx.Proxy):
    pass


class _AttributeProxy(_Sized, fx.proxy.Attribute):
    pass


class _TaskTracer(GradientTracer):
    """Traces a function of the batch. A module that is called without a handle is refused."""

    def __init__(self, task: str, example: Any, batch_size: int) -> None:
        super().__init__()
        self._task, self._mode = task, fake_mode()
        self._samples: list[Any] = []  # the batch at different sizes, as fake tensors
        self._examples: dict[int, Any] = {}  # what these are made from, by the id of the fake tensor
        for missing in (0, 1) if example is not None else ():
            real = tree_map(lambda leaf, missing=missing: _rows(leaf, batch_size, missing), example)
            fake = tree_map(lambda leaf: _fake(self._mode, leaf), real)
            self._samples.append(fake)
            self._examples |= {
                id(leaf): value for leaf, value in zip(tree_leaves(fake), tree_leaves(real), strict=True)
            }
        self.is_evaluating = False
        self.decisions: list[int] = []  # outcomes of branches on shapes, lengths of loops
        self._lengths: dict[fx.Node, int] = {}

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.is_evaluating:
            return forward(*args, **kwargs)
        raise WorkloadError(
            f"it calls a {type(m).__name__} that is not registered; "
            'write handle = spindle.module("name", module) once and call the handle'
        )

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if _writes(kind, target, kwargs):
            is_first = bool(args) and isinstance(args[0], fx.Proxy) and not _is_out_given(target, kwargs)
            changed = args[0].node if is_first else None
            if changed is None or _is_shared(changed) or not torch.is_grad_enabled():
                raise WorkloadError(
                    f"it changes a tensor in place ({getattr(target, '__name__', target)}) that may share memory with "
                    "the batch or another tensor; use an operation that returns a new tensor, such as x.relu() "
                    "instead of x.relu_()"
                )
        if function := _distributed_function(target):
            raise WorkloadError(
                f"it calls {function} of torch.distributed: a task is given the whole batch, so leave out what "
                "gathers or reduces over ranks"
            )
        if kind == "call_method":
            note_method(self._task, target)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        mark_line(proxy.node)
        return proxy

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy) and a.tracer is not self:
            raise WorkloadError(
                "it uses a value that was computed when a task was recorded before, and kept in an attribute or a "
                "cache; compute it each time, or in the forward of a module"
            )
        if isinstance(a, torch.Tensor) and a.requires_grad:
            what = "a parameter" if isinstance(a, nn.Parameter) else "a tensor that takes a gradient,"
            raise WorkloadError(
                f"it uses {what} of shape {tuple(a.shape)} outside any module; put it in a module, "
                'spindle.module("head", head, whole_batch=True)'
            )
        if isinstance(a, ModuleHandle):
            return a
        return super().create_arg(a.item() if isinstance(a, numpy.generic) else a)  # such as numpy.sqrt(64)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a branch on shapes, if every number of samples takes the same branch."""
        answers = self._values_of(obj)
        if not answers or any(isinstance(answer, torch.Tensor) for answer in answers):
            raise WorkloadError(
                "it branches on a tensor's value, which is not known when the step is planned; use torch.where, or "
                "decide from a non-tensor value"
            )
        if len({bool(answer) for answer in answers}) > 1:
            raise WorkloadError(
                "it branches on the number of samples, which differs from rank to rank; use torch.where, "
                "or decide from something else"
            )
        self.decisions.append(bool(answers[0]))
        return bool(answers[0])

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TaskProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Iterate over the keys of a dict, or over the elements of a sequence or tensor, as in `loss(*clip(images))`,
        if their number does not depend on the number of samples."""
        values = self._values_of(obj)
        if values and all(isinstance(value, Mapping) for value in values):
            return iter(list(values[0]))
        if values and all(isinstance(value, KeysView | ValuesView | ItemsView) for value in values):
            mapping_node: Any = obj.node.args[0]
            mapping: Any = self.proxy(mapping_node)
            entries = {key: mapping[key] for key in values[0].mapping}
            return iter(getattr(entries, str(obj.node.target))())
        elements: Any = obj
        return (elements[number] for number in range(self.length(obj, values)))

    def keys(self, obj: fx.Proxy) -> Any:
        """The keys of a dict, for `loss(**clip(images))`."""
        return list(self.iter(obj))

    def length(self, obj: fx.Proxy, values: Sequence[Any] | None = None) -> int:
        """The length of a nest or tensor, if it does not depend on the number of samples."""
        if obj.node not in self._lengths:
            values = self._values_of(obj) if values is None else values
            lengths = {len(value) for value in values}
            if len(lengths) > 1:
                raise WorkloadError(
                    "it loops over the samples of a batch, or takes their number as a Python number, but every rank "
                    "has some of them: write x.shape[0] for len(x), and the loop as operations on the whole batch or in"
                    " a module"
                )
            if not values:
                raise fx.proxy.TraceError("a length is known only with an example of the batch")
            self._lengths[obj.node] = len(values[0])
            if not isinstance(values[0], torch.Size):
                self.decisions.append(self._lengths[obj.node])
        return self._lengths[obj.node]

    def _values_of(self, obj: fx.Proxy) -> list[Any]:
        """The value of what was recorded for batches of different sizes, as fake tensors."""
        node = obj.node  # recorded when it is first asked for: here, where gradients are on
        called = [recorded.args[0].module for recorded in node.graph.nodes if recorded.target is called_module]
        before = ModuleSnapshot(called)  # fake tensors leave small buffers real, such as counts of batches
        self.is_evaluating = True
        try:
            with self._mode, torch.no_grad(), as_when_compiling():
                return [self._value_of(node, sample) for sample in self._samples]
        finally:
            self.is_evaluating = False
            before.restore()

    def _value_of(self, node: fx.Node, batch: Any) -> Any:
        """Evaluate a node on a batch, from all nodes that were recorded before it."""
        known: dict[fx.Node, Any] = {}
        for recorded in node.graph.nodes:
            args, kwargs = fx.node.map_arg((recorded.args, recorded.kwargs), lambda source: known[source])
            match recorded.op:
                case "placeholder":
                    known[recorded] = batch
                case "get_attr":  # a constant of the script
                    known[recorded] = getattr(self.root, recorded.target)
                case "call_function" if recorded.target is called_module:
                    # a module may already be on its device, where batches are moved later
                    there = next((tensor.device for tensor in args[0].module.parameters()), device_of(batch))
                    args, kwargs = on_device((args, kwargs), there)
                    known[recorded] = on_device(self._output_of(args, kwargs), device_of(batch))
                case "call_function":
                    known[recorded] = recorded.target(*args, **kwargs)
                case "call_method":
                    known[recorded] = getattr(args[0], recorded.target)(*args[1:], **kwargs)
        return known[node]

    def _output_of(self, args: Any, kwargs: Any) -> Any:
        """The output of a call of a module as fake tensors. A module that reads values runs on the example's."""
        try:
            return called_module(*args, **kwargs)
        except NEEDS_VALUES as error:
            module, needs_values = args[0].module, error
        with unset_fake_temporarily(), unchanged([module]):
            arguments = tree_map(lambda leaf: self._examples.get(id(leaf), zeros_like(leaf)), (args[1:], kwargs))
            try:
                output = zero_output(module, *arguments)
            except Exception:  # of values that are not the example's: a row fewer, or zeros for what the task computes
                raise needs_values from None
        return tree_map(lambda leaf: _fake(self._mode, leaf), output)


def _proxies(example: Any, batch: Any) -> Any:
    """The batch as the function sees it: its own dicts and tuples, with a proxy for each leaf."""
    if isinstance(example, dict):
        return {key: _proxies(value, batch[key]) for key, value in example.items()}
    if isinstance(example, Packed):
        return batch.tracer.create_proxy("call_function", unpack, (batch[0], batch[1]), {})
    if isinstance(example, tuple) and hasattr(example, "_fields"):
        return type(example)(*(_proxies(value, batch[number]) for number, value in enumerate(example)))
    if isinstance(example, tuple | list):
        return type(example)(_proxies(value, batch[number]) for number, value in enumerate(example))
    return None if example is None else batch


def record(definition: TaskDefinition, example: Any = None) -> RecordedTask:
    """Record a task, or raise an error that names what cannot be recorded, and the line.

    `example` is one of its batches. It lets the function index the batch's dicts and use shapes.
    """

    def function(batch: Any) -> Any:
        return definition.function(batch if example is None else _proxies(example, batch))

    try:
        tracer = _TaskTracer(definition.name, example, definition.batch_size)
        token = recording.set(tracer)
        try:
            with without_torch_logs(), prints_noticed(definition.name), draws_recorded(tracer), _WeightsRefused(tracer):
                graph = tracer.trace(function)
        finally:
            recording.reset(token)
    except WorkloadError as error:
        raise WorkloadError(f"{_where(definition, error)}: {error}") from None
    except Exception as error:
        cause = error if is_debugging() else None
        raise WorkloadError(f"{_where(definition, error)}: {_why_not_recorded(error, example)}") from cause
    _apply_writes_to_copies(graph)
    lines = recorded_lines(graph, tracer.root)
    return replace(read_graph(definition, graph, tracer.root, tuple(tracer.decisions)), lines=lines)


def _why_not_recorded(error: Exception, example: Any) -> str:
    """What an error in a task's function means for its author, who may not know that the function is traced."""
    what = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, KeyError) and isinstance(example, dict) and error.args[0] not in example:
        return f"its batch has no entry {error.args[0]!r}; it has {', '.join(map(repr, example))}"
    if isinstance(error, TypeError) and "item assignment" in str(error):
        return "it writes to a part of a tensor; use torch.where or masked_fill, or write in the forward of a module"
    is_given_to_numpy = isinstance(error, ValueError) and "__array_" in str(error)
    if is_given_to_numpy or (isinstance(error, TypeError) and ("Proxy'" in str(error) or "Proxy." in str(error))):
        return f"it reads the value of a tensor ({what}), but tensors have none while it is recorded; {INSTEAD}"
    if isinstance(error, HandleAttributeError):
        return str(error)
    if _is_own_mistake(error):
        return type(error).__name__ + (f": {error}" if str(error) and "Proxy" not in str(error) else "")
    return (
        f"it cannot be recorded ({what}). A task is recorded once, without values: write x.shape[0] for len(x), "
        "torch.where for a choice by values, and put loops over sizes and writes to parts of a tensor into a module"
    )


def _rows(leaf: Any, batch_size: int, missing: int) -> Any:
    """A leaf with `missing` rows fewer if its rows are those of the batch."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fewer = missing if leaf.dim() and leaf.shape[0] == batch_size > 1 else 0
    return leaf[: leaf.shape[0] - fewer] if fewer else leaf


def _fake(mode: FakeTensorMode, leaf: Any) -> Any:
    return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _where(definition: TaskDefinition, error: BaseException) -> str:
    line = line_of(error)
    return f"task {definition.name!r}, {line}" if line else f"task {definition.name!r}"


def _is_own_mistake(error: Exception) -> bool:
    """Whether an error has nothing to do with recording: a typo in the task, or an error that its own code raises."""
    if isinstance(error, AssertionError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_raised_by_user = trace is not None and is_users(trace.tb_frame.f_code)
    return "Proxy" not in str(error) and (
        is_raised_by_user or isinstance(error, NameError | AttributeError | ImportError)
    )


def _apply_writes_to_copies(graph: fx.Graph) -> None:
    """Apply in-place changes to a copy, which later readers of the tensor use."""
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        if _writes(node.op, node.target, node.kwargs):
            changed, *rest = node.args
            later = set(nodes[place + 1 :])
            changed.replace_all_uses_with(node, delete_user_cb=later.__contains__)
            with graph.inserting_before(node):
                node.args = (graph.call_method("clone", (changed,)), *rest)


def read_graph(
    definition: TaskDefinition, graph: fx.Graph, constants: nn.Module, decisions: tuple[int, ...]
) -> RecordedTask:
    """Split a recorded graph into its calls and its loss."""
    (batch,) = (node for node in graph.nodes if node.op == "placeholder")
    output = next(node for node in graph.nodes if node.op == "output")
    calls: dict[fx.Node, str] = {}
    times: dict[str, int] = {}
    recorded: list[RecordedCall] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (called_module, called_part):
            handle = node.args[0]
            name = f"{handle.name}#{times.get(handle.name, 0)}"
            times[handle.name] = times.get(handle.name, 0) + 1
            wanted = node.args[1] if node.target is called_part else (node.args[1:], node.kwargs)
            sources, arguments = _glue(graph, constants, batch, calls, wanted)
            calls[node] = name
            recorded.append(
                RecordedCall(
                    name=name,
                    handle=handle,
                    chain=handle.chain,
                    sources=sources,
                    arguments=arguments,
                    line=line_of_node(node),
                    items=entries_of_call(definition, sources, arguments, {call.name: call.items for call in recorded}),
                )
            )
    if not recorded:
        raise WorkloadError(f"task {definition.name!r} calls no module; register one with spindle.module and call it")
    result: Any = output.args[0]
    metrics: Any = {}
    if isinstance(result, fx.Node) and result.target is TaskResult:
        result, metrics = result.args
    if result is None:
        raise WorkloadError(f"task {definition.name!r} returns None; it must return its loss, one number in a tensor")
    is_mean = isinstance(result, fx.Node) and result.target is Mean
    wanted = (result, tuple(metrics.values())) if metrics else result
    sources, loss = _glue(graph, constants, batch, calls, wanted)
    return RecordedTask(
        definition=definition,
        calls=tuple(recorded),
        loss_sources=sources,
        loss=loss,
        is_mean=is_mean,
        metrics=tuple(metrics),
        decisions=decisions,
        graph=graph,
        constants=constants,
    )


def _glue(
    graph: fx.Graph, constants: nn.Module, batch: fx.Node, calls: dict[fx.Node, str], wanted: Any
) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """A function of the batch and of outputs of calls that computes the `wanted` nodes."""
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
            copies[node] = part.node_copy(node, lambda source: copies[source])
    part.output(fx.node.map_arg(wanted, lambda source: copies[source]))
    runner = fx.GraphModule(constants, part)
    return tuple(calls[node] for node in sources), runner.forward


def record_all(definitions: Sequence[TaskDefinition], examples: Mapping[str, Any] | None = None) -> list[RecordedTask]:
    """Record tasks that are trained together. Modules are identified by name. With examples, composites are opened."""
    recorded = [record(definition, (examples or {}).get(definition.name)) for definition in definitions]
    return [_open(task, examples[task.definition.name]) if examples else task for task in recorded]


def _open(task: RecordedTask, example: Any) -> RecordedTask:
    """The task with its composites opened, and with its loss split if that is a mean inside one of them."""
    with without_torch_logs():
        opened_graph = open_graph(task, example)
        graph = task.graph if opened_graph is None else opened_graph
        has_calls = draw_once(graph, task.constants, example)
        if opened_graph is None and not has_calls and not entries_of(example):
            return task
        pad_packed_outputs(graph, task.constants, task.definition.batch_size, example)
    opened = replace(read_graph(task.definition, graph, task.constants, task.decisions), lines=task.lines)
    split, is_sum = split_loss(graph)
    if split is None:
        return replace(opened, is_sum=is_sum, whole_loss=opened.loss if is_sum else None)
    with_parts = replace(read_graph(task.definition, split, task.constants, task.decisions), lines=task.lines)
    return replace(with_parts, whole_loss=opened.loss) if with_parts.loss_sources == opened.loss_sources else opened


def with_whole_loss(task: RecordedTask) -> RecordedTask:
    """The task with a loss that is computed over the whole batch, if its split loss comes from inside a module."""
    assert task.whole_loss is not None
    return replace(task, loss=task.whole_loss, is_mean=False, is_sum=False, whole_loss=None)


def cut_all(tasks: Sequence[RecordedTask], examples: Mapping[str, Any]) -> list[RecordedTask]:
    """Cut the modules of recorded tasks into layers, for the arguments that each call gets from these batches."""
    known: dict[Any, tuple[Chain, Callable[[], Any]]] = {}
    return _unify_cuts([_cut(task, examples[task.definition.name], known) for task in tasks])


def _cut(task: RecordedTask, example: Any, known: dict[Any, tuple[Chain, Callable[[], Any]]]) -> RecordedTask:
    mode = fake_mode()
    example = with_two_items(task.definition, example)
    batch = tree_map(lambda leaf: fake_like(mode, leaf), example)
    outputs: dict[str, Callable[[], Any]] = {}
    calls = []
    for call in task.calls:

        def values(call: RecordedCall = call) -> tuple[Any, Any]:
            """The call's arguments for the real batch, with modules that return zeros."""
            with torch.no_grad():
                arguments = call.arguments(
                    example, *(tree_map(zeros_like, outputs[source]()) for source in call.sources)
                )
            return arguments[0], arguments[1]

        try:
            try:
                given = [tree_map(lambda leaf: fake_like(mode, leaf), outputs[source]()) for source in call.sources]
                with mode:
                    args, kwargs = call.arguments(batch, *given)
            except Exception:  # the code may read values, which fake tensors do not have
                args, kwargs = values()
            form = pytree_meta((args, kwargs), 0)
            key = (id(call.handle.module), repr(form.spec), repr(form.leaves))
            if key not in known:
                chain, give = call.handle.cut(args, kwargs, values)
                known[key] = chain, cache(give)
            chain, outputs[call.name] = known[key]
            if _has_sizes_as_constants(call, chain, mode, (batch, *(outputs[source]() for source in call.sources))):
                chain = whole_chain(call.handle.module, "its code takes a size of the batch for a constant (a key?)")
        except Exception as error:
            error.add_note(f"in task {task.definition.name!r}, looking at the layers of {call.name} ({call.line})")
            raise
        calls.append(replace(call, chain=chain))
    return replace(task, calls=tuple(calls))


def _has_sizes_as_constants(call: RecordedCall, chain: Chain, mode: FakeTensorMode, given: Sequence[Any]) -> bool:
    """Whether ints that were recorded as constants follow from the sizes of the call's arguments, so that they may
    differ between batches. They do if they change with these sizes."""
    if chain.reads_values or not any(type(constant) is int for constant in chain.constants):
        return False

    def smaller(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with mode:
            return torch.empty([max(1, size - 1) for size in leaf.shape], dtype=leaf.dtype, device=leaf.device)

    as_fakes = [tree_map(lambda leaf: fake_like(mode, leaf), nest) for nest in given]
    try:
        with mode:
            before, after = (
                [leaf for leaf in tree_leaves(call.arguments(*nests)) if type(leaf) is int]
                for nests in (as_fakes, [tree_map(smaller, nest) for nest in as_fakes])
            )
    except Exception:  # the arguments read values, or cannot be computed for other sizes
        return False
    return before != after


def _unify_cuts(tasks: Sequence[RecordedTask]) -> list[RecordedTask]:
    """Give all calls of a module the same layers; or one layer, if their arguments lead to different layers."""
    for name, handle in handles_of(tasks).items():
        chains = [call.chain for task in tasks for call in task.calls if call.handle.name == name]
        handle.chain = chains[0]
        if len({tuple(layer.parameters for layer in chain.layers) for chain in chains}) > 1:
            reason = "its calls have different arguments, which run different layers"
            tasks = with_module_whole(tasks, handle.module, reason)
    return list(tasks)


def with_module_whole(tasks: Sequence[RecordedTask], module: object, reason: str) -> list[RecordedTask]:
    """The same tasks, with one module kept as one layer."""
    recorded = []
    for task in tasks:
        calls = []
        for call in task.calls:
            if call.handle.module is module:
                call.handle.chain = whole_chain(call.handle.module, reason)
                call = replace(call, chain=call.handle.chain)
            calls.append(call)
        recorded.append(replace(task, calls=tuple(calls)))
    return recorded


def handles_of(tasks: Sequence[RecordedTask]) -> Handles:
    """The modules of tasks by name. Refuses two modules with the same name."""
    handles: Handles = {}
    for task in tasks:
        for call in task.calls:
            known = handles.setdefault(call.handle.name, call.handle)
            if known.module is not call.handle.module:
                raise WorkloadError(
                    f"two modules are called {call.handle.name!r}; give one of them another name in spindle.module"
                )
    return handles


def root_handles(handles: Mapping[str, ModuleHandle]) -> Handles:
    """The handles that the user registered: composites in place of their parts."""
    roots = [handle.composite or handle for handle in handles.values()]
    return {root.name: root for root in roots}


def parameter_names(handles: Mapping[str, ModuleHandle]) -> dict[int, str]:
    """The first name of each tensor, so that tied weights are one parameter."""
    names: dict[int, str] = {}
    parameters: dict[str, int] = {}  # the other way round
    for handle in handles.values():
        for path, parameter in handle.module.named_parameters(remove_duplicate=False):
            name = f"{handle.name}.{path}"
            if parameters.setdefault(name, id(parameter)) != id(parameter):
                raise WorkloadError(
                    f"two parameters are called {name!r}, because the name of module {handle.name!r} is also a path in "
                    "another module; give one of them another name in spindle.module"
                )
            names.setdefault(id(parameter), name)
    return names


def named_parameters(handles: Mapping[str, ModuleHandle]) -> dict[str, nn.Parameter]:
    """Every parameter once, under its first name."""
    names = parameter_names(handles)
    parameters = [parameter for handle in handles.values() for parameter in handle.module.parameters()]
    return {names[id(parameter)]: parameter for parameter in parameters}
