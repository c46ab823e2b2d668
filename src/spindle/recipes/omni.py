"""Workloads like those of MegaScale-Omni: encoders of 1 to 10 B beside language models of 12 to 175 B, images of very
different sizes, and any share of image tokens.

The paper gives the models by name and the numbers of GPUs, sequences and tokens; layers, widths, data and the mixture
of tokens are ours (`docs/recipes.md`). Replicas train on different sequences and synchronize only to reduce gradients,
so a step here is the step of one replica on its devices: the replica with the most work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.errors import InputError, WorkloadError
from spindle.planners.balance import assign_sequences
from spindle.recipes.multimodal import AUDIO, Chain, MultimodalModel, language_chain, model_flops, vit_chain
from spindle.recipes.transformer import Tower
from spindle.workload import LANGUAGE, VISION, Microbatch

_VOCABULARY = 128_256
PATCHES_PER_TOKEN = 16
_MEDIAN_PATCHES, _FEWEST, _MOST = 1500, 64, 16_384
IMAGE_SIGMA = 1.0  # standard deviation of the logarithm of an image's number of patches
_AUDIO_FRAMES, _AUDIO_TOKENS = 1500, 375
_TEXT_TOKENS = 600  # tokens of a document, on average

Mix = tuple[int, int]  # the ratio of tokens of images or sound to tokens of text


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniData:
    """The sequences of a step: their number, their tokens, and the number of replicas that share them."""

    num_sequences: int
    sequence_tokens: int
    num_replicas: int


def _audio(output_width: int) -> Chain:
    tower = Tower(name=AUDIO, num_layers=24, width=1280, num_heads=16, mlp_width=5120, max_tensor_degree=8)
    return Chain(
        tower=tower, before="patches", after="adapter", patch_elements=2 * 128, merge=4, output_width=output_width
    )


def _omni(
    name: str,
    vit: tuple[int, int, int, int],
    language: tuple[int, int, int, int],
    layout: tuple[int, int, int],
    sequences: tuple[int, int],
    description: str,
    with_audio: bool = False,
) -> tuple[MultimodalModel, OmniData]:
    layers, width, hidden, heads = vit
    encoder = vit_chain(layers, width, hidden, heads, language[1], tested_sizes=(16,))
    tensor_degree, num_stages, num_replicas = layout
    model = MultimodalModel(
        name=name,
        description=description,
        chains=(encoder, *([_audio(language[1])] if with_audio else []), language_chain(*language, _VOCABULARY)),
        tensor_degree=tensor_degree,
        num_stages=num_stages,
        cluster_name=f"h800x{tensor_degree * num_stages}",
    )
    return model, OmniData(num_sequences=sequences[0], sequence_tokens=sequences[1], num_replicas=num_replicas)


_B = ((48, 2048, 8192, 16), (80, 8192, 28672, 64), (8, 4, 4), (64, 16_384))
_ALL = (
    _omni(
        "omni-a",
        (40, 1408, 6144, 16),
        (40, 5120, 13824, 40),
        (4, 2, 8),
        (32, 16_384),
        "ViT 1B and a language model of 12B, one of 8 replicas on 64 devices",
    ),
    _omni("omni-b", *_B, "ViT 2.4B and a language model of 70B, one of 4 replicas on 128 devices"),
    _omni(
        "omni-b-audio",
        *_B,
        "ViT 2.4B, audio 0.5B and a language model of 70B, one of 4 replicas on 128",
        with_audio=True,
    ),
    _omni(
        "omni-c",
        (48, 4096, 16384, 32),
        (80, 8192, 28672, 64),
        (8, 8, 4),
        (128, 8192),
        "ViT 10B and a language model of 70B, one of 4 replicas on 256 devices",
    ),
    _omni(
        "omni-d",
        (48, 4096, 16384, 32),
        (96, 12288, 39936, 96),
        (8, 16, 4),
        (256, 8192),
        "ViT 10B and a language model of 175B, one of 4 replicas on 512 devices",
    ),
)
OMNI_MODELS: dict[str, MultimodalModel] = {model.name: model for model, _ in _ALL}
OMNI_DATA: dict[str, OmniData] = {model.name: data for model, data in _ALL}


def parse_mix(text: str) -> Mix:
    """A mix such as `7:3`: seven tokens of images (and sound) to three of text."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        raise InputError(f"a mix is written as tokens of images to tokens of text, such as 7:3; got {text!r}")
    images, words = map(int, parts)
    if images + words == 0:
        raise InputError(f"a mix needs tokens of images or of text, got {text!r}")
    return images, words


def omni_sequences(
    model: MultimodalModel,
    num_sequences: int,
    sequence_tokens: int,
    mix: Mix,
    random: np.random.Generator,
    image_sigma: float = IMAGE_SIGMA,
) -> list[Microbatch]:
    """Sequences filled with documents and images (or images and sound, half of the tokens each), drawn so that tokens
    have this ratio on average. Images are log-normal, 64 to 16,384 patches, sixteen patches per token."""
    if num_sequences < 1:
        raise WorkloadError(f"a batch needs at least one sequence, got {num_sequences}")
    with_audio = any(chain.name == AUDIO for chain in model.chains)
    share = mix[0] / sum(mix)
    mean_image = math.exp(math.log(_MEDIAN_PATCHES) + image_sigma**2 / 2) / PATCHES_PER_TOKEN
    rates = [(1 - share) / _TEXT_TOKENS, share / mean_image]  # documents and images per token
    if with_audio:
        rates = [rates[0], rates[1] / 2, share / 2 / _AUDIO_TOKENS]
    chances = np.array(rates) / sum(rates)
    sequences = []
    for _ in range(num_sequences):
        left, images, sounds = sequence_tokens, [], 0
        while left > 0:
            kind = int(random.choice(len(chances), p=chances))
            if kind == 0:
                left -= max(1, round(float(random.lognormal(math.log(_TEXT_TOKENS) - 0.5, 1.0))))
            elif kind == 1:
                patches = int(np.clip(random.lognormal(math.log(_MEDIAN_PATCHES), image_sigma), _FEWEST, _MOST))
                if -(-patches // PATCHES_PER_TOKEN) > left:
                    break  # the remaining tokens are padding
                images.append(patches)
                left -= -(-patches // PATCHES_PER_TOKEN)
            else:
                if left < _AUDIO_TOKENS:
                    break
                sounds += 1
                left -= _AUDIO_TOKENS
        encoded = [(VISION, tuple(images)), (AUDIO, (_AUDIO_FRAMES,) * sounds)]
        instances = tuple((name, lengths) for name, lengths in encoded if lengths)
        sequences.append(Microbatch(instances=(*instances, (LANGUAGE, (sequence_tokens,)))))
    return sequences


def slowest_replica(
    model: MultimodalModel, sequences: Sequence[Microbatch], num_replicas: int, balanced: bool
) -> tuple[Microbatch, ...]:
    """The sequences of the replica with the most work, with sequences assigned by balancing work, or round-robin."""
    work = np.array([round(model_flops(model, [sequence]) / 1e6) for sequence in sequences], dtype=np.int64)
    in_turn = np.arange(len(sequences)) % num_replicas
    replica = assign_sequences(work, num_replicas).replica if balanced else in_turn
    slowest = int(np.argmax(np.bincount(replica, weights=work, minlength=num_replicas)))
    return tuple(sequence for sequence, at in zip(sequences, replica.tolist(), strict=True) if at == slowest)
