"""The whole product of what plans may do (optimizers in shards, tensor degrees, rounds, recomputation) with tasks that
change, on two to six gloo processes: the numbers of one process.

Here are two trainings of six plans each; SPINDLE_COMBINATIONS=40 asks for as many.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from combined import NUM_PLANS, SETTINGS, Combination  # noqa: E402

RANKS = (4, 2, 6, 3, 5)
NUM_COMBINATIONS = int(os.environ.get("SPINDLE_COMBINATIONS", "2"))


def combination_of(number: int) -> tuple[int, Combination]:
    """Every setting comes once before one comes again, as far as there are enough ranks for its groups; every training
    has all degrees."""
    num_ranks = RANKS[number % len(RANKS)]
    choose = random.Random(number // 4)
    by_degree = [[one for one in SETTINGS if one.degree == degree] for degree in (2, 4, 1)]
    settings = [
        one for some in zip(*(choose.sample(each, len(each)) for each in by_degree), strict=True) for one in some
    ]
    own = settings[number % 4 * NUM_PLANS :][:NUM_PLANS]
    largest = 4 if num_ranks >= 4 else 2
    return num_ranks, Combination(
        seed=number,
        settings=tuple(one if one.degree <= largest else replace(one, degree=largest) for one in own),
        cuts=number % 3 != 2,
        joins=number % 3 == 1,
        optimizer="adamw" if number % 3 == 1 else "sgd",
    )


@pytest.mark.parametrize("number", range(NUM_COMBINATIONS))
def test_every_combination_has_the_numbers_of_one_process(pool, number):
    num_ranks, combination = combination_of(number)
    answers = pool.run(num_ranks, "combine", combination)
    for one in answers:
        assert one.loss < 1e-9, combination
        assert one.parameter < 1e-9, (one.worst, combination)
        assert one.num_changes == NUM_PLANS - 1
        assert one.tasks[-1] == {"describe", "guess", *["look"] * combination.joins}
