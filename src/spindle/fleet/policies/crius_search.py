"""Compiled searches of Crius: the downgrade search of `fit`, and upgrades.

Columns and resources as in `dual_prices`; `share` is the normalised rate of a cell (below 0: not allowed), `least[job]`
the smallest count that a job may be halved to. A branch is the list of changes (job, cell) that leads to it.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.exchange import fits_after, take
from spindle.jit import njit


@njit(cache=True)
def _cell_with(first, kind, count, share, job, wanted_kind, wanted_count):
    for cell in range(first[job], first[job + 1]):
        if kind[cell] == wanted_kind and count[cell] == wanted_count and share[cell] >= 0:
            return cell
    return -1


@njit(cache=True)
def _cheapest_halving(first, kind, limit, count, share, least, cells, resource):
    """The job on a kind, or within a limit, that loses least by half of its devices."""
    best, best_job, best_cell = 1e300, -1, -1
    for job in range(len(cells)):
        cell = cells[job]
        if cell < 0 or count[cell] // 2 < least[job] or count[cell] < 2:
            continue
        if kind[cell] != resource and limit[cell] != resource:
            continue
        half = _cell_with(first, kind, count, share, job, kind[cell], count[cell] // 2)
        if half >= 0 and share[cell] - share[half] < best:
            best, best_job, best_cell = share[cell] - share[half], job, half
    return best_job, best_cell


@njit(cache=True)
def _best_change_of_kind(first, kind, limit, count, share, cells, free, target_job):
    """The job that gains most (loses least) by as many devices of another kind that has them."""
    best, best_job, best_cell = -1e300, -1, -1
    for job in range(len(cells)):
        cell = cells[job]
        if cell < 0:
            continue
        for new in range(first[job], first[job + 1]):
            if kind[new] == kind[cell] or count[new] != count[cell] or share[new] < 0:
                continue
            if job != target_job and not fits_after(cell, new, kind, limit, count, free):
                continue
            if share[new] - share[cell] > best:
                best, best_job, best_cell = share[new] - share[cell], job, new
    return best_job, best_cell


@njit(cache=True)
def change(kind, limit, count, cells, free, job, new):
    """Give a job another cell, or none (-1)."""
    take(cells[job], -1, kind, limit, count, free)
    cells[job] = new
    take(new, 1, kind, limit, count, free)


@njit(cache=True)
def fit(first, kind, limit, count, share, least, target_job, target, cells, free, num_kinds, depth):
    """Search for changes after which the target fits; applies the branch with the largest total rate.

    Changes are a halving on each kind, one within the target's limit if it has one, and a change of kind.
    """
    num_halvings = num_kinds + 1 if limit[target] >= 0 else num_kinds
    width = num_halvings + 1
    most = 1
    for _ in range(depth):
        most = most * width + 1
    parents = np.empty(most, dtype=np.int64)
    jobs = np.empty(most, dtype=np.int64)
    new_cells = np.empty(most, dtype=np.int64)
    size, level_begin = 1, 0
    parents[0] = -1
    best_gain, best_leaf = -1e300, -1
    work, num_free = cells.copy(), free.copy()
    path_job, path_old = np.empty(depth + 1, dtype=np.int64), np.empty(depth + 1, dtype=np.int64)
    change(kind, limit, count, work, num_free, target_job, target)  # oversubscribed until a leaf is feasible
    for _ in range(depth):
        level_end = size
        for node in range(level_begin, level_end):
            # Replay the changes of this branch.
            length, walk = 0, node
            while walk > 0:
                length += 1
                walk = parents[walk]
            walk, position = node, length
            while walk > 0:
                position -= 1
                path_job[position] = walk
                walk = parents[walk]
            for position in range(length):
                step = path_job[position]
                path_old[position] = work[jobs[step]]
                change(kind, limit, count, work, num_free, jobs[step], new_cells[step])
            for branch in range(width):
                if branch < num_halvings:
                    resource = branch if branch < num_kinds else limit[target]
                    job, new = _cheapest_halving(first, kind, limit, count, share, least, work, resource)
                else:
                    job, new = _best_change_of_kind(first, kind, limit, count, share, work, num_free, target_job)
                if job < 0:
                    continue
                parents[size], jobs[size], new_cells[size] = node, job, new
                old = work[job]
                change(kind, limit, count, work, num_free, job, new)
                feasible = True
                for each in range(len(num_free)):
                    if num_free[each] < 0:
                        feasible = False
                if feasible:
                    gain = 0.0
                    for row in range(len(work)):
                        if work[row] != cells[row]:
                            gain += share[work[row]] if work[row] >= 0 else 0.0
                            gain -= share[cells[row]] if cells[row] >= 0 else 0.0
                    if gain > best_gain:
                        best_gain, best_leaf = gain, size
                change(kind, limit, count, work, num_free, job, old)
                size += 1
            for position in range(length - 1, -1, -1):
                change(kind, limit, count, work, num_free, jobs[path_job[position]], path_old[position])
        level_begin = level_end
    if best_leaf < 0 or best_gain <= 0:
        return False
    change(kind, limit, count, cells, free, target_job, target)
    length, walk = 0, best_leaf
    while walk > 0:
        path_job[length] = walk
        length += 1
        walk = parents[walk]
    for position in range(length - 1, -1, -1):
        change(kind, limit, count, cells, free, jobs[path_job[position]], new_cells[path_job[position]])
    return True


@njit(cache=True)
def upgrade(first, kind, limit, count, share, least, cells, free, max_steps):
    """Up to `max_steps` changes to another kind, or to twice the devices, each the one with the largest gain."""
    for _ in range(max_steps):
        best, best_job, best_cell = 1e-9, -1, -1
        for job in range(len(cells)):
            cell = cells[job]
            if cell < 0:
                continue
            for new in range(first[job], first[job + 1]):
                same_kind = kind[new] == kind[cell]
                if count[new] != (2 * count[cell] if same_kind else count[cell]):
                    continue
                if share[new] < 0 or share[new] - share[cell] <= best:
                    continue
                if fits_after(cell, new, kind, limit, count, free):
                    best, best_job, best_cell = share[new] - share[cell], job, new
        if best_job < 0:
            return
        change(kind, limit, count, cells, free, best_job, best_cell)
