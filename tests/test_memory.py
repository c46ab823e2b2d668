"""A limit of memory: plans keep to it, every tensor of a step is counted, and what cannot fit is told."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from budgets import train_within  # noqa: E402
from spindle.errors import OverBudgetError  # noqa: E402
from spindle.run.budget import Budget  # noqa: E402

PLENTY = 500_000_000


@pytest.fixture(scope="module")
def whole(pool):
    return pool.run(2, "train_within", PLENTY)[0]


def test_bytes_are_those_of_tensors_that_are_alive():
    before = torch.zeros(100)
    budget = Budget()
    budget.adopt([before, before[10:]])
    assert budget.num_bytes == 400
    with budget:
        one = torch.ones(50) + 1
        assert budget.num_bytes == 600
        half = one[:10]
        del one
        assert budget.num_bytes == 600
        del half
    assert budget.num_bytes == 400
    assert budget.peak_bytes == 800


def test_a_count_beyond_the_limit_is_an_error():
    with Budget(1000), pytest.raises(OverBudgetError, match="1,200 bytes of tensors are held, 200 more than the 1,000"):
        torch.zeros(300)


@pytest.mark.parametrize("share", [1.06, 0.85, 0.7, 0.6])
def test_a_training_keeps_to_its_limit_with_the_same_losses(pool, whole, share):
    limit = int(share * max(whole.predicted))
    found = pool.run(2, "train_within", limit)[0]
    assert max(found.counted) <= limit
    for counted, predicted in zip(found.counted, found.predicted, strict=True):
        # Steps free what has arrived, and what was sent, a little sooner than is predicted.
        assert 0.88 < counted / predicted < 1.1
    if share < 0.9:
        assert found.sharded or found.recomputed or found.rounds > 1
    for ours, theirs in zip(found.losses, whole.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_does_on_other_numbers_of_ranks(pool, num_ranks):
    plenty = pool.run(num_ranks, "train_within", PLENTY)[0]
    found = pool.run(num_ranks, "train_within", int(0.7 * max(plenty.predicted)))[0]
    for one in (plenty, found):
        for counted, predicted in zip(one.counted, one.predicted, strict=True):
            assert abs(counted / predicted - 1) < 0.1
    assert max(found.counted) <= 0.7 * max(plenty.predicted)


def test_what_fits_in_no_way_is_told_with_what_would():
    found = train_within(0, 1, 1_000_000)
    assert "bytes too many" in found.error
    assert "closest of all that were tried" in found.error
    assert "use devices of" in found.error
