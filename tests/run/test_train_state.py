"""A training that goes on from a state in a new Trainer: bit for bit the numbers of one that was not interrupted."""

from __future__ import annotations

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import spindle  # noqa: E402
from internals import guessed_profile  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402

torch.set_num_threads(1)
STEPS = 9


class Squares(Dataset):
    """Samples that draw random numbers."""

    def __init__(self, length: int = 14) -> None:
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return {"x": torch.full((3,), float(number)) + 0.1 * torch.rand(3) + 0.1 * random.random()}


def as_list(batch):
    return {"x": torch.stack([sample["x"] for sample in batch])}


def batches_that_lack_something():
    """Batches of two forms, which take two variants of their task; endless, and random."""
    while True:
        batch = {"x": torch.randn(4, 3)}
        if random.random() < 0.5:
            batch["y"] = torch.randn(4, 3)
        yield batch


LOADERS = {
    "a dataset": lambda: Squares(),
    "a shuffled loader": lambda: DataLoader(Squares(), 4, shuffle=True, drop_last=True),
    "one with a generator": lambda: DataLoader(
        Squares(), 4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(3)
    ),
    "one that collates": lambda: DataLoader(Squares(), 4, shuffle=True, collate_fn=as_list),
    "a list": lambda: [{"x": torch.full((4, 3), float(number))} for number in range(5)],
    "a generator": batches_that_lack_something,
}


def make_trainer(loader: str) -> tuple[spindle.Trainer, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    tower = spindle.module("tower", module)

    @spindle.task(batch_size=4)
    def pull(batch):
        return (tower(batch["x"]) - (tower(batch["y"]) if "y" in batch else 1.0)).square().mean()

    @spindle.task(batch_size=4, per_sample_mean=True)
    def push(batch):
        return (tower(batch["x"]) + 1).square().mean()

    def adamw(named):
        return torch.optim.AdamW([parameter for _, parameter in named], lr=0.01)

    trainer = spindle.Trainer(
        [pull, push],
        optimizer=adamw,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        max_grad_norm=1.0,
        gradient_accumulation_steps=2,
        sampling_weights={"pull": 2.0, "push": lambda step: 1.0 + step},
        planning=spindle.Planning(profile=guessed_profile),
    )
    return trainer, module


def loaders_of(name: str):
    return {"pull": LOADERS[name](), "push": LOADERS["a list"]()}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("when", ["between fits", "in a fit"])
def test_a_resumed_training_has_the_numbers_of_one_that_was_not_interrupted(loader, when):
    trainer, module = make_trainer(loader)
    random.seed(1)
    torch.manual_seed(1)
    saved = []

    def save():
        saved.append((trainer.train_state(), copy.deepcopy(module.state_dict())))

    if when == "between fits":
        trainer.fit(loaders_of(loader), steps=4, progress=False)
        save()
        expected = list(trainer.fit(loaders_of(loader), steps=STEPS - 4, progress=False).losses)
    else:
        result = trainer.fit(
            loaders_of(loader), steps=STEPS, progress=False, on_step=lambda step, _: save() if step == 3 else None
        )
        expected = list(result.losses[saved[0][0].step :])
    drawn = random.random(), torch.rand(1).item()
    state, weights = saved[0]
    assert state.step == (4 if when == "between fits" else 5)  # losses become known a step later

    resumed, other = make_trainer(loader)
    random.seed(2)  # another process has drawn other numbers
    torch.manual_seed(2)
    other.load_state_dict(weights)
    resumed.load_train_state(state)
    result = resumed.fit(loaders_of(loader), steps=STEPS - state.step, progress=False)
    assert list(result.losses) == expected
    assert all(torch.equal(mine, value) for mine, value in zip(other.parameters(), module.parameters(), strict=True))
    assert (random.random(), torch.rand(1).item()) == drawn


def test_a_state_is_not_changed_by_training_on():
    trainer, _ = make_trainer("a list")
    trainer.fit(loaders_of("a list"), steps=2, progress=False)
    state = trainer.train_state()
    before = copy.deepcopy(state.optimizer.states)
    resumed, _ = make_trainer("a list")
    resumed.load_train_state(state)
    for each in (trainer, resumed):
        each.fit(loaders_of("a list"), steps=2, progress=False)
    for name, values in before.items():
        assert all(
            torch.equal(torch.as_tensor(state.optimizer.states[name][key]), torch.as_tensor(value))
            for key, value in values.items()
        )


def test_a_state_of_another_training_is_refused():
    trainer, _ = make_trainer("a list")
    trainer.fit(loaders_of("a list"), steps=1, progress=False)
    state = trainer.train_state()
    with pytest.raises(TrainingError, match="a Trainer that has trained already cannot load another state"):
        trainer.load_train_state(state)
    fewer, _ = make_trainer("a list")
    fewer.remove_task("push")
    with pytest.raises(TrainingError, match="of the tasks pull, push, this Trainer has pull; make one with the same"):
        fewer.load_train_state(state)
