"""What layers keep for their backward pass: nothing, so that they run again, or tensors that wait on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spindle.run.op_code import LayerCode

Run = Callable[..., Any]


def recomputed(layer: LayerCode, run: Run, args: Any) -> Any:
    """Runs a layer now, and again in backward instead of keeping what it needs there."""
    before = buffers_of(layer)
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=layer.is_random,
        context_fn=lambda: (nullcontext(), again(layer, before)),
    )


def buffers_of(layer: LayerCode) -> list[torch.Tensor]:
    """Copies of what a layer's buffers hold now."""
    return [buffer.clone() for buffer in layer.buffers()]


@contextmanager
def again(layer: LayerCode, before: list[torch.Tensor]) -> Iterator[None]:
    """Inside, a layer's buffers are as they were when it first ran; what it does to them counts once."""
    after = buffers_of(layer)
    _fill(layer.buffers(), before)
    try:
        yield
    finally:
        _fill(layer.buffers(), after)


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # unseen by autograd, which keeps running statistics for backward


class Host:
    """Where tensors of offloaded layers wait. Copies stand in the order of the stream of compute, so that nobody else
    has to wait for them. On a CPU they are copies all the same."""

    def __init__(self) -> None:
        self.num_bytes = 0  # that went there so far

    @contextmanager
    def keeping(self, layer: LayerCode) -> Iterator[None]:
        """Inside, what a layer saves goes to the host, but for its weights, which stay anyway."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in weights:
                return tensor
            self.num_bytes += tensor.nbytes
            place = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, place.copy_(tensor, non_blocking=True)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, tensor = packed
            return tensor.to(device, non_blocking=True)  # type: ignore[no-any-return]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
