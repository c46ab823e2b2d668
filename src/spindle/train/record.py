"""Record a task: its function is traced once; calls of modules become `RecordedCall`s, the code between them glue.

Glue is run where its result is needed: each call carries the nodes that compute its arguments from the batch and from
other calls' outputs, and so does the loss. Glue must compute each row by itself; a loss that does not is
computed over the whole batch.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import WorkloadError
from spindle.launch import is_debugging
from spindle.models import (
    Chain,
    as_when_compiling,
    device_of,
    fake_like,
    fake_mode,
    whole_chain,
    without_torch_logs,
    zeros_like,
)
from spindle.run import on_device, pytree_meta
from spindle.train.composites import open_graph, split_loss
from spindle.train.items import Entries, entries_of_call, with_two_items
from spindle.train.packed import Packed, entries_of, unpack
from spindle.train.packed_parts import pad_packed_outputs
from spindle.train.recording_notices import INSTEAD, note_method, prints_noticed
from spindle.train.task import Mean, ModuleHandle, TaskDefinition, TaskResult, called_module, called_part, recording
from spindle.train.task_errors import line_of_node, mark_line
from spindle.train.tracer import GradientTracer

Handles = dict[str, ModuleHandle]  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call: `arguments(batch, *outputs)` gives its arguments, over the outputs of the calls in `sources`.

    `chain` has the layers that run for these arguments.
    """

    name: str
    handle: ModuleHandle
    chain: Chain
    sources: tuple[str, ...]
    arguments: Callable[..., Any]
    line: str = ""  # of the task's code
    items: Entries = ()  # that it reads, itself or through its sources, if it reads nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """A task as calls in order and a loss `loss(batch, *outputs)` over the outputs of `loss_sources`."""

    definition: TaskDefinition
    calls: tuple[RecordedCall, ...]
    loss_sources: tuple[str, ...]
    loss: Callable[..., Any]
    is_mean: bool
    metrics: tuple[str, ...] = ()  # names: `loss` then returns it with a tuple of their values
    decisions: tuple[bool, ...] = ()  # outcomes of branches on shapes; other batches must take the same ones
    is_sum: bool = False  # whether losses of parts of a batch sum to that of the whole
    whole_loss: Callable[..., Any] | None = None  # instead, where samples of a loss found inside a module are coupled
    graph: fx.Graph = field(repr=False)  # all that was recorded, with its constants
    constants: nn.Module = field(repr=False)

    @property
    def reads_values(self) -> bool:
        """Whether code between towers or blocks of its modules reads values of tensors, on which shapes may depend."""
        return any(call.chain.reads_values for call in self.calls) or any(
            getattr(node.target, "reads_values", False) for node in self.graph.nodes
        )


# Operations that may return a view of another tensor.
_PARTS = """getitem getattr view view_as reshape flatten unflatten transpose swapaxes swapdims movedim permute t squeeze
    unsqueeze expand expand_as broadcast_to chunk split tensor_split unbind narrow select diagonal detach"""


def _is_shared(node: fx.Node) -> bool:
    """Whether an in-place change of this tensor may be visible through another one."""
    return node.op == "placeholder" or getattr(node.target, "__name__", node.target) in _PARTS.split()


