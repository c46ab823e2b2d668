"""From traced tasks to a Workload, and back from a MetaOp to the code it stands for."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from spindle.errors import GuardError
from spindle.graph import MetaOp
from spindle.models import ChainLayer, StyledModule, compiled, split_dims
from spindle.run import Axes, LayerCode, LayersCode, LossCode, OpCode
from spindle.train.probe import Facts
from spindle.train.record import (
    RecordedTask,
    cut_all,
    handles_of,
    parameter_names,
    record_all,
    root_handles,
    with_module_whole,
)
from spindle.train.same_calls import Key
from spindle.train.task import ModuleHandle, TaskDefinition
from spindle.train.tensor import Sharing, parts_of, styles_in
from spindle.train.trace import TracedLayer, TracedTask, trace
from spindle.workload import Call, Layer, LayerCost, Module, ModuleRemark, Numerics, Parameter, Task, Workload

LOSS = "loss"
_NO_FACTS, _NO_SHARING = Facts(), Sharing()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWorkload:
    """A workload with the code of every op."""

    workload: Workload
    tasks: Mapping[str, TracedTask]
    parameters: Mapping[str, nn.Parameter]
    handles: Mapping[str, ModuleHandle]
    facts: Facts
    sharing: Sharing
    styled: tuple[StyledModule, ...]
    # Calls of sweep trials that an earlier trial computes for them.
    shared_calls: Mapping[Key, Key] = field(default_factory=dict)

    @property
    def trial_of(self) -> dict[str, str]:
        """In a sweep: the one task that trains a parameter, by the parameter's name."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            names[id(parameter)]: task.name
            for task in self.tasks.values()
            for call in task.recorded.calls
            for parameter in call.handle.module.parameters()
            if parameter.requires_grad
        }

    @property
    def batch_axes(self) -> dict[str, Axes]:
        return {name: task.batch_axes for name, task in self.tasks.items()}


def trace_all(
    definitions: Sequence[TaskDefinition], examples: Mapping[str, Any], device: torch.device | None = None
) -> list[TracedTask]:
    """Record tasks, cut their modules into layers and trace these; `examples` has a batch of each task. Modules are
    moved to the device first."""
    recorded = record_all(definitions, examples)
    if device is not None:
        for handle in root_handles(handles_of(recorded)).values():
            handle.module.to(device)
    return trace_recorded(recorded, examples)


def trace_recorded(tasks: Sequence[RecordedTask], examples: Mapping[str, Any]) -> list[TracedTask]:
    """Cut the modules of recorded tasks into layers, and trace them."""
    recorded = cut_all(tasks, examples)
    while True:
        try:
            return [trace(task, examples[task.definition.name]) for task in recorded]
        except GuardError as error:
            if not any(call.handle.module is error.module for task in recorded for call in task.calls):
                raise
            reason = "the code between its blocks depends on the number of samples (int(x.shape[0])?)"
            recorded = with_module_whole(recorded, error.module, reason)


def bind(
    name: str,
    tasks: Sequence[TracedTask],
    facts: Facts = _NO_FACTS,
    sharing: Sharing = _NO_SHARING,
    names: Mapping[int, str] | None = None,
    shared_calls: Mapping[Key, Key] | None = None,
) -> BoundWorkload:
    """Make the workload of traced tasks.

    `names` are the names that parameters had before tasks ended, because the name of a tied parameter depends on the
    modules that are there. `shared_calls` are calls that earlier tasks compute.
    """
    shared_calls = shared_calls or {}
    handles = handles_of([task.recorded for task in tasks])
    names = names or parameter_names(handles)
    styled = tuple(styles_in(handles)) if sharing.most else ()
    split = split_dims(styled)
    first: dict[str, nn.Parameter] = {}  # by name; a tied parameter has one name, and is one parameter
    for handle in handles.values():
        for parameter in handle.module.parameters():
            first.setdefault(names[id(parameter)], parameter)
    states = states_of(tasks, facts)
    modules = [_module(handle, names) for handle in handles.values()]
    modules += [Module(name=f"{LOSS}.{task.name}", layers=(Layer(kind=LOSS),)) for task in tasks]
    # A workload has a single number of bytes per element; with mixed dtypes, the widest counts.
    element_bytes = max((parameter.element_size() for parameter in first.values()), default=4)
    workload = Workload(
        name=name,
        modules=tuple(modules),
        parameters=tuple(
            Parameter(
                name=path,
                num_elements=parameter.numel(),
                trainable=parameter.requires_grad,
                is_split=not sharing.most or id(parameter) in split,
            )
            for path, parameter in first.items()
        ),
        tasks=tuple(_task(task, facts, sharing, shared_calls, states) for task in tasks),
        # Adam keeps two moments per weight; a step reads weight, gradient and moments and writes all but the gradient.
        numerics=Numerics(
            parameter_bytes=element_bytes,
            gradient_bytes=element_bytes,
            optimizer_bytes=2 * element_bytes,
            update_bytes=7 * element_bytes,
        ),
        remarks=_remarks(tasks, handles, facts),
    )
    return BoundWorkload(
        workload=workload,
        tasks={task.name: task for task in tasks},
        parameters=first,
        handles=handles,
        facts=facts,
        sharing=sharing,
        styled=styled,
        shared_calls=shared_calls,
    )


