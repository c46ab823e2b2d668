"""The random states that datasets and loaders draw from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = tuple[Any, Any, Any]


def random_state() -> RandomState:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def is_same(state: RandomState, reference: RandomState) -> bool:
    return (
        torch.equal(state[0], reference[0])
        and state[1] == reference[1]
        and np.array_equal(state[2][1], reference[2][1])
        and state[2][2:] == reference[2][2:]
    )


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the random state afterwards."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_all(seed: int) -> None:
    """Seed all of them."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
