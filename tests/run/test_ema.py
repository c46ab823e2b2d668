"""An average of the weights: that of one process, however weights are sharded and whatever changes on the way."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import guessed_profile, losses_behind, one_step_behind  # noqa: E402
from programs import loss_value  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from training_cases import normal_batch, pairs_and_answers, two_towers  # noqa: E402
from trainings import LEARNING_RATE, adamw, sgd  # noqa: E402

DECAY = 0.8


def batches_of(numbers: range) -> dict[str, list[Any]]:
    return {name: [normal_batch(name, number) for number in numbers] for name in ("pair", "answer")}


class Plain:
    """The same training in one process, with torch's own average."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = nn.ModuleDict(modules)
        self.tasks = pairs_and_answers()(modules)
        self.optimizer = adamw(self.modules.named_parameters())
        self.average = AveragedModel(self.modules, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def step(self, number: int, names: tuple[str, ...] = ("pair", "answer")) -> None:
        self.optimizer.zero_grad()
        for task in self.tasks:
            if task.name in names:
                (task.weight * loss_value(task(normal_batch(task.name, number)))).backward()
        self.optimizer.step()
        self.average.update_parameters(self.modules)

    def averages(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.average.module.named_parameters()}


def train_with_average(rank: int, num_ranks: int, planning: dict[str, Any]) -> Comparison:
    """A fit in which the average is looked at; then one module is frozen and thawed, and a task ends."""
    modules = two_towers()
    plain = Plain(deepcopy(modules))
    tasks = pairs_and_answers()({name: spindle.module(name, module) for name, module in modules.items()})
    comparison = Comparison(adam_learning_rate=LEARNING_RATE)
    looked_at: list[tuple[dict[str, torch.Tensor], dict[str, float]]] = []

    def options() -> dict[str, Any]:
        return {"optimizer": adamw, "ema": DECAY, "planning": spindle.Planning(profile=guessed_profile, **planning)}

    def on_step(step: int, _: Any) -> None:
        if step == 1:
            looked_at.append((trainer.state_dict(ema=True), trainer.evaluate(batches_of(range(3)), ema=True)))

    def compare(state: dict[str, torch.Tensor], where: str) -> None:
        comparison.add_tensors("parameter", state, plain.averages(), where)

    with one_step_behind():
        trainer = spindle.Trainer(tasks, **options())
        result = trainer.fit(batches_of(range(4)), steps=4, progress=False, on_step=on_step)
        assert len(result.losses) == 4
        for number in range(4):
            plain.step(number)
            if number == 1 + losses_behind(trainer):  # the last step that was started
                ((state, losses),) = looked_at
                compare(state, " in a fit")
                averaged = pairs_and_answers()(dict(plain.average.module.items()))
                with torch.no_grad():
                    expected = {
                        task.name: [loss_value(task(normal_batch(task.name, index))) for index in range(3)]
                        for task in averaged
                    }
                counts = [float(normal_batch("answer", index)["mask"].sum()) for index in range(3)]
                weighted = sum(float(loss) * count for loss, count in zip(expected["answer"], counts, strict=True))
                means = {"pair": float(sum(expected["pair"])) / 3, "answer": weighted / sum(counts)}
                comparison.add_losses([losses], [means])
        compare(trainer.state_dict(ema=True), " after a fit")

        for frozen, first in ((True, 4), (False, 6)):
            for module in (modules["text"], plain.modules["text"]):
                module.requires_grad_(not frozen)
            trainer.fit(batches_of(range(first, first + 2)), steps=2, progress=False)
            for number in range(first, first + 2):
                plain.step(number)
            compare(trainer.state_dict(ema=True), f" with text {'frozen' if frozen else 'thawed'}")

        # A new Trainer goes on from a state, and then with one task.
        weights, state = trainer.state_dict(), trainer.train_state()
        fresh = two_towers()
        nn.ModuleDict(fresh).load_state_dict(weights)
        again = pairs_and_answers()({name: spindle.module(name, module) for name, module in fresh.items()})
        trainer = spindle.Trainer(again, **options())
        trainer.load_train_state(state)
        trainer.fit(
            batches_of(range(8, 12)),
            steps=4,
            progress=False,
            on_step=lambda step, _: trainer.remove_task("pair") if step == 9 else None,
        )
        last = 9 + 1 + losses_behind(trainer)  # the first step without it
        for number in range(8, 12):
            plain.step(number, ("pair", "answer") if number < last else ("answer",))
        compare(trainer.state_dict(ema=True), " with one task")
        weights = trainer.state_dict()
        comparison.add_tensors("parameter", weights, dict(plain.modules.named_parameters()), " themselves")
    return comparison


@pytest.mark.parametrize(
    ("num_ranks", "planning"),
    [(1, {}), (3, {}), (2, {"shard_optimizer": True}), (2, {"planner": "pipeline"})],
)
def test_the_average_is_that_of_one_process(pool, num_ranks, planning):
    assert_close(pool.run(num_ranks, train_with_average, planning))


def test_an_average_that_nobody_asked_for_is_refused():
    encoder = spindle.module("encoder", nn.Linear(3, 2))
    task = spindle.task(batch_size=4, name="pull")(lambda batch: encoder(batch["x"]).square().mean())
    with pytest.raises(TrainingError, match=r"Trainer\(ema=1.5\): expected a decay between 0 and 1"):
        spindle.Trainer([task], optimizer=sgd, ema=1.5)
    trainer = spindle.Trainer([task], optimizer=sgd)
    with pytest.raises(TrainingError, match=r"there is no average of the weights; give the Trainer ema=0\.999"):
        trainer.state_dict(ema=True)


def test_averages_of_16_bit_weights_are_float32():
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Linear(3, 2).bfloat16())
    task = spindle.task(batch_size=4, name="pull")(lambda batch: encoder(batch["x"]).square().mean())
    planning = spindle.Planning(profile=guessed_profile)
    trainer = spindle.Trainer([task], optimizer=sgd, ema=0.9, planning=planning)
    trainer.fit({"pull": [{"x": torch.ones(4, 3).bfloat16()}]}, steps=3, progress=False)
    states = trainer.train_state().optimizer.states
    assert states["encoder.bias"]["spindle.ema"].dtype == torch.float32
    assert trainer.state_dict(ema=True)["encoder.bias"].dtype == torch.bfloat16
