"""float16 with a loss scale: the steps that one process takes and leaves out, on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from backends import rank_device, to_device  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import capturing, guessed_profile  # noqa: E402
from programs import loss_value  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from training_cases import normal_batch, pairs_and_answers, two_towers  # noqa: E402

STEPS = 10
# Too large at first; then it grows every other step, until it is too large again.
SETTINGS = {"init_scale": 2.0**30, "growth_factor": 2.0**4, "backoff_factor": 2.0**-8, "growth_interval": 2}


def adamw(named: Any, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.01, fused=fused)


def batch_of(task: str, number: int) -> dict[str, torch.Tensor]:
    return {key: leaf.float() for key, leaf in normal_batch(task, number).items()}


class Scales(spindle.Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[float, bool]] = []

    def on_step(self, record: spindle.StepRecord) -> None:
        self.steps.append((record.loss_scale, record.skipped))


def train_in_float16(rank: int, num_ranks: int, planning: dict[str, Any], fused: bool, **options: Any) -> Any:
    modules = {name: module.float() for name, module in two_towers().items()}
    references = deepcopy(modules)
    tasks = pairs_and_answers()({name: spindle.module(name, module) for name, module in modules.items()})
    batches = {task.name: [batch_of(task.name, number) for number in range(2 * STEPS)] for task in tasks}
    scales, captures = Scales(), options.pop("captures", False)
    trainer = spindle.Trainer(
        tasks,
        optimizer=partial(adamw, fused=fused),
        autocast=torch.float16,
        grad_scaler=torch.amp.GradScaler(rank_device().type, **SETTINGS),
        planning=spindle.Planning(profile=guessed_profile, **planning),
        callbacks=[scales],
        **options,
    )
    count = options.get("gradient_accumulation_steps", 1)
    with capturing() if captures else nullcontext():
        first = trainer.fit(batches, steps=STEPS // 2, progress=False)
    assert not captures or first.num_captured_slots
    if "planner" not in planning:
        trainer.replan(planner="sequential")  # the scale goes on
    rest = {name: some[STEPS // 2 * count :] for name, some in batches.items()}
    second = trainer.fit(rest, steps=STEPS - STEPS // 2, progress=False)
    losses, expected_scales = train_plainly(references, fused, count, options.get("max_grad_norm"))
    comparison = Comparison(adam_learning_rate=0.01)
    comparison.add_losses([*first.losses, *second.losses], losses)
    parameters = dict(nn.ModuleDict(modules).named_parameters())
    comparison.add_tensors("parameter", parameters, dict(nn.ModuleDict(references).named_parameters()))
    return comparison, scales.steps, expected_scales


def train_plainly(modules: Any, fused: bool, count: int, max_grad_norm: float | None) -> Any:
    """With torch's own scaler."""
    device = rank_device()
    tasks = pairs_and_answers()({name: module.to(device) for name, module in modules.items()})
    optimizer = adamw(list(nn.ModuleDict(modules).named_parameters()), fused)
    scaler = torch.amp.GradScaler(device.type, **SETTINGS)
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        values: dict[str, list[float]] = {}
        for number in range(step * count, (step + 1) * count):
            total: Any = 0.0
            for task in tasks:
                with torch.autocast(device.type, dtype=torch.float16):
                    loss = loss_value(task(to_device(batch_of(task.name, number), device)))
                values.setdefault(task.name, []).append(float(loss))
                total = total + task.weight * loss / count
            scaler.scale(total).backward()
        if max_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(nn.ModuleDict(modules).parameters(), max_grad_norm)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        scales.append((before, scaler.get_scale() < before))
        losses.append({name: sum(parts) / count for name, parts in values.items()})
    return losses, scales


@pytest.mark.parametrize(
    ("num_ranks", "planning", "options"),
    [
        (1, {}, {"fused": True, "max_grad_norm": 0.5}),
        (3, {}, {"fused": False}),
        (2, {"shard_optimizer": True}, {"fused": True, "max_grad_norm": 0.5, "captures": True}),
        (2, {"planner": "pipeline"}, {"fused": False, "gradient_accumulation_steps": 2}),
    ],
)
def test_steps_are_skipped_and_the_scale_grows_as_in_one_process(pool, num_ranks, planning, options):
    answers = pool.run(num_ranks, train_in_float16, planning, **options)
    assert_close([comparison for comparison, _, _ in answers], 1e-5 if num_ranks == 1 else 2e-2)
    for _, scales, expected in answers:
        assert scales == expected
    skipped = [was_skipped for _, was_skipped in answers[0][1]]
    assert skipped[0]
    assert 2 <= sum(skipped) <= STEPS - 4


def diverging(**options: Any) -> spindle.Trainer:
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Linear(3, 2))

    @spindle.task(batch_size=4)
    def pull(batch):
        return (encoder(batch["x"]) * batch["factor"]).square().mean()

    planning = spindle.Planning(profile=guessed_profile)
    return spindle.Trainer([pull], optimizer=partial(adamw, fused=False), planning=planning, **options)


def test_gradients_that_are_never_finite_end_the_training():
    batches = [{"x": torch.ones(4, 3), "factor": torch.full((4, 1), float("inf"))}]
    trainer = diverging(autocast=torch.float16)
    with pytest.raises(TrainingError, match=r"step 37: gradients are not finite however small the loss scale"):
        trainer.fit({"pull": batches}, steps=60, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"autocast": torch.float64}, r"autocast=torch.float64\): expected torch.bfloat16 or torch.float16"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, r"grad_scaler=...\): requires autocast=torch.float16"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(TrainingError, match=message):
        diverging(**options)
