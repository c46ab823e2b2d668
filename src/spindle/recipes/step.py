"""The profiles of one step of a recipe on a cluster, which planners take.

Planners differ in their input: `pipeline` splits the encoders' microbatches into sub-microbatches, whose size it
chooses; others take whole microbatches. So one batch of a multimodal model has several profiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from spindle.cluster import Cluster
from spindle.errors import InputError
from spindle.graph import metagraph_of
from spindle.profile import Profile, roofline_profile
from spindle.recipes.data import t2v_batch, vlm_batch
from spindle.recipes.multimodal import (
    PART_TOKENS,
    MultimodalModel,
    batch_profile,
    emulator,
    model_flops,
    parts_profile,
    sub_microbatch_sizes,
)
from spindle.recipes.omni import IMAGE_SIGMA, OMNI_DATA, omni_sequences, parse_mix, slowest_replica
from spindle.recipes.recipe import Recipe
from spindle.workload import VIDEO, Microbatch, SampleError, line_of_sample, pack_clips, pack_images, read_samples

NUM_MICROBATCHES = 32  # the default number of microbatches in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Which batch of a multimodal model: its number of microbatches, drawn with a seed or packed from samples.

    For omni recipes: `mix` is the ratio of tokens of images to tokens of text, `image_sigma` the standard deviation of
    the logarithm of image sizes. With `is_balanced`, sequences are assigned to replicas by balancing work, else
    round-robin; `num_microbatches` is for all replicas together.
    """

    num_microbatches: int | None = None
    seed: int | None = None
    samples: Path | None = None
    mix: str | None = None
    image_sigma: float = IMAGE_SIGMA
    is_balanced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step to plan.

    `profile` returns the step with microbatches split into sub-microbatches of given sizes, by module; `sizes` are the
    choices of a planner, of which the first leaves microbatches whole. `part_profiles` returns the step with its item
    calls in parts, first with each call as one part; nothing if the model has no item calls. Steps of pipelines have
    `pipeline_ranks`, and `peak_s`: the time that the model's FLOPs take at the peak of all devices. `planner` plans the
    step of a script; if that is not the script's own planner, `not_own_planner` says why. A step that is no pipeline
    runs its passes once for each of `num_micro_steps`. The layout of a script's pipeline is chosen on
    `layout_profile`: one microbatch of each task.
    """

    profile: Callable[[Mapping[str, int]], Profile]
    sizes: tuple[Mapping[str, int], ...] = ({},)
    part_profiles: Callable[[], list[Profile]] = list
    pipeline_ranks: int | None = None
    peak_s: float | None = None
    planner: str = "wavefront"
    num_micro_steps: int = 1
    not_own_planner: str = ""
    layout_profile: Profile | None = None

    @property
    def whole(self) -> Profile:
        """The step with its microbatches whole."""
        return self.profile({})

    def split_profiles(self) -> list[Profile]:
        """The step with microbatches split in every way that a planner may choose; whole ones first."""
        return [self.profile(sizes) for sizes in self.sizes]

    @property
    def is_pipeline(self) -> bool:
        return self.pipeline_ranks is not None


def step_of(recipe: Recipe | MultimodalModel, cluster: Cluster, batch: BatchOptions = BatchOptions()) -> Step:
    """A step of a recipe, or of one batch of a multimodal model."""
    if isinstance(recipe, MultimodalModel):
        return _model_step(recipe, cluster, batch)
    profile = roofline_profile(metagraph_of(recipe.workload()), cluster, recipe.roofline)
    return Step(profile=lambda sizes: profile)


def _model_step(model: MultimodalModel, cluster: Cluster, batch: BatchOptions) -> Step:
    model.refuse_cluster(cluster)
    if batch.mix is not None and model.name not in OMNI_DATA:
        raise InputError(f"a mix is for {', '.join(OMNI_DATA)}; {model.name} has data of its own, leave it out")
    try:
        if model.name in OMNI_DATA:
            return _step_of(model, cluster, _omni_microbatches(model, batch))
        (microbatches,) = islice(
            batches(model, batch.num_microbatches or NUM_MICROBATCHES, batch.seed or 0, batch.samples), 1
        )
    except SampleError as error:
        if batch.samples is None:
            raise
        line = line_of_sample(batch.samples, error.number)
        raise InputError(f"{batch.samples}, line {line}: {error.reason} (this is {model.name})") from error
    return _step_of(model, cluster, microbatches)


def _omni_microbatches(model: MultimodalModel, batch: BatchOptions) -> tuple[Microbatch, ...]:
    """The sequences of the slowest replica; if samples come from a file, all of them."""
    data = OMNI_DATA[model.name]
    count = batch.num_microbatches or data.num_sequences
    if batch.samples is not None:
        (microbatches,) = islice(batches(model, count, batch.seed or 0, batch.samples), 1)
        return microbatches
    random = np.random.default_rng(batch.seed or 0)
    mix = parse_mix(batch.mix or "5:5")
    sequences = omni_sequences(model, count, data.sequence_tokens, mix, random, batch.image_sigma)
    return slowest_replica(model, sequences, data.num_replicas, batch.is_balanced)


def _step_of(model: MultimodalModel, cluster: Cluster, microbatches: tuple[Microbatch, ...]) -> Step:
    semu = emulator(cluster)

    profiles: dict[tuple[tuple[str, int], ...], Profile] = {}

    def profile(sizes: Mapping[str, int]) -> Profile:
        key = tuple(sorted(sizes.items()))
        if key not in profiles:
            profiles[key] = batch_profile(model, microbatches, sizes, cluster, semu)
        return profiles[key]

    @functools.cache
    def part_profiles() -> list[Profile]:
        return [
            parts_profile(model, microbatches, part_tokens, cluster, semu)
            for part_tokens in (None, *PART_TOKENS)
            if any(microbatch.tokens_of(module) for microbatch in microbatches for module in model.item_modules)
        ]

    peak_flops = cluster.kind.peak_flops * cluster.num_devices
    return Step(
        profile=profile,
        sizes=sub_microbatch_sizes(model, microbatches, semu),
        part_profiles=part_profiles,
        pipeline_ranks=model.num_stages,
        peak_s=model_flops(model, microbatches) / peak_flops,
    )


def batches(
    model: MultimodalModel, num_microbatches: int, seed: int, samples: Path | None = None
) -> Iterator[tuple[Microbatch, ...]]:
    """Endless batches that resemble the paper's data, or the batches of a file's samples until it is used up."""
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
