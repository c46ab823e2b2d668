"""Collectives of a group, as rounds.

In a round every rank stages its part in memory of its own, says so, and, when all have said so, reads what it needs:

    broadcast        root stages                  all read root
    all-gather       each stages its part         all read all
    reduce-scatter   each stages everything       each reduces its slice
    all-reduce       reduce-scatter, then all-gather of the slices; a small one is one round, where all read all

Rounds of a medium use two halves of a segment in turn. Nobody stages the next but one round before all have staged the
next one, hence read this one: no rank needs to say when it has read. What is larger than a half goes in chunks.

A large tensor that is all-reduced again and again, as gradients are, is not staged: others read it where it is. That
moves 3 times its bytes instead of 5. Then all meet once more at the end, because its owner may change it after that.
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
from spindle.run.ipc.shm_control import PLACE_WORDS, ROUND, ROUND_MEANINGS, ROUND_PLACES, ROUND_SIGNALS, Board
from spindle.run.ipc.sums import HALF_PRECISIONS, SUMMED, sum_into

# All stop where they must wait, and say whether that is for the caller's own device (else for other ranks).
Steps = Generator[bool, None, None]

_ONE_ROUND_BYTES = 1 << 15  # an all-reduce up to here reads everything from everybody
_SMALL_BYTES = 1 << 18
_IN_PLACE_BYTES = 1 << 20
_MOST_SEEN = 4096
_TOGETHER = 16  # elements: a rank's part begins where kernels can take several at once


@dataclass(frozen=True, slots=True)
class Combine:
    """How parts become one: all rows of a tensor at once, or one more part into a total."""

    all_of: Callable[[torch.Tensor], torch.Tensor]
    one_more: Callable[[torch.Tensor, torch.Tensor], Any]
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What all ranks have in a round, as bytes. Those that are read in place may go on behind what was asked for."""

    tensors: list[torch.Tensor]
    num_in_place: int


Round = Generator[bool, None, Parts]


