"""A training script that goes wrong on one rank, in a way that its arguments name. Run by test_failures.py.

faulty.py FAULT MARK      FAULT is "kill", "stop", "hang", "raise" or "memory" with a phase of a step ("kill-backward"),
                          or something that goes wrong with data ("loader"). MARK is written when it happens.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

if os.environ.get("SPINDLE_TEST_BACKEND") == "nccl":  # several ranks on one GPU: see tests/backends.py
    os.environ |= {"NCCL_HOSTID": f"host{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}

import torch
import torch.distributed as dist
from torch import nn

import spindle
from spindle.cluster import cluster_named
from spindle.profile import roofline_profile

FAULT, MARK = sys.argv[1], Path(sys.argv[2])
WAY, _, PHASE = FAULT.partition("-")
RANK, FAULTY_RANK, FAULTY_STEP = int(os.environ["RANK"]), 1, 3
steps_read = 0
has_gone_wrong = False


def goes_wrong(fault: str) -> bool:
    """Whether this is the moment; notes when it was."""
    global has_gone_wrong
    if fault != FAULT or RANK != FAULTY_RANK or steps_read <= FAULTY_STEP or has_gone_wrong:
        return False
    has_gone_wrong = WAY == "stop"  # once it is continued, it goes on
    MARK.write_text(str(time.time()))
    return True


def fail_in(phase: str) -> None:
    """Goes wrong here, if this is the phase."""
    if phase != PHASE or not goes_wrong(FAULT):
        return
    match WAY:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)
        case "raise":
            raise ArithmeticError("this layer is broken")
        case "memory":
            if torch.cuda.is_available():
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            raise torch.OutOfMemoryError("tried to allocate 1 PiB")


class FailingInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1.0

    @staticmethod
    def backward(context, gradient):
        fail_in("backward")
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        fail_in("forward")
        return FailingInBackward.apply(super().forward(x))


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        fail_in("optimizer")
        return super().step(closure)


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


class FailingCallback(spindle.Callback):
    def on_step(self, record):
        fail_in("callback")


def failing(function, phase):
    def call(*arguments, **named):
        fail_in(phase)
        return function(*arguments, **named)

    return call


dist.all_reduce = failing(dist.all_reduce, "sync")
# NCCL's group calls take torch's own functions alone.
uses_nccl = torch.cuda.is_available() and "SPINDLE_VIRTUAL_DEVICES" not in os.environ
for name in ("batch_isend_irecv",) if uses_nccl else ("isend", "irecv"):
    setattr(dist, name, failing(getattr(dist, name), "transfer"))


def guessed(graph, num_devices):
    """Nothing is to be measured: that takes longer than the steps."""
    return roofline_profile(graph, cluster_named(f"cpux{num_devices}"))


if __name__ == "__main__":
    ranks = range(int(os.environ["WORLD_SIZE"]))
    everywhere = ",".join(map(str, ranks))
    plan = f"fit/encoder#0[0:4]*4@{everywhere}\nfit/loss[0:1]*1@{everywhere}"
    if PHASE == "transfer":
        plan = f"fit/encoder#0[0:4]*2@1\nfit/encoder#0[0:4]*2@0\nfit/loss[0:1]*1@{ranks[-1]}"
    trainer = spindle.Trainer(
        [fit],
        optimizer=lambda named: FailingSGD([parameter for _, parameter in named] or [torch.zeros(1)], lr=1e-4),
        planning=spindle.Planning(plan=plan, profile=guessed),
        callbacks=[FailingCallback()],
        cuda_graphs=PHASE == "replay",  # a replay runs no Python in which something could go wrong
    )
    trainer.fit(
        {"fit": loader()},
        steps=1000,
        progress=False,
        on_step=lambda step, losses: fail_in("replay") if step > 8 else None,
    )
