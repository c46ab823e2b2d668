"""Simulated annealing over orders: moves of single tokens and exchanges of microbatches, compiled.

The paper searches a tree (PipeWeaver §4.1); annealing alone is as good (experiments/LOG.md).
"""

from __future__ import annotations

import numpy as np

from spindle.jit import njit
from spindle.planners.anneal import DONE, STOP
from spindle.planners.piece_moves import random_below, random_share
from spindle.planners.pipeline.evaluate import evaluate

# Cumulative shares of the kinds of moves; the remaining share moves single tokens.
EXCHANGE_BELOW = 0.2
BASE_BELOW = 0.22

# Mean jump of a token, counted in tokens of its direction; a share FAR of the jumps goes anywhere.
MEAN_JUMP = 4.0
FAR = 0.3


@njit(cache=True, nogil=True)
def _exchange(load, order, place_of, state):
    """Exchange the places of two microbatches, group by group, as far as both have groups."""
    microbatches = load.table.serial_starts.size - 1
    first_microbatch = random_below(state, microbatches)
    second_microbatch = random_below(state, microbatches)
    if first_microbatch == second_microbatch:
        return
    tokens = order.size
    for place in range(tokens):
        place_of[order[place]] = place
    # Match groups from the last one: if only one of them has an encoder, their language models correspond.
    groups = tokens // 2
    first = groups - 1
    second = groups - 1
    while True:
        while first >= 0 and load.microbatch_of[first] != first_microbatch:
            first -= 1
        while second >= 0 and load.microbatch_of[second] != second_microbatch:
            second -= 1
        if first < 0 or second < 0:
            return
        for direction in range(2):
            a = 2 * first + direction
            b = 2 * second + direction
            order[place_of[a]] = b
            order[place_of[b]] = a
        first -= 1
        second -= 1


@njit(cache=True, nogil=True)
def _jump(order, state):
    """Move a token past some others of its direction, the only ones that its priority is compared with."""
    tokens = order.size
    place = random_below(state, tokens)
    token = order[place]
    direction = token & 1
    if random_share(state) < FAR:
        left = 1 + random_below(state, tokens // 2)
    else:
        left = 1
        while random_share(state) < 1.0 - 1.0 / MEAN_JUMP:
            left += 1
    step = 1 if random_share(state) < 0.5 else -1
    while left > 0 and 0 <= place + step < tokens:
        passed = order[place + step]
        order[place] = passed
        place += step
        if passed & 1 == direction:
            left -= 1
    order[place] = token


@njit(cache=True, nogil=True)
def anneal_order(load, scratch, bound, seed, evaluations, hot, cold, control, best_order, best):
    """Anneal from the best known order; updates `best_order` and `best` [makespan, base]. Temperatures fall from `hot`
    to `cold`, as shares of the makespan. Returns (evaluations, makespan) of every improvement."""
    state = np.array([seed * 2 + 1], np.uint64)
    for _ in range(16):
        random_share(state)
    tokens = best_order.size
    current = best_order.copy()
    order = best_order.copy()
    place_of = np.empty(tokens, np.int64)
    makespan = best[0]
    base = best[1]
    num_bases = load.base_gate.size
    record = np.empty((evaluations + 1, 2), np.int64)
    num_records = 0
    done = 0
    while done < evaluations and best[0] > bound:
        # A neighbour of the current order: two microbatches exchanged, another base, or a token moved.
        temperature = hot * (cold / hot) ** (done / evaluations)
        order[:] = current
        new_base = base
        kind = random_share(state)
        if kind < EXCHANGE_BELOW:
            _exchange(load, order, place_of, state)
        elif kind < BASE_BELOW and num_bases > 1:
            new_base = random_below(state, num_bases)
        else:
            _jump(order, state)
        value = evaluate(load, new_base, order, scratch)
        done += 1
        # Metropolis: shorter makespans are always accepted, longer ones with a probability that falls with the
        # difference and with the temperature.
        if value <= makespan - np.log(1.0 - random_share(state)) * temperature * best[0]:
            makespan = value
            base = new_base
            current[:] = order
        if value < best[0]:
            best[0] = value
            best[1] = new_base
            best_order[:] = order
            record[num_records, 0] = done
            record[num_records, 1] = value
            num_records += 1
        control[DONE] = done
        if control[STOP]:
            break
    return record[:num_records]
