"""A training whose second task ends during its fit, for tests of live fleets:

changing_job.py FOLDER STEPS END [--pause SECONDS]

The task ends after step END. Checkpoints go to FOLDER/saved; rank 0 appends a line for each step to FOLDER/steps.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import spindle

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("end", type=int)
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
shared = spindle.module("shared", nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
second_head = spindle.module("second_head", nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))


@spindle.task(batch_size=8)
def first(batch):
    return shared(batch["x"]).square().mean()


@spindle.task(batch_size=8)
def second(batch):
    return second_head(shared(batch["x"])).square().mean()


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed: int) -> None:
        self._x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[number]}


def on_step(step: int, losses: dict[str, float]) -> None:
    if trainer.rank == 0 and options.folder.is_dir():
        attempt = int(os.environ.get("SPINDLE_ATTEMPT", "0"))
        with (options.folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "attempt": attempt, "tasks": sorted(losses)}) + "\n")
    if step >= options.end and "second" in losses and not ended:
        ended.append(step)
        trainer.remove_task("second")
    time.sleep(options.pause)


ended: list[int] = []
trainer = spindle.Trainer(
    [first, second],
    optimizer=lambda parameters: torch.optim.SGD([parameter for _, parameter in parameters], lr=0.05),
    checkpoints=spindle.Checkpoints(options.folder / "saved", every=5, keep=2),
)
trainer.fit({"first": Rows(1), "second": Rows(2)}, steps=options.steps, on_step=on_step, progress=False)
