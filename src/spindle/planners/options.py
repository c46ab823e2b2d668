"""What every planner is given besides a profile: options, including the layout of a pipeline's chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from spindle.errors import PlanError
from spindle.plan import MAX_LANES

Progress = Callable[[float], None]  # called with the share of a search that is done, from 0 to 1


SPREAD, REPLICATED, FIRST, DEDICATED = PLACEMENTS = ("spread", "replicated", "first", "dedicated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Consecutive modules with their numbers of layers, cut before these layers (numbered through all modules). Chunks
    may be empty.

    `placement` says where the chain is placed. *spread*: its chunks in turn over the pipeline ranks. The other
    placements keep it whole: *replicated* on every device (or tensor group) of all ranks, *first* on those of rank 0,
    *dedicated* on those of ranks that run nothing else. A whole chain runs its calls in parts, each on one of its
    groups or on a sequence group. `tensor_degree` is that of its modules; 0 means the layout's.
    """

    modules: tuple[str, ...]
    num_layers: tuple[int, ...]
    bounds: tuple[int, ...]
    placement: str = SPREAD
    tensor_degree: int = 0

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise PlanError(f"a chain is placed as one of {', '.join(PLACEMENTS)}, got {self.placement!r}")

    @property
    def num_chunks(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the chunks of a pipeline are placed: chains over `num_ranks` pipeline ranks, in `num_replicas` replicas. A
    pipeline rank is a tensor-parallel group.

    `cut_by` says what is balanced between chunks: time or parameters. The first `num_dedicated` ranks of each replica
    only run dedicated chains; the other ranks run all others. With `shards_optimizer`, groups that hold the same
    weights (of whole chains, or in replicas) share their optimizer state.
    """

    num_ranks: int
    num_replicas: int
    tensor_degree: int
    chains: tuple[Chain, ...]
    cut_by: str = "time"
    num_dedicated: int = 0
    shards_optimizer: bool = False

    def __post_init__(self) -> None:
        is_dedicated = any(chain.placement == DEDICATED for chain in self.chains)
        if not 0 <= self.num_dedicated < self.num_ranks or is_dedicated != bool(self.num_dedicated):
            raise PlanError(
                f"dedicated chains need ranks of their own, and others at least one of {self.num_ranks}, got "
                f"num_dedicated={self.num_dedicated}"
            )
        for chain in self.chains:
            if chain.placement != SPREAD:
                if chain.tensor_degree and self.tensor_degree % chain.tensor_degree:
                    raise PlanError(
                        f"{' and '.join(chain.modules)} has tensor degree {chain.tensor_degree}, which does not divide "
                        f"the {self.tensor_degree} devices of a pipeline rank"
                    )
                continue
            if chain.num_chunks % self.num_spread_ranks or any(last < first for first, last in pairwise(chain.bounds)):
                raise PlanError(
                    f"a chain over {self.num_spread_ranks} ranks needs a multiple of as many chunks in order, "
                    f"got bounds {list(chain.bounds)}"
                )

    @property
    def num_spread_ranks(self) -> int:
        """The pipeline ranks over which chunks are spread."""
        return self.num_ranks - self.num_dedicated

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(module for chain in self.chains for module in chain.modules)

    def rounds_of(self, chain: Chain) -> int:
        """How many times a chain passes over all ranks."""
        return chain.num_chunks // self.num_spread_ranks

    @property
    def text(self) -> str:
        """How the chains are cut, in words."""
        spread = [chain for chain in self.chains if chain.placement == SPREAD]
        rounds = [f"{self.rounds_of(chain)} for {' and '.join(chain.modules)}" for chain in spread]
        chunks = f"chunks on each rank: {', '.join(rounds)}, cut by {self.cut_by}"
        return "; ".join(filter(None, [self.whole_text, chunks]))

    @property
    def whole_text(self) -> str:
        """Where whole chains are placed, in words; empty if there are none."""
        texts = [
            f"{' and '.join(chain.modules)} {_PLACEMENT_TEXT[chain.placement].format(self.num_dedicated)} at tensor "
            f"degree {chain.tensor_degree or self.tensor_degree}"
            for chain in self.chains
            if chain.placement != SPREAD
        ]
        return "; ".join(texts)

    def devices(self, replica: int, rank: int) -> tuple[int, ...]:
        first = (replica * self.num_ranks + rank) * self.tensor_degree
        return tuple(range(first, first + self.tensor_degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How hard to search, and what is already decided.

    The same options give the same plan, unless a time limit cuts the search short. The optimizer is sharded if that is
    simulated to be faster, or if memory requires it, unless `shard_optimizer` decides. Pipelines have `pipeline_ranks`
    stages, by default as many as the devices allow, and place chunks as in the best of `layouts`, which were chosen on
    another batch, or as is best for this one. If their microbatches could be split in other ways than in the profile,
    `bound_s` is the bound over all of these. Up to `lanes` slots share a device at the same time, if the profile says
    how much they slow each other down; pipelines have one lane. With `quotas`, each lane gets SMs of its own if the
    profile has times on some of the SMs and that is simulated to be faster. The plan of a pipeline that
    is a draft is neither checked nor verified: whoever asks for it does that with the program that will run.
    """

    seed: int = 0
    evaluations: int | None = None
    time_limit_s: float | None = None
    shard_optimizer: bool | None = None
    pipeline_ranks: int | None = None
    layouts: tuple[Layout, ...] = ()
    bound_s: float | None = None
    lanes: int = 1
    quotas: bool = False
    is_draft: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= MAX_LANES:
            raise PlanError(f"a device has 1 to {MAX_LANES} lanes, got lanes={self.lanes}")


_PLACEMENT_TEXT = {
    REPLICATED: "replicated on all ranks",
    FIRST: "on the first rank",
    DEDICATED: "on ranks of its own ({})",
}