def _remarks(
    tasks: Sequence[TracedTask], handles: Mapping[str, ModuleHandle], facts: Facts
) -> tuple[ModuleRemark, ...]:
    """Which modules run as one layer or on one device, and why."""
    one_device = {name: "whole_batch=True" for name, handle in handles.items() if handle.whole_batch}
    for task in tasks:
        for call in task.recorded.calls:
            if (task.name, call.name) in facts.coupled:
                one_device.setdefault(call.handle.name, facts.coupled[task.name, call.name])
    remarks = [
        ModuleRemark(
            module=name,
            one_layer=handle.chain.reason if any(handle.module.children()) else "",
            one_device=one_device.get(name, ""),
            closed=handle.closed_reason,
        )
        for name, handle in handles.items()
    ]
    return tuple(remark for remark in remarks if remark.one_layer or remark.one_device or remark.closed)


def _kinds(handle: ModuleHandle) -> list[str]:
    """Short names for the kinds of layers in a chain."""
    numbers: dict[str, int] = {}
    return [f"kind{numbers.setdefault(layer.kind, len(numbers))}" for layer in handle.chain.layers]


def _module(handle: ModuleHandle, names: Mapping[int, str]) -> Module:
    return Module(
        name=handle.name,
        layers=tuple(
            Layer(kind=kind, parameters=tuple(names[id(parameter)] for parameter in layer.parameters))
            for kind, layer in zip(_kinds(handle), handle.chain.layers, strict=True)
        ),
    )


def states_of(tasks: Sequence[TracedTask], facts: Facts) -> dict[str, str]:
    """Module whose calls change it → the name of its state: the first module that shares it. Only for states that
    several calls of a step change."""
    of_submodule: dict[int, str] = {}
    states: dict[str, str] = {}
    for task in tasks:
        for call in task.recorded.calls:
            if (task.name, call.name) in facts.keeping and call.handle.name not in states:
                inside = [id(module) for module in call.handle.module.modules()]
                shared = next((of_submodule[module] for module in inside if module in of_submodule), call.handle.name)
                states[call.handle.name] = shared
                of_submodule |= dict.fromkeys(inside, shared)
    calls = Counter(states.get(call.handle.name) for task in tasks for call in task.recorded.calls)
    return {name: state for name, state in states.items() if calls[state] > 1}


