"""What is found out about modules on two rows."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spindle
from spindle.run import World
from spindle.train.analyze import analyze
from spindle.train.bind import trace_all
from spindle.train.config import TrainConfig
from spindle.train.probe import probe
from spindle.train.tensor import find_sharing


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


def test_modules_are_tried_under_autocast_as_they_train():
    handle = spindle.module("layer", nn.Linear(4, 4))

    @spindle.task(batch_size=4)
    def pull(batch):
        return handle(batch.bfloat16()).float().square().mean()

    config = TrainConfig(tasks=(pull,), optimizer=torch.optim.SGD, autocast=torch.bfloat16)
    world = World(0, 1, torch.device("cpu"))
    facts = analyze(config, config.tasks, {"pull": torch.randn(4, 4)}, world, print).bound.facts
    assert facts.coupled == {}
    assert facts.reached == {"pull": frozenset({"layer.weight", "layer.bias"})}


def test_batch_normalisation_is_named_as_what_keeps_a_batch_whole():
    tower = spindle.module("tower", nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    pull = spindle.task(batch_size=4, name="pull")(lambda batch: tower(batch["x"]).mean())
    batches = {"pull": {"x": torch.randn(4, 3)}}
    assert [*probe(trace_all([pull], batches), batches).coupled.values()] == [
        "it normalises over its batch (1, a BatchNorm1d)"
    ]


class Adapted(nn.Module):
    """A linear module as PEFT wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.base_layer(x) + self.adapter(x)


def test_adapters_are_named_as_what_keeps_a_layer_on_one_device():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), Adapted(), nn.Linear(8, 4)) for _ in range(2)))
    tower = spindle.module("tower", blocks, tensor_parallel={"*.0": "colwise"})
    pull = spindle.task(batch_size=4, name="pull")(lambda batch: tower(batch["x"]).mean())
    batches = {"pull": {"x": torch.randn(4, 4)}}
    reason = find_sharing(trace_all([pull], batches), batches, has_values=True).reasons["tower"]
    assert reason.endswith("share one of its layers: it has adapters (PEFT), whose weights are not sharded")
