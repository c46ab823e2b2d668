"""A sample of `python -m tests.faults`, which has them all: one training that is disturbed again and again."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

from faults import Fault, Job, Undisturbed, judged, run_job, signalled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

FAULTS = (
    signalled("KILL", "forward", 0),
    signalled("KILL", "loading", 1),  # while it recovers
    signalled("STOP", "sync", 1),
    Fault(action="flip", point="update", at=0, file=3, tenth=5),
    signalled("KILL", "writing", 1),
    Fault(action="full disk", point="writing", at=2),
    signalled("KILL", "renaming", 0),
    signalled("TERM", "replanning", "launcher"),
    signalled("KILL", "removing", 2),
    Fault(action="raise", point="reading", at=1),
)


def test_a_training_that_is_disturbed_again_and_again_ends_with_the_same_bits():
    job = Job(name="sample", kind="sharded", faults=FAULTS)
    row = judged(job, run_job(job), Undisturbed().parameters(job))
    assert row["problems"] == []
    assert len(row["faults"]) == len(FAULTS)
