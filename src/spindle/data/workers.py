"""Processes of one rank that decode microbatches ahead of time.

A process receives requests over a pipe and answers with one tensor in shared memory, so that a step takes few file
descriptors. It ends when its pipe closes, or when its parent is gone. An error, even that the process itself is gone,
is raised when the answer is taken, and names the sample at which it happened.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing

from spindle.data.decode import Decoder, Microbatch, SampleNumber, Wanted
from spindle.errors import InputError, SpindleError, TrainingError

_PARENT_POLL_S = 0.5  # how often an idle process checks that its parent is alive
_END_S = 5.0  # how long a process may take to end by itself
_ALIGNMENT = 64
Count = Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    microbatch: Microbatch
    wanted: Wanted
    counts: bool  # only count the tokens of the batch


@dataclass(frozen=True, slots=True)
class _LengthRequest:
    number: int
    samples: tuple[SampleNumber, ...]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch as one tensor of bytes, and for each entry its dtype, its shape and its offset."""

    flat: torch.Tensor
    entries: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    details: str = ""


class DecodeWorkers:
    """Worker processes of one task's data. `task` is its name, for errors; `count` counts the tokens of a batch."""

    def __init__(
        self, decoder: Decoder, num_workers: int, context: str | None, task: str, count: Count | None = None
    ) -> None:
        self._task = task
        self._sources = list(decoder.datasets)
        self._number = 0
        self._answers: dict[int, Any] = {}
        self._dropped: set[int] = set()
        start: Any = torch.multiprocessing.get_context(context)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._current: list[Any] = []  # by process: the sample that it is reading
        self._requested: list[dict[int, None]] = []  # by process: requests without an answer, in order
        try:
            for _ in range(num_workers):
                parent_end, worker_end = start.Pipe()
                current = start.RawArray("q", [-1, -1])
                # A forked process must close its copies of our ends of the pipes, to notice when we are gone.
                inherited = [*self._connections, parent_end] if start.get_start_method() == "fork" else []
                process = start.Process(
                    target=_serve,
                    args=(worker_end, inherited, decoder, count, current),
                    daemon=True,
                    name=f"decoding {task}",
                )
                process.start()
                worker_end.close()
                self._connections.append(parent_end)
                self._processes.append(process)
                self._current.append(current)
                self._requested.append({})
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise InputError(
                f"task {task!r}: its balanced data cannot be sent to worker processes ({error}); define datasets, "
                'lengths= and tokens= at the top of a module, or take balanced(multiprocessing_context="fork")'
            ) from error

    def ask(self, microbatch: Microbatch, wanted: Wanted, *, counts: bool = False) -> int:
        """Start to decode a microbatch. Returns the number with which to `take` the result."""
        self._number += 1
        return self._send(_Request(self._number, microbatch, wanted, counts))

    def ask_lengths(self, samples: Sequence[SampleNumber]) -> int:
        """Start to read samples for their lengths. Returns the number with which to `take` them."""
        self._number += 1
        return self._send(_LengthRequest(self._number, tuple(samples)))

    def _send(self, request: _Request | _LengthRequest) -> int:
        self._receive(0)
        idlest = min(range(len(self._processes)), key=lambda place: len(self._requested[place]))
        self._requested[idlest][request.number] = None
        with suppress(OSError):  # the process is gone, which `take` reports
            self._connections[idlest].send(request)
        return request.number

    def take(self, number: int) -> Any:
        """The result of a request: a decoded batch, a number of tokens, or lengths of samples."""
        while number not in self._answers:
            self._receive(None)
            for place, process in enumerate(self._processes):
                if number in self._requested[place] and process.exitcode is not None:
                    self._receive(0)  # what it sent before it ended
                    if number not in self._answers:
                        self._answers[number] = self._lost(place)
        answer = self._answers.pop(number)
        if isinstance(answer, _Failure):
            error = TrainingError(answer.message)
            if answer.details:
                error.add_note(answer.details)
            raise error
        return answer

    def drop(self, number: int) -> None:
        """Discard the answer to a request, now or when it comes."""
        if self._answers.pop(number, None) is None:
            self._dropped.add(number)

    def _receive(self, timeout_s: float | None) -> None:
        """Receive the answers that have arrived; without a timeout, wait until there is one, or a process ends."""
        busy = [place for place, requests in enumerate(self._requested) if requests]
        connections = {id(self._connections[place]): place for place in busy}
        sentinels = [self._processes[place].sentinel for place in busy] if timeout_s is None else []
        for ready in wait([*(self._connections[place] for place in busy), *sentinels], timeout_s):
            place = connections.get(id(ready))
            while place is not None and self._requested[place] and self._connections[place].poll():
                try:
                    number, answer = self._connections[place].recv()
                except (EOFError, OSError):  # it ended, perhaps before we took the shared memory of its answer
                    for number in self._requested[place]:
                        self._answers[number] = self._lost(place)
                    self._requested[place].clear()
                    break
                self._requested[place].pop(number, None)
                if number in self._dropped:
                    self._dropped.discard(number)
                else:
                    self._answers[number] = _unpacked(answer) if isinstance(answer, _Packed) else answer

    def _lost(self, place: int) -> _Failure:
        process = self._processes[place]
        process.join(_END_S)
        source, number = self._current[place]
        where = f" at sample {number} of {self._sources[source]!r}" if source >= 0 else ""
        code = process.exitcode
        how = f"was ended by signal {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        hint = "; is /dev/shm full?" if code == -signal.SIGBUS else "; was memory short?" if code == -9 else ""
        return _Failure(
            f"task {self._task!r}: worker process {place} of its balanced data (pid {process.pid}) {how}{where}{hint}"
        )

    def close(self) -> None:
        """End all processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_END_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        self._connections, self._processes, self._requested, self._answers = [], [], [], {}


def _serve(
    connection: Connection,
    inherited: Sequence[Connection],
    decoder: Decoder,
    count: Count | None,
    current: Any,
) -> None:
    """Answer requests until the pipe closes."""
    for other in inherited:
        other.close()
    # Do not run the rank's signal handlers here. Ctrl-C ends the rank, and with it this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    started_by = os.getppid()
    sources = list(decoder.datasets)

    def watch(sample: SampleNumber) -> None:
        current[:] = (sources.index(sample.source), sample.number)

    decoder = replace(decoder, watch=watch)
    try:
        while True:
            while not connection.poll(_PARENT_POLL_S):
                # A process that was forked later keeps `parent` open, so that it looks alive as long as that process
                # is: compare the parent's process id as well.
                if not parent.is_alive() or os.getppid() != started_by:
                    return
            request = connection.recv()
            connection.send((request.number, _answer(decoder, count, request, current, sources)))
            current[:] = (-1, -1)
    except (EOFError, OSError):  # the rank has ended
        return


def _answer(
    decoder: Decoder, count: Count | None, request: _Request | _LengthRequest, current: Any, sources: Sequence[str]
) -> Any:
    current[:] = (-1, -1)
    if isinstance(request, _LengthRequest):
        return decoder.read_lengths(request.samples)
    try:
        batch = decoder.decode(request.microbatch, request.wanted)
        current[:] = (-1, -1)
        if request.counts:
            assert count is not None
            return int(count(batch))
        return _pack(batch)
    except SpindleError as error:
        return _Failure(str(error))
    except Exception as error:
        source, number = current
        what = "the tokens of a batch could not be counted"
        if source >= 0:
            what = f"sample {number} of {sources[source]!r} could not be decoded"
        message = f"balanced data: {what}: {type(error).__name__}: {error}"
        return _Failure(message, f"in worker process {os.getpid()}:\n{traceback.format_exc()}")


def _pack(batch: dict[str, Any]) -> _Packed:
    entries, begin = [], 0
    for name, tensor in batch.items():
        entries.append((name, tensor.dtype, tuple(tensor.shape), begin))
        begin += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    flat: torch.Tensor = torch.empty(begin, dtype=torch.uint8)
    flat = flat.share_memory_()  # type: ignore[no-untyped-call]
    for (_, dtype, shape, first), tensor in zip(entries, batch.values(), strict=True):
        _view(flat, dtype, shape, first).copy_(tensor)
    return _Packed(flat, tuple(entries))


def _unpacked(packed: _Packed) -> dict[str, torch.Tensor]:
    return {name: _view(packed.flat, dtype, shape, first) for name, dtype, shape, first in packed.entries}


def _view(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> torch.Tensor:
    return flat[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape)
