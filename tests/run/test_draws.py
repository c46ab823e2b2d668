"""Random numbers that a task draws, and what modules without parameters keep: once in a step, for all that need it."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402
from torch import nn  # noqa: E402

import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import guessed_profile  # noqa: E402
from random_plans import plan_text_named  # noqa: E402
from spindle.errors import WorkloadError  # noqa: E402
from spindle.run import seed_of  # noqa: E402
from spindle.train.record import record_all  # noqa: E402
from trainings import sgd  # noqa: E402

ROWS, STEPS = 6, 3


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Between(nn.Module):
    """A module between two towers, whose output both the second tower and the loss need."""

    def __init__(self, middle: nn.Module, reads_values: bool) -> None:
        super().__init__()
        self.first, self.middle, self.second = Tower(), middle, Tower()
        self.reads_values = reads_values

    def forward(self, x):
        scale = 2 if not self.reads_values or int((x > -100).sum()) else 3
        middle = self.middle(self.first(x)) * scale
        return {"loss": (middle.tanh() * self.second(middle)).square().mean()}


class Counter(nn.Module):
    """Has another number in every call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Average(nn.Module):
    """Updates a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        centred = x - self.average
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return centred


class Memory(nn.Module):
    """Keeps a tensor for the next batch, as a plain attribute or in an object of its own; the first call returns what
    it gets."""

    def __init__(self, holder: Any = None) -> None:
        super().__init__()
        self.holder = self.__dict__ if holder is None else holder.__dict__

    def forward(self, x):
        before = self.holder.get("memory")
        self.holder["memory"] = x.detach().mean(0)
        return x if before is None else x + before


class Holder:
    """An object that is no module."""


class RememberingBlocks(nn.Module):
    """Keeps something for the next batch in each of its blocks, or between them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), *([Memory()] * inside)) for _ in range(3))
        self.holder = None if inside else Holder()

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        if self.holder is not None:
            x, self.holder.memory = x + getattr(self.holder, "memory", 0.0), x.detach()
        return x


# Tasks: with the calls that draw, in their order.


def noise(model):
    """Noise is added to what the model gets, and compared with what it returns."""

    def task(batch):
        noise = torch.randn_like(batch["x"])
        return (model(batch["x"] + noise) - noise).square().mean()

    return task, "draw_randn_like#0"


def times(model):
    """A time of each sample; nothing of the batch but its size is given to the function that draws."""

    def task(batch):
        time = torch.rand(batch["x"].shape[0], 1, dtype=torch.float64, device=batch["x"].device)
        return (model(batch["x"] * time) - time).square().mean()

    return task, "draw_rand#0"


def constant(model):
    """A number that no entry of the batch has a part in."""

    def task(batch):
        number = torch.rand((), dtype=torch.float64)
        return (model(batch["x"] * number) - number).square().mean()

    return task, "draw_rand#0"


def loss(model):
    """The loss alone draws."""

    def task(batch):
        output = model(batch["x"])
        return (output * torch.rand_like(output)).square().mean()

    return task, "loss"


def returned(model):
    def task(batch):
        return model(batch["x"])["loss"]

    return task, ""


def train(rank: int, num_ranks: int, make_model: Any, make_task: Any) -> Comparison:
    """A random plan against plain PyTorch that seeds its numbers as Spindle does."""
    torch.manual_seed(0)
    model = make_model().double()
    plain = deepcopy(model)
    function, call = make_task(spindle.module("model", model))
    batches = [{"x": torch.randn(ROWS, 8, dtype=torch.float64)} for _ in range(STEPS)]
    task = spindle.task(batch_size=ROWS, name="train")(function)
    trainer = spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(profile=guessed_profile))
    profile = trainer.prepare({"train": batches}, progress=False)
    trainer.replan(plan=plan_text_named(profile, "plan 2"))
    losses = trainer.fit({"train": batches}, steps=STEPS, progress=False).losses
    function, _ = make_task(plain)
    optimizer = sgd(list(plain.named_parameters()))
    expected = []
    for step, batch in enumerate(batches):
        torch.manual_seed(seed_of(0, step, "train", call, 0, 0, ROWS))
        optimizer.zero_grad()
        value = function(batch)
        value.backward()
        optimizer.step()
        expected.append({"train": value.item()})
    comparison = Comparison()
    comparison.add_losses(losses, expected)
    comparison.add_tensors("parameter", dict(model.named_parameters()), dict(plain.named_parameters()))
    comparison.add_tensors("buffer", dict(model.named_buffers()), dict(plain.named_buffers()))
    return comparison


