"""From prices to an allocation: repair, then exchange.

At the prices of the dual every job takes its best cell. Where that oversubscribes a resource, cells are given up in
the order of utility lost per device. Then devices go to the job that gains most by them: free ones, or those of one
other job that loses less by a smaller cell, a cell of another kind, or none. A basic solution of the LP has at most one
fractional job per resource, so the result is close to the bound.

Columns as in `dual_prices`. `floor[job]` is a cell that the job never falls below, or -1; all floors fit together.

Rounds spend most of their time here: inner loops refuse candidates by one comparison where they can, and call functions
of many arrays (each argument is seven words) only for those that are left.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.dual_prices import FORBIDDEN
from spindle.jit import njit

_LEAST_GAIN = 1e-9


@njit(cache=True)
def best_cells(first, kind, limit, count, utility, required, held, prices):
    """The cell that each job takes at these prices, or -1; in doubt the one that it holds."""
    choice = np.full(len(first) - 1, -1, dtype=np.int64)
    for job in range(len(first) - 1):
        best = FORBIDDEN if required[job] else 0.0
        for cell in range(first[job], first[job + 1]):
            if utility[cell] == FORBIDDEN:
                continue
            price = prices[kind[cell]]
            if limit[cell] >= 0:
                price += prices[limit[cell]]
            value = utility[cell] - count[cell] * price
            if cell == held[job]:
                value += _LEAST_GAIN
            if value > best:
                best = value
                choice[job] = cell
    return choice


@njit(cache=True)
def take(cell, sign, kind, limit, count, free):
    if cell >= 0:
        free[kind[cell]] -= sign * count[cell]
        if limit[cell] >= 0:
            free[limit[cell]] -= sign * count[cell]


@njit(cache=True)
def fits_after(old, new, kind, limit, count, free):
    """Whether a job's change from one cell to another leaves no resource of the new cell oversubscribed."""
    if new < 0:
        return True
    num_free = free[kind[new]]
    if old >= 0 and kind[old] == kind[new]:
        num_free += count[old]
    if num_free < count[new]:
        return False
    if limit[new] >= 0:
        num_free = free[limit[new]]
        if old >= 0 and limit[old] == limit[new]:
            num_free += count[old]
        return num_free >= count[new]
    return True


@njit(cache=True)
def _repair(first, kind, limit, count, utility, floor, choice, free):
    """Give up cells until nothing is oversubscribed."""
    for _ in range(4 * len(choice) + 4):
        worst = -1
        for resource in range(len(free)):
            if free[resource] < 0 and (worst < 0 or free[resource] < free[worst]):
                worst = resource
        if worst < 0:
            return
        best = 1e300
        best_job, best_cell = -1, -1
        for job in range(len(choice)):
            old = choice[job]
            if old < 0 or (kind[old] != worst and limit[old] != worst) or old == floor[job]:
                continue
            lowest = first[job] if floor[job] >= 0 else first[job] - 1  # the last one stands for "none"
            for candidate in range(lowest, first[job + 1]):
                new = candidate if candidate >= first[job] else -1
                freed = count[old]
                if new >= 0:
                    if kind[new] == worst or limit[new] == worst:
                        freed -= count[new]
                    is_moved = new != floor[job] and kind[new] != kind[old]
                    if utility[new] == FORBIDDEN or freed <= 0 or (is_moved and count[new] > free[kind[new]]):
                        continue
                    if is_moved and not fits_after(old, new, kind, limit, count, free):
                        continue
                loss = utility[old] - (utility[new] if new >= 0 else 0.0)
                rate = loss / min(freed, -free[worst])
                if rate < best:
                    best = rate
                    best_job, best_cell = job, new
        if best_job < 0:
            break
        take(choice[best_job], -1, kind, limit, count, free)
        choice[best_job] = best_cell
        take(best_cell, 1, kind, limit, count, free)
    # The floors, whose sum fits.
    for job in range(len(choice)):
        take(choice[job], -1, kind, limit, count, free)
        choice[job] = floor[job]
        take(choice[job], 1, kind, limit, count, free)


