"""Memory through which tensors pass from process to process, on the host and on a GPU.

A memory backend allocates segments that other processes map, and orders work on them. On the host a copy is done when
it returns. On a GPU it is merely enqueued: `signal` enqueues a write of this rank's next signal value behind it, and
`wait_signals` makes the stream wait until another rank's signal has reached a value. Signals are words of the group's
`ShmControl`, which the GPU writes and polls and the host can read, too.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spindle.run.ipc.driver import Driver
from spindle.run.ipc.shm_control import FREED, HANDLE_WORDS, ShmControl, make_memory, open_memory

_KINDS = 4  # sizes of segments that a backend may have, for collectives and for messages
_SWITCH_S = 1e-4
Handle = tuple[int, ...]  # the words by which other processes map memory


@dataclass(frozen=True, slots=True)
class Place:
    """Where other processes find a tensor of this process: at an offset in an allocation of `num_bytes`. The `number`
    of an allocation is never reused, while its handle may be."""

    num_bytes: int
    offset: int
    number: int
    handle: Handle


class MemoryBackend(Protocol):
    """What differs between kinds of memory."""

    number: int  # identifies the kind of memory, the same on all ranks
    half_bytes: tuple[int, ...]  # sizes of half a segment for collectives, in increasing order
    slots: tuple[tuple[int, int], ...]  # (number, bytes) of the slots of each segment for messages

    def enter(self) -> Any:
        """Make the calling thread use this backend. Returns what `leave` needs."""

    def leave(self, entered: Any) -> None: ...

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, Handle]:
        """Allocate a segment. Returns it with the handle by which others map it."""

    def attach(self, pid: int, handle: Handle, num_bytes: int) -> torch.Tensor:
        """Map memory of another process."""

    def detach(self, memory: torch.Tensor) -> None:
        """Unmap what `attach` mapped."""

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where others find a tensor's own memory; None if it cannot be shared."""

    def has_freed(self) -> bool:
        """Whether memory that `place_of` has exported was freed since the last call. Others still have it mapped."""

    def record_event(self) -> Any:
        """An event after the work that the caller has enqueued so far."""

    def is_event_done(self, event: Any) -> bool: ...

    def wait_event(self, event: Any, tensors: list[torch.Tensor]) -> None:
        """Order subsequent work on these tensors after an event."""

    def signal(self) -> int:
        """Enqueue this rank's next signal after the work so far. Returns its value."""

    def wait_signals(self, signals: Mapping[int, int]) -> None:
        """Order subsequent work after signals of other ranks, given by rank."""

    def record_done(self) -> Any:
        """An event after the work so far; None if the work is already done."""

    def is_busy(self) -> bool:
        """Whether enqueued work may still be waiting for another rank."""

    def close(self) -> None:
        """Free this rank's memory; no other rank may use it any more."""


