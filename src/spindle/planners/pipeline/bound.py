"""How short can any schedule of these segments be? Printed beside every plan."""

from __future__ import annotations

import heapq

import numpy as np

from spindle.planners.pipeline.segments import Column, Segments, table_of


def bound_ns(segments: Segments) -> int:
    """No schedule of these chunks, in any order, with any memory choices and any memory, is shorter.

    Each rank is a machine whose passes have heads (the longest way to them) and tails (the longest way from them to the
    end). With interruptions allowed, serving the largest tail first is optimal (Jackson's rule), so its length is a
    bound; the longest way of a microbatch and the work of a rank with its least head and tail are inside it.
    """
    table = table_of(segments)
    unused = np.arange(segments.choice_memory.shape[1]) >= segments.choice_count[:, None]
    never = np.iinfo(np.int64).max
    least = [
        np.where(unused, never, choices).min(axis=1)[segments.choice_of]
        for choices in (segments.choice_forward_ns, segments.choice_backward_ns)
    ]
    forward, backward = least
    # A weight pass may run last of all, so only the rest of a backward is on the way.
    on_way = backward - np.minimum(segments.weight_ns, backward)
    forward_heads, forward_tails = np.zeros_like(forward), np.zeros_like(forward)
    backward_heads, backward_tails = np.zeros_like(forward), np.zeros_like(forward)
    ranks, pairs = segments.num_ranks, segments.num_pairs
    hops = segments.hop_ns

    def reach(pair: int, heads: Column, times: Column, order: list[int], start: int) -> int:
        for rank in order:
            heads[pair, rank] = start
            start += times[pair, rank] + hops[pair]
        return start - int(hops[pair])

    rising, falling = list(range(ranks)), list(range(ranks))[::-1]
    forward_ends, backward_ends = [0] * pairs, [0] * pairs
    for pair in range(pairs):
        edges = range(table.predecessor_starts[pair], table.predecessor_starts[pair + 1])
        start = max((forward_ends[table.predecessors[e]] + table.predecessor_wrap[e] for e in edges), default=0)
        forward_ends[pair] = reach(pair, forward_heads, forward, rising, start)
    for pair in reversed(range(pairs)):
        edges = range(table.successor_starts[pair], table.successor_starts[pair + 1])
        start = max((backward_ends[table.successors[e]] + table.successor_wrap[e] for e in edges), default=0)
        start = max(start, forward_ends[pair])
        backward_ends[pair] = reach(pair, backward_heads, on_way, falling, start)
    # Tails: the same ways, walked from the end. What `reach` writes is the time after a pass.
    backward_starts, forward_starts = [0] * pairs, [0] * pairs
    for pair in range(pairs):
        edges = range(table.predecessor_starts[pair], table.predecessor_starts[pair + 1])
        after = max((backward_starts[table.predecessors[e]] + table.predecessor_wrap[e] for e in edges), default=0)
        backward_starts[pair] = reach(pair, backward_tails, on_way, rising, after)
    for pair in reversed(range(pairs)):
        edges = range(table.successor_starts[pair], table.successor_starts[pair + 1])
        after = max((forward_starts[table.successors[e]] + table.successor_wrap[e] for e in edges), default=0)
        after = max(after, backward_starts[pair])
        forward_starts[pair] = reach(pair, forward_tails, forward, falling, after)
    longest = 0
    later = backward - on_way
    for rank in range(ranks):
        jobs = [
            *zip(
                forward_heads[:, rank].tolist(), forward[:, rank].tolist(), forward_tails[:, rank].tolist(), strict=True
            ),
            *zip(
                backward_heads[:, rank].tolist(),
                on_way[:, rank].tolist(),
                backward_tails[:, rank].tolist(),
                strict=True,
            ),
        ]
        weights = zip((backward_heads + on_way)[:, rank].tolist(), later[:, rank].tolist(), strict=True)
        jobs += [(head, time, 0) for head, time in weights if time]
        longest = max(longest, _one_machine(jobs))
    return longest


def _one_machine(jobs: list[tuple[int, int, int]]) -> int:
    """Length of the best schedule of jobs (head, time, tail) on one machine that may interrupt them."""
    jobs = sorted(jobs)
    waiting: list[list[int]] = []
    now = longest = position = 0
    while waiting or position < len(jobs):
        if not waiting:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            heapq.heappush(waiting, [-jobs[position][2], jobs[position][1]])
            position += 1
        until = jobs[position][0] if position < len(jobs) else None
        tail, left = waiting[0]
        if until is not None and now + left > until:
            waiting[0][1] -= until - now
            now = until
        else:
            heapq.heappop(waiting)
            now += left
            longest = max(longest, now - tail)
    return longest
