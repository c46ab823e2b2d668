"""The whole product of what plans may do (sharded optimizers, tensor degrees, rounds, recomputation) with tasks that
change, on two to six gloo processes: the numbers of one process.

Here are two trainings of six plans each; SPINDLE_COMBINATIONS=40 asks for as many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from random_plans import random_plan_text  # noqa: E402
from spindle.plan import Plan, parse_plan  # noqa: E402
from spindle.profile import Profile  # noqa: E402
from spindle.train import task  # noqa: E402
from tensor_parallel import PLAN, SEQUENCE_PLAN, own_modules, workload_over  # noqa: E402
from training_cases import CLIP, halving  # noqa: E402
from trainings import Fit, Training, adamw, assert_trained, sgd, train  # noqa: E402
from zoo import Workload  # noqa: E402

RANKS = (4, 2, 6, 3, 5)
NUM_COMBINATIONS = int(os.environ.get("SPINDLE_COMBINATIONS", "2"))
STEPS, NUM_PLANS = 12, 6
# With or without a task that is new, and has to be traced and profiled.
CHANGES = {
    True: {0: ("-guess",), 2: ("+look",), 5: ("freeze",), 7: ("thaw", "+guess"), 9: ("replan",)},
    False: {0: ("-guess",), 2: ("freeze",), 4: ("replan",), 6: ("+guess",), 8: ("thaw",)},
}


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


def plans_of(settings: tuple[Setting, ...], seed: int) -> Callable[[Profile], Plan]:
    """A random plan of each setting, one after the other."""
    choose, remaining = random.Random(seed), iter(settings)

    def make(profile: Profile) -> Plan:
        setting = next(remaining)
        text = random_plan_text(
            profile,
            choose.randrange(1000),
            degrees={"language": setting.degree},
            has_rounds=setting.has_rounds,
            recomputed_share=0.7 if setting.recomputes else 0.0,
        )
        return parse_plan("# optimizer sharded\n" * setting.shards + text, profile)

    return make


def three_tasks(cuts: bool) -> Workload:
    """The tasks of `tensor_parallel`, with sequences cut or not, and one that trains the vision tower alone."""
    handles = own_modules(tensor_parallel=SEQUENCE_PLAN if cuts else PLAN)
    workload, vision = workload_over(handles), handles["vision"]

    @task(batch_size=4, per_sample_mean=True)
    def look(batch):
        return (vision(batch) - 1).square().mean()

    def batches(number: int) -> dict:
        both = workload.batches(number)
        return {**both, "look": both["describe"]["seen"][:4]}

    return replace(workload, tasks=[*workload.tasks, look], batches=batches)


def combination(number: int) -> tuple[int, bool, Training]:
    """The number of ranks, whether a new task joins, and the training. Every setting comes once before one comes again,
    as far as there are enough ranks for its groups; every training has all degrees."""
    num_ranks = RANKS[number % len(RANKS)]
    choose = random.Random(number // 4)
    by_degree = [[setting for setting in SETTINGS if setting.degree == degree] for degree in (2, 4, 1)]
    shuffled = [choose.sample(settings, len(settings)) for settings in by_degree]
    settings = [setting for group in zip(*shuffled, strict=True) for setting in group][number % 4 * NUM_PLANS :]
    largest = 4 if num_ranks >= 4 else 2
    own = tuple(replace(setting, degree=min(setting.degree, largest)) for setting in settings[:NUM_PLANS])
    joins = number % 3 == 1
    return (
        num_ranks,
        joins,
        Training(
            workload=partial(three_tasks, cuts=number % 3 != 2),
            optimizer=adamw if number % 3 == 1 else sgd,
            options={"lr_scheduler": halving, "max_grad_norm": CLIP},
            fits=(Fit(steps=STEPS, changes=CHANGES[joins]),),
            tasks=("describe", "guess"),
            freezes="language.blocks.1",
            sharing="combined cut" if number % 3 != 2 else "combined",
            make_plans=partial(plans_of, own, number),
        ),
    )


@pytest.mark.parametrize("number", range(NUM_COMBINATIONS))
def test_every_combination_has_the_numbers_of_one_process(pool, number):
    num_ranks, joins, training = combination(number)
    answers = pool.run(num_ranks, train, training)
    assert_trained(answers)
    for answer in answers:
        assert answer.num_changes == NUM_PLANS - 1
        assert answer.tasks[-1] == {"describe", "guess", *["look"] * joins}
