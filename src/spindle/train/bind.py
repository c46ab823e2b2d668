"""From recorded tasks to a Workload, and back from a MetaOp to the code it stands for.

Costs come from one pass over fake tensors: FLOPs as torch counts them, bytes of what crosses each cut. What a layer
keeps for its backward pass is estimated as its inputs and outputs four times over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from spindle.errors import WorkloadError
from spindle.graph import MetaOp
from spindle.run.code import LayersCode, LossCode, OpCode
from spindle.train.record import RecordedCall, RecordedTask
from spindle.train.task import ModuleHandle
from spindle.workload import Call, Layer, LayerCost, Module, Numerics, Parameter, Task, Workload

LOSS = "loss"
_SAVED_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A workload with the code behind it."""

    workload: Workload
    tasks: Mapping[str, RecordedTask]
    parameters: Mapping[str, nn.Parameter]
    handles: Mapping[str, ModuleHandle]

    def call_of(self, op: MetaOp) -> RecordedCall | None:
        """The call an op belongs to; None for a loss."""
        return next((call for call in self.tasks[op.task].calls if call.name == op.call), None)


def bind(name: str, tasks: Sequence[RecordedTask], examples: Mapping[str, Any]) -> Bound:
    """The workload of recorded tasks; `examples` has one batch for each, for shapes alone."""
    handles = _handles(tasks)
    parameter_names = _parameter_names(handles)
    first: dict[str, nn.Parameter] = {}
    for handle in handles.values():
        for parameter in handle.module.parameters():
            first.setdefault(parameter_names[id(parameter)], parameter)
    modules = [_module(handle, parameter_names) for handle in handles.values()]
    modules += [Module(name=f"{LOSS}.{one.definition.name}", layers=(Layer(kind=LOSS),)) for one in tasks]
    workload = Workload(
        name=name,
        modules=tuple(modules),
        parameters=tuple(
            Parameter(name=path, num_elements=parameter.numel(), trainable=parameter.requires_grad)
            for path, parameter in first.items()
        ),
        tasks=tuple(_task(one, examples[one.definition.name]) for one in tasks),
        numerics=Numerics(parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8, update_bytes=28),
    )
    return Bound(
        workload=workload,
        tasks={one.definition.name: one for one in tasks},
        parameters=first,
        handles=handles,
    )


def _handles(tasks: Sequence[RecordedTask]) -> dict[str, ModuleHandle]:
    handles: dict[str, ModuleHandle] = {}
    for one in tasks:
        for call in one.calls:
            known = handles.setdefault(call.handle.name, call.handle)
            if known.module is not call.handle.module:
                raise WorkloadError(
                    f"two modules are called {call.handle.name!r}; give one of them another name in spindle.module"
                )
    return handles


def _parameter_names(handles: Mapping[str, ModuleHandle]) -> dict[int, str]:
    """The first name of each tensor: tied weights are one parameter."""
    names: dict[int, str] = {}
    for handle in handles.values():
        for path, parameter in handle.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{handle.name}.{path}")
    return names


def _kinds(handle: ModuleHandle) -> list[str]:
    """Short names for the kinds of a chain's layers."""
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


def _task(one: RecordedTask, example: Any) -> Task:
    definition = one.definition
    calls, flows = [], []
    outputs: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, example)
        rows = definition.batch_size
        for call in one.calls:
            args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
            costs: dict[str, LayerCost] = {}
            values: Any = None
            for kind, layer in zip(_kinds(call.handle), call.handle.chain.layers, strict=True):
                before = (args, kwargs) if values is None else values
                with FlopCounterMode(display=False) as counter:
                    values = layer.run(*args, **kwargs) if values is None else layer.run(*values)
                cost = _cost(counter.get_total_flops(), before, values, rows, call.handle.whole_batch)
                costs[kind] = max(cost, costs.get(kind, cost), key=lambda known: known.forward_flops)
            outputs[call.name] = values[0]
            calls.append(Call(name=call.name, module=call.handle.name, costs=tuple(costs.items())))
            flows += [(source, call.name) for source in call.sources]
        used = [outputs[source] for source in one.loss_sources]
    splits = one.is_mean or definition.per_sample_mean
    loss_cost = replace(_cost(0, used, used, rows, whole_batch=not splits), meets=one.is_mean)
    calls.append(Call(name=LOSS, module=f"{LOSS}.{definition.name}", costs=((LOSS, loss_cost),)))
    flows += [(source, LOSS) for source in one.loss_sources]
    return Task(name=definition.name, batch_size=definition.batch_size, calls=tuple(calls), flows=tuple(flows))


def _cost(flops: int, before: Any, after: Any, rows: int, whole_batch: bool) -> LayerCost:
    def num_bytes(nest: Any) -> int:
        tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
        return sum(leaf.numel() * leaf.element_size() for leaf in tensors)

    moved = num_bytes(before) + num_bytes(after)
    return LayerCost(
        forward_flops=flops / rows,
        backward_flops=2 * flops / rows,
        traffic_bytes=moved / rows,
        saved_bytes=_SAVED_FACTOR * moved / rows,
        output_bytes=num_bytes(after) / rows,
        whole_batch=whole_batch,
    )


def code_of(bound: Bound, op: MetaOp) -> OpCode:
    """What the executor runs for an op."""
    recorded = bound.tasks[op.task]
    call = bound.call_of(op)
    if call is None:
        return LossCode(
            loss=recorded.loss,
            sources=recorded.loss_sources,
            weight=recorded.definition.weight,
            is_mean=recorded.is_mean,
            per_sample_mean=recorded.definition.per_sample_mean,
        )
    layers = call.handle.chain.layers[op.first_layer : op.first_layer + op.num_layers]
    if op.first_layer:
        return LayersCode(layers=layers)
    return LayersCode(layers=layers, arguments=call.arguments, sources=call.sources)
