"""Trainings whose tasks change on the way, under some legal plan before and after each change, beside a plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import spindle
from courses import guessed_profile
from spindle.graph import MetaGraph
from spindle.plan import Plan, parse_plan
from spindle.profile import Profile
from spindle.train import loop
from zoo import Tower

WIDTH, CLIP = 6, 3.0
AGAIN = 100  # the first batch of a task that joins or comes back
Modules = dict[str, nn.Module]
SIZES = {"pair": 5, "answer": 7, "sound": 4, "late": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """How far a rank ended from the plain loop, the tasks of each step, and what its new plans were made of."""

    loss: float
    parameter: float
    worst: str
    tasks: tuple[frozenset[str], ...]
    num_found_out: int
    num_changes: int
    notices: tuple[str, ...]


def modules_of_all() -> Modules:
    torch.manual_seed(7)
    return {
        "vision": Tower(4, WIDTH, 3).double(),
        "text": Tower(3, WIDTH, 2).double(),
        "audio": Tower(2, WIDTH, 2).double(),
        "head": nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).double(),
        "extra": nn.Linear(WIDTH, WIDTH).double(),
    }


def tasks_of(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Three tasks that share modules, and one that comes late and brings one of its own."""
    vision, text, audio, head, extra = (modules[name] for name in ("vision", "text", "audio", "head", "extra"))

    def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T
        return F.cross_entropy(scores * 4, torch.arange(scores.shape[0], device=scores.device))

    @spindle.task(batch_size=SIZES["pair"])
    def pair(batch):
        return contrast(vision(batch["x"]), text(batch["y"]))

    @spindle.task(batch_size=SIZES["answer"], weight=0.5)
    def answer(batch):
        return spindle.mean((head(text(batch["y"])) - batch["z"]).square().sum(), torch.ones_like(batch["z"]).sum())

    @spindle.task(batch_size=SIZES["sound"], per_sample_mean=True)
    def sound(batch):
        return (audio(batch["a"]) - 1).square().mean()

    @spindle.task(batch_size=SIZES["late"], per_sample_mean=True)
    def late(batch):
        return (extra(audio(batch["a"])) - text(batch["y"])).square().mean()

    return {one.name: one for one in (pair, answer, sound, late)}


def batch_of(task: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * len(task) + number)
    widths = {"x": 4, "y": 3, "a": 2, "z": 2}
    return {
        key: torch.randn(SIZES[task], width, generator=generator, dtype=torch.float64) for key, width in widths.items()
    }


def make_adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for _, one in named], lr=0.02, weight_decay=0.1)


def make_momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in named], lr=0.05, momentum=0.9)


