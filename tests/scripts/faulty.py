"""A training script that goes wrong on one rank, in a way that its arguments name. Run by test_failures.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import spindle

FAULT, MARK = sys.argv[1], Path(sys.argv[2])
RANK, FAULTY_RANK, FAULTY_STEP = int(os.environ["RANK"]), 1, 3
steps_read = 0


def goes_wrong(fault: str) -> bool:
    """Whether this is the moment; notes when it was."""
    if fault != FAULT or RANK != FAULTY_RANK or steps_read <= FAULTY_STEP:
        return False
    MARK.write_text(str(time.time()))
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KilledInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1.0

    @staticmethod
    def backward(context, gradient):
        if goes_wrong("kill-backward"):
            die()
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        if goes_wrong("layer"):
            raise ArithmeticError("this layer is broken")
        if goes_wrong("kill-forward"):
            die()
        return KilledInBackward.apply(super().forward(x))


encoder = spindle.module("encoder", nn.Sequential(*(Layer(8, 8) for _ in range(4))))


@spindle.task(batch_size=7)
def fit(batch):
    return spindle.mean(check((encoder(batch["x"]) ** 2).sum()), batch["x"].shape[0])


@torch.fx.wrap
def check(total):
    if goes_wrong("loss"):
        raise ArithmeticError("this loss is broken")
    return total * float("nan") if goes_wrong("nan") else total


def loader():
    global steps_read
    for number in range(1000):
        steps_read = number
        if goes_wrong("loader"):
            raise OSError("this file is broken")
        rows = 6 if goes_wrong("short") else 7
        value = 9.0 if goes_wrong("other") else 1.0
        yield {"x": torch.full((rows, 8), value + number)}


def all_reduce(*arguments, **named):
    if FAULT == "kill-sync" and goes_wrong("kill-sync"):
        die()
    return really_all_reduce(*arguments, **named)


really_all_reduce, dist.all_reduce = dist.all_reduce, all_reduce

if __name__ == "__main__":
    everywhere = ",".join(map(str, range(int(os.environ["WORLD_SIZE"]))))
    trainer = spindle.Trainer(
        [fit],
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-4),
        plan=f"fit/encoder#0[0:4]*4@{everywhere}\nfit/loss[0:1]*1@{everywhere}",
    )
    trainer.fit({"fit": loader()}, steps=1000, progress=False)
