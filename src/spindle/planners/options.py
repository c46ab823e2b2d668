"""What every planner is given besides a profile: options, including the layout of a pipeline's chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from spindle.errors import PlanError

Progress = Callable[[float], None]  # how much of a search is done, from 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Modules in a row, each with so many layers, cut in front of these layers (numbered through all of them); chunks
    may be empty."""

    modules: tuple[str, ...]
    num_layers: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the chunks of a pipeline stand: chains over so many pipeline ranks, in as many replicas as the devices
    allow; a pipeline rank is a tensor parallel group. `cut_by` says what chunks have equal shares of: time, or
    parameters."""

    num_ranks: int
    num_replicas: int
    tensor_degree: int
    chains: tuple[Chain, ...]
    cut_by: str = "time"

    def __post_init__(self) -> None:
        for chain in self.chains:
            if chain.num_chunks % self.num_ranks or any(last < first for first, last in pairwise(chain.bounds)):
                raise PlanError(
                    f"a chain over {self.num_ranks} ranks needs a multiple of as many chunks in order, "
                    f"got bounds {list(chain.bounds)}"
                )

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(module for chain in self.chains for module in chain.modules)

    def rounds_of(self, chain: Chain) -> int:
        """How many times a chain passes all ranks."""
        return chain.num_chunks // self.num_ranks

    @property
    def text(self) -> str:
        """How chains are cut, in words."""
        rounds = [f"{self.rounds_of(chain)} for {' and '.join(chain.modules)}" for chain in self.chains]
        return f"chunks on each rank: {', '.join(rounds)}, cut by {self.cut_by}"

    def devices(self, replica: int, rank: int) -> tuple[int, ...]:
        first = (replica * self.num_ranks + rank) * self.tensor_degree
        return tuple(range(first, first + self.tensor_degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How hard to search, and what is decided already.

    The same options give the same plan, unless a time limit cuts the search short. The optimizer is sharded where that
    is simulated to be faster, or memory requires it, unless `shard_optimizer` decides. Pipelines have `pipeline_ranks`
    stages, as many as the devices allow unless given, and place chunks as in the best of `layouts`, which were chosen
    on another batch, or as is best for this one. Where their microbatches could be split in other ways than the profile
    has them, `bound_s` is the bound over all of these. Up to `lanes` slots share a device at the same time, where the
    profile says how much they slow each other down; pipelines have one lane.
    """

    seed: int = 0
    evaluations: int | None = None
    time_limit_s: float | None = None
    shard_optimizer: bool | None = None
    pipeline_ranks: int | None = None
    layouts: tuple[Layout, ...] = ()
    bound_s: float | None = None
    lanes: int = 1
