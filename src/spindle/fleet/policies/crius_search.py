"""Compiled searches of Crius: the downgrade search of `fit`, and upgrades.

Columns as in `dual_prices`; `share` is the normalised rate of a cell (below 0: not allowed), `least[job]` the smallest
count that a job may be halved to. A branch is the list of changes (job, cell) that leads to it.
"""

from __future__ import annotations

import numpy as np

from spindle.jit import njit


@njit(cache=True)
def _cell_with(first, kind, count, share, job, wanted_kind, wanted_count):
    for cell in range(first[job], first[job + 1]):
        if kind[cell] == wanted_kind and count[cell] == wanted_count and share[cell] >= 0:
            return cell
    return -1


@njit(cache=True)
def _cheapest_halving(first, kind, count, share, least, cells, wanted_kind):
    """The job on a kind that loses least by half of its devices."""
    best, best_job, best_cell = 1e300, -1, -1
    for job in range(len(cells)):
        cell = cells[job]
        if cell < 0 or kind[cell] != wanted_kind or count[cell] // 2 < least[job] or count[cell] < 2:
            continue
        half = _cell_with(first, kind, count, share, job, kind[cell], count[cell] // 2)
        if half >= 0 and share[cell] - share[half] < best:
            best, best_job, best_cell = share[cell] - share[half], job, half
    return best_job, best_cell


@njit(cache=True)
def _best_change_of_kind(first, kind, count, share, cells, free, target_job):
    """The job that gains most (loses least) by as many devices of another kind that has them."""
    best, best_job, best_cell = -1e300, -1, -1
    for job in range(len(cells)):
        cell = cells[job]
        if cell < 0:
            continue
        for new in range(first[job], first[job + 1]):
            if kind[new] == kind[cell] or count[new] != count[cell] or share[new] < 0:
                continue
            if job != target_job and count[new] > free[kind[new]]:
                continue
            if share[new] - share[cell] > best:
                best, best_job, best_cell = share[new] - share[cell], job, new
    return best_job, best_cell


@njit(cache=True)
def _change(kind, count, cells, free, job, new):
    old = cells[job]
    if old >= 0:
        free[kind[old]] += count[old]
    cells[job] = new
    if new >= 0:
        free[kind[new]] -= count[new]


@njit(cache=True)
def fit(first, kind, count, share, least, target_job, target, cells, free, depth):
    """Search for changes after which the target fits; applies the branch with the largest total rate."""
    num_kinds = len(free)
    width = num_kinds + 1
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
    _change(kind, count, work, num_free, target_job, target)  # oversubscribed until a leaf is feasible
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
                _change(kind, count, work, num_free, jobs[step], new_cells[step])
            for branch in range(width):
                if branch < num_kinds:
                    job, new = _cheapest_halving(first, kind, count, share, least, work, branch)
                else:
                    job, new = _best_change_of_kind(first, kind, count, share, work, num_free, target_job)
                if job < 0:
                    continue
                parents[size], jobs[size], new_cells[size] = node, job, new
                old = work[job]
                _change(kind, count, work, num_free, job, new)
                feasible = True
                for resource in range(num_kinds):
                    if num_free[resource] < 0:
                        feasible = False
                if feasible:
                    gain = 0.0
                    for row in range(len(work)):
                        if work[row] != cells[row]:
                            gain += share[work[row]] if work[row] >= 0 else 0.0
                            gain -= share[cells[row]] if cells[row] >= 0 else 0.0
                    if gain > best_gain:
                        best_gain, best_leaf = gain, size
                _change(kind, count, work, num_free, job, old)
                size += 1
            for position in range(length - 1, -1, -1):
                _change(kind, count, work, num_free, jobs[path_job[position]], path_old[position])
        level_begin = level_end
    if best_leaf < 0 or best_gain <= 0:
        return False
    _change(kind, count, cells, free, target_job, target)
    length, walk = 0, best_leaf
    while walk > 0:
        path_job[length] = walk
        length += 1
        walk = parents[walk]
    for position in range(length - 1, -1, -1):
        _change(kind, count, cells, free, jobs[path_job[position]], new_cells[path_job[position]])
    return True


@njit(cache=True)
def upgrade(first, kind, count, share, least, cells, free, max_steps):
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
                num_free = free[kind[new]] + (count[cell] if same_kind else 0)
                if share[new] >= 0 and count[new] <= num_free and share[new] - share[cell] > best:
                    best, best_job, best_cell = share[new] - share[cell], job, new
        if best_job < 0:
            return
        _change(kind, count, cells, free, best_job, best_cell)