class Collectives:
    """All collectives of one rank in one group, one after the other."""

    def __init__(self, board: Board, segments: Segments, names: Sequence[str]) -> None:
        self._board, self._segments, self._names = board, segments, names
        self._rank, self._size = board.rank, board.size
        self._queue: deque[tuple[Job, Steps]] = deque()
        self._round = 0
        self._num_staged: Counter[int] = Counter()  # rounds of each medium that had bytes
        self._behind: list[int] = []
        self._seen: set[Place] = set()
        self.is_held = False  # whether the first of all waits for its caller's own GPU

    def add(self, job: Job, steps: Steps) -> None:
        self._queue.append((job, steps))

    def jobs(self) -> Iterator[Job]:
        return (job for job, _ in self._queue)

    def waited_for(self) -> set[int]:
        return set(self._behind) if self._queue else set()

    def advance(self) -> bool:
        """Does what can be done without waiting; whether that was to the end of any."""
        moved = is_held = False
        while self._queue:
            job, steps = self._queue[0]
            try:
                is_held = next(steps)
                break
            except StopIteration:
                self._queue.popleft()
                job.finish()
                moved = True
        self.is_held = is_held
        return moved

    def barrier(self, job: Job) -> Steps:
        yield from self._run_round(job, 0)

    def broadcast(self, job: Job, tensors: list[torch.Tensor], root: int) -> Steps:
        for tensor in tensors:
            flat = flat_bytes(tensor)
            for first, last in _chunks(flat.numel(), job.medium.half_bytes[-1]):
                chunk = flat[first:last]

                def stage(part: torch.Tensor, chunk: torch.Tensor = chunk) -> None:
                    if self._rank == root:
                        part.copy_(chunk)

                parts = yield from self._run_round(job, last - first, stage)
                if self._rank != root:
                    chunk.copy_(parts.tensors[root])

    def all_gather(self, job: Job, pairs: list[tuple[list[torch.Tensor], torch.Tensor]]) -> Steps:
        """For each of several tensors: the tensors of all ranks."""
        for outputs, given in pairs:
            flats, source = [flat_bytes(output) for output in outputs], flat_bytes(given)
            for first, last in _chunks(source.numel(), job.medium.half_bytes[-1]):
                yield from self._gather(job, source[first:last], [flat[first:last] for flat in flats])

    def reduce_scatter(
        self, job: Job, pairs: list[tuple[torch.Tensor, list[torch.Tensor]]], combine: Combine, is_mean: bool
    ) -> Steps:
        """For each of several outputs: the reduction of what all ranks have for this one."""
        for output, inputs in pairs:
            target, sources = output.data.view(-1), [one.data.view(-1) for one in inputs]
            most = job.medium.half_bytes[-1] // self._size // target.element_size()
            for first, last in _chunks(target.numel(), most):
                sliced = [source[first:last] for source in sources]
                yield from self._reduce(job, sliced, target[first:last], self._rank * (last - first), combine, is_mean)

    def all_reduce(self, job: Job, tensors: list[torch.Tensor], combine: Combine, is_mean: bool) -> Steps:
        for tensor in tensors:
            rest = tensor.data.view(-1)
            most = job.medium.half_bytes[-1] // rest.element_size()
            place = self._known_place(job.medium, rest)
            while rest.numel():
                chunk = rest[:most]
                if _num_bytes(chunk) <= _ONE_ROUND_BYTES:
                    yield from self._reduce(job, [chunk], chunk, 0, combine, is_mean)
                    rest, place = rest[most:], _further(place, _num_bytes(chunk))
                    continue
                parts = yield from self._run_round(job, _num_bytes(chunk), _staging([chunk]), flat_bytes(rest), place)
                # Where nothing had to be staged, nothing limits it.
                chunk = rest if parts.num_in_place == self._size else chunk
                count = -(-chunk.numel() // self._size // _TOGETHER) * _TOGETHER
                slices = [chunk[rank * count : (rank + 1) * count] for rank in range(self._size)]
                mine, begin = slices[self._rank], self._rank * count
                _combine_parts(mine, parts, begin, combine, is_mean)
                mine_place = _further(place, begin * chunk.element_size())
                yield from self._gather(job, flat_bytes(mine), [flat_bytes(slice_) for slice_ in slices], mine_place)
                if parts.num_in_place:
                    yield from self._run_round(job, 0, is_marked=True)
                rest, place = rest[chunk.numel() :], _further(place, _num_bytes(chunk))

    def _known_place(self, medium: MemoryBackend, tensor: torch.Tensor) -> Place | None:
        """Where others may read a tensor itself. What is seen for the first time may be gone the next: others would
        hold on to its memory."""
        place = medium.place_of(tensor) if _num_bytes(tensor) >= _IN_PLACE_BYTES else None
        if place is None or place in self._seen:
            return place
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        self._seen.add(place)
        return None

    def _gather(self, job: Job, source: torch.Tensor, targets: list[torch.Tensor], place: Place | None = None) -> Steps:
        """Each stages bytes, of which there may be fewer on later ranks; all read all."""
        size = max(target.numel() for target in targets)
        parts = yield from self._run_round(job, size, _staging([source]), source, place)
        _copy_all(targets, [part[: target.numel()] for target, part in zip(targets, parts.tensors, strict=True)])

    def _reduce(
        self,
        job: Job,
        sources: list[torch.Tensor],
        target: torch.Tensor,
        begin: int,
        combine: Combine,
        is_mean: bool,
    ) -> Steps:
        """All stage tensors, one behind the other; each reduces elements from `begin` on into its target."""
        parts = yield from self._run_round(job, sum(map(_num_bytes, sources)), _staging(sources))
        _combine_parts(target, parts, begin, combine, is_mean)

    def _run_round(
        self,
        job: Job,
        num_bytes: int,
        stage: Callable[[torch.Tensor], None] = lambda part: None,
        source: torch.Tensor | None = None,
        place: Place | None = None,
        *,
        is_marked: bool = False,
    ) -> Round:
        """`stage` fills our part; gives the parts of all ranks, which may be read. Every part has so many bytes.

        With a `place` our part is not staged, but is `source`, which others find there. A round without bytes may be
        marked all the same: then what has been started before it is over everywhere.
        """
        board, medium = self._board, job.medium
        words, ours = board.words, board.row(self._rank)
        # Streams that wait for each other for long slow down whatever else the GPU does: the host waits instead.
        self._behind = []
        is_marked = is_marked or num_bytes > 0
        while num_bytes and not job.is_due():
            yield True
        self._round += 1
        number, turn = self._round, self._round % 2
        largest = len(medium.half_bytes) - 1
        kind = next((one for one, half in enumerate(medium.half_bytes) if num_bytes <= half), largest)
        begin = self._num_staged[medium.number] % 2 * medium.half_bytes[kind]
        staged = slice(begin, begin + num_bytes)
        self._num_staged[medium.number] += num_bytes > 0
        signal = 0
        if is_marked:
            job.begin()
        if num_bytes and place is None:
            segment = self._segments.for_collectives(medium, kind, 2 * medium.half_bytes[kind])
            source = self._segments.of(self._rank, medium, segment)[staged]
            stage(source)
        if is_marked:
            signal = medium.signal()
        meaning = zlib.crc32(f"{job.name} {num_bytes} {kind}".encode())
        words[ours + ROUND_MEANINGS + turn], words[ours + ROUND_SIGNALS + turn] = meaning, signal
        self._say_place(turn, place)
        words[ours + ROUND] = number
        board.fence()
        if not self._look_for(number):
            board.ring_all()  # the last to come wakes the others
        while self._look_for(number):
            yield False
        for rank in range(self._size):
            if words[board.row(rank) + ROUND_MEANINGS + turn] != meaning:
                raise RuntimeError(
                    f"{self._names[rank]} does not run the {job.name} of {num_bytes} bytes that "
                    f"{self._names[self._rank]} runs; all ranks of a group must call the same collectives in one order"
                )
        if is_marked:
            medium.wait_for({rank: words[board.row(rank) + ROUND_SIGNALS + turn] for rank in range(self._size)})
        if not num_bytes:
            return Parts([], 0)
        places = [self._place_said(rank, turn) for rank in range(self._size)]
        number_of_segment = self._segments.number_for_collectives(medium, kind)
        parts = []
        for rank, said in enumerate(places):
            if rank == self._rank:
                assert source is not None
                parts.append(source)
            elif said is None:
                parts.append(self._segments.of(rank, medium, number_of_segment)[staged])
            else:
                parts.append(self._segments.at(rank, medium, said))
        return Parts(parts, sum(said is not None for said in places))

    def _say_place(self, turn: int, place: Place | None) -> None:
        words, at = self._board.words, self._board.row(self._rank) + ROUND_PLACES + turn * PLACE_WORDS
        words[at] = 0 if place is None else place.num_bytes
        if place is not None:
            for offset, word in enumerate((place.offset, place.number, *place.handle), start=1):
                words[at + offset] = word

    def _place_said(self, rank: int, turn: int) -> Place | None:
        at = self._board.row(rank) + ROUND_PLACES + turn * PLACE_WORDS
        num_bytes, offset, number, *handle = self._board.words[at : at + PLACE_WORDS]
        return Place(num_bytes, offset, number, tuple(handle)) if num_bytes else None

    def _look_for(self, number: int) -> list[int]:
        """Ranks that are not as far as this round."""
        words, row = self._board.words, self._board.row
        self._behind = [rank for rank in range(self._size) if words[row(rank) + ROUND] < number]
        return self._behind


def _staging(sources: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Puts tensors one behind the other."""

    def stage(part: torch.Tensor) -> None:
        begin = 0
        for source in map(flat_bytes, sources):
            part[begin : begin + source.numel()].copy_(source)
            begin += source.numel()

    return stage


def _further(place: Place | None, num_bytes: int) -> Place | None:
    return None if place is None else replace(place, offset=place.offset + num_bytes)


def _combine_parts(into: torch.Tensor, parts: Parts, begin: int, combine: Combine, is_mean: bool) -> None:
    """Each part's elements from `begin` on, as many as they go into."""
    if into.numel():
        first = begin * into.element_size()
        taken = [part[first : first + _num_bytes(into)].view(into.dtype) for part in parts.tensors]
        _combine_all(into, taken, combine, is_mean)


def _combine_all(into: torch.Tensor, parts: list[torch.Tensor], combine: Combine, is_mean: bool) -> None:
    """In the same order on all ranks, so that all get the same bits; half precisions add up in float32."""
    if combine.is_sum and not is_mean and into.dtype in SUMMED and _num_bytes(into) > _SMALL_BYTES:
        sum_into(into, parts)
        return
    dtype = torch.float32 if into.dtype in HALF_PRECISIONS else into.dtype
    if _num_bytes(into) <= _SMALL_BYTES:  # then the number of kernels is what counts
        total = combine.all_of(torch.stack(parts).to(dtype))
    else:
        total = parts[0].to(dtype, copy=True)  # what it goes into may itself be a part
        for part in parts[1:]:
            combine.one_more(total, part)
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


def _chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + most, size)) for first in range(0, size, most))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
