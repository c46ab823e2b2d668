"""From a plan to a finished one: simulated, checked, verified, beside its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spindle.plan import Plan, check
from spindle.profile import Profile
from spindle.program import lower, refuse_overfull, verify
from spindle.simulate import simulate


def simulated(plan: Plan, profile: Profile) -> tuple[Plan, NDArray[np.int64]]:
    """The plan with its simulated time, and the peak bytes of each rank, which may be more than fit."""
    timeline = simulate(lower(plan, profile), profile)
    return replace(plan, makespan_s=timeline.makespan_s), timeline.peak_bytes()


def scored(plan: Plan, profile: Profile) -> Plan:
    """The plan with its simulated time; refuses one whose memory does not fit after all."""
    timed, peak_bytes = simulated(plan, profile)
    refuse_overfull(peak_bytes, profile)
    return timed


def finished(plan: Plan, profile: Profile, bound_s: float) -> Plan:
    """The plan with its bound, after `check` and `verify`."""
    check(plan, profile)
    verify(lower(plan, profile), profile)
    return replace(plan, bound_s=bound_s)
