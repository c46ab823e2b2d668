"""A short training that says which islands it found and how far its losses are from those of one process.

Run by gpu/two_nodes.py under several agents of torchrun.
"""

from __future__ import annotations

import json
import os

if os.environ.get("SPINDLE_TEST_BACKEND") == "nccl":  # several ranks on one GPU: see tests/backends.py
    os.environ |= {"NCCL_HOSTID": f"host{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
from torch import nn

import spindle
from comparison import Comparison
from trainings import train_plainly

STEPS = 4


def modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return (
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double(),
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))).double(),
    )


def tasks(vision, text):
    @spindle.task(batch_size=6)
    def match(batch):
        return (vision(batch["x"]) - text(batch["y"])).square().mean()

    @spindle.task(batch_size=4)
    def read(batch):
        return (text(batch["y"]) - 1).square().mean()

    return [match, read]


def batch(task: str, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + len(task))
    rows = {"match": 6, "read": 4}[task]
    return {key: torch.randn(rows, 8, generator=generator, dtype=torch.float64) for key in ("x", "y")}


def make_sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


if __name__ == "__main__":
    vision, text = modules()
    chosen = tasks(spindle.module("vision", vision), spindle.module("text", text))
    trainer = spindle.Trainer(chosen, optimizer=make_sgd)
    loaders = {task.name: [batch(task.name, step) for step in range(STEPS)] for task in chosen}
    result = trainer.fit(loaders, steps=STEPS, progress=False)
    plain = [module.to(trainer.world.device) for module in modules()]
    steps = [[{name: batch(name, step) for name in loaders}] for step in range(STEPS)]
    named = [pair for module in plain for pair in module.named_parameters()]
    comparison, expected = Comparison(), train_plainly(tasks(*plain), make_sgd(named), steps)
    comparison.add_losses(result.losses, expected)
    error, _ = comparison.largest["loss"]
    if trainer.rank == 0:
        islands = [island.num_devices for island in trainer.profile.cluster.islands]
        print(json.dumps({"islands": islands, "error": error, "device": str(trainer.world.device)}), flush=True)
