"""A batch of a multimodal model, planned as each system would run it.

Systems differ in what they are given: planner `pipeline` cuts encoders' batches into sub-microbatches; the others pass
whole microbatches. So each has a profile of its own of the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spindle.cluster import Cluster
from spindle.errors import InputError, PlanError
from spindle.plan import Plan
from spindle.planners import Effort, Progress
from spindle.planners.pipeline import (
    Found,
    Layout,
    TaskVariants,
    baseline_ways,
    pipeline_layout,
    plan_baseline,
    search_pipeline,
)
from spindle.profile import Profile, Semu
from spindle.recipes.data import t2v_batch, vlm_batch
from spindle.recipes.multimodal import MultimodalModel, batch_profile, emulator, model_flops, sub_microbatch_size
from spindle.workload import VIDEO, VISION, Microbatch, pack_clips, pack_images, read_samples

PLANNERS = ("pipeline", "optimus", "zb-h1", "static", "vpp", "1f1b")
_MOST_INSTANCES = {VISION: 48, VIDEO: 8}  # of a microbatch


def batches(
    model: MultimodalModel, num_microbatches: int, seed: int, samples: Path | None = None
) -> Iterator[tuple[Microbatch, ...]]:
    """Batches without end like the paper's data, or one after another of a file's samples until it is used up."""
    is_video = any(chain.name == VIDEO for chain in model.chains)
    if samples is None:
        random = np.random.default_rng(seed)
        while True:
            yield (t2v_batch if is_video else vlm_batch)(num_microbatches, random)
    packed = (pack_clips if is_video else pack_images)(read_samples(samples))
    if len(packed) < num_microbatches:
        raise InputError(
            f"{samples}: its samples make {len(packed)} microbatches, a batch has {num_microbatches}; "
            "give more samples, or fewer --microbatches"
        )
    for first in range(0, len(packed) - num_microbatches + 1, num_microbatches):
        yield packed[first : first + num_microbatches]


@dataclass(slots=True)
class Pipelined:
    """A model on a cluster. What is chosen before training is chosen once, on the first batch that is planned."""

    model: MultimodalModel
    cluster: Cluster
    semu: Semu = field(init=False)
    splits: dict[str, int] = field(init=False, default_factory=dict)
    layout: Layout | None = field(init=False, default=None)
    _ways: dict[str, TaskVariants] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        rank = self.model.tensor_degree * self.model.num_stages
        if self.cluster.num_devices % rank:
            raise PlanError(
                f"{self.model.name} has {self.model.num_stages} stages of {self.model.tensor_degree} devices: "
                f"{self.cluster.name} has no multiple of {rank}"
            )
        self.semu = emulator(self.cluster)

    def profile(self, microbatches: Sequence[Microbatch], planner: str) -> Profile:
        """The batch as a planner sees it."""
        splits: Mapping[str, int] = {}
        if planner == "pipeline":
            self.splits |= {
                module: size for module, size in self._splits(microbatches).items() if module not in self.splits
            }
            splits = self.splits
        return batch_profile(self.model, microbatches, splits, self.cluster, self.semu)

    @staticmethod
    def _covers(layouts: Sequence[Layout], profile: Profile) -> bool:
        """Whether chunks are placed for all modules of a batch; the first may have had text alone."""
        placed = [{module for chain in layout.chains for module in chain.modules} for layout in layouts]
        return bool(placed) and all(set(profile.graph.modules) <= one for one in placed)

    def _splits(self, microbatches: Sequence[Microbatch]) -> dict[str, int]:
        """The size of sub-microbatches of each module that has several instances (DIP §4.1)."""
        found = {}
        for chain in self.model.chains:
            lengths = [count for microbatch in microbatches for count in microbatch.tokens_of(chain.name)]
            if chain.name in _MOST_INSTANCES and lengths:
                sizes = range(1, 1 + _MOST_INSTANCES[chain.name])
                typical = int(np.mean(lengths))
                found[chain.name] = sub_microbatch_size(self.model, chain.name, typical, self.semu, sizes)
        return found

    def plan(
        self,
        microbatches: Sequence[Microbatch],
        planner: str = "pipeline",
        effort: Effort = Effort(),  # noqa: B008
        progress: Progress | None = None,
    ) -> tuple[Plan, Profile]:
        """A finished plan for a batch, and the profile it was made from."""
        if planner != "pipeline":
            profile = self.profile(microbatches, planner)
            if not self._covers([layout for layout, _ in self._ways.get(planner, [])], profile):
                self._ways[planner] = baseline_ways(profile, planner, self.model.num_stages)
            return plan_baseline(profile, planner, self.model.num_stages, self._ways[planner]), profile
        plan, profile, _ = self.search(microbatches, effort, progress)
        return plan, profile

    def search(
        self,
        microbatches: Sequence[Microbatch],
        effort: Effort = Effort(),  # noqa: B008
        progress: Progress | None = None,
    ) -> tuple[Plan, Profile, list[Found]]:
        """The plan of planner `pipeline`, its profile, and how the search of each replica came to it."""
        profile = self.profile(microbatches, "pipeline")
        if self.layout is None or not self._covers([self.layout], profile):
            self.layout = pipeline_layout(profile, self.model.num_stages)
        plan, found = search_pipeline(profile, self.layout, effort, progress)
        return plan, profile, found

    def mfu(self, microbatches: Sequence[Microbatch], step_s: float) -> float:
        """Which share of all devices' peak a step of this length uses, recomputation not counted."""
        peak = self.cluster.kind.peak_flops * self.cluster.num_devices
        return model_flops(self.model, microbatches) / peak / step_s
