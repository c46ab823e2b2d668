"""Tests by what they need, each kind in a folder: unit (nothing), laws (hypothesis), golden (checked-in plans), run
(processes of this machine), gpu (skipped without one). Modules beside this file are for all of them."""

import gc

import pytest
from hypothesis import settings

from sweeps import RUNS_ALL

settings.register_profile("spindle", deadline=None, derandomize=True, max_examples=40 if RUNS_ALL else 20)
settings.load_profile("spindle")


# Workers take whole files, in this order: the last ones to end must be short. The others follow in theirs.
SLOWEST = (
    "test_run.py",
    "test_failures.py",
    "test_hf.py",
    "test_tensor.py",
    "test_pipeline_training.py",
    "test_composites.py",
    "test_readme.py",
    "test_examples.py",
    "test_sharded.py",
    "test_from_transformers.py",
    "test_agreement.py",
    "test_sequence.py",
    "test_memory.py",
    "test_combined.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(SLOWEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported out of the full collections of a Trainer that drops a plan."""
    gc.freeze()


@pytest.fixture(scope="session")
def pool():
    """Processes that tests share, with what they know about the workloads they have seen."""
    from pool import Pool  # needs torch

    processes = Pool()
    yield processes
    processes.close()
