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


def gather_buffers(runtime: RankRuntime, world: World) -> None:
    """Gather each layer's buffers on rank 0, from the first rank of the slot that ran it last."""
    if world.size == 1:
        return
    handles = runtime.workload.bound.handles
    owner: dict[int, int] = {}
    program, plan = runtime.planned.program, runtime.planned.plan
    slots = sorted(zip(program.slots, plan.slots, strict=True), key=lambda pair: pair[0].op)
    for shape, slot in slots:
        op = runtime.workload.graph.metaops[shape.op]
        if op.module is not None and op.module in handles:
            layers = handles[op.module].chain.layers[op.first_layer + slot.first : op.first_layer + slot.last]
            owner.update((id(buffer), slot.devices[0]) for layer in layers for buffer in layer.buffers)
    buffers = [buffer for handle in handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [owner.get(id(buffer), 0) for buffer in buffers], [0])
