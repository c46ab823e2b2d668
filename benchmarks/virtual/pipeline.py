"""Pipelines predicted beside measured, over batches whose mix changes from step to step.

    spindle launch --virtual-devices 4 benchmarks/virtual/pipeline.py --output pipeline.json
    spindle launch --virtual-devices 4 benchmarks/virtual/pipeline.py --width 1024 --patches 256 --output pipeline.json
    spindle launch -n 2 benchmarks/virtual/pipeline.py --small --output pipeline.json

A ViT feeds a language model; a microbatch is one sequence with none to twelve images. Each step has eight of them, its
own schedule, and a prediction made before it ran. The mix drifts from few images to many. Layers run without CUDA
graphs, and are measured so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spindle

MOST_IMAGES = 6


class Block(nn.Module):
    def __init__(self, width: int, is_causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads, self.is_causal = width // 64, is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        heads = self.query(self.first(x)).view(count, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=self.is_causal)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Vision(nn.Module):
    def __init__(self, width: int, num_layers: int, output: int) -> None:
        super().__init__()
        self.enter = nn.Linear(588, width)
        self.blocks = nn.ModuleList([Block(width, is_causal=False) for _ in range(num_layers)])
        self.adapter = nn.Linear(width, output)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        for block in self.blocks:
            x = block(x)
        return self.adapter(x[:, ::64])  # a few of the patches, as tokens


class Language(nn.Module):
    def __init__(self, width: int, num_layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, is_causal=True) for _ in range(num_layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        if seen is not None:
            seen = seen.reshape(1, -1, x.shape[-1])
            x = torch.cat([seen, x[:, seen.shape[1] :]], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def microbatches(
    steps: int, per_step: int, length: int, vocabulary: int, patches: int, dtype: torch.dtype
) -> Iterator[Any]:
    """The mix drifts from text with few images to many images."""
    generator = torch.Generator().manual_seed(0)
    for number in range(10**9):
        share = min(1.0, number / (steps * per_step))
        most = 1 + round((MOST_IMAGES - 1) * share)
        # Text alone now and then; the first has many images, and the second none.
        count = 0 if number % 5 == 1 else 1 + int(torch.randint(most, (1,), generator=generator))
        if number < 3 * (MOST_IMAGES + 1):
            count = (MOST_IMAGES - number) % (MOST_IMAGES + 1) if number != 1 else 0
        batch = {"tokens": torch.randint(vocabulary, (1, length), generator=generator)}
        if count:
            batch["images"] = torch.randn(1, count, patches, 588, generator=generator).to(dtype)
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="so small that CPUs can")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--width", type=int, default=1536, help="of the encoder; with 1024 its kernels are launch-bound"
    )
    parser.add_argument("--patches", type=int, default=1024, help="of an image; 256 for the same")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not arguments.small
    dtype = torch.bfloat16 if on_gpu else torch.float32
    vision_size, language_size = ((arguments.width, 12), (1536, 16)) if on_gpu else ((64, 3), (64, 3))
    length, vocabulary, patches = (2048, 32000, arguments.patches) if on_gpu else (256, 100, 64)
    torch.manual_seed(0)
    encoder = Vision(*vision_size, language_size[0]).to(dtype)
    model = Language(*language_size, vocabulary).to(dtype)
    vision, language = spindle.module("vision", encoder), spindle.module("language", model)

    @spindle.task(batch_size=1)
    def caption(batch: Any) -> Any:
        logits = (
            language(batch["tokens"], vision(batch["images"][0])) if "images" in batch else language(batch["tokens"])
        )
        return F.cross_entropy(logits[0].float(), batch["tokens"][0])

    trainer = spindle.Trainer(
        [caption],
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4, fused=on_gpu),
        gradient_accumulation_steps=arguments.microbatches,
        planning=spindle.Planning(planner="pipeline"),
        cuda_graphs=False,
    )
    loader = microbatches(arguments.steps, arguments.microbatches, length, vocabulary, patches, dtype)
    # Made beforehand: random images of a step take as long as a third of the step.
    loader = list(itertools.islice(loader, (arguments.steps + 4) * arguments.microbatches))
    result = trainer.fit({"caption": loader}, steps=arguments.steps, progress=False)
    if trainer.rank == 0:
        assert trainer.profile is not None
        errors = [predicted / measured - 1 for predicted, measured in result.sampled_s]
        results = {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "torch": torch.__version__,
            "num_ranks": result.program.num_ranks,
            "sampled_s": result.sampled_s,
            "mean_error": statistics.mean(map(abs, errors)),
            "step_s": result.step_s,
            "losses": [losses["caption"] for losses in result.losses],
            "host_rates": trainer.profile.host_rates,
            "host": asdict(trainer.profile.host) if trainer.profile.host else None,
            "layers": {
                op.name: [curve.forward_s[0], curve.backward_s[0], *curve.launch_s]
                for op, (curve, *_) in zip(trainer.profile.graph.metaops, trainer.profile.curves, strict=True)
            },
            "notices": result.notices,
        }
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
        shown = [(round(1e3 * predicted, 1), round(1e3 * measured, 1)) for predicted, measured in result.sampled_s]
        print(f"mean error {results['mean_error']:.3f}: {shown}")
        result.print()


if __name__ == "__main__":
    main()
