"""What the first training of a process takes seconds for, done once in the process that others are copies of: fake
tensors, symbolic sizes, the compiled loops, what all models of transformers import. Nothing here runs a backward:
autograd refuses to run in a copy then."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

import torch
from torch import nn

import spindle.measure
import spindle.train  # noqa: F401
from spindle.cluster import cluster_named
from spindle.models import chain_of
from spindle.plan import parse_plan
from spindle.profile import abstract_profile
from spindle.program import lower, verify
from spindle.simulate import simulate


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(2))

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD) * (x_BLD.shape[1] + 1)
        return x_BLD.mean(1)


def warm_up() -> None:
    torch.set_num_threads(1)  # a pool of threads would not be copied
    chain_of(Blocks(), torch.zeros(3, 5, 4))
    # Without a planner: the solver of its linear program starts a thread.
    profile = abstract_profile({"ops": [{"name": "op", "layers": 1, "time_s": {"1": 1e-3}}]}, cluster_named("a800x1"))
    program = lower(parse_plan("op*1@0", profile), profile)
    verify(program, profile)
    simulate(program, profile)
    with suppress(ImportError):
        import_module("transformers.models.clip.modeling_clip")


if os.environ.get("SPINDLE_TEST_BACKEND", "gloo") == "gloo":  # fake tensors start CUDA, which no copy can use then
    warm_up()
