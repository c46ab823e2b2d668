"""Parameters on their way from rank 0 to the ranks that hold them, and back.

Of a parameter that a tensor group splits, each rank has a shard: rank 0 cuts it, and whoever needs the whole joins it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spindle.graph import MetaGraph
from spindle.models import shard_of
from spindle.program import Program
from spindle.run.world import World, peers

_FLAT_ELEMENTS = 1 << 24  # of one message


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a split parameter that a rank has."""

    dim: int
    size: int
    place: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return shard_of(whole, self.dim, self.size, self.place)


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
        places: list[dict[int, int]] = [{} for _ in parameters]  # in its tensor group, by rank
        degrees = [1] * len(parameters)
        for shape, slot in zip(program.slots, program.plan.slots, strict=True):
            for layer in graph.metaops[shape.op].parameters[slot.first : slot.last]:
                for number in layer:
                    degrees[number] = shape.tensor_degree if dims and number in dims else 1
                    for position, rank in enumerate(shape.ranks.tolist()):
                        places[number][rank] = position % degrees[number]
        self.holders = [tuple(sorted(one)) for one in places]
        self._part_shapes = [
            torch.Size(
                size // degrees[number] if (dims or {}).get(number) == dim else size for dim, size in enumerate(one)
            )
            for number, one in enumerate(self.shapes)
        ]
        self._shards: list[dict[int, Shard]] = [
            {rank: Shard((dims or {}).get(number, 0), degrees[number], place) for rank, place in sorted(one.items())}
            for number, one in enumerate(places)
        ]

    def shard(self, number: int, rank: int | None = None) -> Shard | None:
        """What a rank, else this one, has of a parameter that is split."""
        shard = self._shards[number].get(self.world.rank if rank is None else rank)
        return None if shard is None or shard.size == 1 else shard

    def counts(self, number: int) -> bool:
        """Whether this rank is the first that holds what it holds of a parameter."""
        return self.world.rank in self._owners(number).values()

    def _owners(self, number: int) -> dict[int, int]:
        """The first rank that holds each shard, by its place."""
        owners: dict[int, int] = {}
        for rank, shard in self._shards[number].items():
            owners.setdefault(shard.place, rank)
        return dict(sorted(owners.items()))

    def send_out(self) -> None:
        """Every parameter takes rank 0's value on the ranks that hold it; elsewhere its memory is freed."""
        rank, device = self.world.rank, self.world.device
        for numbers in self._flats():
            shards = self._shards[numbers[0]]
            if rank == 0:
                flats = {one.place: self._flat(numbers, to) for to, one in shards.items() if to != 0}
                with peers("handing out parameters"):
                    for request in [dist.isend(flats[one.place], to) for to, one in shards.items() if to != 0]:
                        assert request is not None
                        request.wait()
            elif rank in shards:
                for number, part in self._parts(numbers, self._receive(numbers, 0)):
                    self._fill(number, part)
        for number, parameter in enumerate(self.parameters):
            # A parameter of a layer that no task runs stays where it is: at home.
            if self.holders[number] and rank not in self.holders[number]:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
                parameter.grad = None
            elif self.holders[number]:
                parameter.data = parameter.data.to(device)
                shard = self.shard(number)
                if shard is not None and rank == 0:
                    parameter.data = shard.of(parameter.data)

    @contextmanager
    def in_shape(self) -> Iterator[None]:
        """Inside, parameters that are elsewhere, or not all here, have their shapes, though not their values and no
        memory."""
        away = [
            (parameter, shape, parameter.data)
            for parameter, shape in zip(self.parameters, self.shapes, strict=True)
            if parameter.shape != shape
        ]
        for parameter, shape, _ in away:
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=self.world.device).expand(shape)
        try:
            yield
        finally:
            for parameter, _, data in away:
                parameter.data = data

    def bring_home(self) -> None:
        """Every rank gets every parameter's value back, as each had it before: to evaluate, or to train on."""
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
                    with peers("bringing parameters home"):
                        for request in [dist.isend(flat, to) for to in others]:
                            assert request is not None
                            request.wait()
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

    def _flats(self) -> Iterator[list[int]]:
        """Parameters in messages: those of the same ranks and type together, up to a size."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            shards = tuple((rank, shard.size, shard.place) for rank, shard in self._shards[number].items())
            groups.setdefault((shards, parameter.dtype), []).append(number)
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
        with peers("receiving parameters"):
            dist.recv(flat, source)
        return flat

    def _parts(self, numbers: list[int], flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        shapes = [self._part_shapes[number] for number in numbers]
        for number, shape, part in zip(
            numbers, shapes, torch.split(flat, [one.numel() for one in shapes]), strict=True
        ):
            yield number, part.view(shape)

    def _fill(self, number: int, value: torch.Tensor) -> None:
        parameter = self.parameters[number]
        if parameter.shape == value.shape:
            parameter.data.copy_(value)
        else:
            parameter.data = value.clone()
