"""Encoder and language model on the same devices, over shares of image tokens: predicted beside measured.

    spindle launch --virtual-devices 4 benchmarks/virtual/colocate.py --output colocate.json [--budget-s 300]
    spindle launch -n 2 benchmarks/virtual/colocate.py --small --output colocate.json
    spindle launch --virtual-devices 8 benchmarks/virtual/colocate.py --cells 9:1/upfront/on/1 --output colocate.json

A ViT of 0.3 B and a language model of 0.7 B; images of 256 to 4,096 patches, sixteen to a token; sequences of 2,048
tokens, of which images are 1, 5 or 9 parts in 10. Planner `colocate` against `pipeline` and `stage-0`, on the same
batches from the same weights: losses of all of them are compared. Layers run without CUDA graphs, and are measured so.

A cell is MIX/PLANNER/SHARES/MICROBATCHES: SHARES is `on` where several devices may share a long image, and a step has
so many microbatches; with few of them, long images do not level out. The two last may be left out. Results are
written as they come; what is there is not run again. An error on all ranks alike (no plan, no memory) is a result.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import spindle
from spindle.run import join_world
from spindle.train import timing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from virtual.cells import Cells
from virtual.run import about, attempt, free

PATCHES_PER_TOKEN = 16
IMAGE = 0  # the token that stands for a row of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    vision: tuple[int, int]  # width, layers
    language: tuple[int, int]
    tokens: int
    vocabulary: int
    patch_elements: int
    patches: tuple[int, int]  # of an image, fewest and most
    microbatches: int


LARGE = Sizes(
    vision=(1024, 24),
    language=(1536, 24),
    tokens=2048,
    vocabulary=32000,
    patch_elements=64,
    patches=(256, 4096),
    microbatches=8,
)
SMALL = Sizes(
    vision=(64, 4),
    language=(64, 4),
    tokens=128,
    vocabulary=100,
    patch_elements=16,
    patches=(64, 256),
    microbatches=4,
)


class VisionBlock(nn.Module):
    """Attention inside each image of a packed sequence; `ends` are where images end, from 0. One image alone needs
    neither a mask nor a kernel for several, and can be shared by several devices."""

    def __init__(self, width: int, most_patches: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads, self.most_patches = width // min(64, width // 4), most_patches

    def forward(self, x_PD: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.query(self.first(x_PD)).view(len(x_PD), 3, self.num_heads, -1).unbind(1)
        if x_PD.is_cuda and len(ends) > 2:
            seen = varlen_attn(q, k, v, ends, ends, self.most_patches, self.most_patches)
        else:
            mask = None
            if len(ends) > 2:
                image = torch.searchsorted(ends[1:], torch.arange(len(x_PD), dtype=ends.dtype), right=True)
                mask = image[:, None] == image[None]
            heads = (part.transpose(0, 1)[None] for part in (q, k, v))
            seen = F.scaled_dot_product_attention(*heads, attn_mask=mask)[0].transpose(0, 1)
        x_PD = x_PD + self.out(seen.reshape(x_PD.shape))
        return x_PD + self.down(F.gelu(self.up(self.second(x_PD)))), ends


class Vision(nn.Module):
    def __init__(self, width: int, num_layers: int, output: int, sizes: Sizes) -> None:
        super().__init__()
        self.enter = nn.Linear(sizes.patch_elements, width)
        self.blocks = nn.ModuleList(VisionBlock(width, sizes.patches[1]) for _ in range(num_layers))
        self.adapter = nn.Linear(PATCHES_PER_TOKEN * width, output)

    def forward(self, patches: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        x_PD = self.enter(patches)
        for block in self.blocks:
            x_PD, ends = block(x_PD, ends)
        return self.adapter(x_PD.reshape(-1, PATCHES_PER_TOKEN * x_PD.shape[1]))


class LanguageBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads = max(1, width // 64)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        count, length, width = x_BLD.shape
        heads = self.query(self.first(x_BLD)).view(count, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x_BLD = x_BLD + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return x_BLD + self.down(F.gelu(self.up(self.second(x_BLD))))


class Language(nn.Module):
    def __init__(self, width: int, num_layers: int, vocabulary: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LanguageBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(x_BLD)


class Data:
    """Sequences of text and images in a ratio of tokens, the same each time: microbatch by number."""

    def __init__(self, sizes: Sizes, mix: str, dtype: torch.dtype) -> None:
        images, words = map(int, mix.split(":"))
        self.sizes, self.share = sizes, images / (images + words)
        generator = torch.Generator().manual_seed(0)
        most = 2 * PATCHES_PER_TOKEN * sizes.tokens
        # Images are slices of this: making each would take as long as a good part of a step.
        self.pool = torch.randn(2 * most, sizes.patch_elements, generator=generator).to(dtype)

    def microbatch(self, number: int) -> dict[str, torch.Tensor]:
        sizes = self.sizes
        generator = torch.Generator().manual_seed(1 + number)
        ids = torch.randint(1, sizes.vocabulary, (1, sizes.tokens), generator=generator)
        lengths = self._images(number, generator)
        batch = {"ids": ids, "labels": torch.randint(sizes.vocabulary, (1, sizes.tokens), generator=generator)}
        if lengths:
            ids[0, : sum(lengths) // PATCHES_PER_TOKEN] = IMAGE
            begin = int(torch.randint(len(self.pool) - sum(lengths), (), generator=generator))
            batch["patches"] = self.pool[begin : begin + sum(lengths)]
            batch["lengths"] = torch.tensor(lengths)
        return batch

    def _images(self, number: int, generator: torch.Generator) -> list[int]:
        fewest, most = self.sizes.patches
        if number == 0:  # on which layers are measured: one image of each size
            return [fewest << power for power in range((most // fewest).bit_length())]
        lengths: list[int] = []
        wanted = self.share * self.sizes.tokens * PATCHES_PER_TOKEN
        while True:
            drawn = math.sqrt(fewest * most) * math.exp(0.7 * float(torch.randn((), generator=generator)))
            length = round(min(most, max(fewest, drawn)) / PATCHES_PER_TOKEN) * PATCHES_PER_TOKEN
            left = wanted - sum(lengths)
            # A last image that would be too long comes with the chance that keeps the ratio on average.
            if length > left:
                if float(torch.rand((), generator=generator)) < left / length:
                    room = self.sizes.tokens * PATCHES_PER_TOKEN - sum(lengths)
                    lengths.append(min(length, room))
                return [length for length in lengths if length]
            lengths.append(length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is measured: a planner on one mix of images and words."""

    mix: str
    planner: str
    shares_items: bool
    microbatches: int

    @property
    def name(self) -> str:
        return f"{self.mix}/{self.planner}/{'on' if self.shares_items else 'off'}/{self.microbatches}"


