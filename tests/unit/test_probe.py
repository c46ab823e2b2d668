"""What is found out about modules on two rows."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spindle
from spindle.train.bind import trace_all
from spindle.train.probe import probe


class Branches(nn.Module):
    """Parameters that the loss reaches, that it does not reach, and that nothing uses on this batch."""

    def __init__(self, *, is_checkpointed):
        super().__init__()
        self.used, self.beside, self.idle = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        first, second = self.beside
        beside = first(x)
        beside = checkpoint(second, beside, use_reentrant=True) if self.is_checkpointed else second(beside)
        return self.used(x), beside


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_parameters_that_no_gradient_reaches_are_known(is_checkpointed):
    module = spindle.module("branches", Branches(is_checkpointed=is_checkpointed), split=False)

    @spindle.task(batch_size=4, per_sample_mean=True)
    def pull(batch):
        first, _ = module(batch)
        return first.square().mean()

    batches = {"pull": torch.randn(4, 4)}
    reached = probe(trace_all([pull], batches), batches).reached
    names = {name for name, _ in module.module.named_parameters() if not name.startswith("beside")}
    assert reached == {"pull": frozenset(f"branches.{name}" for name in names)}


class Placed(nn.Module):
    def forward(self, x):
        return x + torch.arange(x.shape[0]).unsqueeze(1)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Placed(), "what it does with a sample depends on its place in the batch"),
        (Centred(), "its samples influence each other"),
        (nn.Dropout(0.5), None),
    ],
)
def test_modules_whose_samples_are_not_independent_are_found(module, reason):
    handle = spindle.module("layer", nn.Sequential(nn.Linear(4, 4), module))

    @spindle.task(batch_size=4, per_sample_mean=True)
    def pull(batch):
        return handle(batch).square().mean()

    batches = {"pull": torch.randn(4, 4)}
    coupled = probe(trace_all([pull], batches), batches).coupled
    assert coupled.get(("pull", "layer#0")) == reason
