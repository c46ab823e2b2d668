"""A sample of `python -m tests.fleet_faults`, which has them all: a live fleet that is disturbed again and again."""

from __future__ import annotations

import sys

import pytest

from fleet_faults import MOVE, STOP, Injection, Series, Undisturbed, judged, run_series

pytest.importorskip("ray", reason="live fleets need Ray: pip install 'spindle-train[fleet]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

INJECTIONS = (
    Injection(faults=("killed scheduler", "clock"), phase="written", action=MOVE),
    Injection(faults=("killed rank", "full disk"), phase="group removed", action=STOP),
)


def test_two_jobs_of_a_fleet_that_is_disturbed_end_as_if_nothing_had_happened():
    series = Series(name="sample", injections=INJECTIONS, steps=300)
    row = judged(series, run_series(series), Undisturbed().weights(series.steps))
    assert row["problems"] == []
    assert len(row["faults"]) == len(INJECTIONS)
