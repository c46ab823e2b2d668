"""How long does a step take with this order of priorities? One evaluation of the search, compiled.

An order is a permutation of tokens, one per group and direction (2 * group + direction), highest priority first. It is
interleaved with the times and memory of a *base* (a memory choice for every stage, and a gate); where the base leaves
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

# What an evaluation reads. Bases are stacked: [base, n, P].
Load = namedtuple(
    "Load",
    [
        "table",
        "choices",
        "weight_ns",
        "caps",
        "base_gate",  # [base]
        "base_upgrades",  # [base]: is there a faster choice than the base's for any stage?
        "base_forward",
        "base_backward",
        "base_memory",
        "base_choice",
        "microbatch_of",  # per group
    ],
)

# What an evaluation writes; the last one's schedule stays there.
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
    """All that evaluations under these caps read; bases are (gate, memory choices)."""
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


def bases_of(segments: Segments, caps: Column, num_levels: int = 4) -> list[tuple[int, Column]]:
    """Bases that fit: the leanest choices that take no more time than the fastest (what is offloaded for nothing), and
    from the leanest choices to the fastest, in equal steps of memory; each under the safe gate, and the leanest also
    under plain admission. Where all fits at once, the fastest choices without a gate, alone."""
    fastest = fastest_choices(segments)
    everything = segments.choice_memory[segments.choice_of, fastest].sum(axis=0)
    if (everything <= caps).all():
        return [(NONE, fastest)]
    lean = np.zeros_like(fastest)
    levels = [_level(segments, fastest, level / max(num_levels - 1, 1)) for level in range(num_levels)]
    bases: list[tuple[int, Column]] = []
    for choice in (levels[0], _leanest_at_no_cost(segments), *levels[1:]):
        fits = (least_caps_of(segments, choice) <= caps).all()
        if fits and not any((choice == known).all() for _, known in bases):
            bases.append((SAFE, choice))
    if (least_caps(segments, ADMISSION) <= caps).all():
        bases.append((ADMISSION, lean))
    return bases


def _leanest_at_no_cost(segments: Segments) -> Column:
    """Per stage the leanest choice that is as fast as the fastest, but for the nanosecond by which keeping everything
    is made to win ties. [n, P]"""
    time = segments.choice_forward_ns + segments.choice_backward_ns
    unused = np.arange(time.shape[1]) >= segments.choice_count[:, None]
    time = np.where(unused, np.iinfo(np.int64).max, time)
    leanest = (time <= time.min(axis=1, keepdims=True) + 1).argmax(axis=1)
    return np.ascontiguousarray(leanest[segments.choice_of].astype(np.int64))


def least_caps_of(segments: Segments, choice: Column) -> Column:
    """What `least_caps` of the safe gate would be with other memory choices than the leanest."""
    table = table_of(segments)
    memory = segments.choice_memory[segments.choice_of, choice]
    signs = np.where(table.serial_direction == 0, 1, -1)[:, None]
    # Every microbatch ends with nothing held, so one sum runs over all of them.
    return np.asarray(np.cumsum(signs * memory[table.serial_pair], axis=0).max(axis=0), dtype=np.int64)


def _level(segments: Segments, fastest: Column, share: float) -> Column:
    """Per stage its fastest choice with at most this share of the memory between the leanest and the fastest."""
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
    """Orders worth a first look: natural; microbatches by falling, by rising and by alternating work."""
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
    # Backwards of what was encoded last come first again: the mirror of the natural order.
    forwards, backwards = natural[natural % 2 == 0], natural[natural % 2 == 1]
    orders.append(np.concatenate([forwards, backwards]))
    return [np.ascontiguousarray(order.astype(np.int64)) for order in orders]
