"""Who measures: one rank by itself, or all ranks the same at the same time."""

from __future__ import annotations

from typing import Any

import torch

from spindle.run.world import World


class RankSync:
    """Ranks that share one GPU measure each point side by side, so that every neighbour is as busy as in a step.

    They take the same decisions: whatever one of them finds alone (a time, a failure) is told to all. A rank that
    measures by itself tells nobody.
    """

    def __init__(self, world: World, *, enabled: bool) -> None:
        self._world, self._is_enabled = world, enabled and world.size > 1
        self.rank, self.size = (world.rank, world.size) if self._is_enabled else (0, 1)

    def all_gather(self, *numbers: float) -> list[tuple[float, ...]]:
        """Everybody's numbers, by rank. Nobody leaves before all have come."""
        record = torch.tensor(numbers, dtype=torch.float64)
        table = self._world.start_all_gather(record).wait() if self._is_enabled else [record]
        return [tuple(row.tolist()) for row in table]

    def broadcast(self, value: Any) -> Any:
        """What the first of them says, for all."""
        return self._world.broadcast_object(value) if self._is_enabled else value
