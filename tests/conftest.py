"""Tests by what they need: unit, laws (hypothesis), golden, run (processes of this machine). None needs a GPU."""

import pytest
from hypothesis import settings

settings.register_profile("spindle", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("spindle")


@pytest.fixture(scope="session")
def pool():
    """Processes that tests share, with what they know about the workloads they have seen."""
    from pool import Pool  # needs torch

    one = Pool()
    yield one
    one.close()
