"""Memory through which tensors pass from process to process, of the host and of a GPU.

A medium hands out segments that other processes map, and keeps order. On the host a copy is over when it returns. On a
GPU it is merely on a stream: `signal` puts a mark behind all that is on the stream, and `wait_for` lets the stream wait
for another rank's mark. Marks are words of the group's board, which the GPU writes and polls and the host sees, too.
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
from spindle.run.ipc.shm_control import FREED, HANDLE_WORDS, Board, make_memory, open_memory

_KINDS = 4  # of segments a medium may have, for collectives and for messages
_SWITCH_S = 1e-4
Handle = tuple[int, ...]  # the words by which other processes find memory


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of this process is, for others: in an allocation of so many bytes, from an offset on. No two
    allocations of a process have one number, while a handle may come again."""

    num_bytes: int
    offset: int
    number: int
    handle: Handle


class MemoryBackend(Protocol):
    """What differs between kinds of memory."""

    number: int  # among the kinds, the same on all ranks
    half_bytes: tuple[int, ...]  # of the segments for collectives, small to large
    slots: tuple[tuple[int, int], ...]  # of the segments for messages: how many of how many bytes

    def enter(self) -> Any:
        """From here on the calling thread uses this medium; gives what `leave` needs."""

    def leave(self, entered: Any) -> None: ...

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, Handle]:
        """A segment, and how others find it."""

    def attach(self, pid: int, handle: Handle, num_bytes: int) -> torch.Tensor:
        """Memory of another process."""

    def detach(self, memory: torch.Tensor) -> None:
        """Lets go of what `attach` gave."""

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where others find a tensor's own memory, if they can."""

    def has_freed(self) -> bool:
        """Whether memory that `place_of` spoke of is gone since it was last asked. Others still hold on to it."""

    def moment(self) -> Any:
        """What the caller has started so far, to be waited for by `after`."""

    def is_past(self, moment: Any) -> bool: ...

    def after(self, moment: Any, tensors: list[torch.Tensor]) -> None:
        """What follows here, on these tensors, comes after that moment."""

    def signal(self) -> int:
        """A mark behind what has been done here so far."""

    def wait_for(self, marks: Mapping[int, int]) -> None:
        """What follows here comes after the marks of some ranks."""

    def done(self) -> Any:
        """What has been done here so far, for whoever waits for it; None when it is over."""

    def is_busy(self) -> bool:
        """Whether something here may still be waiting for another rank."""

    def close(self) -> None:
        """Frees what is ours, which no other rank may be using any more."""


