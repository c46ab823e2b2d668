"""The paper's allocator for one level (§3.3): the continuous optimum C*, then two whole allocations for each op.

The inverse of T interpolates the speedup s(n) = T(smallest)/T(n) over allowed n, from s(0) = 0, on its upper concave
hull. The paper's eq. (11) interpolates time instead; that form leaves area unused and is undefined below one device, so
it overstates C*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.planners.problem import Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """`num_devices` is n*, which need not be whole. `tuples` are at most two pairs (devices, layers), whose layers are
    not rounded yet."""

    num_devices: float
    tuples: tuple[tuple[int, float], ...]


def allocate(choices: Sequence[Choices], num_layers: Sequence[int], num_devices: int) -> tuple[float, list[Allocation]]:
    """C* in seconds and the allocation of each op (Alg. 2, eq. 8-10)."""
    hulls = [_speedup_hull(choice) for choice in choices]
    work = [float(choice.layer_s[0]) * layers for choice, layers in zip(choices, num_layers, strict=True)]
    tables = [(counts.tolist(), speedup.tolist()) for counts, speedup in hulls]

    def devices_at(end_s: float) -> list[float]:
        return [
            _interpolate(total / end_s, speedup, counts) for total, (counts, speedup) in zip(work, tables, strict=True)
        ]

    low = max(float(choice.layer_s[-1]) * layers for choice, layers in zip(choices, num_layers, strict=True))
    high = sum(work)
    if sum(devices_at(low)) <= num_devices:
        high = low
    for _ in range(80):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if sum(devices_at(middle)) < num_devices:
            high = middle
        else:
            low = middle
    allocations = []
    for count, total, (counts, _), choice in zip(devices_at(high), work, hulls, choices, strict=True):
        upper = min(int(np.searchsorted(counts, count - 1e-9)), len(counts) - 1)
        upper = max(upper, 1)
        n_low, n_high = int(counts[upper - 1]), int(counts[upper])
        # The time on each side, so that both layers and area add up (t1 and t2 in the text).
        share_high = (count - n_low) / (n_high - n_low)
        tuples = []
        if n_low and share_high < 1 - 1e-12:
            tuples.append((n_low, (1 - share_high) * high / choice.time_on(n_low)))
        if share_high > 1e-12:
            layers_high = share_high * high / choice.time_on(n_high) if n_low else total / float(choice.layer_s[0])
            tuples.append((n_high, layers_high))
        allocations.append(Allocation(num_devices=count, tuples=tuple(tuples)))
    return high, allocations


def _interpolate(value: float, values: list[float], results: list[float]) -> float:
    """`np.interp` for a single number, in a tenth of its time."""
    upper = min(bisect_right(values, value), len(values) - 1)
    share = (value - values[upper - 1]) / (values[upper] - values[upper - 1])
    return results[upper - 1] + min(1.0, share) * (results[upper] - results[upper - 1])


def _speedup_hull(choices: Choices) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of devices and speedups, from (0, 0), where the speedup is concave."""
    counts = np.concatenate([[0], choices.num_devices])
    speedup = np.concatenate([[0.0], choices.layer_s[0] / choices.layer_s])
    hull: list[int] = []
    for point in range(len(counts)):
        while len(hull) >= 2:
            first, second = hull[-2], hull[-1]
            rise = (speedup[second] - speedup[first]) * (counts[point] - counts[first])
            if rise <= (speedup[point] - speedup[first]) * (counts[second] - counts[first]):
                hull.pop()
            else:
                break
        hull.append(point)
    return counts[hull], speedup[hull]
