"""Known orders of passes: 1F1B, interleaved 1F1B (Megatron VPP), ZB-H1, and encoders in bubbles (Optimus).

Each gives the passes of every rank in order, timed by `retime`. All are free of deadlock for any segments: with several
pairs per microbatch, text alone, fewer microbatches than ranks, or a number that ranks do not divide. If a pattern from
the literature would deadlock there, its ranks run more forwards first, as few as possible. If there are several
candidates, `caps` says how much memory a rank may hold (with the leanest memory choices).
"""

from __future__ import annotations

import numpy as np

from spindle.errors import PlanError
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.segments import BACKWARD, FORWARD, INPUT, WEIGHT, Column, Segments, Table, table_of
from spindle.planners.pipeline.walk import Choose, Pass, Walk, soonest, walk_soonest


def one_forward_one_backward(segments: Segments) -> Schedule:
    """1F1B: microbatch after microbatch; rank r runs P-1-r forwards, then alternates forwards and backwards."""
    return _patterned(segments, *_sequences(segments, 1), _first_warm_ups(segments, 1))


def interleaved(segments: Segments, caps: Column | None = None) -> Schedule:
    """Interleaved 1F1B over chunks, as Megatron-LM orders its virtual stages.

    P microbatches pass the first chunk, then the second one, and so on. If P does not divide their number, which
    Megatron-LM refuses, groups may be somewhat larger than P. The pairs of a microbatch are its chunks.
    """
    num_chunks = int(np.bincount(segments.microbatch).max())
    ranks, microbatches = segments.num_ranks, segments.num_microbatches
    sizes = {ranks, -(-microbatches // max(microbatches // ranks, 1))}
    candidates = [
        _patterned(segments, *_sequences(segments, size), _first_warm_ups(segments, num_chunks, size))
        for size in sorted(sizes)
    ]
    return _best(candidates, caps)


def zero_bubble(segments: Segments) -> Schedule:
    """ZB-H1: backwards are cut into input and weight passes; weight passes fill bubbles, and no rank holds more memory
    than the fullest one under 1F1B. The best of several: 1F1B with cut backwards, and two rules for placing weight
    passes, each under two memory limits."""
    plain = one_forward_one_backward(segments)
    table = table_of(segments)
    ranks = range(segments.num_ranks)
    cut = [[pass_ for whole in _passes(plain, rank) for pass_ in _cut(segments, whole, rank)] for rank in ranks]
    lanes = [[[pass_ for pass_ in order if pass_[1] in kinds] for kinds in LANES] for order in cut]
    candidates = [_timed(segments, cut, table)]
    fullest = np.full_like(plain.peak, plain.peak.max())
    for most, is_eager in ((fullest, True), (fullest, False), (plain.peak, True), (plain.peak, False)):
        walked = Walk(segments, table, lanes, _filling(segments, most, is_eager)).run()
        if walked is not None:
            candidates.append(_timed(segments, walked, table))
    return _best(candidates, None)


# Lanes of a rank under ZB-H1.
LANES = ((FORWARD,), (BACKWARD, INPUT), (WEIGHT,))


def _filling(segments: Segments, most: Column, is_eager: bool) -> Choose:
    """The rule for placing weight passes: alternate forwards and input passes, and run a weight pass if neither can
    start now, or if memory requires it.

    Unless `is_eager`, a weight pass has to end before the next forward or input pass could start."""

    def choose(walk: Walk, rank: int, starts: list[int | None]) -> int | None:
        forward, back, weight = starts
        if forward is not None:
            pair, _ = walk.head(rank, 0)
            if walk.live[rank] + int(segments.memory[pair, rank]) > most[rank]:
                forward = None
                if weight is not None and (back is None or back > walk.last[rank]):
                    return 2
        was_forward = bool(walk.orders[rank]) and walk.orders[rank][-1][1] == FORWARD
        chosen = soonest(walk, rank, [None, back, None, forward] if was_forward else [forward, back, None])
        chosen = 0 if chosen == 3 else chosen
        if weight is None:
            return chosen
        if chosen is None:
            return 2
        start = forward if chosen == 0 else back
        assert start is not None
        gap = start - walk.last[rank]
        needed = 1 if is_eager else max(1, int(segments.weight_ns[walk.head(rank, 2)[0], rank]))
        return 2 if gap >= needed else chosen

    return choose


def encoders_in_bubbles(segments: Segments, is_backbone: Column, caps: Column | None = None) -> Schedule:
    """Optimus, coarse-grained: the backbone (a language model; `is_backbone` [n]) keeps its own (interleaved) 1F1B
    order and always has priority; all other pairs run only while their rank would be idle."""
    backbone = np.asarray(is_backbone, dtype=bool)
    table = table_of(segments)
    inside = _restricted(segments, backbone)
    numbers = np.flatnonzero(backbone)
    backbone_order = (
        interleaved(inside) if np.bincount(inside.microbatch).max() > 1 else one_forward_one_backward(inside)
    )
    own = [
        [(int(numbers[pair]), kind) for pair, kind in _passes(backbone_order, rank)]
        for rank in range(segments.num_ranks)
    ]
    columns = segments.forward_ns.copy(), segments.backward_ns.copy()
    candidates = []
    for group_size in sorted({1, segments.num_ranks, segments.num_microbatches}):
        encoders = [
            [pass_ for pass_ in sequence if not backbone[pass_[0]]] for sequence in _sequences(segments, group_size)
        ]
        for first, second in (encoders, encoders[::-1]):
            lane_pair, lane_kind = _lanes(own, first, second)
            pair, kind = (np.full((segments.num_ranks, 2 * segments.num_pairs), -1) for _ in range(2))
            if walk_soonest(table, *columns, lane_pair, lane_kind, pair, kind):
                candidates.append(retime(segments, pair, kind, table=table))
    if not candidates:
        raise PlanError("the backbone waits for modules outside of it that wait for the backbone")
    return _best(candidates, caps)


def _best(candidates: list[Schedule], caps: Column | None) -> Schedule:
    """The shortest schedule that fits; if none does, the one with the smallest excess."""

    def excess(schedule: Schedule) -> int:
        return 0 if caps is None else max(0, int((schedule.peak - caps).max()))

    return min(candidates, key=lambda schedule: (excess(schedule), schedule.makespan_ns))


def _lanes(own: list[list[Pass]], *shared: list[Pass]) -> tuple[Column, Column]:
    """Pairs and kinds of the passes in each rank's lanes: one of its own, and those that all ranks share; padded with
    pair -1. [P, lanes, passes]"""
    length = max(map(len, [*own, *shared]))
    pair, kind = (np.full((len(own), 1 + len(shared), length), -1) for _ in range(2))
    for rank, passes in enumerate(own):
        pair[rank, 0, : len(passes)], kind[rank, 0, : len(passes)] = np.array(passes).reshape(-1, 2).T
    for lane, passes in enumerate(shared, 1):
        pair[:, lane, : len(passes)], kind[:, lane, : len(passes)] = np.array(passes).reshape(-1, 2).T[:, None]
    return pair, kind


def _passes(schedule: Schedule, rank: int) -> list[Pass]:
    rows = zip(schedule.pair[rank].tolist(), schedule.kind[rank].tolist(), strict=True)
    return [(pair, kind) for pair, kind in rows if pair >= 0]


def _cut(segments: Segments, whole: Pass, rank: int) -> list[Pass]:
    pair, kind = whole
    if kind == BACKWARD and segments.weight_ns[pair, rank]:
        return [(pair, INPUT), (pair, WEIGHT)]
    return [whole]


def _timed(segments: Segments, orders: list[list[Pass]], table: Table) -> Schedule:
    length = max(len(order) for order in orders)
    pair, kind = np.full((len(orders), length), -1), np.zeros((len(orders), length), dtype=np.int64)
    for rank, order in enumerate(orders):
        pair[rank, : len(order)] = [number for number, _ in order]
        kind[rank, : len(order)] = [pass_kind for _, pass_kind in order]
    return retime(segments, pair, kind, table=table)


def _sequences(segments: Segments, group_size: int) -> tuple[list[Pass], list[Pass]]:
    """All forwards and all backwards, in the order of every rank: each group of `group_size` microbatches passes one
    chunk after another."""
    starts = segments.predecessor_starts
    pairs = range(segments.num_pairs)
    depth, height = [0] * len(pairs), [0] * len(pairs)
    for pair in pairs:
        before = segments.predecessors[starts[pair] : starts[pair + 1]].tolist()
        depth[pair] = max((depth[predecessor] + 1 for predecessor in before), default=0)
    for pair in reversed(pairs):
        for predecessor in segments.predecessors[starts[pair] : starts[pair + 1]].tolist():
            height[predecessor] = max(height[predecessor], height[pair] + 1)
    part = (segments.microbatch // group_size).tolist()
    microbatch = segments.microbatch.tolist()
    forwards = sorted(pairs, key=lambda pair: (part[pair], depth[pair], microbatch[pair], pair))
    backwards = sorted(pairs, key=lambda pair: (part[pair], height[pair], microbatch[pair], -pair))
    return [(pair, FORWARD) for pair in forwards], [(pair, BACKWARD) for pair in backwards]


def _first_warm_ups(segments: Segments, num_chunks: int, together: int = 1) -> list[int]:
    """The number of warm-up forwards of each rank, as in Megatron-LM: those before the first 1F1B pair."""
    ranks = segments.num_ranks
    if num_chunks == 1:
        return [ranks - 1 - rank for rank in range(ranks)]
    return [2 * (ranks - 1 - rank) + (num_chunks - 1) * together for rank in range(ranks)]


def _patterned(segments: Segments, forwards: list[Pass], backwards: list[Pass], warm_ups: list[int]) -> Schedule:
    """Warm-up forwards, then alternating forwards and backwards, then the remaining backwards."""
    table = table_of(segments)
    total = len(forwards)

    def attempt(num_extra: int) -> Schedule | None:
        orders = []
        for warm_up in warm_ups:
            num_first = min(warm_up + num_extra, total)
            order = forwards[:num_first]
            for place, backward in enumerate(backwards):
                order += [*forwards[num_first + place : num_first + place + 1], backward]
            orders.append(order)
        try:
            return _timed(segments, orders, table)
        except PlanError:
            return None

    schedule = attempt(0)
    if schedule is not None:
        return schedule
    # With all forwards first there is no deadlock: bisect for the smallest number of extra forwards without one.
    low, high = 1, total
    while low < high:
        middle = (low + high) // 2
        if attempt(middle) is None:
            low = middle + 1
        else:
            high = middle
    schedule = attempt(high)
    assert schedule is not None, "all forwards before all backwards cannot wait for themselves"
    return schedule


def _restricted(segments: Segments, is_inside: Column) -> Segments:
    """The segments of the chosen pairs alone, with microbatches and groups renumbered."""
    numbers = np.flatnonzero(is_inside)
    place = np.full(segments.num_pairs, -1)
    place[numbers] = np.arange(len(numbers))
    starts, before, wraps = [0], [], []
    for pair in numbers.tolist():
        for edge in range(segments.predecessor_starts[pair], segments.predecessor_starts[pair + 1]):
            if is_inside[segments.predecessors[edge]]:
                before.append(int(place[segments.predecessors[edge]]))
                wraps.append(int(segments.wrap_ns[edge]))
        starts.append(len(before))
    columns = {name: getattr(segments, name)[numbers] for name in ("forward_ns", "backward_ns", "weight_ns", "memory")}
    return Segments(
        num_ranks=segments.num_ranks,
        microbatch=np.unique(segments.microbatch[numbers], return_inverse=True)[1],
        group=np.unique(segments.group[numbers], return_inverse=True)[1],
        hop_ns=segments.hop_ns[numbers],
        predecessor_starts=np.array(starts),
        predecessors=np.array(before, dtype=np.int64),
        wrap_ns=np.array(wraps, dtype=np.int64),
        choice_of=segments.choice_of[numbers],
        choice_forward_ns=segments.choice_forward_ns,
        choice_backward_ns=segments.choice_backward_ns,
        choice_memory=segments.choice_memory,
        choice_count=segments.choice_count,
        **columns,
    )
