"""Parameters on their way from rank 0 to the ranks that hold them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from spindle.graph import MetaGraph
from spindle.program import Program
from spindle.run.world import World, peers

_FLAT_ELEMENTS = 1 << 24  # of one message


class Weights:
    """All parameters of a workload: where each lives during training.

    At home, every rank has them all. Away, each has those of its slots and the others take no memory.
    """

    def __init__(self, program: Program, graph: MetaGraph, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.parameters, self.world = parameters, world
        self.shapes = [parameter.shape for parameter in parameters]
        holders: list[set[int]] = [set() for _ in parameters]
        for shape, slot in zip(program.slots, program.plan.slots, strict=True):
            for layer in graph.metaops[shape.op].parameters[slot.first : slot.last]:
                for number in layer:
                    holders[number].update(shape.ranks.tolist())
        self.holders = [tuple(sorted(one)) for one in holders]

    def send_out(self) -> None:
        """Every parameter takes rank 0's value on the ranks that hold it; elsewhere its memory is freed."""
        rank, device = self.world.rank, self.world.device
        for numbers in self._flats():
            holders = self.holders[numbers[0]]
            if rank == 0:
                flat = self._flat(numbers)
                with peers("handing out parameters"):
                    for request in [dist.isend(flat, to) for to in holders if to != 0]:
                        assert request is not None
                        request.wait()
            elif rank in holders:
                self._fill(numbers, self._receive(numbers, 0))
        for number, parameter in enumerate(self.parameters):
            # A parameter of a layer that no task runs stays where it is: at home.
            if self.holders[number] and rank not in self.holders[number]:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
                parameter.grad = None
            elif self.holders[number]:
                parameter.data = parameter.data.to(device)

    @contextmanager
    def in_shape(self) -> Iterator[None]:
        """Inside, parameters that are elsewhere have their shapes, though not their values and no memory."""
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
            holders = self.holders[numbers[0]]
            others = [rank for rank in range(self.world.size) if rank not in holders]
            if holders and self.world.rank == holders[0] and others:
                flat = self._flat(numbers)
                with peers("bringing parameters home"):
                    for request in [dist.isend(flat, to) for to in others]:
                        assert request is not None
                        request.wait()
            elif holders and self.world.rank in others:
                self._fill(numbers, self._receive(numbers, holders[0]))

    def _flats(self) -> Iterator[list[int]]:
        """Parameters in messages: those of the same ranks and type together, up to a size."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            groups.setdefault((self.holders[number], parameter.dtype), []).append(number)
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

    def _flat(self, numbers: list[int]) -> torch.Tensor:
        return torch.cat([self.parameters[number].data.reshape(-1) for number in numbers]).to(self.world.device)

    def _receive(self, numbers: list[int], source: int) -> torch.Tensor:
        size = sum(self.shapes[number].numel() for number in numbers)
        flat = torch.empty(size, dtype=self.parameters[numbers[0]].dtype, device=self.world.device)
        with peers("receiving parameters"):
            dist.recv(flat, source)
        return flat

    def _fill(self, numbers: list[int], flat: torch.Tensor) -> None:
        sizes = [self.shapes[number].numel() for number in numbers]
        for number, part in zip(numbers, torch.split(flat, sizes), strict=True):
            parameter = self.parameters[number]
            if parameter.shape == self.shapes[number]:
                parameter.data.copy_(part.view(self.shapes[number]))
            else:
                parameter.data = part.view(self.shapes[number]).clone()
