"""Tests by what they need: unit, laws (hypothesis), golden, run (processes of this machine). None needs a GPU."""

import pytest
from hypothesis import settings

settings.register_profile("spindle", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("spindle")


@pytest.fixture(scope="module")
def pool():
    """Processes that the tests of a file share."""
    from pool import Pool  # needs torch

    one = Pool()
    yield one
    one.close()