def _writes(kind: str, target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation changes its first argument in place."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_keyword = target in (operator.and_, operator.or_, operator.not_)  # the underscore is of Python's keyword
    in_name = name.endswith("_") and not name.startswith("_") and not is_keyword
    return kind in ("call_method", "call_function") and (in_name or kwargs.get("inplace") is True)


class _TaskTracer(GradientTracer):
    """Traces a function of the batch; a module that is called without a handle is refused."""

    def __init__(self, task: str, samples: Sequence[Any], mode: FakeTensorMode) -> None:
        super().__init__()
        self._task, self._samples, self._mode = task, samples, mode  # batches of different sizes, of fake tensors
        self._looking = False
        self.decisions: list[bool] = []  # outcomes of branches on shapes

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._looking:
            return forward(*args, **kwargs)
        raise WorkloadError(
            f"it calls a {type(m).__name__} that is not registered; "
            'write handle = spindle.module("name", module) once and call the handle'
        )

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if _writes(kind, target, kwargs):
            changed = args[0].node if args and isinstance(args[0], fx.Proxy) else None
            if changed is None or _is_shared(changed) or not torch.is_grad_enabled():
                raise WorkloadError(
                    f"it changes a tensor in place ({getattr(target, '__name__', target)}) that may share memory with "
                    "the batch or another tensor; use an operation that returns a new tensor, such as x.relu() "
                    "instead of x.relu_()"
                )
        if kind == "call_method":
            note_method(self._task, target)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        mark_line(proxy.node)
        return proxy

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and a.requires_grad:
            what = "a parameter" if isinstance(a, nn.Parameter) else "a tensor that takes a gradient,"
            raise WorkloadError(
                f"it uses {what} of shape {tuple(a.shape)} outside any module; put it in a module, "
                'spindle.module("head", head, whole_batch=True)'
            )
        if isinstance(a, ModuleHandle):
            return a
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A branch may depend on shapes, as long as every number of samples takes the same one."""
        self._looking = True
        try:
            with self._mode, torch.no_grad(), as_when_compiling():
                answers = [self._value_of(obj.node, sample) for sample in self._samples]
        finally:
            self._looking = False
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

    def _value_of(self, node: fx.Node, batch: Any) -> Any:
        """Evaluate a node on a batch, from everything that was recorded before it."""
        known: dict[fx.Node, Any] = {}
        for recorded in node.graph.nodes:
            args, kwargs = fx.node.map_arg((recorded.args, recorded.kwargs), lambda source: known[source])
            match recorded.op:
                case "placeholder":
                    known[recorded] = batch
                case "get_attr":  # a constant of the script
                    known[recorded] = getattr(self.root, recorded.target)
                case "call_function" if recorded.target is called_module:
                    # A module may already be on its device; batches are moved there later.
                    there = next((tensor.device for tensor in args[0].module.parameters()), device_of(batch))
                    args, kwargs = on_device((args, kwargs), there)
                    known[recorded] = on_device(called_module(*args, **kwargs), device_of(batch))
                case "call_function":
                    known[recorded] = recorded.target(*args, **kwargs)
                case "call_method":
                    known[recorded] = getattr(args[0], recorded.target)(*args[1:], **kwargs)
        return known[node]


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
    """Record a task, or raise an error that names what cannot be recorded, and its line.

    `example` is one of its batches: with it, the function may index the batch's dicts, and use shapes.
    """
    samples: list[Any] = []
    mode = fake_mode()
    if example is not None:
        rows = definition.batch_size
        samples = [tree_map(lambda leaf: _fake(mode, leaf, rows, 0), example)]
        samples.append(tree_map(lambda leaf: _fake(mode, leaf, rows, 1), example))

    def function(batch: Any) -> Any:
        return definition.function(batch if example is None else _proxies(example, batch))

    name = f"task {definition.name!r}"
    try:
        tracer = _TaskTracer(definition.name, samples, mode)
        token = recording.set(tracer)
        try:
            with without_torch_logs(), prints_noticed(definition.name):
                graph = tracer.trace(function)
        finally:
            recording.reset(token)
    except WorkloadError as error:
        raise WorkloadError(f"{name}{_line_of(error, definition)}: {error}") from None
    except Exception as error:
        what = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        text = (
            f"it cannot be recorded ({what}). A task is recorded once, without values: write x.shape[0] for len(x), "
            "torch.where for a choice by values, and put loops over sizes and writes to parts of a tensor into a module"
        )
        if isinstance(error, KeyError) and isinstance(example, dict) and error.args[0] not in example:
            text = f"its batch has no entry {error.args[0]!r}; it has {', '.join(map(repr, example))}"
        elif isinstance(error, TypeError) and "'Proxy'" in str(error):
            text = f"it reads the value of a tensor ({what}), but tensors have none while it is recorded; {INSTEAD}"
        elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleHandle):
            text = str(error)
        elif isinstance(error, NameError | AttributeError | ImportError) and "Proxy" not in str(error):
            text = f"{type(error).__name__}: {error}"  # a typo, and none of recording's business
        cause = error if is_debugging() else None
        raise WorkloadError(f"{name}{_line_of(error, definition)}: {text}") from cause
    _settle_writes(graph)
    return read_graph(definition, graph, tracer.root, tuple(tracer.decisions))


def _fake(mode: FakeTensorMode, leaf: Any, batch_size: int, missing: int) -> Any:
    """A fake tensor of the leaf's shape, with `missing` rows fewer if it has the batch's rows."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fewer = missing if leaf.dim() and leaf.shape[0] == batch_size > 1 else 0
    return mode.from_tensor(leaf[: leaf.shape[0] - fewer] if fewer else leaf)


def _line_of(error: BaseException, definition: TaskDefinition) -> str:
    """The last line of the task's own file on the way to the error."""
    file = definition.function.__code__.co_filename
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _settle_writes(graph: fx.Graph) -> None:
    """Make in-place changes work on a copy, which later readers of the tensor get."""
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        if _writes(node.op, node.target, node.kwargs):
            changed, *rest = node.args
            later = set(nodes[place + 1 :])
            changed.replace_all_uses_with(node, delete_user_cb=later.__contains__)
            with graph.inserting_before(node):
                node.args = (graph.call_method("clone", (changed,)), *rest)


def read_graph(
    definition: TaskDefinition, graph: fx.Graph, constants: nn.Module, decisions: tuple[bool, ...]
) -> RecordedTask:
    """The calls and the loss of a recorded graph."""
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
            copies[node] = part.node_copy(node, lambda source: copies[source])
    part.output(fx.node.map_arg(wanted, lambda source: copies[source]))
    runner = fx.GraphModule(constants, part)
    return tuple(calls[node] for node in sources), runner.forward


def record_all(definitions: Sequence[TaskDefinition], examples: Mapping[str, Any] | None = None) -> list[RecordedTask]:
    """Record tasks that train together; modules are identified by name. With examples, composites are opened."""
    recorded = [record(definition, (examples or {}).get(definition.name)) for definition in definitions]
    return [_open(task, examples[task.definition.name]) if examples else task for task in recorded]


def _open(task: RecordedTask, example: Any) -> RecordedTask:
    """A task with its composites opened, and its loss split where it is a mean inside one of them."""
    with without_torch_logs():
        graph = open_graph(task, example)
        if graph is None and not entries_of(example):
            return task
        graph = task.graph if graph is None else graph
        pad_packed_outputs(graph, task.constants, task.definition.batch_size, example)
    opened = read_graph(task.definition, graph, task.constants, task.decisions)
    split, is_sum = split_loss(graph)
    if split is None:
        return replace(opened, is_sum=is_sum, whole_loss=opened.loss if is_sum else None)
    with_parts = read_graph(task.definition, split, task.constants, task.decisions)
    return replace(with_parts, whole_loss=opened.loss) if with_parts.loss_sources == opened.loss_sources else opened


def with_whole_loss(task: RecordedTask) -> RecordedTask:
    """A task whose loss, taken from inside a module, is computed over the whole batch."""
    assert task.whole_loss is not None
    return replace(task, loss=task.whole_loss, is_mean=False, is_sum=False, whole_loss=None)


def cut_all(tasks: Sequence[RecordedTask], examples: Mapping[str, Any]) -> list[RecordedTask]:
    """Cut the modules of recorded tasks into layers, for the arguments that each call has on these batches."""
    known: dict[Any, tuple[Chain, Callable[[], Any]]] = {}
    return _cut_alike([_cut(task, examples[task.definition.name], known) for task in tasks])


def _cut(task: RecordedTask, example: Any, known: dict[Any, tuple[Chain, Callable[[], Any]]]) -> RecordedTask:
    mode = fake_mode()
    example = with_two_items(task.definition, example)
    batch = tree_map(lambda leaf: fake_like(mode, leaf), example)
    outputs: dict[str, Callable[[], Any]] = {}
    calls = []
    for call in task.calls:

        def values(call: RecordedCall = call) -> tuple[Any, Any]:
            """Its arguments on the real batch, where modules return zeros."""
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
            except Exception:  # it may read values, which fake tensors do not have
                args, kwargs = values()
            form = pytree_meta((args, kwargs), 0)
            key = (id(call.handle.module), repr(form.spec), repr(form.leaves))
            if key not in known:
                chain, give = call.handle.cut(args, kwargs, values)
                known[key] = chain, cache(give)
            chain, outputs[call.name] = known[key]
            if _takes_sizes_for_constants(call, chain, mode, (batch, *(outputs[source]() for source in call.sources))):
                chain = whole_chain(call.handle.module, "its code takes a size of the batch for a constant (a key?)")
        except Exception as error:
            error.add_note(f"in task {task.definition.name!r}, looking at the layers of {call.name} ({call.line})")
            raise
        calls.append(replace(call, chain=chain))
    return replace(task, calls=tuple(calls))


def _takes_sizes_for_constants(call: RecordedCall, chain: Chain, mode: FakeTensorMode, given: Sequence[Any]) -> bool:
    """Whether ints that are constants of a recorded module follow from sizes of what its call is given, so that they
    may differ from batch to batch: they do if they change with these sizes."""
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
    except Exception:  # its arguments read values, or do not follow from other sizes
        return False
    return before != after


def _cut_alike(tasks: Sequence[RecordedTask]) -> list[RecordedTask]:
    """Give calls of one module the same layers, or one layer if their arguments run different ones."""
    for name, handle in handles_of(tasks).items():
        chains = [call.chain for task in tasks for call in task.calls if call.handle.name == name]
        handle.chain = chains[0]
        if len({tuple(layer.parameters for layer in chain.layers) for chain in chains}) > 1:
            reason = "its calls have different arguments, which run different layers"
            tasks = kept_whole(tasks, handle.module, reason)
    return list(tasks)


def kept_whole(tasks: Sequence[RecordedTask], module: object, reason: str) -> list[RecordedTask]:
    """The same tasks with one module as one layer."""
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
    """The modules of tasks by name; two under one name are refused."""
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
    """The handles that the user registered: composites instead of their parts."""
    roots = [handle.composite or handle for handle in handles.values()]
    return {root.name: root for root in roots}


def parameter_names(handles: Mapping[str, ModuleHandle]) -> dict[int, str]:
    """The first name of each tensor: tied weights are one parameter."""
    names: dict[int, str] = {}
    for handle in handles.values():
        for path, parameter in handle.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{handle.name}.{path}")
    return names


def named_parameters(handles: Mapping[str, ModuleHandle]) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first name."""
    names = parameter_names(handles)
    parameters = [parameter for handle in handles.values() for parameter in handle.module.parameters()]
    return {names[id(parameter)]: parameter for parameter in parameters}
