"""Rank 0 cuts modules into layers and traces them; the other ranks receive the result.

Processes may differ (the order of a set of strings depends on PYTHONHASHSEED), so two processes that record one module
may record different layers. A task's own function is recorded by every rank, which gives it the rank's own modules and
callables; `agreement` compares these recordings. A module whose recording cannot be serialised is recorded by every
rank, too, and all ranks compare the layers that they end up with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spindle.errors import TrainingError
from spindle.models import Chain, NotSerializableError, build_chain, dump_chain, load_source, source_text
from spindle.run import Axes, World
from spindle.train.agreement import compare
from spindle.train.bind import trace_recorded
from spindle.train.record import RecordedCall, RecordedTask, cut_all, with_whole_loss
from spindle.train.trace import TracedLayer, TracedTask


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChainMessage:
    """A module's chain as bytes. Without bytes: why every rank has to record the module itself, and rank 0's kinds of
    layers."""

    module: str
    data: bytes | None
    reason: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskMessage:
    """What rank 0 has traced of a task. `chains` are the positions of its calls' chains in the message."""

    chains: tuple[int, ...]
    batch_axes: Axes
    layers: Mapping[str, tuple[TracedLayer, ...]]
    loss_bytes: int
    whole_only: str
    uneven: frozenset[str]
    splits_loss: bool


_Message = tuple[list[_ChainMessage], list[_TaskMessage]]


def trace_on_rank_0(
    tasks: Sequence[RecordedTask], examples: Mapping[str, Any], world: World, notify: Callable[[str], None]
) -> list[TracedTask]:
    """Trace recorded tasks on rank 0, and give all ranks the result."""
    if world.size == 1:
        return trace_recorded(tasks, examples)
    traced: list[TracedTask] = []
    message: _Message | None = None
    if world.rank == 0:
        traced = trace_recorded(tasks, examples)
        message = _message_of(traced)
    chains, task_messages = world.broadcast_object(message)
    for chain in chains:
        if chain.data is None:
            notify(f"module {chain.module!r} is recorded by every rank: {chain.reason}")
    if world.rank != 0:
        traced = _rebuild(tasks, examples, chains, task_messages, world)
    calls = [(task.name, call) for task in traced for call in task.recorded.calls]
    texts = {id(call.chain): source_text(call.chain) for _, call in calls}
    compare(world, {f"the layers of {call.name} in task {task!r}": texts[id(call.chain)] for task, call in calls})
    return traced


def _message_of(traced: Sequence[TracedTask]) -> _Message:
    positions: dict[int, int] = {}  # by the id of the chain
    chains: list[_ChainMessage] = []
    for task in traced:
        for call in task.recorded.calls:
            if id(call.chain) in positions:
                continue
            positions[id(call.chain)] = len(chains)
            try:
                chains.append(_ChainMessage(module=call.handle.name, data=dump_chain(call.chain)))
            except NotSerializableError as error:
                kinds = tuple(layer.kind for layer in call.chain.layers)
                chains.append(_ChainMessage(module=call.handle.name, data=None, reason=str(error), kinds=kinds))
    tasks = [
        _TaskMessage(
            chains=tuple(positions[id(call.chain)] for call in task.recorded.calls),
            batch_axes=task.batch_axes,
            layers=task.layers,
            loss_bytes=task.loss_bytes,
            whole_only=task.whole_only,
            uneven=task.uneven,
            splits_loss=task.recorded.is_mean or task.recorded.is_sum,
        )
        for task in traced
    ]
    return chains, tasks


def _rebuild(
    tasks: Sequence[RecordedTask],
    examples: Mapping[str, Any],
    chains: Sequence[_ChainMessage],
    messages: Sequence[_TaskMessage],
    world: World,
) -> list[TracedTask]:
    """The tasks as rank 0 has traced them, over this rank's modules."""
    if any(chain.data is None for chain in chains):
        tasks = cut_all(tasks, examples)
    built: dict[int, Chain] = {}
    traced = []
    for task, message in zip(tasks, messages, strict=True):
        if task.whole_loss is not None and not message.splits_loss:
            task = with_whole_loss(task)
        calls = []
        for call, position in zip(task.calls, message.chains, strict=True):
            if position not in built:
                built[position] = _chain(call, chains[position], world)
            calls.append(replace(call, chain=built[position]))
        traced.append(
            TracedTask(
                recorded=replace(task, calls=tuple(calls)),
                batch_axes=message.batch_axes,
                layers=message.layers,
                loss_bytes=message.loss_bytes,
                whole_only=message.whole_only,
                uneven=message.uneven,
            )
        )
    for call in reversed([call for task in traced for call in task.recorded.calls]):
        call.handle.chain = call.chain  # of the first call, in the end
    return traced


def _chain(call: RecordedCall, message: _ChainMessage, world: World) -> Chain:
    module, name = call.handle.module, call.handle.name
    if message.data is None:  # recorded by this rank; whether its layers are those of rank 0 is compared later
        kinds = (
            message.kinds
            if len(message.kinds) == len(call.chain.layers)
            else [layer.kind for layer in call.chain.layers]
        )
        layers = [replace(layer, kind=kind) for layer, kind in zip(call.chain.layers, kinds, strict=True)]
        return replace(call.chain, layers=tuple(layers))
    try:
        return build_chain(module, load_source(module, message.data, world.device))
    except Exception as error:  # importing what the chain refers to may fail on this rank
        raise TrainingError(
            f"rank {world.rank} cannot rebuild the layers of module {name!r} that rank 0 recorded "
            f"({type(error).__name__}: {error}); import what the module uses on all ranks, or register it with "
            f"spindle.module({name!r}, ..., split=False)"
        ) from error