@njit(cache=True)
def _losses(first, kind, limit, count, utility, floor, choice, free, loss, loser, left):
    """loss[k, d, 0]: the least utility that a job loses by freeing d devices of kind k or more, loss[k, d, 1] that of
    another job; `loser` are these jobs, `left` the cells that are left to them."""
    loss[:] = 1e300
    loser[:] = -1
    for job in range(len(choice)):
        old = choice[job]
        if old < 0 or old == floor[job]:
            continue
        resource, size, value = kind[old], count[old], utility[old]
        if floor[job] < 0 and value < loss[resource, size, 1]:
            _remember(loss[resource, size], loser[resource, size], left[resource, size], value, job, -1)
        for new in range(first[job], first[job + 1]):
            freed = size
            if kind[new] == resource:
                freed -= count[new]
                if freed <= 0:
                    continue
            elif count[new] > free[kind[new]]:
                continue
            lost = value - utility[new]  # more than any, if this cell is forbidden
            if lost < loss[resource, freed, 1] and fits_after(old, new, kind, limit, count, free):
                _remember(loss[resource, freed], loser[resource, freed], left[resource, freed], lost, job, new)
    for resource in range(loss.shape[0]):
        for freed in range(loss.shape[1] - 2, 0, -1):
            for place in range(2):
                lost = loss[resource, freed + 1, place]
                if lost < loss[resource, freed, 1]:
                    job, new = loser[resource, freed + 1, place], left[resource, freed + 1, place]
                    _remember(loss[resource, freed], loser[resource, freed], left[resource, freed], lost, job, new)


@njit(cache=True)
def _remember(loss, loser, left, lost, job, new):
    """Enter a candidate into the two least losses, of different jobs."""
    if lost < loss[0]:
        if loser[0] != job:
            loss[1], loser[1], left[1] = loss[0], loser[0], left[0]
        loss[0], loser[0], left[0] = lost, job, new
    elif lost < loss[1] and loser[0] != job:
        loss[1], loser[1], left[1] = lost, job, new


@njit(cache=True)
def _exchange(first, kind, limit, count, utility, floor, choice, free, num_kinds, max_exchanges):
    """Give devices to the job that gains most, free ones or those of another job, while that gains."""
    size = 1
    for cell in range(len(count)):
        size = max(size, count[cell] + 1)
    loss = np.empty((num_kinds, size, 2))
    loser = np.empty((num_kinds, size, 2), dtype=np.int64)
    left = np.empty((num_kinds, size, 2), dtype=np.int64)
    for _ in range(max_exchanges):
        _losses(first, kind, limit, count, utility, floor, choice, free, loss, loser, left)
        best = _LEAST_GAIN
        best_job, best_cell, giver, giver_cell = -1, -1, -1, -1
        for job in range(len(choice)):
            old = choice[job]
            current = utility[old] if old >= 0 else 0.0
            for new in range(first[job], first[job + 1]):
                gain = utility[new] - current
                if gain <= best or utility[new] == FORBIDDEN:
                    continue
                missing = count[new] - free[kind[new]]
                if old >= 0 and kind[old] == kind[new]:
                    missing -= count[old]
                if missing <= 0:
                    if fits_after(old, new, kind, limit, count, free):
                        best = gain
                        best_job, best_cell, giver = job, new, -1
                    continue
                if limit[new] >= 0:
                    num_free = free[limit[new]]
                    if old >= 0 and limit[old] == limit[new]:
                        num_free += count[old]
                    if num_free < count[new]:
                        continue
                place = 1 if loser[kind[new], missing, 0] == job else 0
                lost = loss[kind[new], missing, place]
                other_job, other_cell = loser[kind[new], missing, place], left[kind[new], missing, place]
                if other_job >= 0 and gain - lost > best:
                    # Both may want the same free devices of another kind or limit.
                    take(choice[other_job], -1, kind, limit, count, free)
                    take(other_cell, 1, kind, limit, count, free)
                    if fits_after(old, new, kind, limit, count, free):
                        best = gain - lost
                        best_job, best_cell, giver, giver_cell = job, new, other_job, other_cell
                    take(other_cell, -1, kind, limit, count, free)
                    take(choice[other_job], 1, kind, limit, count, free)
        if best_job < 0:
            return
        if giver >= 0:
            take(choice[giver], -1, kind, limit, count, free)
            choice[giver] = giver_cell
            take(giver_cell, 1, kind, limit, count, free)
        take(choice[best_job], -1, kind, limit, count, free)
        choice[best_job] = best_cell
        take(best_cell, 1, kind, limit, count, free)


@njit(cache=True)
def allocate(first, kind, limit, count, utility, floor, required, held, capacity, num_kinds, prices, max_exchanges):
    """The cell of each job, or -1, and the sum of their utilities."""
    choice = best_cells(first, kind, limit, count, utility, required, held, prices)
    free = capacity.copy()
    for job in range(len(choice)):
        take(choice[job], 1, kind, limit, count, free)
    _repair(first, kind, limit, count, utility, floor, choice, free)
    _exchange(first, kind, limit, count, utility, floor, choice, free, num_kinds, max_exchanges)
    total = 0.0
    for job in range(len(choice)):
        if choice[job] >= 0:
            total += utility[choice[job]]
    return choice, total
