"""Passes placed one after another, by a rule, for orders that have no closed form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spindle.planners.pipeline.segments import BACKWARD, FORWARD, INPUT, WEIGHT, Segments, Table

Pass = tuple[int, int]  # pair, kind


class Walk:
    """Every rank has lanes of passes, each run in its order. The rank that can start soonest goes next, with the lane
    that the rule chooses from when the heads of its lanes could start."""

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
        """The orders of all ranks, or None if every rank waits while passes are left."""
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
            # What it makes ready lies on this rank, its neighbours, or the ends.
            for affected in {rank, max(rank - 1, 0), min(rank + 1, top), 0, top}:
                options[affected] = self._option(affected)
        is_complete = all(
            place == len(lane)
            for lanes, places in zip(self.lanes, self.places, strict=True)
            for lane, place in zip(lanes, places, strict=True)
        )
        return self.orders if is_complete else None

    def _option(self, rank: int) -> tuple[int, int] | None:
        """When this rank would start its next pass, and of which lane."""
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
        """When a pass may start, its rank busy or not; None while something before it is not placed."""
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
    """The lane that can start first, the first of these."""
    ready = [(start, lane) for lane, start in enumerate(starts) if start is not None]
    return min(ready)[1] if ready else None
