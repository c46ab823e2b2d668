"""Policies: pure functions of what a scheduler may know: estimates, never true step times.

    price      ours: dual prices, repair, exchange; leases, quotas, deadlines
    crius      Crius (now Arena): requested cells, a downgrade search, upgrades, opportunism
    sia        Sia: goodput to the power of -1/2, normalised by each job's slowest cell
    gavel      Gavel: the requested count on any kind, time shares by LP
    backfill   EASY: later jobs run where they do not delay the first
    fcfs       first come, first served, on what was requested

`weighted-sia` is Sia's objective with our weights and without leases, to show what the weights contribute.
"""

from __future__ import annotations

from collections.abc import Mapping

from spindle.errors import FleetError
from spindle.fleet.policies.crius import crius
from spindle.fleet.policies.fixed import backfill, fcfs
from spindle.fleet.policies.gavel import fastest_rates, gavel, gavel_max_min
from spindle.fleet.policies.policy import Choice, Policy, Round
from spindle.fleet.policies.price import price
from spindle.fleet.policies.sia import sia, weighted_sia

POLICIES: Mapping[str, Policy] = {
    "price": price,
    "crius": crius,
    "sia": sia,
    "gavel": gavel,
    "gavel-max-min": gavel_max_min,
    "backfill": backfill,
    "fcfs": fcfs,
    "weighted-sia": weighted_sia,
}
EVENT_DRIVEN = frozenset({"crius", "backfill", "fcfs"})  # time alone changes nothing
REQUESTED_COUNTS = frozenset({"gavel", "gavel-max-min"})  # jobs get as many devices as they requested
COMPARED = ("price", "sia", "crius", "gavel", "backfill", "fcfs")


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise FleetError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]


__all__ = [
    "COMPARED",
    "EVENT_DRIVEN",
    "POLICIES",
    "REQUESTED_COUNTS",
    "Choice",
    "Policy",
    "Round",
    "fastest_rates",
    "policy_named",
]
