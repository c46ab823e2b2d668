"""A compiled loop over passes in a given order: each runs as early as its data and its lanes allow."""

from __future__ import annotations

from spindle.jit import njit


@njit(cache=True)
def run_passes(need_starts, needed, group_of, lane_starts, lanes, duration_s, lane_end_s, start_s, end_s):
    """Fill `start_s` and `end_s` of each pass.

    Pass p needs the earlier passes `needed[need_starts[p] : need_starts[p + 1]]`. Group g of passes takes the lanes
    `lanes[lane_starts[g] : lane_starts[g + 1]]`. `lane_end_s` must be zero: it holds when each lane becomes free.
    """
    for number in range(len(duration_s)):
        start = 0.0
        for place in range(need_starts[number], need_starts[number + 1]):
            start = max(start, end_s[needed[place]])
        first, last = lane_starts[group_of[number]], lane_starts[group_of[number] + 1]
        for place in range(first, last):
            start = max(start, lane_end_s[lanes[place]])
        end = start + duration_s[number]
        start_s[number] = start
        end_s[number] = end
        for place in range(first, last):
            lane_end_s[lanes[place]] = end
