"""From prices to an allocation: repair, then exchange.

At the prices of the dual every job takes its best cell. Where that oversubscribes a resource, cells are given up in
the order of utility lost per device. Then devices go to the job that gains most by them: free ones, or those of one
other job that loses less by a smaller cell, a cell of another kind, or none. A basic solution of the LP has at most one
fractional job per resource, so the result is close to the bound.

Columns as in `dual_prices`. `floor[job]` is a cell that the job never falls below, or -1; all floors fit together.
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
                if new >= 0 and utility[new] == FORBIDDEN:
                    continue
                freed = count[old]
                if new >= 0 and (kind[new] == worst or limit[new] == worst):
                    freed -= count[new]
                if freed <= 0 or (
                    new >= 0
                    and new != floor[job]
                    and kind[new] != kind[old]
                    and not fits_after(old, new, kind, limit, count, free)
                ):
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
def _losses(
    first, kind, limit, count, utility, floor, choice, free, loss, loss_job, loss_cell, second, second_job, second_cell
):
    """loss[k, d]: the least utility that one job loses by freeing d devices of kind k or more; `second` is the least of
    another job."""
    loss[:] = 1e300
    second[:] = 1e300
    loss_job[:] = -1
    second_job[:] = -1
    size = loss.shape[1]
    for job in range(len(choice)):
        old = choice[job]
        if old < 0 or old == floor[job]:
            continue
        lowest = first[job] if floor[job] >= 0 else first[job] - 1
        for candidate in range(lowest, first[job + 1]):
            new = candidate if candidate >= first[job] else -1
            if new == old or (new >= 0 and utility[new] == FORBIDDEN):
                continue
            if not fits_after(old, new, kind, limit, count, free):
                continue
            freed = count[old]
            if new >= 0 and kind[new] == kind[old]:
                freed -= count[new]
            if freed <= 0:
                continue
            lost = utility[old] - (utility[new] if new >= 0 else 0.0)
            _remember(
                kind[old],
                min(freed, size - 1),
                lost,
                job,
                new,
                loss,
                loss_job,
                loss_cell,
                second,
                second_job,
                second_cell,
            )
    for resource in range(loss.shape[0]):
        for freed in range(size - 2, 0, -1):
            for other in (0, 1):
                if other == 0:
                    lost, job, new = (
                        loss[resource, freed + 1],
                        loss_job[resource, freed + 1],
                        loss_cell[resource, freed + 1],
                    )
                else:
                    lost, job, new = (
                        second[resource, freed + 1],
                        second_job[resource, freed + 1],
                        second_cell[resource, freed + 1],
                    )
                if job >= 0:
                    _remember(
                        resource, freed, lost, job, new, loss, loss_job, loss_cell, second, second_job, second_cell
                    )


@njit(cache=True)
def _remember(resource, freed, lost, job, new, loss, loss_job, loss_cell, second, second_job, second_cell):
    """Enter a candidate into the two least losses, of different jobs."""
    if lost < loss[resource, freed]:
        if loss_job[resource, freed] != job:
            second[resource, freed] = loss[resource, freed]
            second_job[resource, freed] = loss_job[resource, freed]
            second_cell[resource, freed] = loss_cell[resource, freed]
        loss[resource, freed] = lost
        loss_job[resource, freed] = job
        loss_cell[resource, freed] = new
    elif lost < second[resource, freed] and loss_job[resource, freed] != job:
        second[resource, freed] = lost
        second_job[resource, freed] = job
        second_cell[resource, freed] = new


@njit(cache=True)
def _exchange(first, kind, limit, count, utility, floor, choice, free, num_kinds, max_exchanges):
    """Give devices to the job that gains most, free ones or those of another job, while that gains."""
    size = 1
    for cell in range(len(count)):
        size = max(size, count[cell] + 1)
    loss = np.empty((num_kinds, size))
    second = np.empty((num_kinds, size))
    loss_job = np.empty((num_kinds, size), dtype=np.int64)
    loss_cell = np.empty((num_kinds, size), dtype=np.int64)
    second_job = np.empty((num_kinds, size), dtype=np.int64)
    second_cell = np.empty((num_kinds, size), dtype=np.int64)
    for _ in range(max_exchanges):
        _losses(
            first,
            kind,
            limit,
            count,
            utility,
            floor,
            choice,
            free,
            loss,
            loss_job,
            loss_cell,
            second,
            second_job,
            second_cell,
        )
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
                lost, other_job, other_cell = (
                    loss[kind[new], missing],
                    loss_job[kind[new], missing],
                    loss_cell[kind[new], missing],
                )
                if other_job == job:
                    lost, other_job, other_cell = (
                        second[kind[new], missing],
                        second_job[kind[new], missing],
                        second_cell[kind[new], missing],
                    )
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
