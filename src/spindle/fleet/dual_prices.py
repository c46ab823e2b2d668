"""Prices of devices: the Lagrangian dual of one round.

Each job takes at most one cell, no resource is oversubscribed, and the sum of utilities is to be largest. A resource is
a kind of device, or the limit of a team on a kind. With a price p_r per device, every job takes the cell with the
largest utility minus what its devices cost, or none; and

    bound(p) = sum_r p_r capacity_r + sum_j max(0, max_c (u_c - n_c p))

is at least the utility of any allocation, for any prices. It is convex in p. Coordinate by coordinate, the best price
of a resource is the least at which demand does not exceed its capacity. Coordinate descent may stall where bound(p) is
not smooth; it stays an upper bound.

Columns: cells of job j are `first[j]` to `first[j + 1]`; each has a kind (resource), a limit (resource, or -1), a count
and a utility. `required[j]` says that the job must take one of its cells; cells that it may not take have utility
FORBIDDEN.
"""

from __future__ import annotations

import numpy as np

from spindle.jit import njit

FORBIDDEN = -1e300


@njit(cache=True)
def bound_at(first, kind, limit, count, utility, required, capacity, prices):
    """The dual value: no allocation has a larger utility."""
    total = 0.0
    for resource in range(len(capacity)):
        total += prices[resource] * capacity[resource]
    for job in range(len(first) - 1):
        best = FORBIDDEN if required[job] else 0.0
        for cell in range(first[job], first[job + 1]):
            price = prices[kind[cell]]
            if limit[cell] >= 0:
                price += prices[limit[cell]]
            best = max(best, utility[cell] - count[cell] * price)
        total += best
    return total


@njit(cache=True)
def _demand(starts, counts, gains, num_jobs, price):
    """Devices that jobs take at a price: cells of job i are starts[i] to starts[i + 1], gains are over their next
    best."""
    total = 0
    for job in range(num_jobs):
        best = 0.0
        num_devices = 0
        for cell in range(starts[job], starts[job + 1]):
            value = gains[cell] - counts[cell] * price
            if value > best:
                best = value
                num_devices = counts[cell]
        total += num_devices
    return total


@njit(cache=True)
def _least_price(first, kind, limit, count, utility, required, capacity, prices, resource, starts, counts, gains):
    """The least price of one resource at which demand does not exceed capacity, all others being fixed.

    The last three arguments are scratch space.
    """
    num_jobs = 0
    size = 0
    most = 0.0
    reserved = 0
    for job in range(len(first) - 1):
        rest = FORBIDDEN if required[job] else 0.0
        begin = size
        for cell in range(first[job], first[job + 1]):
            if utility[cell] == FORBIDDEN:
                continue
            price = 0.0
            uses = False
            if kind[cell] == resource:
                uses = True
            else:
                price += prices[kind[cell]]
            if limit[cell] == resource:
                uses = True
            elif limit[cell] >= 0:
                price += prices[limit[cell]]
            value = utility[cell] - count[cell] * price
            if uses:
                counts[size] = count[cell]
                gains[size] = value
                size += 1
            elif value > rest:
                rest = value
        if rest == FORBIDDEN:
            # The job must take one of these cells: the smallest is reserved, larger ones gain over it.
            smallest = begin
            for cell in range(begin, size):
                if (counts[cell], -gains[cell]) < (counts[smallest], -gains[smallest]):
                    smallest = cell
            if begin == size:
                continue
            base, rest = counts[smallest], gains[smallest]
            reserved += base
            for cell in range(begin, size):
                counts[cell] -= base
                if counts[cell] == 0:
                    gains[cell] = FORBIDDEN
        # Cells that lose to what the job can have elsewhere are never taken.
        end = begin
        for cell in range(begin, size):
            if gains[cell] > rest:
                gains[end] = gains[cell] - rest
                counts[end] = counts[cell]
                most = max(most, gains[end] / counts[end])
                end += 1
        size = end
        if end > begin:
            starts[num_jobs] = begin
            num_jobs += 1
    starts[num_jobs] = size
    supply = capacity[resource] - reserved
    if _demand(starts, counts, gains, num_jobs, 0.0) <= supply:
        return 0.0
    low, high = 0.0, max(most, 1e-12)
    warm = prices[resource]
    if 0.0 < warm < high:  # most of the time the price has hardly moved
        for width in (0.003, 0.03, 0.3):
            below, above = warm * (1 - width), min(high, warm * (1 + width))
            over_below = _demand(starts, counts, gains, num_jobs, below) > supply
            if over_below:
                low = max(low, below)
            else:
                high = min(high, below)
                continue
            if _demand(starts, counts, gains, num_jobs, above) <= supply:
                high = above
                break
            low = above
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if _demand(starts, counts, gains, num_jobs, middle) > supply:
            low = middle
        else:
            high = middle
    return high


@njit(cache=True)
def descend(first, kind, limit, count, utility, required, capacity, prices, max_sweeps):
    """Prices that (nearly) minimise the bound, starting from `prices`; returns them with the bound."""
    best_prices = prices.copy()
    best = bound_at(first, kind, limit, count, utility, required, capacity, prices)
    starts = np.empty(len(first) + 1, dtype=np.int64)
    counts = np.empty(len(count), dtype=np.int64)
    gains = np.empty(len(count), dtype=np.float64)
    current = prices.copy()
    for _ in range(max_sweeps):
        before = best
        for resource in range(len(capacity)):
            current[resource] = _least_price(
                first, kind, limit, count, utility, required, capacity, current, resource, starts, counts, gains
            )
        value = bound_at(first, kind, limit, count, utility, required, capacity, current)
        if value < best:
            best = value
            best_prices = current.copy()
        if before - best <= 1e-4 * abs(best):
            break
    return best_prices, best
