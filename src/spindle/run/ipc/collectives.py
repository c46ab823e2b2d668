"""Collectives of a group, as rounds.

In a round every rank stages its part in its own memory, publishes that, and, once all have, reads what it needs:

    broadcast        root stages                  all read root
    all-gather       each stages its part         all read all
    reduce-scatter   each stages everything       each reduces its slice
    all-to-all       each stages everything       each reads its slices
    all-reduce       reduce-scatter, then all-gather of the slices; a small one is one round, where all read all

Rounds of a memory backend alternate between two halves of a segment. A rank stages round n + 2 only after all ranks
have staged round n + 1, and hence have read round n: no rank needs to publish that it has read. A tensor that is larger
than a half is sent in chunks.

A large tensor that takes part repeatedly, such as gradients and sharded parameters, is not staged: other ranks read it
in place. An all-reduce then moves 3 times its bytes instead of 5. Such a collective ends with one more round, after
which owners may change their tensors.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spindle.run.ipc.job import Job, flat_bytes
from spindle.run.ipc.memory_backend import MemoryBackend, Place, Segments
from spindle.run.ipc.shm_control import PLACE_WORDS, ROUND, ROUND_DIGESTS, ROUND_PLACES, ROUND_SIGNALS, ShmControl
from spindle.run.ipc.sums import HALF_PRECISIONS, SUMMED, sum_into

# Generators that yield where they must wait: True for the caller's own device, False for other ranks.
Steps = Generator[bool, None, None]

_ONE_ROUND_BYTES = 1 << 15  # up to this size an all-reduce is one round, in which all read all
_SMALL_BYTES = 1 << 18
_IN_PLACE_BYTES = 1 << 20
_MAX_SEEN = 4096
_ALIGNED_ELEMENTS = 16  # a rank's slice begins at a multiple of these, for vectorized loads


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction operator: over all rows of a tensor at once, or of one more part into a total."""

    reduce_rows: Callable[[torch.Tensor], torch.Tensor]
    accumulate: Callable[[torch.Tensor, torch.Tensor], Any]
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of all ranks in a round, as bytes. Parts that are read in place may be longer than requested."""

    tensors: list[torch.Tensor]
    in_place: list[bool]

    @property
    def are_all_in_place(self) -> bool:
        return all(self.in_place)


Round = Generator[bool, None, Parts]


class Collectives:
    """The queue of one rank's collectives in one group, executed one after the other."""

    def __init__(self, control: ShmControl, segments: Segments, names: Sequence[str]) -> None:
        self._control, self._segments, self._names = control, segments, names
        self._rank, self._size = control.rank, control.size
        self._queue: deque[tuple[Job, Steps]] = deque()
        self._round = 0
        self._num_staged: Counter[int] = Counter()  # by memory backend: rounds with bytes
        self._late_ranks: list[int] = []
        self._seen: set[Place] = set()
        self.waits_for_device = False  # whether the first in the queue waits for its caller's own GPU

    def add(self, job: Job, steps: Steps) -> None:
        self._queue.append((job, steps))

    def jobs(self) -> Iterator[Job]:
        return (job for job, _ in self._queue)

    def waited_for(self) -> set[int]:
        return set(self._late_ranks) if self._queue else set()

    def advance(self) -> bool:
        """Advance as far as possible without waiting. Returns whether any collective was finished."""
        moved = waits_for_device = False
        while self._queue:
            job, steps = self._queue[0]
            try:
                waits_for_device = next(steps)
                break
            except StopIteration:
                self._queue.popleft()
                job.finish()
                moved = True
        self.waits_for_device = waits_for_device
        return moved

    def barrier(self, job: Job) -> Steps:
        yield from self._run_round(job, 0)

    def broadcast(self, job: Job, tensors: list[torch.Tensor], root: int) -> Steps:
        for tensor in tensors:
            flat = flat_bytes(tensor)
            for first, last in _chunks(flat.numel(), job.backend.half_bytes[-1]):
                chunk = flat[first:last]

                def stage(part: torch.Tensor, chunk: torch.Tensor = chunk) -> None:
                    if self._rank == root:
                        part.copy_(chunk)

                parts = yield from self._run_round(job, last - first, stage)
                if self._rank != root:
                    chunk.copy_(parts.tensors[root])

    def all_gather(self, job: Job, pairs: list[tuple[list[torch.Tensor], torch.Tensor]]) -> Steps:
        """Gather each of several tensors from all ranks."""
        for outputs, given in pairs:
            targets, rest = [flat_bytes(output) for output in outputs], flat_bytes(given)
            place = self._known_place(job.backend, rest)
            while rest.numel():
                chunk = rest[: job.backend.half_bytes[-1]]
                parts = yield from self._run_round(job, chunk.numel(), _staging([chunk]), rest, place)
                count = (rest if parts.are_all_in_place else chunk).numel()
                _copy_all([target[:count] for target in targets], [part[:count] for part in parts.tensors])
                if any(parts.in_place):
                    yield from self._run_round(job, 0, signals=True)  # all have read; their owners may write
                targets, rest = [target[count:] for target in targets], rest[count:]
                place = _advance_place(place, count)

    def reduce_scatter(
        self, job: Job, pairs: list[tuple[torch.Tensor, list[torch.Tensor]]], reduction: Reduction, is_mean: bool
    ) -> Steps:
        """Reduce, for each of several outputs, what all ranks have for this rank."""
        for output, inputs in pairs:
            target, sources = output.data.view(-1), [source.data.view(-1) for source in inputs]
            max_elements = job.backend.half_bytes[-1] // self._size // target.element_size()
            whole = _end_to_end(sources)
            place = None if whole is None else self._known_place(job.backend, whole)
            source = None if whole is None else flat_bytes(whole)
            first = 0
            while first < target.numel():
                last = min(first + max_elements, target.numel())
                stage = _staging([source[first:last] for source in sources])
                num_bytes = self._size * (last - first) * target.element_size()
                parts = yield from self._run_round(job, num_bytes, stage, source, place)
                if parts.are_all_in_place:
                    last = target.numel()
                # What is staged has the slices for all ranks end to end; what is in place has the tensors. Piece by
                # piece, because some reductions take a copy of what they reduce.
                for begin, end in (
                    (first + start, first + stop) for start, stop in _chunks(last - first, max_elements)
                ):
                    begins = [
                        self._rank * target.numel() + begin
                        if is_in_place
                        else self._rank * (last - first) + begin - first
                        for is_in_place in parts.in_place
                    ]
                    _reduce_parts(target[begin:end], parts, begins, reduction, is_mean)
                if any(parts.in_place):
                    yield from self._run_round(job, 0, signals=True)  # all have read; their owners may write
                first = last

    def all_to_all(self, job: Job, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Steps:
        """Read what each rank has for this one."""
        targets, sources = ([flat_bytes(tensor) for tensor in tensors] for tensors in (outputs, inputs))
        for first, last in _chunks(targets[0].numel(), job.backend.half_bytes[-1] // self._size):
            stage = _staging([source[first:last] for source in sources])
            parts = yield from self._run_round(job, self._size * (last - first), stage)
            own = slice(self._rank * (last - first), (self._rank + 1) * (last - first))
            _copy_all([target[first:last] for target in targets], [part[own] for part in parts.tensors])

    def all_reduce(self, job: Job, tensors: list[torch.Tensor], reduction: Reduction, is_mean: bool) -> Steps:
        for tensor in tensors:
            rest = tensor.data.view(-1)
            max_elements = job.backend.half_bytes[-1] // rest.element_size()
            place = self._known_place(job.backend, rest)
            while rest.numel():
                chunk = rest[:max_elements]
                if _num_bytes(chunk) <= _ONE_ROUND_BYTES:
                    parts = yield from self._run_round(job, _num_bytes(chunk), _staging([chunk]))
                    _reduce_parts(chunk, parts, [0] * self._size, reduction, is_mean)
                    rest, place = rest[max_elements:], _advance_place(place, _num_bytes(chunk))
                    continue
                parts = yield from self._run_round(job, _num_bytes(chunk), _staging([chunk]), flat_bytes(rest), place)
                # Where all ranks are read in place, no staging segment limits the size.
                chunk = rest if parts.are_all_in_place else chunk
                count = -(-chunk.numel() // self._size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
                slices = [chunk[rank * count : (rank + 1) * count] for rank in range(self._size)]
                own_slice, begin = slices[self._rank], self._rank * count
                _reduce_parts(own_slice, parts, [begin] * self._size, reduction, is_mean)
                own_place = _advance_place(place, begin * chunk.element_size())
                yield from self._gather(
                    job, flat_bytes(own_slice), [flat_bytes(slice_) for slice_ in slices], own_place
                )
                if any(parts.in_place):
                    yield from self._run_round(job, 0, signals=True)  # all have read; their owners may write
                rest, place = rest[chunk.numel() :], _advance_place(place, _num_bytes(chunk))

    def _known_place(self, backend: MemoryBackend, tensor: torch.Tensor) -> Place | None:
        """Where others may read a tensor in place; None the first time it is seen, because a tensor that is reduced
        only once would stay mapped by others after it is freed."""
        place = backend.place_of(tensor) if _num_bytes(tensor) >= _IN_PLACE_BYTES else None
        if place is None or place in self._seen:
            return place
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
        self._seen.add(place)
        return None

    def _gather(self, job: Job, source: torch.Tensor, targets: list[torch.Tensor], place: Place | None = None) -> Steps:
        """Stage this rank's bytes and read those of all ranks; later ranks may have fewer."""
        size = max(target.numel() for target in targets)
        parts = yield from self._run_round(job, size, _staging([source]), source, place)
        _copy_all(targets, [part[: target.numel()] for target, part in zip(targets, parts.tensors, strict=True)])

    def _run_round(
        self,
        job: Job,
        num_bytes: int,
        stage: Callable[[torch.Tensor], None] = lambda part: None,
        source: torch.Tensor | None = None,
        place: Place | None = None,
        *,
        signals: bool = False,
    ) -> Round:
        """Run one round: fill this rank's part with `stage`, publish it, wait for all ranks, and return their parts.

        Every part has `num_bytes`. With a `place` this rank's part is not staged, but is `source`, which others read
        there. A round without bytes that `signals` is a barrier on the device, too.
        """
        control, backend = self._control, job.backend
        words, own_row = control.words, control.row(self._rank)
        self._late_ranks = []
        signals = signals or num_bytes > 0
        # Streams that wait long for each other slow down the GPU's other work, so the host waits for the caller's work.
        while num_bytes and not job.is_ready():
            yield True
        self._round += 1
        number, parity = self._round, self._round % 2
        largest = len(backend.half_bytes) - 1
        kind = next((index for index, half in enumerate(backend.half_bytes) if num_bytes <= half), largest)
        begin = self._num_staged[backend.number] % 2 * backend.half_bytes[kind]
        staged = slice(begin, begin + num_bytes)
        self._num_staged[backend.number] += num_bytes > 0
        signal = 0
        if signals:
            job.begin()
        if num_bytes and place is None:
            segment = self._segments.for_collectives(backend, kind, 2 * backend.half_bytes[kind])
            source = self._segments.of(self._rank, backend, segment)[staged]
            stage(source)
        if signals:
            signal = backend.signal()
        digest = zlib.crc32(f"{job.name} {num_bytes} {kind}".encode())
        words[own_row + ROUND_DIGESTS + parity], words[own_row + ROUND_SIGNALS + parity] = digest, signal
        self._publish_place(parity, place)
        words[own_row + ROUND] = number
        control.fence()
        if not self._note_late_ranks(number):
            control.ring_all()  # the last rank to stage wakes the others
        while self._note_late_ranks(number):
            yield False
        for rank in range(self._size):
            if words[control.row(rank) + ROUND_DIGESTS + parity] != digest:
                raise RuntimeError(
                    f"{self._names[rank]} does not run the {job.name} of {num_bytes} bytes that "
                    f"{self._names[self._rank]} runs; all ranks of a group must call the same collectives in one order"
                )
        if signals:
            rows = map(control.row, range(self._size))
            backend.wait_signals({rank: words[row + ROUND_SIGNALS + parity] for rank, row in enumerate(rows)})
        if not num_bytes:
            return Parts([], [])
        places = [self._published_place(rank, parity) for rank in range(self._size)]
        segment_number = self._segments.number_for_collectives(backend, kind)
        parts = []
        for rank, published in enumerate(places):
            if rank == self._rank:
                assert source is not None
                parts.append(source)
            elif published is None:
                parts.append(self._segments.of(rank, backend, segment_number)[staged])
            else:
                parts.append(self._segments.at(rank, backend, published))
        return Parts(parts, [published is not None for published in places])

    def _publish_place(self, parity: int, place: Place | None) -> None:
        words, at = self._control.words, self._control.row(self._rank) + ROUND_PLACES + parity * PLACE_WORDS
        words[at] = 0 if place is None else place.num_bytes
        if place is not None:
            for offset, word in enumerate((place.offset, place.number, *place.handle), start=1):
                words[at + offset] = word

    def _published_place(self, rank: int, parity: int) -> Place | None:
        at = self._control.row(rank) + ROUND_PLACES + parity * PLACE_WORDS
        num_bytes, offset, number, *handle = self._control.words[at : at + PLACE_WORDS]
        return Place(num_bytes, offset, number, tuple(handle)) if num_bytes else None

    def _note_late_ranks(self, number: int) -> list[int]:
        """Remember and return the ranks that have not staged this round yet."""
        words, row = self._control.words, self._control.row
        self._late_ranks = [rank for rank in range(self._size) if words[row(rank) + ROUND] < number]
        return self._late_ranks


def _staging(sources: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """A function that copies tensors end to end into a part."""

    def stage(part: torch.Tensor) -> None:
        begin = 0
        for source in map(flat_bytes, sources):
            part[begin : begin + source.numel()].copy_(source)
            begin += source.numel()

    return stage


def _advance_place(place: Place | None, num_bytes: int) -> Place | None:
    return None if place is None else replace(place, offset=place.offset + num_bytes)


def _reduce_parts(into: torch.Tensor, parts: Parts, begins: Sequence[int], reduction: Reduction, is_mean: bool) -> None:
    """Reduce the elements of all parts, of each from its own beginning on, into a tensor, as many as it has."""
    if into.numel():
        size = into.element_size()
        slices = [
            part[begin * size : begin * size + _num_bytes(into)].view(into.dtype)
            for part, begin in zip(parts.tensors, begins, strict=True)
        ]
        _reduce_all(into, slices, reduction, is_mean)


def _end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One-dimensional tensors of equal length as one tensor; None unless they lie end to end in memory."""
    first = tensors[0]
    num_bytes, storage = _num_bytes(first), first.untyped_storage().data_ptr()
    if any(
        tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != first.data_ptr() + number * num_bytes
        for number, tensor in enumerate(tensors)
    ):
        return None
    return first.as_strided((first.numel() * len(tensors),), (1,))


def _reduce_all(into: torch.Tensor, parts: list[torch.Tensor], reduction: Reduction, is_mean: bool) -> None:
    """Reduce parts in the same order on all ranks, so that all get the same bits; half precision in float32."""
    if reduction.is_sum and not is_mean and into.dtype in SUMMED and _num_bytes(into) > _SMALL_BYTES:
        sum_into(into, parts)
        return
    dtype = torch.float32 if into.dtype in HALF_PRECISIONS else into.dtype
    if _num_bytes(into) <= _SMALL_BYTES:  # the number of kernels matters, not the bytes
        total = reduction.reduce_rows(torch.stack(parts).to(dtype))
    else:
        total = parts[0].to(dtype, copy=True)  # `into` may itself be a part
        for part in parts[1:]:
            reduction.accumulate(total, part)
    if is_mean:
        total.div_(len(parts))
    into.copy_(total)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if sum(map(_num_bytes, targets)) <= _SMALL_BYTES:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def _chunks(size: int, max_size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + max_size, size)) for first in range(0, size, max_size))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
