"""What modules keep beside their weights (running statistics): the same on all ranks before a fit and after it."""

from __future__ import annotations

from spindle.run import World
from spindle.train.bind import Bound
from spindle.train.runtime import RankRuntime


def share_buffers(bound: Bound, world: World) -> None:
    """Every rank takes rank 0's."""
    if world.size == 1:
        return
    buffers = [buffer for handle in bound.handles.values() for buffer in handle.module.buffers()]
    values = world.broadcast_object([buffer.cpu() for buffer in buffers] if world.rank == 0 else None)
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def gather_buffers(runtime: RankRuntime, world: World) -> None:
    """Rank 0 takes each layer's buffers from the first rank that ran it in its last call."""
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
    sent = [
        (number, buffer.cpu())
        for number, buffer in enumerate(buffers)
        if owner.get(id(buffer), 0) == world.rank and world.rank
    ]
    for received in world.gather_objects(sent):
        for number, value in received:
            buffers[number].copy_(value)
