"""Sweeps: CI runs a spread of their cases; SPINDLE_ALL_CASES=1 runs all, and so do the tests on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

ALL_VARIABLE = "SPINDLE_ALL_CASES"
RUNS_ALL = ALL_VARIABLE in os.environ or os.environ.get("SPINDLE_TEST_BACKEND", "gloo") != "gloo"

Case = TypeVar("Case")
Value = TypeVar("Value")


def spread(cases: Iterable[Case], step: int) -> list[Case]:
    """Every `step`-th case, or all of them."""
    return list(cases)[:: 1 if RUNS_ALL else step]


def alternating(cases: Iterable[Case], first: Value, second: Value) -> list[tuple[Case, Value]]:
    """Each case with the first or the second value in turn; where all are run, with both."""
    values = (first, second)
    listed = list(cases)
    return chosen(
        [(case, values[number % 2]) for number, case in enumerate(listed)],
        *[(case, values[1 - number % 2]) for number, case in enumerate(listed)],
    )


def chosen(cases: Iterable[Case], *more: Case) -> list[Case]:
    """Some cases, and the others only where all are run."""
    return [*cases, *(more if RUNS_ALL else ())]
