"""Parameters scattered from rank 0 to the ranks that hold them, resharded for another plan, and gathered again.

Of a parameter that a tensor group splits, each rank has a shard: rank 0 cuts it, and whoever needs the whole joins it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spindle.graph import MetaGraph
from spindle.models import shard_of
from spindle.program import Program, held_by
from spindle.run.world import Message, World, peers

_FLAT_ELEMENTS = 1 << 24  # of one message


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a split parameter that a rank has."""

    dim: int
    size: int
    place: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return shard_of(whole, self.dim, self.size, self.place)


Shards = Mapping[int, Shard]  # of one parameter, by rank


@dataclass(frozen=True, slots=True)
class _Away:
    """A parameter that is not at home: its shape as a whole, and who has what of it."""

    parameter: nn.Parameter
    shape: torch.Size
    shards: Shards

    @property
    def part_shape(self) -> torch.Size:
        one = next(iter(self.shards.values()), Shard(0, 1, 0))
        return torch.Size(size // one.size if dim == one.dim else size for dim, size in enumerate(self.shape))


class Weights:
    """All parameters of a workload: where each lives during training.

    At home, every rank has them all. Away, each has those of its slots and the others take no memory. `dims` has the
    dimensions of those that tensor groups split, by position.
    """

    def __init__(
        self,
        program: Program,
        graph: MetaGraph,
        parameters: Sequence[nn.Parameter],
        world: World,
        dims: Mapping[int, int] | None = None,
    ) -> None:
        self.parameters, self.world = parameters, world
        self.shapes = [parameter.shape for parameter in parameters]
        self._shards: list[dict[int, Shard]] = [
            {rank: Shard((dims or {}).get(number, 0), size, place) for rank, (place, size) in sorted(held.items())}
            for number, held in enumerate(held_by(program, graph))
        ]
        self.holders = [tuple(shard) for shard in self._shards]
        self._part_shapes = [
            _Away(parameter, parameter.shape, shards).part_shape
            for parameter, shards in zip(parameters, self._shards, strict=True)
        ]
        self._parked: dict[int, _Away] = {}  # by id: what another plan had, and this one does not know

    def shard(self, number: int, rank: int | None = None) -> Shard | None:
        """What a rank, else this one, has of a parameter that is split."""
        shard = self._shards[number].get(self.world.rank if rank is None else rank)
        return None if shard is None or shard.size == 1 else shard

    def counts(self, number: int) -> bool:
        """Whether this rank is the first that holds what it holds of a parameter."""
        return self.world.rank in self._owners(number).values()

    def _owners(self, number: int) -> dict[int, int]:
        """The first rank that holds each shard, by its place."""
        return _owners_of(self._shards[number])

    def scatter_parameters(self) -> None:
        """Every parameter takes rank 0's value on the ranks that hold it; elsewhere its memory is freed."""
        self._bring({})

    def take_over(self, old: Weights) -> None:
        """Parameters go straight from where another plan has them to where this one does. What this one does not use
        stays where it is."""
        self._bring(old._away())

    def _bring(self, before: dict[int, _Away]) -> None:
        """Parameters come to the ranks that hold them, from where they are, which is at home if nothing is said of it.
        One of a layer that no task runs stays there."""
        rank = self.world.rank
        known = [
            before.pop(id(parameter), None) if self._shards[number] else None
            for number, parameter in enumerate(self.parameters)
        ]
        self._parked = {key: self._kept_once(one) for key, one in before.items()}
        num_sent = [0] * self.world.size
        for numbers in self._flats([None if one is None else tuple(one.shards.items()) for one in known]):
            was, now = known[numbers[0]], self._shards[numbers[0]]
            sources = {to: _sources(was, shard, to, num_sent) for to, shard in now.items()}
            away = [known[number] or _Away(self.parameters[number], self.shapes[number], {}) for number in numbers]
            received = self._exchange(away, numbers, sources)
            for position, number in enumerate(numbers if sources.get(rank) else ()):
                parts = [flats[position] for flats in received]
                self._take(number, was, parts)
        for number, parameter in enumerate(self.parameters):
            if self._shards[number] and rank not in self._shards[number]:
                parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype), None
            elif self._shards[number]:
                parameter.data = parameter.data.to(self.world.device)
                shard = self.shard(number)
                if shard is not None and known[number] is None and rank == 0:
                    parameter.data = shard.of(parameter.data)

    def _kept_once(self, one: _Away) -> _Away:
        """One rank keeps each part of a parameter that nobody uses."""
        owners = _owners_of(one.shards)
        if self.world.rank not in owners.values():
            one.parameter.data, one.parameter.grad = torch.empty(0, dtype=one.parameter.dtype), None
        else:
            one.parameter.data = one.parameter.data.cpu()  # no plan counts it
        return replace(one, shards={rank: one.shards[rank] for rank in owners.values()})

    def _away(self) -> dict[int, _Away]:
        """Where parameters are that are not at home, by id."""
        ours = {
            id(parameter): _Away(parameter, self.shapes[number], self._shards[number])
            for number, parameter in enumerate(self.parameters)
            if self._shards[number]
        }
        return self._parked | ours

    def _exchange(
        self, away: list[_Away], numbers: list[int], sources: Mapping[int, list[int]]
    ) -> list[list[torch.Tensor]]:
        """What this rank gets of some parameters, from each of its sources, and what others get of this one's."""
        rank = self.world.rank
        flats: list[torch.Tensor] = []
        sends: list[Message] = []
        receives: list[Message] = []
        mine: dict[int, torch.Tensor] = {}  # by the place of those who get it, where it is cut for them
        is_home = not away[0].shards
        shapes = [
            self._part_shapes[number] if is_home else one.part_shape for number, one in zip(numbers, away, strict=True)
        ]
        size = sum(shape.numel() for shape in shapes)
        for to, some in sources.items():
            for source in some:
                if rank == source:
                    place = self._shards[numbers[0]][to].place if is_home else 0
                    if place not in mine:
                        mine[place] = self._flat(numbers, to if is_home else None)
                    if rank == to:
                        flats.append(mine[place])
                    else:
                        sends.append(Message(mine[place], to))
                elif rank == to:
                    flats.append(torch.empty(size, dtype=away[0].parameter.dtype, device=self.world.device))
                    receives.append(Message(flats[-1], source))
        self.world.exchange(sends, receives)
        return [
            [
                part.view(shape)
                for part, shape in zip(torch.split(flat, [shape.numel() for shape in shapes]), shapes, strict=True)
            ]
            for flat in flats
        ]

    def _take(self, number: int, was: _Away | None, parts: list[torch.Tensor]) -> None:
        """A parameter's new value on this rank, from the parts of it that came."""
        whole, shard = parts[0], self.shard(number)
        if was is not None and whole.shape != self._part_shapes[number]:
            whole = torch.cat(parts, dim=next(iter(was.shards.values())).dim)
            whole = whole if shard is None else shard.of(whole)
        self._fill(number, whole)

    @contextmanager
    def in_shape(self) -> Iterator[None]:
        """Inside, parameters that are elsewhere, or not all here, have their shapes, though not their values and no
        memory."""
        away = [
            (one.parameter, one.shape, one.parameter.data)
            for one in self._away().values()
            if one.parameter.shape != one.shape
        ]
        for parameter, shape, _ in away:
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=self.world.device).expand(shape)
        try:
            yield
        finally:
            for parameter, _, data in away:
                parameter.data = data

    def gather_parameters(self) -> None:
        """Every rank gets every parameter's value back, as each had it before: to evaluate, or to train on."""
        self._bring_parked_home()
        for numbers in self._flats():
            owners, shards = self._owners(numbers[0]), self._shards[numbers[0]]
            found: dict[int, list[torch.Tensor]] = {number: [] for number in numbers}
            for owner in owners.values():
                # Of a parameter that is not split, those that hold it need nothing.
                others = [
                    rank for rank in range(self.world.size) if rank != owner and (len(owners) > 1 or rank not in shards)
                ]
                if self.world.rank == owner and others:
                    flat = self._flat(numbers)
                    self.world.exchange([Message(flat, to) for to in others], [])
                elif self.world.rank in others:
                    flat = self._receive(numbers, owner)
                else:
                    continue
                for number, part in self._parts(numbers, flat):
                    found[number].append(part)
            for number, parts in found.items():
                if len(owners) > 1:
                    self.parameters[number].grad = None  # of a part
                    self._fill(number, torch.cat(parts, dim=self._shards[number][owners[0]].dim))
                elif parts and self.world.rank not in shards:
                    self._fill(number, parts[0])

    def _bring_parked_home(self) -> None:
        for one in self._parked.values():
            if self.world.size == 1:
                one.parameter.data = one.parameter.data.to(self.world.device)
                continue
            parts = []
            for owner in _owners_of(one.shards).values():
                part = one.parameter.data.to(self.world.device)
                if self.world.rank != owner:
                    part = torch.empty(one.part_shape, dtype=one.parameter.dtype, device=self.world.device)
                with peers("bringing parameters home"):
                    dist.broadcast(part, owner, group=self.world.everyone)
                parts.append(part)
            dim = next(iter(one.shards.values())).dim
            one.parameter.data = torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]
        self._parked = {}

    def _flats(self, more: Sequence[Any] | None = None) -> Iterator[list[int]]:
        """Parameters in messages: those of the same ranks and type together, and alike in what `more` says of them, up
        to a size."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            shards = tuple((rank, shard.size, shard.place) for rank, shard in self._shards[number].items())
            key = (shards, parameter.dtype, None if more is None else more[number])
            groups.setdefault(key, []).append(number)
        for numbers in groups.values():
            flat: list[int] = []
            size = 0
            for number in numbers:
                if flat and size + self.shapes[number].numel() > _FLAT_ELEMENTS:
                    yield flat
                    flat, size = [], 0
                flat.append(number)
                size += self.shapes[number].numel()
            yield flat

    def _flat(self, numbers: list[int], to: int | None = None) -> torch.Tensor:
        """What this rank has, or the part of it that another one is to have."""
        flat = []
        for number in numbers:
            part, shard = self.parameters[number].data, None if to is None else self.shard(number, to)
            flat.append((part if shard is None else shard.of(part)).reshape(-1))
        return torch.cat(flat).to(self.world.device)

    def _receive(self, numbers: list[int], source: int) -> torch.Tensor:
        size = sum(self._part_shapes[number].numel() for number in numbers)
        flat = torch.empty(size, dtype=self.parameters[numbers[0]].dtype, device=self.world.device)
        self.world.exchange([], [Message(flat, source)])
        return flat

    def _parts(self, numbers: list[int], flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        shapes = [self._part_shapes[number] for number in numbers]
        for number, shape, part in zip(
            numbers, shapes, torch.split(flat, [shape.numel() for shape in shapes]), strict=True
        ):
            yield number, part.view(shape)

    def _fill(self, number: int, value: torch.Tensor) -> None:
        parameter = self.parameters[number]
        if parameter.shape == value.shape:
            parameter.data.copy_(value)
        else:
            parameter.data = value.clone()


def _owners_of(shards: Shards) -> dict[int, int]:
    """The first rank that holds each shard, by its place."""
    owners: dict[int, int] = {}
    for rank, shard in shards.items():
        owners.setdefault(shard.place, rank)
    return dict(sorted(owners.items()))


def _sources(was: _Away | None, shard: Shard, to: int, num_sent: list[int]) -> list[int]:
    """Ranks from which one gets what it is to have of a parameter: none if it is there, rank 0 if all is at home, one
    that has the same, else all that have a part. Those that sent least are asked first."""
    if was is None:
        return [] if to == 0 else [0]
    if was.shards.get(to) == shard:
        return []
    alike = [rank for rank, other in was.shards.items() if other == shard]
    found = [min(alike, key=lambda rank: num_sent[rank])] if alike else list(_owners_of(was.shards).values())
    for rank in found:
        num_sent[rank] += rank != to
    return found
