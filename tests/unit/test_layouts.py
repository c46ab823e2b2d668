"""A few of the random layouts of `python -m tests.layouts`."""

from __future__ import annotations

import pytest

from layouts import outcome_of


@pytest.mark.parametrize("number", [0, 1, 2, 3, 82, 183, 20001, 20002, 20003])
def test_a_random_layout_has_plans_without_deadlock_at_every_memory_that_admits_one(number):
    outcome = outcome_of(number)
    assert outcome.error is None
    assert outcome.num_plans
