"""Batches like the DIP paper's, drawn from a seeded generator.

The paper names its datasets (§5) and gives two numbers: LAION-2B has 16.4 tokens per image on average, OBELICS between
0.4 and 3115. Our assumptions: the shapes of the distributions, means that the datasets' own papers suggest (OBELICS 2.5
images per document, about half of ScienceQA's questions with an image, long captions in ShareGPT4Video and short ones
in InternVid), the weights of the mixture, and that a microbatch draws all its samples from one source. See
`docs/recipes.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spindle.errors import WorkloadError
from spindle.workload import Clip, Microbatch, Sample, pack_clips, pack_images

LAION_TOKENS_PER_IMAGE = 16.4
OBELICS_TOKENS_PER_IMAGE = (0.4, 3115.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dataset: its share of the microbatches, and how one of its samples is drawn."""

    name: str
    weight: float
    draw: Callable[[np.random.Generator], Sample]


def _log_normal(random: np.random.Generator, mean: float, spread: float) -> float:
    """A length with a long tail: log-normal with this mean; `spread` is the standard deviation of its logarithm."""
    return float(random.lognormal(math.log(mean) - spread**2 / 2, spread))


def _laion(random: np.random.Generator) -> Sample:
    return Sample(text_tokens=max(1, round(_log_normal(random, LAION_TOKENS_PER_IMAGE, 0.6))), images=1)


def _obelics(random: np.random.Generator) -> Sample:
    images = int(random.geometric(1 / 2.5))
    tokens_per_image = float(np.clip(_log_normal(random, 326, 1.3), *OBELICS_TOKENS_PER_IMAGE))
    return Sample(text_tokens=round(images * tokens_per_image), images=images)


def _science_qa(random: np.random.Generator) -> Sample:
    return Sample(text_tokens=max(16, round(_log_normal(random, 200, 0.6))), images=int(random.random() < 0.487))


def _text(random: np.random.Generator) -> Sample:
    return Sample(text_tokens=max(16, round(_log_normal(random, 1000, 1.0))))


def _clip(seconds: float) -> tuple[Clip, ...]:
    return (Clip(seconds=round(max(1.0, seconds), 2)),)


def _share_gpt_4_video(random: np.random.Generator) -> Sample:
    return Sample(text_tokens=round(_log_normal(random, 370, 0.4)), clips=_clip(_log_normal(random, 14, 0.6)))


def _intern_vid(random: np.random.Generator) -> Sample:
    return Sample(text_tokens=max(4, round(_log_normal(random, 26, 0.4))), clips=_clip(_log_normal(random, 8, 0.8)))


def _mm_trail(random: np.random.Generator) -> Sample:
    return Sample(text_tokens=max(8, round(_log_normal(random, 120, 0.4))), clips=_clip(_log_normal(random, 4.6, 0.6)))


VLM_SOURCES = (
    Source(name="OBELICS", weight=0.45, draw=_obelics),
    Source(name="LAION-2B", weight=0.3, draw=_laion),
    Source(name="ScienceQA", weight=0.15, draw=_science_qa),
    Source(name="text", weight=0.1, draw=_text),
)
T2V_SOURCES = (
    Source(name="ShareGPT4Video", weight=0.3, draw=_share_gpt_4_video),
    Source(name="InternVid", weight=0.4, draw=_intern_vid),
    Source(name="MMTrail-2M", weight=0.3, draw=_mm_trail),
)


def vlm_batch(num_microbatches: int, random: np.random.Generator) -> tuple[Microbatch, ...]:
    """Sequences of text with 0 to 48 images."""
    return _batch(num_microbatches, random, VLM_SOURCES, pack_images)


def t2v_batch(num_microbatches: int, random: np.random.Generator) -> tuple[Microbatch, ...]:
    """Up to 8 clips with their texts."""
    return _batch(num_microbatches, random, T2V_SOURCES, pack_clips)


def _batch(
    num_microbatches: int,
    random: np.random.Generator,
    sources: tuple[Source, ...],
    pack: Callable[[list[Sample]], tuple[Microbatch, ...]],
) -> tuple[Microbatch, ...]:
    if num_microbatches < 1:
        raise WorkloadError(f"a batch needs at least one microbatch, got {num_microbatches}")
    weights = np.array([source.weight for source in sources])
    microbatches = []
    for _ in range(num_microbatches):
        source = sources[int(random.choice(len(sources), p=weights / weights.sum()))]
        samples: list[Sample] = []
        packed: tuple[Microbatch, ...] = ()
        while len(packed) < 2:  # the first microbatch is full once a second one has begun
            samples += [source.draw(random) for _ in range(8)]
            packed = pack(samples)
        microbatches.append(packed[0])
    return tuple(microbatches)
