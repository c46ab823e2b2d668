"""A small vision-language model over images of different sizes: items of a batch, encoded before they are mixed with
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spindle
from trainings import Training
from zoo import Workload

WIDTH, HEADS, VOCABULARY, MERGE = 8, 2, 11, 4
IMAGE_TOKEN = 0


class Attention(nn.Module):
    """Self-attention inside each item of a packed sequence, or over all of it."""

    def __init__(self, is_per_item: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_per_item = is_per_item

    def forward(self, x_PD: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_PD).reshape(len(x_PD), 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        item = torch.searchsorted(lengths.cumsum(0), torch.arange(len(x_PD), device=x_PD.device), right=True)
        mask = item[:, None] == item[None] if self.is_per_item else None
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return self.out(mixed.transpose(0, 1).reshape(x_PD.shape))


class Block(nn.Module):
    def __init__(self, is_per_item: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(is_per_item)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x_PD: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_PD = x_PD + self.attention(self.norm(x_PD), lengths)
        return x_PD + self.mlp(x_PD), lengths


class Encoder(nn.Module):
    """Patches of images in one sequence; four of them become a row of the output."""

    def __init__(self, num_layers: int, patch_size: int, is_per_item: bool = True, pools: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(patch_size, WIDTH)
        self.blocks = nn.ModuleList(Block(is_per_item) for _ in range(num_layers))
        self.merge = nn.Linear(MERGE * WIDTH, WIDTH)

    def forward(self, patches: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x_PD = self.embed(patches)
        for block in self.blocks:
            x_PD, lengths = block(x_PD, lengths)
        return self.merge(x_PD.reshape(-1, MERGE * WIDTH))


class Language(nn.Module):
    """A causal language model over embeddings."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        mask = torch.full((x_BLD.shape[1], x_BLD.shape[1]), float("-inf"), dtype=x_BLD.dtype, device=x_BLD.device)
        mask = mask.triu(1)
        for block in self.blocks:
            x_BLD = block(x_BLD, src_mask=mask)
        return self.head(x_BLD)


def vlm_batch(number: int, rows: int, images: Sequence[int], tokens: int = 24, patch_size: int = 3) -> Any:
    """A batch of `rows` sequences with images of so many output rows each, anywhere in them; without images the entries
    are missing."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    total = sum(images)
    assert total < rows * tokens
    places = torch.randperm(rows * tokens, generator=generator)[:total]
    ids.view(-1)[places] = IMAGE_TOKEN
    batch = {"ids": ids, "labels": torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)}
    if images:
        lengths = MERGE * torch.tensor(images)
        patches = torch.randn(int(lengths.sum()), patch_size, generator=generator, dtype=torch.float64)
        batch |= {"patches": patches, "lengths": lengths}
    return batch


def images_of(number: int, most: int = 5) -> tuple[int, ...]:
    """Sizes of the images of a batch: 0 to `most` images of 1 to 9 output rows."""
    generator = torch.Generator().manual_seed(77 + number)
    count = int(torch.randint(0, most + 1, (1,), generator=generator)) if number else most
    return tuple(torch.randint(1, 10, (count,), generator=generator).tolist())


def vlm(
    rows: int = 2,
    images: Callable[[int], tuple[int, ...]] = images_of,
    num_layers: tuple[int, int] = (3, 4),
    freezes: tuple[str, ...] = (),
    is_per_item: bool = True,
    mean: bool = True,
) -> Workload:
    torch.manual_seed(3)
    modules = {
        "vision": Encoder(num_layers[0], 3, is_per_item).double(),
        "projector": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).double(),
        "embed": nn.Embedding(VOCABULARY, WIDTH).double(),
        "language": Language(num_layers[1]).double(),
    }
    for name in freezes:
        modules[name].requires_grad_(False)
    handles = {name: spindle.module(name, module) for name, module in modules.items()}
    vision, projector, embed, language = handles.values()

    @spindle.task(batch_size=rows, items={"patches": "lengths"})
    def describe(batch):
        x = embed(batch["ids"])
        if "patches" in batch:
            seen = projector(vision(batch["patches"], batch["lengths"]))
            x = x.masked_scatter((batch["ids"] == IMAGE_TOKEN)[..., None], seen)
        losses = F.cross_entropy(language(x).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return spindle.mean(losses.sum(), losses.shape[0]) if mean else losses.mean()

    return Workload(
        tasks=[describe],
        batches=lambda number: {"describe": vlm_batch(number, rows, images(number))},
        handles=handles,
    )


def vlm_training(micro_steps: int = 3, **options: Any) -> Training:
    return Training(workload=partial(vlm, **options), options={"gradient_accumulation_steps": micro_steps})