# What happens once losses of a step are known: "-name" a task ends, "+name" one joins, "replan", "freeze" and "thaw"
# the text tower.
COURSES: dict[str, dict[int, tuple[str, ...]]] = {
    "ends": {1: ("-pair",)},
    "ends and comes back": {0: ("-answer",), 4: ("+answer",)},
    "joins": {1: ("+late",)},
    "all of it": {0: ("-sound",), 2: ("+late", "-pair"), 5: ("freeze",), 8: ("thaw", "+pair"), 10: ("replan",)},
}
STEPS = {"ends": 6, "ends and comes back": 10, "joins": 7, "all of it": 15}
BEGIN = ("pair", "answer", "sound")


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def change(rank: int, num_ranks: int, name: str, seed: int, shards: str, momentum: bool = False) -> Changed:
    """Trains with changes, and then plainly, with the tasks that each step had. `shards` is "all", "none" or "some"
    plans."""
    from worlds import random_plan_text

    choose = random.Random(seed)
    num_found_out = 0

    def some_plan(profile: Profile) -> Plan:
        plan = parse_plan(random_plan_text(profile, f"plan {choose.randrange(1000)}"), profile)
        return replace(plan, shard_optimizer={"all": True, "none": False}.get(shards, choose.random() < 0.5))

    def counted(graph: MetaGraph, num_devices: int) -> Profile:
        """On rank 0, once for all tasks whenever some of them are new."""
        nonlocal num_found_out
        num_found_out += 1
        return guessed_profile(graph, num_devices)

    modules = modules_of_all()
    handles = {one: spindle.module(one, each) for one, each in modules.items()}
    tasks = tasks_of(handles)
    make = make_momentum if momentum else make_adam
    trainer = spindle.Trainer(
        [tasks[one] for one in BEGIN],
        optimizer=make,
        lr_scheduler=halving,
        max_grad_norm=CLIP,
        planning=spindle.Planning(planner=some_plan, profile=counted),
    )
    result, frozen_at = fit(trainer, tasks, BEGIN, batch_of, modules["text"], COURSES[name], STEPS[name])
    history = result.losses
    nn.ModuleDict(modules).cpu()
    plain = modules_of_all()
    optimizer = make(list(nn.ModuleDict(plain).named_parameters()))
    expected = train_plainly(tasks_of(plain), batch_of, optimizer, history, plain["text"], frozen_at)
    loss = max(
        abs(ours[task] - value) / max(abs(value), 1e-3)
        for ours, theirs in zip(history, expected, strict=True)
        for task, value in theirs.items()
    )
    mine, theirs = (nn.ModuleDict(one).state_dict() for one in (modules, plain))
    errors = {
        path: float((mine[path] - one).double().norm() / max(float(one.double().norm()), 1e-3))
        for path, one in theirs.items()
    }
    worst = max(errors, key=lambda path: errors[path])
    return Changed(
        loss=loss,
        parameter=errors[worst],
        worst=worst,
        tasks=tuple(frozenset(losses) for losses in history),
        num_found_out=num_found_out,
        num_changes=len(result.changes_s),
        notices=tuple(trainer.notices),
    )


BatchOf = Callable[[str, int], Any]


def fit(
    trainer: spindle.Trainer,
    tasks: Mapping[str, Any],
    begin: Sequence[str],
    batch_of: BatchOf,
    freezing: nn.Module,
    course: Mapping[int, Sequence[str]],
    steps: int,
) -> tuple[Any, dict[int, bool]]:
    """Trains with the changes of a course; and the steps from which on a module was frozen, or was not."""
    frozen_at: dict[int, bool] = {}

    def loader(task: str, first: int = 0) -> Any:
        return (batch_of(task, number) for number in count(first))

    def on_step(step: int, losses: Any) -> None:
        for what in course.get(step, ()):
            if what[0] == "-":
                trainer.remove_task(what[1:])
            elif what[0] == "+":
                trainer.add_task(tasks[what[1:]], loader(what[1:], AGAIN))
            else:
                if what != "replan":
                    freezing.requires_grad_(what == "thaw")
                    behind = loop._LOSSES_BEHIND[trainer.world.device.type]
                    frozen_at[step + 1 + behind] = what == "freeze"  # a step is told of when others are through
                trainer.replan()

    # Losses that are further behind reach `on_step` several at a time when tasks change, and so would the changes.
    with mock.patch.dict(loop._LOSSES_BEHIND, {"cuda": 1}):
        result = trainer.fit({one: loader(one) for one in begin}, steps=steps, progress=False, on_step=on_step)
    return result, frozen_at


def train_plainly(
    tasks: Mapping[str, Any],
    batch_of: BatchOf,
    optimizer: torch.optim.Optimizer,
    history: Sequence[Mapping[str, float]],
    freezing: nn.Module,
    frozen_at: Mapping[int, bool],
) -> list[dict[str, float]]:
    """The losses of a plain loop with the tasks that each step had."""
    scheduler = halving(optimizer)
    asked = dict.fromkeys(tasks, 0)
    expected: list[dict[str, float]] = []
    for step, on in enumerate(history):
        if step in frozen_at:
            freezing.requires_grad_(not frozen_at[step])
        optimizer.zero_grad()
        losses = {}
        for task in [one for one in tasks if one in on]:
            if step and task not in history[step - 1]:
                asked[task] = AGAIN
            found = tasks[task](batch_of(task, asked[task]))
            asked[task] += 1
            value = found.total / found.count if isinstance(found, tuple) else found
            losses[task] = value.item()
            (value * tasks[task].weight).backward()
        torch.nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], CLIP)
        optimizer.step()
        scheduler.step()
        expected.append(losses)
    return expected
