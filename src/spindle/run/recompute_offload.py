"""Activation checkpointing and offloading: layers that are recomputed in backward, or whose saved tensors go to the
host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spindle.run.op_code import LayerCode

Run = Callable[..., Any]


def checkpointed(layer: LayerCode, run: Run, args: Any) -> Any:
    """Run a layer without saving activations; backward recomputes them."""
    before = copy_buffers(layer)
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=layer.is_random,
        context_fn=lambda: (nullcontext(), with_buffers(layer, before)),
    )


def copy_buffers(layer: LayerCode) -> list[torch.Tensor]:
    """Copies of a layer's buffers."""
    return [buffer.clone() for buffer in layer.buffers()]


@contextmanager
def with_buffers(layer: LayerCode, before: list[torch.Tensor]) -> Iterator[None]:
    """Give a layer the buffers that it first ran with, and restore the present ones afterwards, so that running
    statistics are updated once."""
    after = copy_buffers(layer)
    _fill(layer.buffers(), before)
    try:
        yield
    finally:
        _fill(layer.buffers(), after)


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # without a version bump: autograd may have saved running statistics


class HostOffload:
    """Offloads saved tensors to the host. Copies are enqueued on the compute stream, so that no other stream has to
    wait for them. On a CPU tensors are copied, too."""

    def __init__(self) -> None:
        self.num_bytes = 0  # offloaded so far

    @contextmanager
    def saved_tensors(self, layer: LayerCode) -> Iterator[None]:
        """Offload the tensors that a layer saves for backward, except its weights, which stay on the device anyway."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in weights:
                return tensor
            self.num_bytes += tensor.nbytes
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, copy.copy_(tensor, non_blocking=True)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, tensor = packed
            return tensor.to(device, non_blocking=True)  # type: ignore[no-any-return]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
