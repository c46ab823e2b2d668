"""List schedulers for orders that have no closed form: `Walk` with any rule, and `walk_soonest`, compiled, with the
rule that baselines are tuned with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spindle.jit import njit
from spindle.planners.pipeline.segments import BACKWARD, FORWARD, INPUT, WEIGHT, Segments, Table

Pass = tuple[int, int]  # pair, kind


class Walk:
    """Every rank has lanes of passes, each run in order. The rank that can start soonest goes next, on the lane that
    the rule `choose` picks, given when the next pass of each lane could start."""

    def __init__(self, segments: Segments, table: Table, lanes: list[list[list[Pass]]], choose: Choose) -> None:
        self.segments, self.table, self.lanes, self.choose = segments, table, lanes, choose
        pairs, ranks = segments.forward_ns.shape
        self.forward_end, self.back_end = np.full((pairs, ranks), -1), np.full((pairs, ranks), -1)
        self.places = [[0] * len(of_rank) for of_rank in lanes]
        self.last, self.live = [0] * ranks, [0] * ranks
        self.orders: list[list[Pass]] = [[] for _ in range(ranks)]

    def head(self, rank: int, lane: int) -> Pass:
        return self.lanes[rank][lane][self.places[rank][lane]]

    def run(self) -> list[list[Pass]] | None:
        """The orders of all ranks, or None for a deadlock."""
        top = self.segments.num_ranks - 1
        options = [self._option(rank) for rank in range(top + 1)]
        while True:
            ready = [(option[0], rank) for rank, option in enumerate(options) if option is not None]
            if not ready:
                break
            start, rank = min(ready)
            option = options[rank]
            assert option is not None
            self._place(rank, start, option[1])
            # It can only make passes ready on this rank, on its neighbours, or on the first and last rank.
            for affected in {rank, max(rank - 1, 0), min(rank + 1, top), 0, top}:
                options[affected] = self._option(affected)
        is_complete = all(
            place == len(lane)
            for lanes, places in zip(self.lanes, self.places, strict=True)
            for lane, place in zip(lanes, places, strict=True)
        )
        return self.orders if is_complete else None

    def _option(self, rank: int) -> tuple[int, int] | None:
        """When this rank would start its next pass, and on which lane."""
        starts: list[int | None] = []
        for lane, place in zip(self.lanes[rank], self.places[rank], strict=True):
            at = self._ready_at(rank, *lane[place]) if place < len(lane) else None
            starts.append(None if at is None else max(at, self.last[rank]))
        lane_number = self.choose(self, rank, starts)
        if lane_number is None:
            return None
        start = starts[lane_number]
        assert start is not None
        return start, lane_number

    def _ready_at(self, rank: int, pair: int, kind: int) -> int | None:
        """When the inputs of a pass are ready, whether or not its rank is busy; None while any of them is not
        placed."""
        table, top = self.table, self.segments.num_ranks - 1
        hop = int(table.hop_ns[pair])
        if kind == WEIGHT:
            ends = [(int(self.back_end[pair, rank]), 0)]
        elif kind == FORWARD and rank > 0:
            ends = [(int(self.forward_end[pair, rank - 1]), hop)]
        elif kind == FORWARD:
            part = slice(table.predecessor_starts[pair], table.predecessor_starts[pair + 1])
            befores = self.forward_end[table.predecessors[part], top].tolist()
            ends = list(zip(befores, table.predecessor_wrap[part].tolist(), strict=True))
        else:
            ends = [(int(self.forward_end[pair, rank]), 0)]
            if rank < top:
                ends.append((int(self.back_end[pair, rank + 1]), hop))
            else:
                part = slice(table.successor_starts[pair], table.successor_starts[pair + 1])
                afters = self.back_end[table.successors[part], 0].tolist()
                ends += zip(afters, table.successor_wrap[part].tolist(), strict=True)
        if any(end < 0 for end, _ in ends):
            return None
        return max((end + wait for end, wait in ends), default=0)

    def _place(self, rank: int, start: int, lane: int) -> None:
        pair, kind = self.head(rank, lane)
        segments = self.segments
        weight = int(segments.weight_ns[pair, rank])
        if kind == FORWARD:
            end = start + int(segments.forward_ns[pair, rank])
            self.forward_end[pair, rank] = end
            self.live[rank] += int(segments.memory[pair, rank])
        elif kind == WEIGHT:
            end = start + weight
        else:
            end = start + int(segments.backward_ns[pair, rank]) - (weight if kind == INPUT else 0)
            self.back_end[pair, rank] = end
        if kind in (BACKWARD, WEIGHT):
            self.live[rank] -= int(segments.memory[pair, rank])
        self.last[rank] = end
        self.orders[rank].append((pair, kind))
        self.places[rank][lane] += 1


Choose = Callable[[Walk, int, list[int | None]], int | None]


def soonest(walk: Walk, rank: int, starts: list[int | None]) -> int | None:
    """The lane that can start first; on ties, the first lane."""
    ready = [(start, lane) for lane, start in enumerate(starts) if start is not None]
    return min(ready)[1] if ready else None


@njit(cache=True, nogil=True)
def walk_soonest(table, forward_ns, backward_ns, lane_pair, lane_kind, order_pair, order_kind):
    """Fill the order of every rank [P, passes] from its lanes [P, lanes, passes], both padded with pair -1.

    The pass that can start first goes next; on ties, on the first rank and lane. Passes are FORWARD or BACKWARD.
    Returns whether all were placed; if not, there is a deadlock.
    """
    ranks, lanes, length = lane_pair.shape
    pairs = forward_ns.shape[0]
    forward_end = np.full((pairs, ranks), -1, np.int64)
    back_end = np.full((pairs, ranks), -1, np.int64)
    place = np.zeros((ranks, lanes), np.int64)
    last = np.zeros(ranks, np.int64)
    num_placed = np.zeros(ranks, np.int64)
    while True:
        # Of the next passes of all lanes whose inputs are ready, the one that can start first.
        best_start = -1
        best_rank = 0
        best_lane = 0
        is_done = True
        for rank in range(ranks):
            for lane in range(lanes):
                if place[rank, lane] == length or lane_pair[rank, lane, place[rank, lane]] < 0:
                    continue
                is_done = False
                pair = lane_pair[rank, lane, place[rank, lane]]
                start = last[rank]
                is_ready = True
                if lane_kind[rank, lane, place[rank, lane]] == FORWARD:
                    if rank > 0:
                        is_ready = forward_end[pair, rank - 1] >= 0
                        start = max(start, forward_end[pair, rank - 1] + table.hop_ns[pair])
                    else:
                        for edge in range(table.predecessor_starts[pair], table.predecessor_starts[pair + 1]):
                            end = forward_end[table.predecessors[edge], ranks - 1]
                            is_ready = is_ready and end >= 0
                            start = max(start, end + table.predecessor_wrap[edge])
                else:
                    is_ready = forward_end[pair, rank] >= 0
                    if rank < ranks - 1:
                        is_ready = is_ready and back_end[pair, rank + 1] >= 0
                        start = max(start, back_end[pair, rank + 1] + table.hop_ns[pair])
                    else:
                        for edge in range(table.successor_starts[pair], table.successor_starts[pair + 1]):
                            end = back_end[table.successors[edge], 0]
                            is_ready = is_ready and end >= 0
                            start = max(start, end + table.successor_wrap[edge])
                if is_ready and (best_start < 0 or start < best_start):
                    best_start = start
                    best_rank = rank
                    best_lane = lane
        if best_start < 0:
            return is_done
        position = place[best_rank, best_lane]
        pair = lane_pair[best_rank, best_lane, position]
        kind = lane_kind[best_rank, best_lane, position]
        if kind == FORWARD:
            last[best_rank] = best_start + forward_ns[pair, best_rank]
            forward_end[pair, best_rank] = last[best_rank]
        else:
            last[best_rank] = best_start + backward_ns[pair, best_rank]
            back_end[pair, best_rank] = last[best_rank]
        place[best_rank, best_lane] += 1
        order_pair[best_rank, num_placed[best_rank]] = pair
        order_kind[best_rank, num_placed[best_rank]] = kind
        num_placed[best_rank] += 1
