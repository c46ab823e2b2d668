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


def in_whole_numbers(batch):
    """Without what samples draw: in worker processes that follows from a seed of theirs."""
    return {"x": torch.stack([sample["x"] for sample in batch]).floor()}


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


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("save_at", [1, 2, 6])
def test_samples_go_on_in_the_epoch_of_a_loader_whose_workers_stay(seed, save_at):
    """DataLoader draws a seed for new workers, and none in the epochs of workers that are there."""

    def trained(steps, state=None):
        linear = spindle.module("linear", nn.Linear(3, 2))

        @spindle.task(batch_size=4)
        def pull(batch):
            return linear(batch["x"]).square().mean() * 0 + batch["x"].square().mean()

        trainer = spindle.Trainer(
            [pull],
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
            planning=spindle.Planning(profile=guessed_profile),
        )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        workers = {"num_workers": 1, "persistent_workers": True, "collate_fn": in_whole_numbers}
        loader = DataLoader(Squares(), 4, shuffle=True, drop_last=True, generator=generator, **workers)
        if state is not None:
            trainer.load_train_state(state)
        saved = []

        def on_step(step, _):
            if step == save_at:
                saved.append(trainer.train_state())

        result = trainer.fit({"pull": loader}, steps=steps, progress=False, on_step=on_step)
        return [losses["pull"] for losses in result.losses], saved

    torch.manual_seed(1)
    expected, (state,) = trained(10)
    torch.manual_seed(2)
    rest, _ = trained(10 - state.step, state)
    assert rest == expected[state.step :]
    assert len(set(expected)) > 3


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


class WithFloat32Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
            momentum.mul_(0.9).add_(parameter.grad.float(), alpha=1e-3)
            parameter.sub_(momentum.to(parameter.dtype))


def momenta_of_bfloat16_weights(*, replans):
    made = []

    def optimizer(named):
        made.append(WithFloat32Momentum([parameter for _, parameter in named]))
        return made[-1]

    torch.manual_seed(0)
    handle = spindle.module("tower", nn.Linear(8, 8).bfloat16())
    task = spindle.task(batch_size=4, name="pull")(lambda batch: handle(batch).float().square().mean())
    trainer = spindle.Trainer([task], optimizer=optimizer, planning=spindle.Planning(profile=guessed_profile))
    batches = {"pull": [torch.ones(4, 8).bfloat16()]}
    trainer.fit(batches, steps=2, progress=False)
    if replans:
        trainer.replan(planner="sequential")
    trainer.fit(batches, steps=2, progress=False)
    assert len(made) == 1 + replans
    return [state["momentum"] for state in made[-1].state.values()]


def test_a_new_plan_keeps_what_an_optimizer_has_in_another_dtype_than_its_parameter():
    expected, replanned = (momenta_of_bfloat16_weights(replans=replans) for replans in (False, True))
    for first, second in zip(expected, replanned, strict=True):
        assert second.dtype == torch.float32
        assert torch.equal(first, second)
