"""Ranks that measure at the same time, or one rank that measures alone."""

from __future__ import annotations

from typing import Any

import torch

from spindle.run import World


class RankSync:
    """Ranks that share one GPU measure each point at the same time, so that all neighbours are as busy as in a step.

    They share every result (a time, a failure), so that all take the same decisions. If not `enabled`, each rank
    measures alone, as rank 0 of 1.
    """

    def __init__(self, world: World, *, enabled: bool) -> None:
        self._world, self._is_enabled = world, enabled and world.size > 1
        self.rank, self.size = (world.rank, world.size) if self._is_enabled else (0, 1)

    def all_gather(self, *numbers: float) -> list[tuple[float, ...]]:
        """The numbers of all ranks, by rank. Synchronizes the ranks."""
        record = torch.tensor(numbers, dtype=torch.float64)
        table = self._world.start_all_gather(record).wait() if self._is_enabled else [record]
        return [tuple(row.tolist()) for row in table]

    def broadcast(self, value: Any) -> Any:
        """The value of the first rank, on all ranks."""
        return self._world.broadcast_object(value) if self._is_enabled else value
