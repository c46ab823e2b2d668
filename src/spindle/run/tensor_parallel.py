"""A tensor-parallel group of ranks: the collectives that its layers run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spindle.models import span_of
from spindle.run.flat_collectives import start_reduce_scatter_in
from spindle.run.world import World, peers

TENSOR = "tensor"  # the purpose of its process groups


class TensorParallelGroup:
    """The members of a tensor-parallel group, whose process group must exist."""

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.size, self.group_rank = len(ranks), ranks.index(world.rank)
        self._rank, self._ranks = world.rank, tuple(sorted(ranks))  # a process group has its ranks in ascending order
        self._group = world.group(TENSOR, ranks)
        self._order = [self._ranks.index(rank) for rank in ranks]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        with peers("all-reducing in a tensor-parallel group"):
            dist.all_reduce(total, group=self._group)
        return total

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        rows = tensor.movedim(dim, 0)
        most = -(-len(rows) // self.size)
        padded = rows.new_zeros(self.size, most, *rows.shape[1:])
        for place, row in enumerate(self._order):
            first, last = span_of(len(rows), self.size, place)
            padded[row, : last - first] = rows[first:last]
        doing = "all-reducing in a tensor-parallel group"
        request = start_reduce_scatter_in(padded.view(-1), self._group, self._ranks, self._rank, doing)
        with peers(doing):
            request.wait()
        first, last = span_of(len(rows), self.size, self.group_rank)
        own = padded[self._order[self.group_rank], : last - first].movedim(0, dim)
        return own.clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
        lengths = self._lengths(tensor.shape[dim], length, tensor.device)
        padded = tensor
        if tensor.shape[dim] < max(lengths):  # all-gather takes equal sizes
            padding = list(tensor.shape)
            padding[dim] = max(lengths) - tensor.shape[dim]
            padded = torch.cat([tensor, tensor.new_zeros(padding)], dim)
        padded = padded.contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with peers("gathering in a tensor-parallel group"):
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([parts[row].narrow(dim, 0, size) for row, size in zip(self._order, lengths, strict=True)], dim)

    def _lengths(self, own: int, length: int | None, device: torch.device) -> list[int]:
        """The lengths of all members' shards: computed from the whole length, or gathered if that is unknown."""
        if length is not None:
            spans = [span_of(length, self.size, place) for place in range(self.size)]
            return [last - first for first, last in spans]
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        own_length = torch.full_like(lengths[0], own)
        with peers("gathering in a tensor-parallel group"):
            dist.all_gather(lengths, own_length, group=self._group)
        return [int(lengths[row]) for row in self._order]