class Segments:
    """Segments of memory of a group's ranks, by rank and number. This rank's are allocated on first use; others' are
    mapped once they have published their handles."""

    def __init__(self, control: ShmControl) -> None:
        self._control = control
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._placed: dict[tuple[int, int], tuple[MemoryBackend, Handle, torch.Tensor]] = {}  # by rank and number
        self._freed: dict[int, int] = {}  # by rank: its count of freed allocations when last checked

    def at(self, rank: int, backend: MemoryBackend, place: Place) -> torch.Tensor:
        """The memory of another rank from a place on."""
        key = (rank, place.number)
        if key not in self._placed:
            # A handle that appears again belongs to new memory at the same address.
            stale = [old for old, (_, handle, _) in self._placed.items() if old[0] == rank and handle == place.handle]
            for old in stale:
                self._detach(old)
            memory = backend.attach(self._control.pid(rank), place.handle, place.num_bytes)
            self._placed[key] = backend, place.handle, memory
        return self._placed[key][2][place.offset :]

    def _detach(self, key: tuple[int, int]) -> None:
        backend, _, memory = self._placed.pop(key)
        backend.detach(memory)

    def release(self) -> None:
        """Unmap tensors of ranks that have freed some; those that still exist are mapped again on their next use."""
        for rank in {rank for rank, _ in self._placed}:
            freed = self._control.words[self._control.row(rank) + FREED]
            if self._freed.get(rank, 0) != freed:
                self._freed[rank] = freed
                for key in [key for key in self._placed if key[0] == rank]:
                    self._detach(key)

    def number_for_collectives(self, backend: MemoryBackend, kind: int) -> int:
        return backend.number * 2 * _KINDS + kind

    def for_collectives(self, backend: MemoryBackend, kind: int, num_bytes: int) -> int:
        return self._own_segment(backend, self.number_for_collectives(backend, kind), num_bytes)

    def for_messages(self, backend: MemoryBackend, kind: int, num_bytes: int) -> int:
        return self._own_segment(backend, (backend.number * 2 + 1) * _KINDS + kind, num_bytes)

    def _own_segment(self, backend: MemoryBackend, number: int, num_bytes: int) -> int:
        """Allocate a segment of this rank on its first use, and publish its handle."""
        if (self._control.rank, number) not in self._tensors:
            tensor, handle = backend.allocate(num_bytes)
            self._tensors[self._control.rank, number] = tensor
            words, place = self._control.words, self._control.segment(self._control.rank, number)
            for offset, word in enumerate(handle, start=1):
                words[place + offset] = word
            words[place] = num_bytes
        return number

    def of(self, rank: int, backend: MemoryBackend, number: int) -> torch.Tensor:
        """The memory of a segment that its rank has published."""
        if (rank, number) not in self._tensors:
            place = self._control.segment(rank, number)
            num_bytes, *handle = self._control.words[place : place + 1 + HANDLE_WORDS]
            assert num_bytes
            self._tensors[rank, number] = backend.attach(self._control.pid(rank), tuple(handle), num_bytes)
        return self._tensors[rank, number]

    def clear(self) -> None:
        self._tensors.clear()
        self._placed.clear()


