"""A Trainer with planner `colocate`: items of microbatches are encoded in parts on any rank. The numbers are those of a
plain PyTorch loop in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from trainings import assert_trained, train  # noqa: E402
from vlm import vlm_training  # noqa: E402


def train_vlm(rank, num_ranks, plan="colocate", **options):
    return train(rank, num_ranks, vlm_training(**options), plan)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_images_are_encoded_in_parts_on_any_rank(pool, num_ranks):
    answers = pool.run(num_ranks, train_vlm)
    assert_trained(answers)
    assert all(answer.pipelined for answer in answers)
