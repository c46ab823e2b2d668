"""Memory that parameters and activations need on a device.

Counted: weights, gradients and optimizer state of the parameters a device uses; activations saved between a slot's
forward and backward pass; the working space of a backward pass, in activations of one layer. Not counted: allocator
fragmentation, kernel workspaces, communication buffers beyond what is in flight.
"""

from __future__ import annotations

from spindle.graph import MetaGraph, MetaOp


def state_bytes(graph: MetaGraph, parameter: int, tensor_degree: int = 1, num_owners: int = 1) -> int:
    """Bytes of weights, gradient and optimizer state of one parameter on each device that uses it, with the optimizer
    state sharded over `num_owners` devices."""
    weights, numerics = graph.parameters[parameter], graph.numerics
    elements = weights.elements_at(tensor_degree)
    if not weights.trainable:
        return elements * numerics.parameter_bytes
    owned = -(-elements // num_owners)  # the largest shard
    return elements * (numerics.parameter_bytes + numerics.gradient_bytes) + owned * numerics.optimizer_bytes


def saved_bytes(op: MetaOp, rows: int, num_layers: int, tensor_degree: int, recompute: bool) -> int:
    """Bytes that a slot saves on one device for its backward pass; with `recompute`, only the input of each layer."""
    if op.cost is None or num_layers == 0:
        return 0
    per_row = op.cost.recompute_bytes_at(tensor_degree) if recompute else op.cost.saved_bytes_at(tensor_degree)
    return int(rows * num_layers * per_row)


# Working space in units of one layer's activations. With recomputation, the activations of the recomputed layer are
# alive as well: counting the tensors of real steps gave half of them in addition.
_WORKING, _WORKING_RECOMPUTE = 1.0, 1.5


def backward_bytes(op: MetaOp, rows: int, tensor_degree: int, recompute: bool = False) -> int:
    """The working space of a backward pass on one device."""
    share = _WORKING_RECOMPUTE if recompute else _WORKING
    return 0 if op.cost is None else int(share * rows * op.cost.saved_bytes / tensor_degree)


def bytes_text(num_bytes: float) -> str:
    """Format a size of memory."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"