class Segments:
    """Pieces of memory of a group's ranks, by rank and number. Ours are made when they are needed; those of others are
    mapped once they have said where they are."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._placed: dict[tuple[int, int], tuple[MemoryBackend, Handle, torch.Tensor]] = {}  # by rank and number
        self._freed: dict[int, int] = {}  # how often ranks have freed what is placed, as far as we know

    def at(self, rank: int, medium: MemoryBackend, place: Place) -> torch.Tensor:
        """The bytes from a place of another rank on."""
        key = (rank, place.number)
        if key not in self._placed:
            for other in [one for one, (_, handle, _) in self._placed.items() if one[0] == rank]:
                if self._placed[other][1] == place.handle:
                    self._detach(other)
            memory = medium.attach(self._board.pid(rank), place.handle, place.num_bytes)
            self._placed[key] = medium, place.handle, memory
        return self._placed[key][2][place.offset :]

    def _detach(self, key: tuple[int, int]) -> None:
        medium, _, memory = self._placed.pop(key)
        medium.detach(memory)

    def release(self) -> None:
        """Of all placed memory of ranks that have freed some of it; what is still there is attached again."""
        for rank in {rank for rank, _ in self._placed}:
            freed = self._board.words[self._board.row(rank) + FREED]
            if self._freed.get(rank, 0) != freed:
                self._freed[rank] = freed
                for key in [key for key in self._placed if key[0] == rank]:
                    self._detach(key)

    def number_for_collectives(self, medium: MemoryBackend, kind: int) -> int:
        return medium.number * 2 * _KINDS + kind

    def for_collectives(self, medium: MemoryBackend, kind: int, num_bytes: int) -> int:
        return self._ours(medium, self.number_for_collectives(medium, kind), num_bytes)

    def for_messages(self, medium: MemoryBackend, kind: int, num_bytes: int) -> int:
        return self._ours(medium, (medium.number * 2 + 1) * _KINDS + kind, num_bytes)

    def _ours(self, medium: MemoryBackend, number: int, num_bytes: int) -> int:
        """Makes a segment of ours if there is none yet."""
        if (self._board.rank, number) not in self._tensors:
            tensor, handle = medium.allocate(num_bytes)
            self._tensors[self._board.rank, number] = tensor
            words, place = self._board.words, self._board.segment(self._board.rank, number)
            for offset, word in enumerate(handle, start=1):
                words[place + offset] = word
            words[place] = num_bytes
        return number

    def of(self, rank: int, medium: MemoryBackend, number: int) -> torch.Tensor:
        """The bytes of a segment that its rank has spoken of."""
        if (rank, number) not in self._tensors:
            place = self._board.segment(rank, number)
            num_bytes, *handle = self._board.words[place : place + 1 + HANDLE_WORDS]
            assert num_bytes
            self._tensors[rank, number] = medium.attach(self._board.pid(rank), tuple(handle), num_bytes)
        return self._tensors[rank, number]

    def forget(self) -> None:
        self._tensors.clear()
        self._placed.clear()


class HostMemoryBackend:
    """Shared memory of the host."""

    number = 0
    half_bytes: tuple[int, ...] = (1 << 16, 1 << 20)
    slots: tuple[tuple[int, int], ...] = ((32, 1 << 14), (4, 1 << 20))

    def __init__(self) -> None:
        self._files: list[int] = []
        self._placed: set[tuple[int, int]] = set()  # numbers of files and of what is behind them

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
        """What `share_memory_()` made of a tensor, others can open."""
        storage = tensor.untyped_storage()
        by_file = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
        if not (by_file and storage.is_shared()):
            return None
        file, num_bytes = storage._share_fd_cpu_()
        # The number of a file is given away again, the number behind it is not.
        inode = os.fstat(file).st_ino
        self._placed.add((file, inode))
        handle = (file, inode) + (0,) * (HANDLE_WORDS - 2)
        return Place(num_bytes, tensor.data_ptr() - storage.data_ptr(), inode, handle)

    def detach(self, memory: torch.Tensor) -> None:
        pass  # it goes with the last tensor of it

    def has_freed(self) -> bool:
        gone = {(file, inode) for file, inode in self._placed if not _is_open(file, inode)}
        self._placed -= gone
        return bool(gone)

    def moment(self) -> Any:
        return None

    def is_past(self, moment: Any) -> bool:
        return True

    def after(self, moment: Any, tensors: list[torch.Tensor]) -> None:
        pass

    def signal(self) -> int:
        return 0

    def wait_for(self, marks: Mapping[int, int]) -> None:
        pass

    def done(self) -> Any:
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
    """Memory of a GPU that several processes use, and a stream for what is done with it."""

    number = 1
    half_bytes: tuple[int, ...] = (1 << 18, 1 << 22, 1 << 24, 1 << 26)
    slots: tuple[tuple[int, int], ...] = ((32, 1 << 16), (4, 1 << 25))

    def __init__(self, board: Board, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._key = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._driver, self._board, self._count = Driver(), board, 0
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # so that there is a context
            self._context = self._driver.context()
            self._words = self._driver.register(board.address, board.num_bytes)
        # A thread that is woken gets the interpreter from one that launches work only after this time, 5 ms at first.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._owned: list[int] = []
        self._opened: list[int] = []
        # Where allocations begin, and how others find them, by the driver's number, which it never uses again.
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
        """Torch's own memory, unless it comes from an allocator whose memory cannot be shared."""
        found = self._driver.allocation_of(tensor.data_ptr())
        if found is None:
            return None
        base, num_bytes, number = found
        if number not in self._handles:
            self._handles[number] = base, self._handle_of(base)
        handle = self._handles[number][1]
        return None if handle is None else Place(num_bytes, tensor.data_ptr() - base, number, handle)

    def detach(self, memory: torch.Tensor) -> None:
        self.stream.synchronize()
        self._driver.close(memory.data_ptr())
        self._opened.remove(memory.data_ptr())

    def has_freed(self) -> bool:
        known = {number: self._driver.allocation_of(base) for number, (base, _) in self._handles.items()}
        gone = [number for number, found in known.items() if found is None or found[2] != number]
        for number in gone:
            del self._handles[number]
        return bool(gone)

    def _handle_of(self, address: int) -> Handle | None:
        try:
            return struct.unpack(f"{HANDLE_WORDS}q", self._driver.export(address))
        except RuntimeError:
            return None

    def _tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Allocation(address, num_bytes), device=self.device)

    def moment(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def is_past(self, moment: Any) -> bool:
        return bool(moment.query())

    def after(self, moment: Any, tensors: list[torch.Tensor]) -> None:
        self.stream.wait_event(moment)
        for tensor in tensors:
            tensor.record_stream(self.stream)  # else its memory could be given away while we use it

    def signal(self) -> int:
        self._count += 1
        address = self._words + self._board.signal_offset(self._board.rank)
        self._driver.write_value(self.stream.cuda_stream, address, self._count)
        return self._count

    def wait_for(self, marks: Mapping[int, int]) -> None:
        values = [
            (self._words + self._board.signal_offset(rank), signal)
            for rank, signal in marks.items()
            if rank != self._board.rank  # our own mark is on this very stream
        ]
        if values:
            self._driver.wait_values(self.stream.cuda_stream, values)

    def done(self) -> Any:
        self._last = self.stream.record_event()
        return self._last

    def is_busy(self) -> bool:
        return self._last is not None and not self._last.query()

    def release(self) -> None:
        """Waits for what was started here, and uses no other rank's memory any more."""
        self.stream.synchronize()
        for address in self._opened:
            self._driver.close(address)
        self._opened.clear()

    def close(self) -> None:
        for address in self._owned:
            self._driver.free(address)
        self._owned.clear()
        self._driver.unregister(self._board.address)


class _Allocation:
    """Memory of a GPU as torch takes it from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
