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


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def distances_to_float64(rank: int, num_ranks: int) -> tuple[float, float]:
    """How far a step moves the parameters from where one in float64 does, relative to its length: a step of these
    ranks, and one of plain PyTorch, both in float16."""
    torch.manual_seed(0)
    towers, batch = {"a": Tower(), "b": Tower()}, {key: torch.randn(12, 32) for key in "xy"}
    copies = [deepcopy(towers), deepcopy(towers)]

    def moved(modules: Any) -> torch.Tensor:
        pairs = zip(nn.ModuleDict(modules).parameters(), nn.ModuleDict(towers).parameters(), strict=True)
        return torch.cat([(now.detach().double() - before.detach().double()).flatten() for now, before in pairs])

    def difference(modules: Any, batch: Any) -> torch.Tensor:
        output = modules["a"](batch["x"]) - modules["b"](batch["y"])
        return (output.float() if output.dtype == torch.float16 else output).square().mean()

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], 0.05)

    def step_plainly(modules: Any, batch: Any, autocast: bool) -> torch.Tensor:
        optimizer = sgd(list(nn.ModuleDict(modules).named_parameters()))
        scaler = torch.amp.GradScaler(rank_device().type, init_scale=2.0**16, enabled=autocast)
        with torch.autocast(rank_device().type, dtype=torch.float16, enabled=autocast):
            loss = difference(nn.ModuleDict(modules).to(rank_device()), to_device(batch, rank_device()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        nn.ModuleDict(modules).cpu()
        return moved(modules)

    exact = step_plainly(nn.ModuleDict(deepcopy(towers)).double(), {k: v.double() for k, v in batch.items()}, False)
    plain = step_plainly(copies[0], batch, True)
    handles = {name: spindle.module(name, module) for name, module in copies[1].items()}
    task = spindle.task(batch_size=12, per_sample_mean=True, name="task")(partial(difference, handles))
    trainer = spindle.Trainer(
        [task],
        optimizer=sgd,
        autocast=torch.float16,
        grad_scaler=torch.amp.GradScaler(rank_device().type, init_scale=2.0**16),
        planning=spindle.Planning(profile=guessed_profile, planner="sequential"),
    )
    trainer.fit({"task": [batch]}, steps=1, progress=False)
    assert {len(slot.devices) for slot in trainer.plan.slots} == {num_ranks}
    ours = moved(nn.ModuleDict(copies[1]).cpu())
    return tuple(float((each - exact).norm() / exact.norm()) for each in (ours, plain))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_on_several_ranks_are_as_close_to_float64_as_on_one(pool, num_ranks):
    # They differ from each other: each rank rounds the gradients of its rows to float16.
    for ours, plain in pool.run(num_ranks, distances_to_float64):
        assert 0 < ours < 1.1 * plain < 1e-3
