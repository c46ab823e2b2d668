"""Buffers of modules (running statistics): the same on all ranks before and after a fit."""

from __future__ import annotations

from spindle.run import World, send_tensors
from spindle.train.bind import Bound
from spindle.train.runtime import RankRuntime


def share_buffers(bound: Bound, world: World) -> None:
    """Broadcast rank 0's buffers."""
    if world.size == 1:
        return
    buffers = [buffer for handle in bound.handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [0] * len(buffers), range(world.size))


def buffer_owners(runtime: RankRuntime) -> dict[int, int]:
    """The rank whose buffers of a layer are the latest, by id of the buffer: the first of the slot that ran it last."""
    handles = runtime.workload.bound.handles
    owner: dict[int, int] = {}
    program, plan = runtime.planned.program, runtime.planned.plan
    slots = sorted(zip(program.slots, plan.slots, strict=True), key=lambda pair: pair[0].op)
    for shape, slot in slots:
        op = runtime.workload.graph.metaops[shape.op]
        if op.module is not None and op.module in handles:
            layers = handles[op.module].chain.layers[op.first_layer + slot.first : op.first_layer + slot.last]
            owner.update((id(buffer), slot.devices[0]) for layer in layers for buffer in layer.buffers)
    return owner


def gather_buffers(runtime: RankRuntime, world: World) -> None:
    """Gather each layer's buffers on rank 0."""
    if world.size == 1:
        return
    owner = buffer_owners(runtime)
    buffers = [buffer for handle in runtime.workload.bound.handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [owner.get(id(buffer), 0) for buffer in buffers], [0])
