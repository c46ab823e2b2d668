"""Sia (SOSP'23): maximise the sum of 1.1 - (r a)^(-1/2) over jobs that run.

a is a cell's rate over that of the job's slowest cell; r = (age - restarts * cost) / (age + cost) where the cell
changes, else 1. The integer program is solved by our own solver instead of a MILP.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import ARRIVAL_S, NUM_REALLOCATIONS, REALLOC_S, FloatColumn
from spindle.fleet.policies.policy import Choice, Round, maximise
from spindle.fleet.utility import remaining_steps, weights

_ALLOCATED = 1.1
_LEAST_RESTART_FACTOR = 0.01


def sia(this_round: Round) -> Choice:
    return maximise(this_round, sia_utilities(this_round))


def weighted_sia(this_round: Round) -> Choice:
    columns = this_round.columns
    weight = weights(columns, this_round.options, remaining_steps(columns, this_round.now_s))
    return maximise(this_round, sia_utilities(this_round) * weight[columns.job_of_cell])


def sia_utilities(this_round: Round) -> FloatColumn:
    columns = this_round.columns
    if not len(columns.rate):
        return np.zeros(0)
    slowest = np.minimum.reduceat(np.append(columns.rate, np.inf), np.minimum(columns.first[:-1], len(columns.rate)))
    job = columns.job_of_cell
    age_s = np.maximum(0.0, this_round.now_s - columns.numbers[ARRIVAL_S])
    cost_s = columns.numbers[REALLOC_S]
    restarts = columns.numbers[NUM_REALLOCATIONS]
    factor = np.maximum((age_s - restarts * cost_s) / np.maximum(age_s + cost_s, 1e-9), _LEAST_RESTART_FACTOR)
    # A job that has never run has nothing to restart.
    factor = np.where(restarts == 0, 1.0, factor)[job]
    held = this_round.held
    factor[held[held >= 0]] = 1.0
    utility: FloatColumn = _ALLOCATED - (factor * columns.rate / slowest[job]) ** -0.5
    return utility
