"""A training under a limit of memory, in which every tensor is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spindle
from courses import unmeasured

WIDTH, ROWS = 96, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    losses: tuple[dict[str, float], ...]
    counted: tuple[int, ...]  # on rank 0, of all ranks
    predicted: tuple[int, ...]
    rounds: int
    recomputed: int
    sharded: bool
    error: str = ""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        query, key, value = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.mix(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Tower(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(width, WIDTH), nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


def train_within(rank: int, num_ranks: int, memory_bytes: int | None, steps: int = 3, **options: Any) -> Trained:
    """Two contrastive tasks over three towers, with AdamW."""
    torch.manual_seed(3)
    vision, text, audio = (
        spindle.module(name, Tower(width, count))
        for name, width, count in (("vision", 24, 5), ("text", 16, 4), ("audio", 8, 3))
    )

    def contrast(one, other):
        scores = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T
        return F.cross_entropy(scores * 4, torch.arange(ROWS, device=scores.device))

    @spindle.task(batch_size=ROWS)
    def pictures(batch):
        return contrast(vision(batch["x"]), text(batch["y"]))

    @spindle.task(batch_size=ROWS)
    def sounds(batch):
        return contrast(audio(batch["x"]), text(batch["y"]))

    def batches(width: int, length: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(width)
        return [
            {
                "x": torch.randn(ROWS, length, width, generator=generator),
                "y": torch.randn(ROWS, 24, 16, generator=generator),
            }
        ] * (steps + 1)

    with unmeasured():
        trainer = spindle.Trainer(
            [pictures, sounds],
            optimizer=lambda named: torch.optim.AdamW([one for _, one in named], lr=1e-3),
            planning=spindle.Planning(memory_limit_bytes=memory_bytes),
            **options,
        )
        try:
            result = trainer.fit({"pictures": batches(24, 48), "sounds": batches(8, 32)}, steps=steps, progress=False)
        except spindle.errors.DoesNotFitError as error:
            return Trained(losses=(), counted=(), predicted=(), rounds=0, recomputed=0, sharded=False, error=str(error))
    return Trained(
        losses=result.losses,
        counted=result.peak_bytes,
        predicted=tuple(int(one) for one in result.predicted.peak_bytes()),
        rounds=result.plan.num_rounds,
        recomputed=len(result.plan.recompute),
        sharded=result.plan.shard_optimizer,
    )
