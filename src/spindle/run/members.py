"""A tensor group of ranks, as the layers that it shares see it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spindle.run.world import World, peers

TENSOR = "tensor"  # the purpose of its groups


class RankMembers:
    """The members of a tensor group; its process group must have been made."""

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.size, self.place = len(ranks), ranks.index(world.rank)
        self._group = world.group(TENSOR, ranks)
        self._order = [sorted(ranks).index(rank) for rank in ranks]  # torch has ranks in rising order

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        with peers("adding up in a tensor group"):
            dist.all_reduce(total, group=self._group)
        return total

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with peers("joining in a tensor group"):
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat([parts[place] for place in self._order], dim=-1)
