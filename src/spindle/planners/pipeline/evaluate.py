"""One evaluation of the search, compiled: the makespan of an order of priorities.

An order is a permutation of tokens, one per group and direction (2 * group + direction), highest priority first. Passes
are interleaved with the times and memory of a *base* (a memory choice for every stage, and a gate); if the base leaves
room under the caps, memory choices are upgraded and the passes timed again.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from spindle.jit import njit
from spindle.planners.pipeline.gates import ADMISSION, NONE, SAFE, least_caps
from spindle.planners.pipeline.interleave import interleave_passes, natural_priorities
from spindle.planners.pipeline.memory import choices_of, choose_memory, fastest_choices
from spindle.planners.pipeline.retime import retime_passes, stage_columns
from spindle.planners.pipeline.segments import Column, Segments, table_of

_NUM_LEVELS = 4  # bases between the leanest choices and the fastest

# The inputs of an evaluation. Bases are stacked: [base, n, P].
Load = namedtuple(
    "Load",
    [
        "table",
        "choices",
        "weight_ns",
        "caps",
        "base_gate",  # [base]
        "base_upgrades",  # [base]: whether any stage has a faster choice than the base's
        "base_forward",
        "base_backward",
        "base_memory",
        "base_choice",
        "microbatch_of",  # per group
    ],
)

# The outputs of an evaluation; the schedule of the last one stays there.
Scratch = namedtuple(
    "Scratch",
    [
        "priority",
        "pair",
        "kind",
        "start_ns",
        "end_ns",
        "peak",
        "choice",
        "forward_ns",
        "backward_ns",
        "memory",
        "forward_end",
        "back_end",
    ],
)


@njit(cache=True, nogil=True)
def evaluate(load, base, order, scratch):
    """The makespan of an order on a base."""
    for place in range(order.size):
        scratch.priority[order[place] >> 1, order[place] & 1] = order.size - place
    makespan = interleave_passes(
        load.table,
        load.base_forward[base],
        load.base_backward[base],
        load.base_memory[base],
        scratch.priority,
        load.caps,
        load.base_gate[base],
        scratch.pair,
        scratch.kind,
        scratch.start_ns,
        scratch.end_ns,
        scratch.peak,
    )
    scratch.choice[:] = load.base_choice[base]
    if not load.base_upgrades[base]:
        return makespan
    choose_memory(load.choices, scratch.pair, scratch.kind, load.caps, scratch.choice)
    pairs, ranks = scratch.choice.shape
    for pair in range(pairs):
        for rank in range(ranks):
            row = load.choices.of[pair, rank]
            chosen = scratch.choice[pair, rank]
            scratch.forward_ns[pair, rank] = load.choices.forward_ns[row, chosen]
            scratch.backward_ns[pair, rank] = load.choices.backward_ns[row, chosen]
            scratch.memory[pair, rank] = load.choices.memory[row, chosen]
    return retime_passes(
        load.table,
        scratch.forward_ns,
        scratch.backward_ns,
        load.weight_ns,
        scratch.memory,
        scratch.pair,
        scratch.kind,
        scratch.start_ns,
        scratch.end_ns,
        scratch.peak,
        scratch.forward_end,
        scratch.back_end,
    )


def scratch_of(segments: Segments) -> Scratch:
    passes = (segments.num_ranks, 2 * segments.num_pairs)
    shapes: dict[str, tuple[int, ...]]
    stages = (segments.num_pairs, segments.num_ranks)
    shapes = {"priority": (segments.num_groups, 2), "peak": (segments.num_ranks,)}
    shapes |= dict.fromkeys(("pair", "kind", "start_ns", "end_ns"), passes)
    return Scratch(*(np.empty(shapes.get(name, stages), dtype=np.int64) for name in Scratch._fields))


def load_of(segments: Segments, caps: Column, bases: list[tuple[int, Column]]) -> Load:
    """The inputs of evaluations under these caps; bases are (gate, memory choices)."""
    columns = [stage_columns(segments, choice) for _, choice in bases]
    fastest = fastest_choices(segments)
    time = segments.choice_forward_ns + segments.choice_backward_ns
    microbatch_of = np.zeros(segments.num_groups, dtype=np.int64)
    microbatch_of[segments.group] = segments.microbatch
    return Load(
        table=table_of(segments),
        choices=choices_of(segments),
        weight_ns=segments.weight_ns.copy(),
        caps=caps,
        base_gate=np.array([gate for gate, _ in bases], dtype=np.int64),
        base_upgrades=np.array(
            [(time[segments.choice_of, choice] > time[segments.choice_of, fastest]).any() for _, choice in bases]
        ),
        base_forward=np.stack([forward for forward, _, _ in columns]),
        base_backward=np.stack([backward for _, backward, _ in columns]),
        base_memory=np.stack([memory for _, _, memory in columns]),
        base_choice=np.stack([choice for _, choice in bases]),
        microbatch_of=microbatch_of,
    )


def bases_of(segments: Segments, caps: Column) -> list[tuple[int, Column]]:
    """The bases that fit under the caps: memory choices from the leanest to the fastest in equal steps of memory, and
    the leanest choices that are as fast as the fastest (which offload at no cost), each under the safe gate; and the
    leanest choices under admission. If everything fits at once, only the fastest choices without a gate."""
    fastest = fastest_choices(segments)
    everything = segments.choice_memory[segments.choice_of, fastest].sum(axis=0)
    if (everything <= caps).all():
        return [(NONE, fastest)]
    lean = np.zeros_like(fastest)
    levels = [_level(segments, fastest, level / (_NUM_LEVELS - 1)) for level in range(_NUM_LEVELS)]
    bases: list[tuple[int, Column]] = []
    for choice in (levels[0], _leanest_at_no_cost(segments), *levels[1:]):
        fits = (least_caps_of(segments, choice) <= caps).all()
        if fits and not any((choice == known).all() for _, known in bases):
            bases.append((SAFE, choice))
    if (least_caps(segments, ADMISSION) <= caps).all():
        bases.append((ADMISSION, lean))
    return bases


def _leanest_at_no_cost(segments: Segments) -> Column:
    """The leanest choice of each stage that is as fast as the fastest, apart from the nanosecond that is added to
    offloading so that keeping everything wins ties. [n, P]"""
    time = segments.choice_forward_ns + segments.choice_backward_ns
    unused = np.arange(time.shape[1]) >= segments.choice_count[:, None]
    time = np.where(unused, np.iinfo(np.int64).max, time)
    leanest = (time <= time.min(axis=1, keepdims=True) + 1).argmax(axis=1)
    return np.ascontiguousarray(leanest[segments.choice_of].astype(np.int64))


def least_caps_of(segments: Segments, choice: Column) -> Column:
    """`least_caps` of the safe gate with these memory choices instead of the leanest."""
    table = table_of(segments)
    memory = segments.choice_memory[segments.choice_of, choice]
    signs = np.where(table.serial_direction == 0, 1, -1)[:, None]
    # A microbatch that has ended holds nothing, so one cumulative sum runs through all microbatches.
    return np.asarray(np.cumsum(signs * memory[table.serial_pair], axis=0).max(axis=0), dtype=np.int64)


def _level(segments: Segments, fastest: Column, share: float) -> Column:
    """The fastest choice of each stage with at most this share of the memory between its leanest and its fastest
    choice. [n, P]"""
    if share == 1:
        return fastest
    time = segments.choice_forward_ns + segments.choice_backward_ns
    most = segments.choice_memory[segments.choice_of, fastest]
    limit = segments.memory + share * (most - segments.memory)
    sizes, times = segments.choice_memory[segments.choice_of], time[segments.choice_of]
    unused = np.arange(time.shape[1]) >= segments.choice_count[segments.choice_of][:, :, None]
    times = np.where(unused | (sizes > limit[:, :, None]), np.iinfo(np.int64).max, times)
    return np.ascontiguousarray(times.argmin(axis=2).astype(np.int64))


def starting_orders(segments: Segments) -> list[Column]:
    """Orders to evaluate first: natural; then microbatches by decreasing, increasing and alternating work."""
    natural = np.argsort(-natural_priorities(segments).reshape(-1), kind="stable")
    microbatch_of = np.zeros(segments.num_groups, dtype=np.int64)
    microbatch_of[segments.group] = segments.microbatch
    work = np.zeros(segments.num_microbatches, dtype=np.int64)
    np.add.at(work, segments.microbatch, (segments.forward_ns + segments.backward_ns).sum(axis=1))
    falling = np.argsort(-work, kind="stable")
    half = (len(falling) + 1) // 2
    alternating = np.empty_like(falling)
    alternating[::2], alternating[1::2] = falling[:half], falling[half:][::-1]
    orders = [natural]
    for ranking in (falling, falling[::-1], alternating, alternating[::-1]):
        place = np.empty_like(ranking)
        place[ranking] = np.arange(len(ranking))
        orders.append(natural[np.argsort(place[microbatch_of[natural >> 1]], kind="stable")])
    return [np.ascontiguousarray(order.astype(np.int64)) for order in orders]