class Autoencoder(nn.Module):
    """Draws what its decoder gets, and nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Tower(), Tower()

    def forward(self, x):
        mean, spread = self.encoder(x), self.encoder(-x)
        drawn = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        return {"loss": (self.decoder(drawn) - x).square().mean() + (mean.square() + spread.exp() - spread).mean()}


def autoencoded(model):
    def task(batch):
        return model(batch["x"])["loss"]

    return task, "model.decoder#0"


def test_a_model_that_draws_for_one_of_its_towers_is_opened():
    assert_close([train(0, 1, Autoencoder, autoencoded)])
    handle = spindle.module("model", Autoencoder().double())
    batches = {"train": {"x": torch.randn(ROWS, 8, dtype=torch.float64)}}
    (recorded,) = record_all([spindle.task(batch_size=ROWS, name="train")(autoencoded(handle)[0])], batches)
    assert [call.name for call in recorded.calls] == ["model.encoder#0", "model.encoder#1", "model.decoder#0"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("make_task", [noise, times, constant, loss])
def test_a_draw_of_a_task_gives_all_that_need_it_the_same_numbers(pool, num_ranks, make_task):
    assert_close(pool.run(num_ranks, train, Tower, make_task))


MIDDLES = {
    "counter": Counter,
    "average": Average,
    "normalisation": partial(nn.BatchNorm1d, 8, affine=False),
    "memory": Memory,
    "memory in an object": lambda: Memory(Holder()),
}


def between(kind: str, reads_values: bool) -> nn.Module:
    return Between(MIDDLES[kind](), reads_values)


@pytest.mark.parametrize("reads_values", [False, True])
@pytest.mark.parametrize("kind", MIDDLES)
def test_a_module_without_parameters_that_keeps_something_runs_once_in_a_step(pool, kind, reads_values):
    assert_close(pool.run(2, train, partial(between, kind, reads_values), returned))


def remembering(model):
    def task(batch):
        return model(batch["x"]).square().mean()

    return task, ""


@pytest.mark.parametrize("inside", [True, False])
def test_what_blocks_keep_for_the_next_batch_is_there_in_the_next_step(pool, inside):
    assert_close(pool.run(2, train, partial(RememberingBlocks, inside), remembering))


@pytest.mark.parametrize("reads_values", [False, True])
def test_dropout_between_two_towers_drops_the_same_for_both(reads_values):
    class Difference(nn.Module):
        """Zero, if what it drops is the same each time."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.dropout = Tower(), Tower(), nn.Dropout(0.5)
            for parameter in self.second.parameters():
                nn.init.zeros_(parameter)

        def forward(self, x):
            scale = 2 if not reads_values or int((x > -100).sum()) else 3
            dropped = self.dropout(self.first(x)) * scale
            return {"loss": (self.second(dropped) - dropped).abs().max(), "kept": dropped.square().mean()}

    model = spindle.module("model", Difference().double())

    @spindle.task(batch_size=ROWS)
    def compare(batch):
        returned = model(batch["x"])
        return spindle.result(returned["loss"], kept=returned["kept"].expand(batch["x"].shape[0]))

    trainer = spindle.Trainer(
        [compare],
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], 0.0),
        planning=spindle.Planning(profile=guessed_profile),
    )
    batch = {"x": torch.randn(ROWS, 8, dtype=torch.float64)}
    result = trainer.fit({"compare": [batch]}, steps=3, progress=False)
    assert "model.first" in {op.module for op in trainer.profile.graph.metaops}
    assert [losses["compare"] for losses in result.losses] == [0.0] * 3


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: random.random(), r"task 'draw': it draws random numbers with Python or numpy"),
        (lambda: float(numpy.random.rand()), r"task 'draw': it draws random numbers with Python or numpy"),
        (lambda: torch.rand(3, generator=torch.Generator()), r"line \d+ .*draws random numbers from a torch.Generator"),
        (lambda: torch.manual_seed(0).initial_seed(), r"task 'draw': it seeds torch's random numbers"),
    ],
)
def test_draws_that_would_be_the_same_in_every_step_are_refused(draw, message):
    linear = spindle.module("linear", nn.Linear(8, 3))

    @spindle.task(batch_size=ROWS, name="draw")
    def task(batch):
        return (linear(batch["x"]) * draw()).mean()

    trainer = spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(profile=guessed_profile))
    torch.rand(1)  # a state that `manual_seed(0)` does not give
    with pytest.raises(WorkloadError, match=message):
        trainer.prepare({"draw": [{"x": torch.ones(ROWS, 8)}]}, progress=False)
