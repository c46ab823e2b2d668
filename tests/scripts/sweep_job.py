"""A script that takes the learning rates of its trials, over one frozen encoder."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import spindle

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--lr", nargs="+", default=["1e-3"])
parser.add_argument("--random", action="store_true", help="the encoder draws random numbers")
parser.add_argument("--shared-steps", action="store_true", help="so many steps for all trials together")
options = parser.parse_args()
encoder = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)), nn.Dropout(0.1))
vision = spindle.module("vision", encoder.requires_grad_(False).train(options.random))


def trial(rate: str) -> spindle.Trial:
    head = spindle.module(f"head_{rate}", nn.Linear(256, 4))

    @spindle.task(batch_size=64, name=rate, per_sample_mean=True)
    def classify(batch: Any) -> Any:
        return nn.functional.cross_entropy(head(vision(batch["x"])), batch["y"])

    return spindle.Trial(classify, lambda named: torch.optim.AdamW([each for _, each in named], lr=float(rate)))


batch = {"x": torch.randn(64, 256), "y": torch.randint(4, (64,))}
num_steps = options.steps * 12 // len(options.lr) if options.shared_steps else options.steps
spindle.Trainer([trial(rate) for rate in options.lr]).fit([batch], steps=num_steps, progress=False)
