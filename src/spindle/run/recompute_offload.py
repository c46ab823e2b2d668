"""Activation checkpointing and offloading: layers that are recomputed in backward, or whose saved tensors go to the
host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spindle.program import OffloadCopies
from spindle.run.op_code import LayerCode

Run = Callable[..., Any]


def checkpointed(layer: LayerCode, run: Run, args: Any) -> Any:
    """Run a layer without saving activations. Backward recomputes them."""
    before = copy_buffers(layer)
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=layer.is_random,
        context_fn=lambda: (nullcontext(), with_buffers(layer, before)),
    )


def copy_buffers(layer: LayerCode) -> list[torch.Tensor]:
    """Copies of the buffers that a layer may change."""
    return [buffer.clone() for buffer in layer.buffers()]


@contextmanager
def with_buffers(layer: LayerCode, before: list[torch.Tensor]) -> Iterator[None]:
    """A context in which a layer has the buffers of its first run. The current ones are restored afterwards, so that
    running statistics are updated only once."""
    after = copy_buffers(layer)
    _fill(layer.buffers(), before)
    try:
        yield
    finally:
        _fill(layer.buffers(), after)


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # without a version bump, because autograd may have saved running statistics


@dataclass(slots=True, eq=False)
class Offloaded:
    """A saved tensor: on the device, on the host, or on both while it is copied."""

    on_device: torch.Tensor | None
    on_host: torch.Tensor | None


class HostOffload:
    """Saved tensors of offloaded layers, which are on the host between forward and backward.

    On a GPU, copies run on two streams of their own, one per direction; `program/copies.py` determines during which
    passes. Two rules make that safe without `record_stream`. First, the compute stream allocates memory on the device,
    and a copy starts after an event that this stream records after the allocation. Second, the memory is released only
    after the compute stream waits for the copy, so whoever gets it next from the allocator runs after the copy. Pinned
    host memory is guarded by torch's allocator, which records an event on the stream of each copy. As always with
    autograd, what a layer saves must not be written to afterwards.

    On a CPU, the same tensors are copied at the same places, synchronously.
    """

    def __init__(self, device: torch.device, copies: Sequence[OffloadCopies]) -> None:
        self.num_bytes = 0  # bytes offloaded so far
        self._device = device
        self._slots = frozenset(entry.slot for entry in copies)
        # By position in the compute order: slots whose memory is released, slots that are fetched, and slots that run
        # backward.
        self._released = sorted((entry.released, entry.slot) for entry in copies)
        self._fetched = sorted((entry.fetched, entry.slot) for entry in copies)
        self._returned = sorted((entry.backward, entry.slot) for entry in copies)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if copies and device.type == "cuda":
            self._streams = _copy_streams()
        self._tensors: dict[int, dict[object, Offloaded]] = {}  # by slot: its saved tensors, each once
        self._events: dict[int, torch.cuda.Event] = {}  # by slot: an event after its last copy
        self._num_released = self._num_fetched = self._num_returned = 0

    def begin(self) -> None:
        """Start a step. Nothing is left of the previous step, unless that failed."""
        for stream in self._streams or () if self._tensors else ():
            torch.cuda.current_stream().wait_stream(stream)
        self._tensors.clear()
        self._events.clear()
        self._num_released = self._num_fetched = self._num_returned = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        """How many slots have activations on the host, or on their way."""
        return len(self._tensors)

    def before(self, place: int) -> None:
        """Release, fetch and wait for tensors, before the instruction at this position of the compute order is
        launched."""
        while self._num_released < len(self._released) and self._released[self._num_released][0] <= place:
            self._release(self._released[self._num_released][1])
            self._num_released += 1
        while self._num_fetched < len(self._fetched) and self._fetched[self._num_fetched][0] <= place:
            self._fetch(self._fetched[self._num_fetched][1])
            self._num_fetched += 1
        while self._num_returned < len(self._returned) and self._returned[self._num_returned][0] <= place:
            self._wait_for_copies(self._returned[self._num_returned][1])
            self._tensors.pop(self._returned[self._num_returned][1], None)  # the autograd graph owns them now
            self._num_returned += 1

    @contextmanager
    def saved_tensors(self, slot: int, layer: LayerCode) -> Iterator[None]:
        """A context that offloads the tensors that a layer saves for backward, except its weights, which stay on the
        device anyway."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters}
        saved = self._tensors.setdefault(slot, {})

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in weights or tensor.device.type != self._device.type:
                return tensor
            # Several ops may save the same tensor. No other tensor has its address while a slot runs forward, because
            # all are kept.
            kind = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (tensor.data_ptr(), tensor._version, kind)
            if key not in saved:
                # detached, because autograd would never free a tensor that its own graph owns
                saved[key] = Offloaded(tensor.detach(), None)
                self._copy_to_host(saved[key])
            return saved[key]

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            assert packed.on_device is not None, "its slot runs backward, so it has been fetched"
            return packed.on_device  # type: ignore[no-any-return]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        if self._streams is not None:
            self._events[slot] = self._streams[0].record_event()

    def _copy_to_host(self, saved: Offloaded) -> None:
        assert saved.on_device is not None
        self.num_bytes += saved.on_device.nbytes
        saved.on_host = torch.empty_like(saved.on_device, device="cpu", pin_memory=self._streams is not None)
        with self._on_stream(0):
            saved.on_host.copy_(saved.on_device, non_blocking=True)

    def _release(self, slot: int) -> None:
        """Release the device memory of tensors that were copied to the host."""
        self._wait_for_copies(slot)
        for saved in self._tensors.get(slot, {}).values():
            saved.on_device = None

    def _fetch(self, slot: int) -> None:
        """Start to copy tensors back."""
        tensors = self._tensors.get(slot, {}).values()
        for saved in tensors:
            assert saved.on_host is not None
            saved.on_device = torch.empty_like(saved.on_host, device=self._device, pin_memory=False)
        with self._on_stream(1):
            for saved in tensors:
                assert saved.on_device is not None
                assert saved.on_host is not None
                saved.on_device.copy_(saved.on_host, non_blocking=True)
                saved.on_host = None
            if self._streams is not None:
                self._events[slot] = self._streams[1].record_event()

    @contextmanager
    def _on_stream(self, direction: int) -> Iterator[None]:
        """A context in which copies run on the stream of a direction, after everything launched on the current stream
        so far."""
        if self._streams is None:
            yield
            return
        self._streams[direction].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._streams[direction]):
            yield

    def _wait_for_copies(self, slot: int) -> None:
        """Let the current stream wait for the last copies of a slot."""
        event = self._events.pop(slot, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


@cache
def _copy_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams for copies to the host and back. All executors share them, because each plan of a pipeline has an
    executor of its own."""
    return torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
