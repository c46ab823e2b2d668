"""Ours: one price per kind of device, then repair and exchange (`dual_prices`, `exchange`).

Some jobs are promised devices before prices are made: those with a promised deadline, urgent ones, those with a lease,
and those of teams that use their guarantee. What they are promised is a floor: a cell that they get at least.
"""

from __future__ import annotations

from spindle.fleet.floors import floors_of
from spindle.fleet.policies.policy import Choice, Round, maximise
from spindle.fleet.utility import utilities


def price(given: Round) -> Choice:
    utility = utilities(given.columns, given.options, given.now_s)
    floor, leases = floors_of(given, utility)
    choice = maximise(given, utility, floor)
    choice.leases = leases
    return choice
