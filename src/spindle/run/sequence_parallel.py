"""A sequence group of ranks: the all-to-alls that attention runs in it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spindle.run.world import World, peers

SEQUENCE = "sequence"  # the purpose of its process groups


class SequenceParallelGroup:
    """The members of a sequence group, in the order of their slices. Their process group must exist."""

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.size, self.group_rank = len(ranks), ranks.index(world.rank)
        self._group = world.group(SEQUENCE, ranks)
        # A process group has its ranks in ascending order.
        self._members = [ranks.index(rank) for rank in sorted(ranks)]

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        is_ascending = self._members == list(range(self.size))
        sent = tensor.contiguous() if is_ascending else tensor[self._members]
        received = torch.empty_like(sent)
        with peers("exchanging tokens in a sequence group"):
            # As bytes: backends do not support all dtypes.
            dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=self._group)
        if is_ascending:
            return received
        in_order = torch.empty_like(received)
        in_order[self._members] = received
        return in_order
