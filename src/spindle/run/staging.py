"""Tensors copied into one flat piece of host memory, from which a thread writes them to disk.

On CPUs the copy is made at once. On a GPU it runs on a separate stream, concurrently with the forward and backward
passes that follow; whatever overwrites a tensor has to wait for `StagedBytes.event` first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class StagedBytes:
    """Bytes of tensors end to end, complete once `wait` has returned. `event` is None if the copy was made
    synchronously."""

    memory: torch.Tensor
    event: torch.cuda.Event | None = None

    def wait(self) -> memoryview:
        if self.event is not None:
            self.event.synchronize()
        return memoryview(self.memory.numpy())  # type: ignore[arg-type]  # an array is a buffer


class Staging:
    """Host memory for copies, reused from copy to copy; pinned if there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor], urgent: Collection[int] = ()) -> StagedBytes:
        """Copy tensors. Those at the positions `urgent` are copied before work that is launched later on the current
        stream.

        Tensors with larger elements must come first, so that none needs padding. The last copy must no longer be in
        use.
        """
        ends = list(accumulate(tensor.numel() * tensor.element_size() for tensor in tensors))
        num_bytes = ends[-1] if ends else 0
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating more
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        memory = self._memory[:num_bytes]
        targets = [
            memory[begin:end].view(tensor.dtype).view(tensor.shape)
            for begin, end, tensor in zip([0, *ends], ends, tensors, strict=False)
        ]
        if self._device.type != "cuda":
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor.detach())
            return StagedBytes(memory)
        current, stream = torch.cuda.current_stream(), _stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for position in urgent:
                _copy(targets[position], tensors[position], stream)
            current.wait_event(stream.record_event())
            for position, tensor in enumerate(tensors):
                if position not in urgent:
                    _copy(targets[position], tensor, stream)
            return StagedBytes(memory, stream.record_event(torch.cuda.Event(blocking=True)))  # type: ignore[no-untyped-call]


def _copy(target: torch.Tensor, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    target.copy_(tensor.detach(), non_blocking=True)
    if tensor.is_cuda:
        tensor.record_stream(stream)  # the allocator does not know about this use


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