def _task(
    traced: TracedTask, facts: Facts, sharing: Sharing, shared_calls: Mapping[Key, Key], states: Mapping[str, str]
) -> Task:
    definition, recorded = traced.recorded.definition, traced.recorded
    rows = definition.batch_size
    calls, flows = [], []
    for call in recorded.calls:
        is_coupled = (traced.name, call.name) in facts.coupled
        whole_batch = call.handle.whole_batch or is_coupled or call.handle.name in states
        costs: dict[str, LayerCost] = {}
        layers = zip(_kinds(call.handle), call.chain.layers, traced.layers[call.name], strict=True)
        for kind, chained, layer in layers:
            cost = _cost(layer, rows, whole_batch)
            cost = replace(cost, recompute=call.handle.activation_checkpointing, state=states.get(call.handle.name, ""))
            if call.handle.name in sharing.most:
                sent, share = sharing.costs.get((traced.name, call.name, chained.kind), (0.0, 0.0))
                most = sharing.most[call.handle.name]
                cost = replace(cost, tensor_bytes=sent, tensor_share=share, max_tensor_degree=most)
            # Layers of one kind have equal costs up to details (the first one has no gradient to pass on); the largest
            # cost is used for all.
            costs[kind] = max(cost, costs.get(kind, cost), key=lambda known: known.backward_flops)
        same_as = "/".join(shared_calls.get((traced.name, call.name), ()))
        calls.append(Call(name=call.name, module=call.handle.name, costs=tuple(costs.items()), same_as=same_as))
        flows += [(source, call.name) for source in call.sources]
    splits = recorded.is_mean or recorded.is_sum or definition.per_sample_mean
    whole_loss = bool(traced.whole_only) or not traced.uneven.isdisjoint(recorded.loss_sources)
    loss_cost = LayerCost(
        forward_flops=0,
        backward_flops=0,
        traffic_bytes=2 * traced.loss_bytes / rows,
        saved_bytes=2 * traced.loss_bytes / rows,
        output_bytes=0,
        whole_batch=not splits or whole_loss,
        # Ranks that split a loss synchronize: they all-reduce its count, and check the sum in the first step.
        gang=splits and not whole_loss,
    )
    calls.append(Call(name=LOSS, module=f"{LOSS}.{definition.name}", costs=((LOSS, loss_cost),)))
    flows += [(source, LOSS) for source in recorded.loss_sources]
    return Task(name=definition.name, batch_size=rows, calls=tuple(calls), flows=tuple(flows))


def _cost(layer: TracedLayer, rows: int, whole_batch: bool) -> LayerCost:
    return LayerCost(
        forward_flops=layer.forward_flops / rows,
        backward_flops=layer.backward_flops / rows,
        traffic_bytes=(layer.input_bytes + layer.output_bytes) / rows,
        saved_bytes=layer.saved_bytes / rows,
        output_bytes=layer.output_bytes / rows,
        whole_batch=whole_batch,
    )


def computation_key_of(layer: ChainLayer) -> Any:
    """A key that is equal for layers that compute the same; None if that is unknown."""
    return (layer.settings, *(parameter.requires_grad for parameter in layer.parameters)) if layer.settings else None


def _compiled(handle: ModuleHandle, layer: ChainLayer) -> Callable[..., tuple[Any, ...]] | None:
    if handle.compile is None or not layer.modules:
        return None
    return compiled(layer.run, layer.modules, handle.compile)


def code_of(bound: BoundWorkload, op: MetaOp) -> OpCode:
    """The code that the executor runs for an op."""
    traced = bound.tasks[op.task]
    recorded, facts = traced.recorded, bound.facts

    def named(sources: Sequence[str]) -> tuple[str, ...]:
        """The sources under the names that the graph uses: a source of another task includes that task's name
        (`MetaGraph.source_name`)."""
        return tuple("/".join(bound.shared_calls.get((traced.name, source), (source,))) for source in sources)

    call = next((call for call in recorded.calls if call.name == op.call), None)
    if call is None:
        return LossCode(
            loss=recorded.loss,
            sources=named(recorded.loss_sources),
            weight=recorded.definition.weight,
            is_mean=recorded.is_mean,
            is_sum=recorded.is_sum,
            reads_values=recorded.reads_values,
            per_sample_mean=recorded.definition.per_sample_mean,
            is_random=traced.name in facts.random_losses,
            metrics=recorded.metrics,
        )
    layers = tuple(
        LayerCode(
            run=call.chain.layers[number].run,
            axes=traced.layers[call.name][number].axes,
            parameters=call.chain.layers[number].parameters,
            buffers=partial(operator.attrgetter("buffers"), call.chain.layers[number]),
            writes_input=traced.layers[call.name][number].writes_input,
            is_random=(traced.name, call.name, number) in facts.random_layers,
            styled=parts_of(call.chain.layers[number].parameters, bound.styled),
            likeness=computation_key_of(call.chain.layers[number]),
            compiled=_compiled(call.handle, call.chain.layers[number]),
        )
        for number in range(op.first_layer, op.first_layer + op.num_layers)
    )
    items = facts.items.get((traced.name, call.name))
    code = LayersCode(layers=layers, reads_values=recorded.reads_values, items=items)
    return code if op.first_layer else replace(code, arguments=call.arguments, sources=named(call.sources))
