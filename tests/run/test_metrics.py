"""Metrics that tasks return beside their losses: those of one process, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import capturing, guessed_profile  # noqa: E402
from programs import loss_value  # noqa: E402
from training_cases import WIDTH, two_towers  # noqa: E402
from trainings import sgd  # noqa: E402

STEPS = 6


def tasks_of(handles: Mapping[str, Any]) -> list[Any]:
    """A loss of the whole batch, one over tokens, and a mean over samples, whose batches differ in structure."""
    vision, text, head = handles["vision"], handles["text"], handles["head"]

    @spindle.task(batch_size=5)
    def pair(batch):
        scores = F.normalize(vision(batch["x"]), dim=-1) @ F.normalize(text(batch["y"]), dim=-1).T
        labels = torch.arange(scores.shape[0], device=scores.device)
        return spindle.result(F.cross_entropy(scores * 4, labels), retrieved=scores.argmax(-1) == labels)

    @spindle.task(batch_size=7, weight=0.5)
    def answer(batch):
        wrong = ((head(text(batch["y"])) - batch["z"]) ** 2).mean(-1)
        total, count = (wrong * batch["mask"]).sum(), batch["mask"].sum()
        small = ((wrong < 1).double() * batch["mask"]).sum()
        return spindle.result(spindle.mean(total, count), error=wrong.mean(), small=(small, count), rows=7.0)

    @spindle.task(batch_size=6, per_sample_mean=True)
    def mixed(batch):
        features = vision(batch["x"])
        metrics = {"square": features.square().mean(-1)}
        if batch["y"] is not None:
            features = features + text(batch["y"])
            metrics["both"] = spindle.mean(features.abs().sum(), features.shape[0])
        return spindle.result(features.square().mean(), **metrics)

    return [pair, answer, mixed]


def batch_of(task: str, number: int, rows: int | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number * 10 + len(task))
    size = rows or {"pair": 5, "answer": 7, "mixed": 6}[task]
    batch: dict[str, Any] = {
        name: torch.randn(size, width, generator=generator, dtype=torch.float64)
        for name, width in (("x", 4), ("y", 3), ("z", 2))
    }
    batch["mask"] = (torch.rand(size, generator=generator) < 0.7).double()
    batch["mask"][0] = 1.0
    if task == "mixed" and number % 3 == 1:
        batch["y"] = None
    return batch


def value_of(totals: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in totals.items()}


def add_metrics(totals: dict[str, list[float]], task: str, metrics: Mapping[str, Any], num_rows: int) -> None:
    """As the documentation says: pairs as they are, a value for each sample, or a mean over samples."""
    for name, value in metrics.items():
        if isinstance(value, tuple):
            total, count = float(value[0]), float(value[1])
        elif isinstance(value, torch.Tensor) and value.dim():
            total, count = float(value.double().sum()), value.numel()
        else:
            total, count = float(value) * num_rows, num_rows
        sums = totals.setdefault(f"{task}/{name}", [0.0, 0.0])
        sums[0] += total
        sums[1] += count


def train_plainly(modules: Mapping[str, nn.Module], steps: Sequence[Sequence[Mapping[str, Any]]]) -> Any:
    """Losses and metrics of each step."""
    optimizer = sgd(nn.ModuleDict(modules).named_parameters())
    losses, metrics = [], []
    for micro_steps in steps:
        optimizer.zero_grad()
        totals: dict[str, list[float]] = {}
        values: dict[str, list[float]] = {}
        for batches in micro_steps:
            for task in tasks_of(modules):
                result = task(batches[task.name])
                loss = loss_value(result)
                (task.weight * loss / len(micro_steps)).backward()
                values.setdefault(task.name, []).append(float(loss))
                add_metrics(totals, task.name, result.metrics, len(batches[task.name]["x"]))
        optimizer.step()
        losses.append({name: sum(parts) / len(parts) for name, parts in values.items()})
        metrics.append(value_of(totals))
    return losses, metrics


def train_with_metrics(
    rank: int, num_ranks: int, planning: dict[str, Any], count: int, captures: bool = False
) -> tuple[Comparison, set[str]]:
    modules = two_towers()
    references = deepcopy(modules)
    tasks = tasks_of({name: spindle.module(name, module) for name, module in modules.items()})
    batches = {task.name: [batch_of(task.name, number) for number in range(STEPS * count)] for task in tasks}
    planning = spindle.Planning(profile=guessed_profile, **planning)
    with capturing() if captures else nullcontext():
        trainer = spindle.Trainer(tasks, optimizer=sgd, gradient_accumulation_steps=count, planning=planning)
        result = trainer.fit(batches, steps=STEPS, progress=False)
    assert not captures or result.num_captured_slots
    comparison = Comparison()
    steps = [
        [{name: some[step * count + number] for name, some in batches.items()} for number in range(count)]
        for step in range(STEPS)
    ]
    losses, metrics = train_plainly(references, steps)
    comparison.add_losses(result.losses, losses)
    comparison.add_losses(result.metrics, metrics)
    # Evaluation, with a last batch that is short.
    unequal = {name: [*some, batch_of(name, 40, rows=3)] for name, some in batches.items()}
    totals: dict[str, list[float]] = {}
    with torch.no_grad():
        for task in tasks_of(references):
            for batch in unequal[task.name]:
                add_metrics(totals, task.name, task(batch).metrics, len(batch["x"]))
    means = trainer.evaluate(unequal)
    comparison.add_losses([{name: means[name] for name in totals}], [value_of(totals)])
    return comparison, set(means)


NAMES = {"pair/retrieved", "answer/error", "answer/small", "answer/rows", "mixed/square", "mixed/both"}


@pytest.mark.parametrize(
    ("num_ranks", "planning", "count", "captures"),
    [
        (1, {}, 1, False),
        (2, {}, 2, True),
        (3, {}, 1, False),
        (2, {"shard_optimizer": True}, 1, False),
        (3, {"planner": "pipeline"}, 2, False),
    ],
)
def test_metrics_are_those_of_one_process(pool, num_ranks, planning, count, captures):
    answers = pool.run(num_ranks, train_with_metrics, planning, count, captures)
    assert_close([comparison for comparison, _ in answers], kinds=("loss",))
    assert all(names == {"pair", "answer", "mixed"} | NAMES for _, names in answers)


def return_a_maximum(rank: int, num_ranks: int) -> None:
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Linear(3, WIDTH).double())

    @spindle.task(batch_size=6, per_sample_mean=True)
    def pull(batch):
        values = encoder(batch["x"]).square()
        return spindle.result(values.mean(), largest=values.max())

    batches = [{"x": torch.randn(6, 3, dtype=torch.float64)}] * 2
    plan = "pull/encoder#0[0:1]*1@0,1\npull/loss[0:1]*1@0,1"
    trainer = spindle.Trainer([pull], optimizer=sgd, planning=spindle.Planning(plan=plan, profile=guessed_profile))
    trainer.fit({"pull": batches}, steps=2, progress=False)


def test_a_metric_that_is_no_mean_over_samples_is_refused(pool):
    with pytest.raises(AssertionError) as raised:  # rank 0's error, as the pool tells it
        pool.run(2, return_a_maximum)
    assert "TrainingError: task 'pull': its metric 'largest' is" in str(raised.value)
    assert "a mean over samples, a value for each sample, or a pair (total, count)" in str(raised.value)
