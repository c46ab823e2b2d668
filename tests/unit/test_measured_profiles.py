"""Profiles that were measured on an H200, one share of it for each device: planned and simulated without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from spindle.planners import PlanOptions, graph_bound_s, make_plan
from spindle.profile.file import read_profile
from spindle.program import lower, verify
from spindle.simulate import simulate
from sweeps import spread

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "profiles"
NAMES = sorted(path.name for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_measured_profile_says_where_it_was_measured(name):
    profile = read_profile(FOLDER / name)
    assert "H200" in profile.measured_on
    assert profile.cluster.num_devices == 8
    assert profile.host_rates[-1] == 1.0  # its curves are those of busy neighbours


@pytest.mark.parametrize("name", spread(NAMES, 3))
def test_wavefront_is_never_behind_and_nobody_is_below_the_bound(name):
    profile, times = read_profile(FOLDER / name), {}
    for planner in ("wavefront", "paper", "sequential", "distmm", "task-level"):
        program = lower(make_plan(profile, planner, PlanOptions(evaluations=20_000)), profile)
        verify(program, profile)
        times[planner] = simulate(program, profile).makespan_s
    assert times["wavefront"] == min(times.values())
    assert min(times.values()) >= graph_bound_s(profile)
