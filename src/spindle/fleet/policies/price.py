"""Ours: one price per kind of device, then repair and exchange (`dual_prices`, `exchange`).

Some jobs are promised devices before prices are made: those with a promised deadline, urgent ones, those with a lease,
and those of teams that use their guarantee. What they are promised is a floor: a cell that they get at least.
"""

from __future__ import annotations

from spindle.fleet.floors import floors_of
from spindle.fleet.policies.policy import Choice, Round, maximise
from spindle.fleet.utility import utilities


def price(this_round: Round) -> Choice:
    utility = utilities(this_round.columns, this_round.options, this_round.now_s)
    floor, leases = floors_of(this_round, utility)
    choice = maximise(this_round, utility, floor)
    choice.leases, choice.floor = leases, floor
    return choice
