"""A small training for tests of live fleets: two tasks that share a module, in float64.

fleet_job.py FOLDER STEPS [--pause SECONDS] [--raise-at STEP] [--size N] [--every N] [--memory-every N]
             [--scales]

Checkpoints go to FOLDER/saved, and at the end the weights to FOLDER/final.npz. Each rank 0 appends lines to
FOLDER/steps.jsonl: one for its start, one for each of its steps, and one for its end: what it has measured and planned.
It pauses after each step until there is a file FOLDER/fast; with --scales, n ranks pause for 1/n of that. One rank that
finds FOLDER/raise after a step removes it and raises; one that finds FOLDER/hang in its optimizer removes it and hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import spindle

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--raise-at", type=int, default=-1)
parser.add_argument("--size", type=int, default=16)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--memory-every", type=int, default=None)
parser.add_argument("--scales", action="store_true")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
RANK, ATTEMPT = int(os.environ.get("RANK", "0")), int(os.environ.get("SPINDLE_ATTEMPT", "0"))
SIZE, ROWS = options.size, 12


def note(**values: object) -> None:
    if RANK == 0 and options.folder.is_dir():
        with (options.folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"attempt": ATTEMPT, "time_s": time.time(), "pid": os.getpid(), **values}) + "\n")


def is_asked_for(what: str) -> bool:
    """Whether this rank is the one that finds, and removes, a file of this name."""
    try:
        os.unlink(options.folder / what)
        return True
    except FileNotFoundError:
        return False


def tower() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(3)))


shared = spindle.module("shared", tower())
left = spindle.module("left", tower())
right = spindle.module("right", tower())


@spindle.task(batch_size=ROWS)
def first(batch):
    return (right(shared(left(batch["x"]))) - batch["y"]).square().mean()


@spindle.task(batch_size=ROWS)
def second(batch):
    return (shared(right(batch["x"])) - batch["y"]).square().mean()


taken_steps: list[int] = []


class HangingSGD(torch.optim.SGD):
    """Hangs when it is asked to, not in the first steps, which may take long."""

    def step(self, closure=None):
        if len(taken_steps) > 2 and is_asked_for("hang"):
            time.sleep(3600)
        return super().step(closure)


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(96, SIZE, generator=generator)
        self._y = torch.randn(96, SIZE, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[number], "y": self._y[number]}


def on_step(step: int, losses: object) -> None:
    note(step=step)
    taken_steps.append(step)
    if step == options.raise_at:
        raise ValueError(f"step {step} is broken")
    if is_asked_for("raise"):
        raise ValueError(f"asked to fail in step {step}")
    if not (options.folder / "fast").exists():
        time.sleep(options.pause / (trainer.world.size if options.scales else 1))


trainer = spindle.Trainer(
    [first, second],
    optimizer=lambda parameters: HangingSGD([p for _, p in parameters], lr=0.05, momentum=0.9),
    checkpoints=spindle.Checkpoints(
        options.folder / "saved", every=options.every, keep=2, memory_every=options.memory_every
    ),
)
if ATTEMPT:
    note(start=True)
trainer.fit({"first": Rows(1), "second": Rows(2)}, steps=options.steps, on_step=on_step, progress=False)
plan = trainer.plan
note(
    ended=True,
    ranks=trainer.world.size,
    cluster="" if trainer.profile is None else trainer.profile.cluster.name,
    planner="" if plan is None else plan.planner,
)
if RANK == 0:
    weights = {name: value.numpy() for name, value in trainer.state_dict().items()}
    np.savez(options.folder / "final.npz", **weights)
