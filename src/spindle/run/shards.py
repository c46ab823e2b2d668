"""Parameters of which each rank updates a part: where they stand, and how the parts come together again.

The parameters of a bucket stand side by side in one piece of memory, which is cut into as many equal parts as the
bucket has ranks, wherever that falls. To the optimizer, a rank's part of a parameter is a parameter of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spindle.program import Program
from spindle.run.flat_collectives import Request, start_all_gather
from spindle.run.world import World, wait


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `[first, last)` of a parameter of this shape, counted as in memory."""

    first: int
    last: int
    shape: tuple[int, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """As many dimensions as the parameter has, because optimizers are told by them what to decay."""
        return (*(1 for _ in self.shape[1:]), self.last - self.first) if self.shape else ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a parameter: elements `[first, last)` stand from `begin` of a part on."""

    part: int
    begin: int
    first: int
    last: int


def pieces_of(sizes: Sequence[int], num_parts: int) -> tuple[int, list[list[Piece]]]:
    """How many elements a part has when these stand side by side, and where each of them lies."""
    part_size = max(1, -(-sum(sizes) // num_parts))
    pieces: list[list[Piece]] = []
    start = 0
    for size in sizes:
        found = []
        first = 0
        while first < size:
            part, begin = divmod(start + first, part_size)
            last = min(size, first + part_size - begin)
            found.append(Piece(part, begin, first, last))
            first = last
        pieces.append(found or [Piece(0, 0, 0, 0)])  # what has no elements is somewhere, too
        start += size
    return part_size, pieces


class Flat:
    """Parameters of one type and one bucket, side by side. They stand so once they were taken in."""

    def __init__(self, numbers: Sequence[int], parameters: Sequence[nn.Parameter], ranks: tuple[int, ...], rank: int):
        self.numbers, self.parameters, self.ranks, self.place = numbers, parameters, ranks, ranks.index(rank)
        self.owned: list[tuple[Span, nn.Parameter] | None] = []  # of each parameter, what this rank updates
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory

    def attach(self) -> None:
        """Moves parameters here; those that are here stay."""
        sizes = [parameter.numel() for parameter in self.parameters]
        one = self.parameters[0]
        if self._memory is None:
            part_size, pieces = pieces_of(sizes, len(self.ranks))
            self._memory = torch.zeros(part_size * len(self.ranks), dtype=one.dtype, device=one.device)
            mine = self._memory[self.place * part_size :]
            for parameter, stretches in zip(self.parameters, pieces, strict=True):
                owned = None
                for piece in stretches:
                    if piece.part == self.place:
                        span = Span(piece.first, piece.last, tuple(parameter.shape))
                        stretch = mine[piece.begin : piece.begin + piece.last - piece.first]
                        owned = (span, nn.Parameter(stretch.view(span.part_shape)))
                self.owned.append(owned)
        for parameter, place in zip(self.parameters, torch.split(self.memory[: sum(sizes)], sizes), strict=True):
            if parameter.data_ptr() != place.data_ptr():
                place.view_as(parameter).copy_(parameter.data)
                parameter.data = place.view_as(parameter)

    def release(self) -> None:
        """Parameters get memory of their own again."""
        for parameter in self.parameters if self._memory is not None else ():
            parameter.data = parameter.data.clone()
        self._memory = None
        self.owned.clear()


class Shards:
    """What one rank has of all sharded buckets of a program; all its executors share it."""

    def __init__(self, program: Program, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._world = world
        self.flats: list[list[Flat]] = []  # by bucket: one for each type
        for bucket in program.buckets:
            by_type: dict[torch.dtype, list[int]] = {}
            for number in bucket.parameters if world.rank in bucket.ranks else ():
                by_type.setdefault(parameters[number].dtype, []).append(number)
            ranks = tuple(bucket.ranks.tolist())
            self.flats.append(
                [Flat(some, [parameters[one] for one in some], ranks, world.rank) for some in by_type.values()]
            )
        self._gathers: dict[int, list[Request]] = {}  # by bucket, until they are waited for

    def __iter__(self) -> Iterator[Flat]:
        return (flat for flats in self.flats for flat in flats)

    def attach(self) -> None:
        for flat in self:
            flat.attach()

    def release(self) -> None:
        self.settle()
        for flat in self:
            flat.release()

    @property
    def owned(self) -> dict[int, tuple[Span, nn.Parameter] | None]:
        """What this rank updates of each sharded parameter that it holds."""
        return {number: owned for flat in self for number, owned in zip(flat.numbers, flat.owned, strict=True)}

    def sharers(self, number: int) -> tuple[int, ...]:
        """The ranks among which a parameter is in parts, this one among them."""
        return next(flat.ranks for flat in self if number in flat.numbers)

    def drop_gradients(self) -> None:
        for flat in self:
            for owned in flat.owned:
                if owned is not None:
                    owned[1].grad = None

    def start_gather(self, bucket: int) -> None:
        """Parts were updated: they come together while other things go on."""
        requests = [start_all_gather(flat.memory, flat.ranks, self._world) for flat in self.flats[bucket]]
        if requests:
            self._gathers[bucket] = requests

    def is_gathering(self, bucket: int) -> bool:
        return bucket in self._gathers

    def wait(self, bucket: int) -> None:
        for request in self._gathers.pop(bucket, ()):
            wait(request)

    def settle(self) -> None:
        """All parameters are as their last update left them."""
        for bucket in list(self._gathers):
            self.wait(bucket)