def cell_of(text: str, microbatches: int) -> Cell:
    mix, planner, *rest = text.split("/")
    shares_items = rest[0] == "on" if rest else planner in ("colocate", "upfront")
    return Cell(
        mix=mix, planner=planner, shares_items=shares_items, microbatches=int(rest[1]) if rest[1:] else microbatches
    )


@cache
def made(sizes: Sizes, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The modules with their first weights, which take a processor core several seconds."""
    torch.manual_seed(0)
    width = sizes.language[0]
    modules = {
        "vision": Vision(*sizes.vision, width, sizes),
        "embed": nn.Embedding(sizes.vocabulary, width),
        "language": Language(*sizes.language, sizes.vocabulary),
    }
    return {name: module.to(dtype) for name, module in modules.items()}


def train(cell: Cell, sizes: Sizes, steps: int, dtype: torch.dtype, on_gpu: bool) -> dict[str, Any]:
    """The results of a cell, which rank 0 has."""
    begin_s = time.monotonic()
    modules = deepcopy(made(sizes, dtype))
    vision, embed, language = (spindle.module(name, module) for name, module in modules.items())

    @spindle.task(batch_size=1, items={"patches": "lengths"})
    def describe(batch: Any) -> Any:
        x = embed(batch["ids"])
        if "patches" in batch:
            x = x.masked_scatter((batch["ids"] == IMAGE)[..., None], vision(batch["patches"], batch["lengths"]))
        return F.cross_entropy(language(x)[0].float(), batch["labels"][0])

    trainer = spindle.Trainer(
        [describe],
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4, fused=on_gpu),
        gradient_accumulation_steps=cell.microbatches,
        planning=spindle.Planning(
            planner=cell.planner, sequence_parallel_degrees={} if cell.shares_items else {"vision": 1}
        ),
        cuda_graphs=False,
    )
    data = Data(sizes, cell.mix, dtype)
    batches = [data.microbatch(number) for number in range((steps + 1) * cell.microbatches)]
    with mock.patch.object(timing, "_STEPS_PER_TIMELINE", 3):
        result = trainer.fit({"describe": batches}, steps=steps, progress=False)
    if trainer.rank:
        return {}
    result.print()
    patches = [sum(batch["lengths"].tolist()) for batch in batches if "lengths" in batch]
    parts = {slot.op.partition("[")[0] for slot in result.program.plan.slots if "/vision#0." in slot.op}
    shared = {slot.op.partition("[")[0] for slot in result.program.plan.slots if slot.sequence_degree > 1}
    errors = [abs(predicted / measured - 1) for predicted, measured in result.sampled_s]
    return {
        "mix": cell.mix,
        "planner": cell.planner,
        "sequence_groups": cell.shares_items,
        "microbatches": cell.microbatches,
        "num_ranks": result.program.num_ranks,
        "settings": result.plan.settings,
        "step_s": result.typical_step_s,
        "steps_s": result.step_s,
        "sampled_s": result.sampled_s,
        "mean_error": statistics.mean(errors) if errors else None,
        "predicted_peak_bytes": result.predicted.peak_bytes().tolist(),
        "peak_bytes": result.peak_bytes,
        "losses": [losses["describe"] for losses in result.losses],
        "num_parts": len(parts),
        "num_shared": len(shared),
        "mean_patches": statistics.mean(patches) if patches else 0,
        "share_with_images": len(patches) / len(batches),
        "notices": result.notices,
        "cell_s": time.monotonic() - begin_s,
    }


MIXES = ("9:1", "5:5", "1:9")
CELLS = (  # the most telling first
    *("9:1/colocate", "9:1/pipeline", "9:1/stage-0"),
    *(f"{mix}/{planner}" for mix in MIXES[1:] for planner in ("colocate", "pipeline")),
    *("9:1/upfront/on/1", "9:1/upfront/off/1", "9:1/colocate/off"),
    *(f"{mix}/stage-0" for mix in MIXES[1:]),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="so small that CPUs can")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cells", default=",".join(CELLS), help="MIX/PLANNER[/SHARES[/MICROBATCHES]],...")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no cell after so many seconds")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    begin_s, world = time.monotonic(), join_world()
    on_gpu = torch.cuda.is_available() and not arguments.small
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes = SMALL if arguments.small else LARGE
    results = Cells(arguments.output) if world.rank == 0 else None
    if results is not None:
        results.describe(about(world, arguments.small))
    for cell in (cell_of(text, sizes.microbatches) for text in arguments.cells.split(",")):
        is_left = results is not None and cell.name not in results.done()
        if not world.broadcast_object(is_left and time.monotonic() - begin_s < arguments.budget_s):
            continue
        if results is not None:
            results.begin(cell.name)
        entry, error = attempt(world, partial(train, cell, sizes, arguments.steps, dtype, on_gpu))
        if results is not None:
            results.finish(cell.name, {"error": error} if entry is None else entry)
            line = error if entry is None else line_of(cell.name, results.measured())
            print(f"{time.monotonic() - begin_s:5.0f} s  {cell.name}: {line}", flush=True)
        free()


def line_of(name: str, cells: dict[str, Any]) -> str:
    """A cell beside the others of the same mix and as many microbatches."""
    entry = cells[name]
    text = f"{1e3 * entry['step_s']:.1f} ms a step"
    if entry["mean_error"] is not None:
        text += f", predicted within {entry['mean_error']:.1%}"
    if entry["num_parts"]:
        text += f", {entry['num_shared']} of {entry['num_parts']} parts shared"
    if entry["peak_bytes"]:
        text += f", peak {max(entry['peak_bytes']) / 2**30:.1f} of {max(entry['predicted_peak_bytes']) / 2**30:.1f} GiB"
    for other_name, other in cells.items():
        if other_name != name and all(other[key] == entry[key] for key in ("mix", "microbatches")):
            # a cell may have more steps than another
            apart = max(abs(a - b) for a, b in zip(entry["losses"], other["losses"], strict=False))
            text += f"; {entry['step_s'] / other['step_s']:.3f} x {other_name}, losses {apart:.1e} apart"
    return text


if __name__ == "__main__":
    main()
