"""Contrastive training of an image tower and a text tower, on generated pairs."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps


def tower(inputs):
    blocks = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4))
    return nn.Sequential(nn.Linear(inputs, 64), *blocks, nn.Linear(64, 32))


def make_batch(number):
    """Images and sentences that show the same 8 numbers, each in its own way."""
    generator = torch.Generator().manual_seed(number)
    shown = torch.randn(32, 8, generator=generator)
    return {"pixels": shown.repeat(1, 6) + 0.1 * torch.randn(32, 48, generator=generator), "words": shown.repeat(1, 2)}


def make_adamw(named_parameters):
    return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=1e-3)


def show(step, losses):
    print(f"step {step:3}  image_text {losses['image_text']:.6f}")


torch.manual_seed(0)
loader = [make_batch(number) for number in range(16)]
vision = tower(48)
text = tower(16)


def image_text(batch):
    logits = vision(batch["pixels"]) @ text(batch["words"]).T
    return F.cross_entropy(logits, torch.arange(logits.shape[0], device=logits.device))


optimizer = make_adamw([*vision.named_parameters(), *text.named_parameters()])
for step in range(steps):
    loss = image_text(loader[step % len(loader)])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, {"image_text": loss.item()})
