"""Trainings in which everything comes together: optimizers in shards, tensor groups of several sizes with sequences cut
or not, rounds, recomputation, and tasks and modules that change on the way; each plan another combination."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch import nn

import spindle
from changing import CLIP, fit, halving, train_plainly
from courses import guessed_profile
from spindle.plan import parse_plan
from spindle.profile import Profile
from spindle.train import loop, task
from tensors import PLAN, SEQUENCE_PLAN, difference, make_optimizer, own_modules, shared_plan_text, tasks_of

# With or without a task that is new, and has to be tried and measured.
COURSES = {
    True: {0: ("-guess",), 2: ("+look",), 5: ("freeze",), 7: ("thaw", "+guess"), 9: ("replan",)},
    False: {0: ("-guess",), 2: ("freeze",), 4: ("replan",), 6: ("+guess",), 8: ("thaw",)},
}
BEGIN, STEPS, NUM_PLANS = ("describe", "guess"), 11, 6  # and the steps by which a change comes later


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one plan does."""

    shards: bool
    degree: int
    has_rounds: bool
    recomputes: bool


SETTINGS = [
    Setting(shards=shards, degree=degree, has_rounds=has_rounds, recomputes=recomputes)
    for shards, degree, has_rounds, recomputes in product((False, True), (1, 2, 4), (False, True), (False, True))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The settings of its plans one after the other, and what is one for all of them."""

    seed: int
    settings: tuple[Setting, ...]
    cuts: bool
    joins: bool
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    loss: float
    parameter: float
    worst: str
    num_changes: int
    tasks: tuple[frozenset[str], ...]


def workload(cuts: bool) -> tuple[dict[str, Any], dict[str, Any], Callable[[str, int], Any]]:
    handles = own_modules(tensor_parallel=SEQUENCE_PLAN if cuts else PLAN)
    some, batches = tasks_of(handles)
    vision = handles["vision"]

    @task(batch_size=4, per_sample_mean=True)
    def look(batch):
        return (vision(batch) - 1).square().mean()

    def batch_of(name: str, number: int) -> Any:
        return batches(number)["describe"]["seen"][:4] if name == "look" else batches(number)[name]

    tasks = {one.name: one for one in (*some, look)}
    return tasks, {name: handle.module for name, handle in handles.items()}, batch_of


def combine(rank: int, num_ranks: int, combination: Combination) -> Combined:
    """Trains with changes, and then plainly, with the tasks that each step had."""
    choose, settings = random.Random(combination.seed), iter(combination.settings)

    def next_plan(profile: Profile) -> Any:
        setting = next(settings)
        degrees = {"language": setting.degree}
        text = shared_plan_text(profile, degrees, choose.randrange(1000), setting.has_rounds, setting.recomputes)
        return parse_plan("# optimizer sharded\n" * setting.shards + text, profile)

    tasks, modules, batch_of = workload(combination.cuts)
    make = partial(make_optimizer, combination.optimizer)
    trainer = spindle.Trainer(
        [tasks[one] for one in BEGIN],
        optimizer=make,
        lr_scheduler=halving,
        max_grad_norm=CLIP,
        planning=spindle.Planning(planner=next_plan, profile=guessed_profile),
    )
    steps = STEPS + loop._LOSSES_BEHIND[trainer.world.device.type]
    result, frozen_at = fit(
        trainer, tasks, BEGIN, batch_of, modules["language"].blocks[1], COURSES[combination.joins], steps
    )
    plain_tasks, plain, _ = workload(combination.cuts)
    optimizer = make(list(nn.ModuleDict(plain).named_parameters()))
    expected = train_plainly(plain_tasks, batch_of, optimizer, result.losses, plain["language"].blocks[1], frozen_at)
    loss, parameter, worst = difference(result.losses, expected, trainer.state_dict(), plain, combination.optimizer)
    tasks_of_steps = tuple(frozenset(losses) for losses in result.losses)
    return Combined(
        loss=loss, parameter=parameter, worst=worst, num_changes=len(result.changes_s), tasks=tasks_of_steps
    )
