"""Memory choices of each stage for a fixed order of passes (PipeWeaver §4.3).

Greedy, for each rank: starting from a base, upgrade stages in the order of most time saved per extra memory, as long as
the memory held at the start of every pair stays under the rank's cap. This memory depends on the rank's order alone, so
it stays under the cap when times change. A solver takes 10 to 100 ms here; the greedy algorithm came within 2 % of it.

The upgrades of a stage are the corners of the convex hull of its choices. Their gains fall along the hull, so one
sorted list serves every order, and one sweep over it is the greedy algorithm. A second sweep takes choices inside the
hull that still fit.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from spindle.jit import njit
from spindle.planners.pipeline.segments import BACKWARD, FORWARD, WEIGHT, Column, Segments

# The inputs of `choose_memory`: tables of choices, and the upgrades of each rank by falling gain.
Choices = namedtuple("Choices", ["of", "forward_ns", "backward_ns", "memory", "count", "starts", "pair", "to"])


def choices_of(segments: Segments) -> Choices:
    """The tables of memory choices of segments, with sorted upgrades."""
    time = segments.choice_forward_ns + segments.choice_backward_ns
    steps_of_row = [
        _hull_steps(time[row, :count].tolist(), segments.choice_memory[row, :count].tolist())
        for row, count in enumerate(segments.choice_count.tolist())
    ]
    starts, pairs, targets = [0], [], []
    for rank in range(segments.num_ranks):
        steps = [
            (-gain, pair, to)
            for pair, row in enumerate(segments.choice_of[:, rank].tolist())
            for gain, to in steps_of_row[row]
        ]
        steps.sort()
        pairs += [pair for _, pair, _ in steps]
        targets += [to for _, _, to in steps]
        starts.append(len(pairs))
    return Choices(
        of=segments.choice_of.copy(),
        forward_ns=segments.choice_forward_ns.copy(),
        backward_ns=segments.choice_backward_ns.copy(),
        memory=segments.choice_memory.copy(),
        count=segments.choice_count.copy(),
        starts=np.array(starts, dtype=np.int64),
        pair=np.array(pairs, dtype=np.int64),
        to=np.array(targets, dtype=np.int64),
    )


def _hull_steps(times: list[int], sizes: list[int]) -> list[tuple[float, int]]:
    """Upgrades along the lower hull, starting from the leanest choice: (time saved per extra memory, choice)."""
    steps: list[tuple[float, int]] = []
    current = 0
    while True:
        better = [
            ((times[current] - times[to]) / max(sizes[to] - sizes[current], 1e-9), times[current] - times[to], to)
            for to in range(current + 1, len(times))
            if times[to] < times[current]
        ]
        if not better:
            return steps
        gain, _, current = max(better, key=lambda step: (step[0], step[1]))
        steps.append((gain, current))


@njit(cache=True, nogil=True)
def choose_memory(choices, order_pair, order_kind, caps, choice):
    """Upgrade `choice` [n, P] in place. Returns False if it does not fit even as given."""
    pairs, ranks = choice.shape
    length = order_pair.shape[1]
    used = np.empty(pairs, np.int64)
    first = np.empty(pairs, np.int64)
    beyond = np.empty(pairs, np.int64)
    for rank in range(ranks):
        # The memory held when the k-th forward starts. A pair is live from forward `first` until before forward
        # `beyond`.
        count = 0
        live = 0
        for position in range(length):
            pair = order_pair[rank, position]
            if pair < 0:
                break
            size = choices.memory[choices.of[pair, rank], choice[pair, rank]]
            kind = order_kind[rank, position]
            if kind == FORWARD:
                live += size
                if live > caps[rank]:
                    return False
                used[count] = live
                first[pair] = count
                count += 1
            elif kind == BACKWARD or kind == WEIGHT:  # noqa: SIM109
                live -= size
                beyond[pair] = count
        for step in range(choices.starts[rank], choices.starts[rank + 1]):
            pair = choices.pair[step]
            to = choices.to[step]
            if to > choice[pair, rank]:
                extra = (
                    choices.memory[choices.of[pair, rank], to]
                    - choices.memory[choices.of[pair, rank], choice[pair, rank]]
                )
                if _fits(used, first[pair], beyond[pair], caps[rank] - extra):
                    choice[pair, rank] = to
                    for start in range(first[pair], beyond[pair]):
                        used[start] += extra
        for pair in range(pairs):
            row = choices.of[pair, rank]
            current = choice[pair, rank]
            for to in range(choices.count[row] - 1, current, -1):
                is_faster = (
                    choices.forward_ns[row, to] + choices.backward_ns[row, to]
                    < choices.forward_ns[row, current] + choices.backward_ns[row, current]
                )
                extra = choices.memory[row, to] - choices.memory[row, current]
                if is_faster and _fits(used, first[pair], beyond[pair], caps[rank] - extra):
                    choice[pair, rank] = to
                    for start in range(first[pair], beyond[pair]):
                        used[start] += extra
                    break
    return True


@njit(inline="always")
def _fits(used, first, beyond, most):
    for start in range(first, beyond):  # noqa: SIM110
        if used[start] > most:
            return False
    return True


def fastest_choices(segments: Segments) -> Column:
    """The fastest choice of each stage; the leanest one of equally fast choices. [n, P]"""
    time = segments.choice_forward_ns + segments.choice_backward_ns
    unused = np.arange(time.shape[1]) >= segments.choice_count[:, None]
    fastest = np.where(unused, np.iinfo(np.int64).max, time).argmin(axis=1)
    return np.ascontiguousarray(fastest[segments.choice_of].astype(np.int64))
