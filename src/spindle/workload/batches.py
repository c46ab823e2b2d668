"""Batches of samples with real lengths, packed into microbatches.

A microbatch has, for each module, the number of tokens of each instance: an image is one instance of the vision
encoder, a clip one of the video model, a packed sequence one of the language model. Instances of a module are
independent of each other, so a microbatch can be split into sub-microbatches. Knows no model.

Samples come from a file of one JSON object per line, or from a generator (`spindle.recipes`):

    {"text_tokens": 812, "images": 3}
    {"text_tokens": 96, "clips": [{"seconds": 7.5}, {"seconds": 3, "width": 512, "height": 320}]}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spindle.artifact import from_json, json_value, read_text_file
from spindle.errors import InputError, WorkloadError

VISION, LANGUAGE, VIDEO = "vision", "language", "video"
# Limits of each sample in a file, and of the text of all its samples together; more is surely a mistake.
_MAX_IMAGES, _MAX_TOKENS, _MAX_PIXELS, _MAX_TOTAL_TOKENS = 10**6, 10**9, 1 << 16, 10**10


class SampleError(WorkloadError):
    """A sample that cannot be packed: its number (from 0) and the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"sample {number}: {reason}")
        self.number, self.reason = number, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """For each module, the tokens of each of its instances; a module without instances does not run."""

    instances: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.instances]
        if len(set(names)) < len(names):
            raise WorkloadError(f"a microbatch must name each module once, got {', '.join(names)}")
        for name, tokens in self.instances:
            if any(count < 1 for count in tokens):
                raise WorkloadError(f"module {name!r}: every instance needs at least one token, got {list(tokens)[:8]}")
        if not any(tokens for _, tokens in self.instances):
            raise WorkloadError("a microbatch needs at least one instance of a module")

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """The tokens of each instance of a module; empty if the microbatch does not use the module."""
        return next((tokens for name, tokens in self.instances if name == module), ())

    @property
    def num_images(self) -> int:
        return len(self.tokens_of(VISION))

    @property
    def num_clips(self) -> int:
        return len(self.tokens_of(VIDEO))

    @property
    def num_tokens(self) -> int:
        """Tokens of the language model, including image tokens and padding."""
        return sum(self.tokens_of(LANGUAGE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A video clip; its frames are scaled to this size before they are encoded."""

    seconds: float
    width: int = 256
    height: int = 256

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise WorkloadError(f"a clip must be longer than 0 seconds, got seconds={self.seconds}")
        if min(self.width, self.height) < 1:
            raise WorkloadError(f"a clip needs at least one pixel in each direction, got {self.width} x {self.height}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The lengths of one sample: tokens of its text, its images, its clips."""

    text_tokens: int
    images: int = 0
    clips: tuple[Clip, ...] = ()

    def __post_init__(self) -> None:
        if min(self.text_tokens, self.images) < 0:
            raise WorkloadError(
                f"text_tokens and images must not be negative, got {self.text_tokens} and {self.images}"
            )
        if not (self.text_tokens or self.images or self.clips):
            raise WorkloadError("a sample needs at least one token, image or clip")


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Read the samples of a JSONL file, one per line; empty lines are skipped."""
    samples = []
    num_tokens = 0
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            data = json_value(line)
        except (ValueError, RecursionError, InputError) as error:
            raise InputError(f"{where}: not a JSON object on one line ({error})") from error
        sample = from_json(Sample, data, where)
        if sample.images > _MAX_IMAGES or sample.text_tokens > _MAX_TOKENS:
            raise InputError(
                f"{where}: a sample has at most {_MAX_IMAGES:,} images and {_MAX_TOKENS:,} tokens of text, got "
                f"{sample.images:,} and {sample.text_tokens:,}"
            )
        if any(max(clip.width, clip.height) > _MAX_PIXELS for clip in sample.clips):
            raise InputError(f"{where}: a clip has at most {_MAX_PIXELS:,} pixels in each direction")
        num_tokens += sample.text_tokens
        if num_tokens > _MAX_TOTAL_TOKENS:
            raise InputError(
                f"{where}: up to here there are {num_tokens:,} tokens of text, expected up to {_MAX_TOTAL_TOKENS:,}"
            )
        samples.append(sample)
    if not samples:
        raise InputError(f"{path}: has no samples; write one JSON object per line, such as {_EXAMPLE}")
    return tuple(samples)


def line_of_sample(path: Path, number: int) -> int:
    """The line (from 1) of a sample (numbered from 0) in a file."""
    return _lines(path)[number][0]


def _lines(path: Path) -> list[tuple[int, str]]:
    """Non-empty lines with their numbers."""
    lines = enumerate(read_text_file(path).split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


_EXAMPLE = '{"text_tokens": 812, "images": 3}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How samples become microbatches.

    The limits and the frame rate are from the DIP paper (§5). An image of 728 x 728 pixels has 52 x 52 = 2704 patches
    of 14 x 14 pixels; 4 x 4 patches become one token of the language model, which makes 169 tokens. Our assumptions:
    the latents of a clip have an 8th of its width and height and a 4th of its frames, and are cut into patches of
    2 x 2, so that a token stands for 16 x 16 pixels of 4 frames; text is padded to a multiple of `pad_tokens`.
    """

    max_tokens: int = 8192
    max_images: int = 48
    max_clips: int = 8
    image_patches: int = 2704
    image_tokens: int = 169
    frames_per_s: float = 16.0
    max_seconds: float = 16.0
    frames_per_token: int = 4
    pixels_per_token: int = 16
    pad_tokens: int = 1

    def __post_init__(self) -> None:
        for name in (
            *("max_tokens", "max_images", "max_clips", "image_patches", "image_tokens", "frames_per_s", "max_seconds"),
            *("frames_per_token", "pixels_per_token", "pad_tokens"),
        ):
            if not getattr(self, name) > 0:
                raise WorkloadError(f"packing: {name} must be above 0, got {getattr(self, name)}")
        if self.image_tokens > self.max_tokens:
            raise WorkloadError(
                f"packing: one image ({self.image_tokens} tokens) does not fit into max_tokens={self.max_tokens}"
            )

    def clip_tokens(self, clip: Clip) -> int:
        """Tokens of the video model for a clip, which is truncated to `max_seconds`."""
        frames = max(1, math.floor(min(clip.seconds, self.max_seconds) * self.frames_per_s))
        across = max(1, clip.width // self.pixels_per_token) * max(1, clip.height // self.pixels_per_token)
        return -(-frames // self.frames_per_token) * across


FILLED = Packing(pad_tokens=8192)  # every sequence is padded to the full length, as static shapes need it


def pack_images(samples: Iterable[Sample], packing: Packing = FILLED) -> tuple[Microbatch, ...]:
    """Pack texts with images, in order: a microbatch is one sequence of text and image tokens.

    A sample that does not fit into the current sequence begins the next one. A sample that is too long for any sequence
    is split into parts, with its images spread over them.
    """
    microbatches: list[Microbatch] = []
    tokens = images = 0

    def close() -> None:
        nonlocal tokens, images
        if tokens:
            sequence = -(-tokens // packing.pad_tokens) * packing.pad_tokens
            vision = ((VISION, (packing.image_patches,) * images),) if images else ()
            microbatches.append(Microbatch(instances=(*vision, (LANGUAGE, (sequence,)))))
        tokens = images = 0

    for number, sample in enumerate(samples):
        if sample.clips:
            raise SampleError(number, "it has clips; a vision-language model takes text with images and no clips")
        for part in _cut(sample, packing):
            length = part.text_tokens + part.images * packing.image_tokens
            if tokens + length > packing.max_tokens or images + part.images > packing.max_images:
                close()
            tokens, images = tokens + length, images + part.images
    close()
    return tuple(microbatches)


def _cut(sample: Sample, packing: Packing) -> list[Sample]:
    """Split a sample into the fewest equal parts that each fit into a sequence."""
    length = sample.text_tokens + sample.images * packing.image_tokens
    count = max(-(-length // packing.max_tokens), -(-sample.images // packing.max_images))
    if count <= 1:
        return [sample]
    while not _fits_into(sample, count, packing):
        count += 1
    parts = zip(even_parts(sample.text_tokens, count), even_parts(sample.images, count)[::-1], strict=True)
    return [Sample(text_tokens=text, images=images) for text, images in parts if text or images]


def _fits_into(sample: Sample, count: int, packing: Packing) -> bool:
    """Whether the longest of `count` equal parts fits into a sequence.

    The first parts have the longer texts and the last parts more images, so the longest is the first or the last.
    """
    text, num_longer_texts = divmod(sample.text_tokens, count)
    images, num_more_images = divmod(sample.images, count)
    first = text + (num_longer_texts > 0) + images * packing.image_tokens
    last = text + (num_longer_texts + num_more_images > count) + (images + (num_more_images > 0)) * packing.image_tokens
    return max(first, last) <= packing.max_tokens


def pack_clips(samples: Iterable[Sample], packing: Packing = FILLED) -> tuple[Microbatch, ...]:
    """Pack clips with their texts, in order: each clip is an instance of the video model, and the texts of all clips
    are one sequence of the language model."""
    microbatches: list[Microbatch] = []
    clips: list[int] = []
    tokens = 0

    def close() -> None:
        nonlocal tokens
        if clips:
            sequence = -(-max(1, tokens) // packing.pad_tokens) * packing.pad_tokens
            microbatches.append(Microbatch(instances=((LANGUAGE, (sequence,)), (VIDEO, tuple(clips)))))
        clips.clear()
        tokens = 0

    for number, sample in enumerate(samples):
        if sample.images or not sample.clips:
            raise SampleError(number, "text-to-video takes samples with clips and without images")
        for clip, text in zip(sample.clips, even_parts(sample.text_tokens, len(sample.clips)), strict=True):
            if text > packing.max_tokens:
                raise SampleError(
                    number,
                    f"{text} tokens of text for one clip do not fit into a sequence of {packing.max_tokens}; "
                    "shorten the text",
                )
            if len(clips) == packing.max_clips or tokens + text > packing.max_tokens:
                close()
            tokens += text
            clips.append(packing.clip_tokens(clip))
    close()
    return tuple(microbatches)


def even_parts(total: int, count: int) -> list[int]:
    """Split an integer into `count` parts that differ by at most one, larger parts first."""
    smallest, num_larger = divmod(total, count)
    return [smallest + 1] * num_larger + [smallest] * (count - num_larger)


def split_evenly(instances: tuple[int, ...], max_size: int | None) -> tuple[tuple[int, ...], ...]:
    """Split instances into the fewest parts of at most `max_size` instances, of even size, larger parts first (DIP
    §4.1: 26 images with a limit of 12 are 9, 9 and 8). Without a limit, all are in one part."""
    if max_size is not None and max_size < 1:
        raise WorkloadError(f"a sub-microbatch needs at least one instance, got a limit of {max_size}")
    if not instances:
        return ()
    count = 1 if max_size is None else -(-len(instances) // max_size)
    parts, start = [], 0
    for size in even_parts(len(instances), count):
        parts.append(instances[start : start + size])
        start += size
    return tuple(parts)


def items_in_parts(lengths: Sequence[int], part_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Group the numbers of items into parts of about `part_tokens` tokens.

    An item of at least that length is a part of its own; the others, longest first, each go to the part with the fewest
    tokens. Parts are ordered by their first items.
    """
    if part_tokens < 1:
        raise WorkloadError(f"a part needs at least one token, got part_tokens={part_tokens}")
    whole = [(item,) for item, length in enumerate(lengths) if length >= part_tokens]
    short = [item for item, length in enumerate(lengths) if length < part_tokens]
    count = -(-sum(lengths[item] for item in short) // part_tokens)
    shared: list[list[int]] = [[] for _ in range(count)]
    total = [0] * count
    for item in sorted(short, key=lambda item: (-lengths[item], item)):
        part = min(range(count), key=lambda part: (total[part], part))
        shared[part].append(item)
        total[part] += lengths[item]
    return tuple(sorted([*whole, *(tuple(sorted(items)) for items in shared)]))
