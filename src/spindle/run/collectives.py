"""Collectives of a group, as rounds.

In a round every rank stages its part in memory of its own, says so, and, when all have said so, reads what it needs:

    broadcast        root stages                  all read root
    all-gather       each stages its part         all read all
    reduce-scatter   each stages everything       each reduces its slice
    all-reduce       reduce-scatter, then all-gather of the slices; a small one is one round, where all read all

Rounds use two halves of a segment in turn. Nobody stages the next but one round before all have staged the next one,
hence read this one: no rank needs to say when it has read. What is larger than a half goes in chunks.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spindle.run.board import ROUND, ROUND_MEANINGS, ROUND_SIGNALS, Board
from spindle.run.job import Job, flat_bytes
from spindle.run.medium import Segments
from spindle.run.sums import HALF_PRECISIONS, sum_into

Steps = Generator[None, None, None]  # stops where it must wait for other ranks

_ONE_ROUND_BYTES = 1 << 15  # an all-reduce up to here reads everything from everybody
_SMALL_BYTES = 1 << 18
_TOGETHER = 16  # elements: a rank's part begins where kernels can take several at once


@dataclass(frozen=True, slots=True)
class Combine:
    """How parts become one: all rows of a tensor at once, or one more part into a total."""

    all_of: Callable[[torch.Tensor], torch.Tensor]
    one_more: Callable[[torch.Tensor, torch.Tensor], Any]
    is_sum: bool = False


class Collectives:
    """All collectives of one rank in one group, one after the other."""

    def __init__(self, board: Board, segments: Segments, names: Sequence[str]) -> None:
        self._board, self._segments, self._names = board, segments, names
        self._rank, self._size = board.rank, board.size
        self._queue: deque[tuple[Job, Steps]] = deque()
        self._round = 0
        self._behind: list[int] = []
        self.held: Job | None = None  # what waits for its caller's own GPU

    def add(self, job: Job, steps: Steps) -> None:
        self._queue.append((job, steps))

    def jobs(self) -> Iterator[Job]:
        return (job for job, _ in self._queue)

    def waited_for(self) -> set[int]:
        return set(self._behind) if self._queue else set()

    def advance(self) -> bool:
        """Does what can be done without waiting; whether that was to the end of any."""
        moved, held = False, None
        while self._queue:
            job, steps = self._queue[0]
            try:
                next(steps)
                held = None if job.is_due() else job
                break
            except StopIteration:
                self._queue.popleft()
                job.finish()
                moved = True
        self.held = held
        return moved

    def barrier(self, job: Job) -> Steps:
        yield from self._run_round(job, 0, lambda part: None, lambda parts: None)

    def broadcast(self, job: Job, tensors: list[torch.Tensor], root: int) -> Steps:
        for tensor in tensors:
            flat = flat_bytes(tensor)
            for first, last in _chunks(flat.numel(), job.medium.half_bytes[-1]):
                chunk = flat[first:last]

                def stage(part: torch.Tensor, chunk: torch.Tensor = chunk) -> None:
                    if self._rank == root:
                        part.copy_(chunk)

                def read(parts: list[torch.Tensor], chunk: torch.Tensor = chunk) -> None:
                    if self._rank != root:
                        chunk.copy_(parts[root])

                yield from self._run_round(job, last - first, stage, read)

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
                parts = [source[first:last] for source in sources]
                yield from self._reduce(job, parts, target[first:last], self._rank * (last - first), combine, is_mean)

    def all_reduce(self, job: Job, tensors: list[torch.Tensor], combine: Combine, is_mean: bool) -> Steps:
        for tensor in tensors:
            flat = tensor.data.view(-1)
            for first, last in _chunks(flat.numel(), job.medium.half_bytes[-1] // flat.element_size()):
                chunk = flat[first:last]
                if _num_bytes(chunk) <= _ONE_ROUND_BYTES:
                    yield from self._reduce(job, [chunk], chunk, 0, combine, is_mean)
                    continue
                count = -(-chunk.numel() // self._size // _TOGETHER) * _TOGETHER
                slices = [chunk[rank * count : (rank + 1) * count] for rank in range(self._size)]
                mine = slices[self._rank]
                yield from self._reduce(job, [chunk], mine, self._rank * count, combine, is_mean)
                yield from self._gather(job, flat_bytes(mine), [flat_bytes(one) for one in slices])

    def _gather(self, job: Job, source: torch.Tensor, targets: list[torch.Tensor]) -> Steps:
        """Each stages bytes, of which there may be fewer on later ranks; all read all."""

        def stage(part: torch.Tensor) -> None:
            part[: source.numel()].copy_(source)

        def read(parts: list[torch.Tensor]) -> None:
            _copy_all(targets, [part[: target.numel()] for target, part in zip(targets, parts, strict=True)])

        yield from self._run_round(job, max(target.numel() for target in targets), stage, read)

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

        def stage(part: torch.Tensor) -> None:
            sizes = [_num_bytes(source) for source in sources]
            for place, source in zip(torch.split(part, sizes), sources, strict=True):
                place.copy_(flat_bytes(source))

        def read(parts: list[torch.Tensor]) -> None:
            if target.numel():
                views = [part.view(target.dtype)[begin : begin + target.numel()] for part in parts]
                _combine_all(target, views, combine, is_mean)

        yield from self._run_round(job, sum(map(_num_bytes, sources)), stage, read)

    def _run_round(
        self,
        job: Job,
        num_bytes: int,
        stage: Callable[[torch.Tensor], None],
        read: Callable[[list[torch.Tensor]], None],
    ) -> Steps:
        """`stage` fills our part, `read` gets the parts of all ranks; every part has so many bytes."""
        board, medium = self._board, job.medium
        words, ours = board.words, board.row(self._rank)
        # Streams that wait for each other for long slow down whatever else the GPU does: the host waits instead.
        self._behind = []
        while num_bytes and not job.is_due():
            yield
        self._round += 1
        number, turn = self._round, self._round % 2
        largest = len(medium.half_bytes) - 1
        kind = next((one for one, half in enumerate(medium.half_bytes) if num_bytes <= half), largest)
        begin = turn * medium.half_bytes[kind]
        place = slice(begin, begin + num_bytes)
        segment = -1
        signal = 0
        if num_bytes:
            job.begin()
            segment = self._segments.for_collectives(medium, kind, 2 * medium.half_bytes[kind])
            stage(self._segments.of(self._rank, medium, segment)[place])
            signal = medium.signal()
        meaning = zlib.crc32(f"{job.name} {num_bytes} {segment}".encode())
        words[ours + ROUND_MEANINGS + turn], words[ours + ROUND_SIGNALS + turn] = meaning, signal
        words[ours + ROUND] = number
        board.fence()
        if not self._look_for(number):
            board.ring_all()  # the last to come wakes the others
        while self._look_for(number):
            yield
        for rank in range(self._size):
            if words[board.row(rank) + ROUND_MEANINGS + turn] != meaning:
                raise RuntimeError(
                    f"{self._names[rank]} does not run the {job.name} of {num_bytes} bytes that "
                    f"{self._names[self._rank]} runs; all ranks of a group must call the same collectives in one order"
                )
        if num_bytes:
            medium.wait_for({rank: words[board.row(rank) + ROUND_SIGNALS + turn] for rank in range(self._size)})
            read([self._segments.of(rank, medium, segment)[place] for rank in range(self._size)])

    def _look_for(self, number: int) -> list[int]:
        """Ranks that are not as far as this round."""
        words, row = self._board.words, self._board.row
        self._behind = [rank for rank in range(self._size) if words[row(rank) + ROUND] < number]
        return self._behind


def _combine_all(into: torch.Tensor, parts: list[torch.Tensor], combine: Combine, is_mean: bool) -> None:
    """In the same order on all ranks, so that all get the same bits; half precisions add up in float32."""
    if combine.is_sum and not is_mean and into.dtype in HALF_PRECISIONS and _num_bytes(into) > _SMALL_BYTES:
        sum_into(into, parts)
        return
    dtype = torch.float32 if into.dtype in HALF_PRECISIONS else into.dtype
    if _num_bytes(into) <= _SMALL_BYTES:  # then the number of kernels is what counts
        total = combine.all_of(torch.stack(parts).to(dtype))
    else:
        total = into if into.dtype == dtype else torch.empty_like(into, dtype=dtype)
        total.copy_(parts[0])
        for part in parts[1:]:
            combine.one_more(total, part)
    if is_mean:
        total.div_(len(parts))
    if total is not into:
        into.copy_(total)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if sum(map(_num_bytes, targets)) <= _SMALL_BYTES:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + most, size)) for first in range(0, size, most))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