class HostMemoryBackend:
    """Shared memory of the host."""

    number = 0
    half_bytes: tuple[int, ...] = (1 << 16, 1 << 20)
    slots: tuple[tuple[int, int], ...] = ((32, 1 << 14), (4, 1 << 20))

    def __init__(self) -> None:
        self._files: list[int] = []
        self._placed: set[tuple[int, int]] = set()  # file descriptors and inodes

    def enter(self) -> Any:
        return None

    def leave(self, entered: Any) -> None:
        pass

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, Handle]:
        file, memory, _ = make_memory(num_bytes)
        self._files.append(file)
        return _bytes_of(memory), (file,) + (0,) * (HANDLE_WORDS - 1)

    def attach(self, pid: int, handle: Handle, num_bytes: int) -> torch.Tensor:
        return _bytes_of(open_memory(pid, handle[0], num_bytes))

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Others can open the file behind a tensor on which `share_memory_()` was called."""
        storage = tensor.untyped_storage()
        by_file = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
        if not (by_file and storage.is_shared()):
            return None
        file, num_bytes = storage._share_fd_cpu_()
        # A file descriptor is reused, an inode is not.
        inode = os.fstat(file).st_ino
        self._placed.add((file, inode))
        handle = (file, inode) + (0,) * (HANDLE_WORDS - 2)
        return Place(num_bytes, tensor.data_ptr() - storage.data_ptr(), inode, handle)

    def detach(self, memory: torch.Tensor) -> None:
        pass  # it is unmapped when its last tensor is freed

    def has_freed(self) -> bool:
        freed = {(file, inode) for file, inode in self._placed if not _is_open(file, inode)}
        self._placed -= freed
        return bool(freed)

    def record_event(self) -> Any:
        return None

    def is_event_done(self, event: Any) -> bool:
        return True

    def wait_event(self, event: Any, tensors: list[torch.Tensor]) -> None:
        pass

    def signal(self) -> int:
        return 0

    def wait_signals(self, signals: Mapping[int, int]) -> None:
        pass

    def record_done(self) -> Any:
        return None

    def is_busy(self) -> bool:
        return False

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


def _is_open(file: int, inode: int) -> bool:
    try:
        return os.fstat(file).st_ino == inode
    except OSError:
        return False


def _bytes_of(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


class CudaMemoryBackend:
    """Memory of a GPU that several processes use, and the stream on which all copies are enqueued."""

    number = 1
    half_bytes: tuple[int, ...] = (1 << 18, 1 << 22, 1 << 24, 1 << 26)
    slots: tuple[tuple[int, int], ...] = ((32, 1 << 16), (4, 1 << 25))

    def __init__(self, control: ShmControl, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._key = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._driver, self._control, self._count = Driver(), control, 0
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the context
            self._context = self._driver.context()
            self._words = self._driver.register(control.address, control.num_bytes)
        # A thread that wakes up gets the GIL from one that launches kernels only after this interval, by default 5 ms.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._owned: list[int] = []
        self._opened: list[int] = []
        # Base addresses and handles of allocations, by the driver's buffer ID, which it never reuses.
        self._handles: dict[int, tuple[int, Handle | None]] = {}
        self._last: Any = None
        self._thread = threading.local()

    def enter(self) -> Any:
        if not getattr(self._thread, "is_ready", False):
            torch.cuda.set_device(self.device)
            self._driver.use(self._context)
            self._thread.is_ready = True
        before = torch._C._cuda_getCurrentStream(self._index)
        torch._C._cuda_setStream(*self._key)
        return before

    def leave(self, entered: Any) -> None:
        torch._C._cuda_setStream(*entered)

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, Handle]:
        address = self._driver.allocate(num_bytes)
        self._owned.append(address)
        return self._tensor(address, num_bytes), struct.unpack(f"{HANDLE_WORDS}q", self._driver.export(address))

    def attach(self, pid: int, handle: Handle, num_bytes: int) -> torch.Tensor:
        address = self._driver.open(struct.pack(f"{HANDLE_WORDS}q", *handle))
        self._opened.append(address)
        return self._tensor(address, num_bytes)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Memory of torch's allocator can be shared, but not that of every other allocator."""
        allocation = self._driver.allocation_of(tensor.data_ptr())
        if allocation is None:
            return None
        base, num_bytes, number = allocation
        if number not in self._handles:
            self._handles[number] = base, self._handle_of(base)
        handle = self._handles[number][1]
        return None if handle is None else Place(num_bytes, tensor.data_ptr() - base, number, handle)

    def detach(self, memory: torch.Tensor) -> None:
        self.stream.synchronize()
        self._driver.close(memory.data_ptr())
        self._opened.remove(memory.data_ptr())

    def has_freed(self) -> bool:
        allocations = {number: self._driver.allocation_of(base) for number, (base, _) in self._handles.items()}
        freed = [number for number, allocation in allocations.items() if allocation is None or allocation[2] != number]
        for number in freed:
            del self._handles[number]
        return bool(freed)

    def _handle_of(self, address: int) -> Handle | None:
        try:
            return struct.unpack(f"{HANDLE_WORDS}q", self._driver.export(address))
        except RuntimeError:
            return None

    def _tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Allocation(address, num_bytes), device=self.device)

    def record_event(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def is_event_done(self, event: Any) -> bool:
        return bool(event.query())

    def wait_event(self, event: Any, tensors: list[torch.Tensor]) -> None:
        self.stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(self.stream)  # so that the allocator does not reuse its memory meanwhile

    def signal(self) -> int:
        self._count += 1
        address = self._words + self._control.signal_offset(self._control.rank)
        self._driver.write_value(self.stream.cuda_stream, address, self._count)
        return self._count

    def wait_signals(self, signals: Mapping[int, int]) -> None:
        values = [
            (self._words + self._control.signal_offset(rank), signal)
            for rank, signal in signals.items()
            if rank != self._control.rank  # its own signal is on this very stream
        ]
        if values:
            self._driver.wait_values(self.stream.cuda_stream, values)

    def record_done(self) -> Any:
        self._last = self.stream.record_event()
        return self._last

    def is_busy(self) -> bool:
        return self._last is not None and not self._last.query()

    def release(self) -> None:
        """Synchronize the stream and unmap other ranks' memory."""
        self.stream.synchronize()
        for address in self._opened:
            self._driver.close(address)
        self._opened.clear()

    def close(self) -> None:
        for address in self._owned:
            self._driver.free(address)
        self._owned.clear()
        self._driver.unregister(self._control.address)


class _Allocation:
    """GPU memory as `torch.as_tensor` takes it from other libraries."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
