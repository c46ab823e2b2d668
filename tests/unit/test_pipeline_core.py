"""The core of planner `pipeline`: golden values of the reference document, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from pipelines import MILLISECOND, UNIT
from spindle.errors import DoesNotFitError, PlanError, WorkloadError
from spindle.planners.bounds import bound_ns
from spindle.planners.pipeline.gates import ADMISSION, HARD, NONE, SAFE, least_caps, limits_of
from spindle.planners.pipeline.interleave import (
    interleave,
    natural_priorities,
)
from spindle.planners.pipeline.memory import fastest_choices
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.segments import Segments, footprints

CAPS = (32, 24, 20, 16, 12, 10, 9)


def chain(num_ranks: int = 4, num_microbatches: int = 8) -> Segments:
    """One segment per microbatch, F=1, B=2, one unit of memory."""
    shape = (num_microbatches, num_ranks)
    return pipelines.without_choices(
        microbatch=np.arange(num_microbatches),
        group=np.arange(num_microbatches),
        forward_ns=np.ones(shape, dtype=np.int64),
        backward_ns=np.full(shape, 2),
        memory=np.ones(shape, dtype=np.int64),
        predecessors=[[] for _ in range(num_microbatches)],
    )


def two_by_two(num_ranks: int) -> Segments:
    """Two microbatches of an encoder (pairs 0, 2) and a language model (pairs 1, 3)."""
    shape = (4, num_ranks)
    return pipelines.without_choices(
        microbatch=np.array([0, 0, 1, 1]),
        group=np.arange(4),
        forward_ns=np.ones(shape, dtype=np.int64),
        backward_ns=np.full(shape, 2),
        memory=np.ones(shape, dtype=np.int64),
        predecessors=[[], [0], [], [2]],
    )


def random_priorities(segments: Segments, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(2 * segments.num_groups).reshape(-1, 2)


def interleaved_slowly(segments: Segments, priority: np.ndarray, cap: float, gate: str, ticks: float = 1):
    """The interleaving in plain Python, written apart from the compiled one: (makespan, peaks, orders), or None.

    Times are divided by `ticks`: with fractions they are rounded as those of the reference document were.
    """
    pairs, ranks = segments.forward_ns.shape
    length = [(segments.forward_ns / ticks).tolist(), (segments.backward_ns / ticks).tolist()]
    if ticks == 1:
        length = [segments.forward_ns.tolist(), segments.backward_ns.tolist()]
    starts = segments.predecessor_starts
    before = [segments.predecessors[starts[pair] : starts[pair + 1]].tolist() for pair in range(pairs)]
    wrap = {
        (source, pair): int(segments.wrap_ns[starts[pair] + place])
        for pair in range(pairs)
        for place, source in enumerate(before[pair])
    }
    after = [[target for target in range(pairs) if pair in before[target]] for pair in range(pairs)]
    microbatches = range(segments.num_microbatches)
    footprint = [segments.memory[segments.microbatch == number].sum(axis=0) for number in microbatches]
    left = [int((segments.microbatch == number).sum()) * ranks for number in microbatches]
    ended: dict[tuple[int, int, int], float] = {}
    queues: list[dict[tuple[int, int], float]] = [{} for _ in range(ranks)]
    queues[0] = {(pair, 0): 0 for pair in range(pairs) if not before[pair]}
    admitted: set[int] = set()
    last, turn = [0] * ranks, [1] * ranks
    live, peak, reserved = ([0] * ranks for _ in range(3))
    orders: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]

    def may_start(rank: int, pair: int, direction: int) -> bool:
        microbatch = segments.microbatch[pair]
        if direction or gate == "none" or microbatch in admitted:
            return True
        if gate == "hard":
            return live[rank] + segments.memory[pair, rank] <= cap
        return all(reserved[each] + footprint[microbatch][each] <= cap for each in range(ranks))

    for _ in range(2 * pairs * ranks):
        ready = [{key: at for key, at in queue.items() if may_start(rank, *key)} for rank, queue in enumerate(queues)]
        soonest = [(max(last[rank], min(queue.values())), rank) for rank, queue in enumerate(ready) if queue]
        if not soonest:
            return None
        rank = min(soonest)[1]
        now = {direction for (_, direction), at in ready[rank].items() if at <= last[rank]}
        allowed = {1 - turn[rank]} if len(now) == 2 else {0, 1}
        _, _, at, pair, direction = min(
            (max(at, last[rank]), -priority[segments.group[pair], direction], at, pair, direction)
            for (pair, direction), at in ready[rank].items()
            if direction in allowed
        )
        del queues[rank][pair, direction]
        end = max(at, last[rank]) + length[direction][pair][rank]
        last[rank], turn[rank], ended[pair, direction, rank] = end, direction, end
        orders[rank].append((pair, direction))
        microbatch, hop = segments.microbatch[pair], int(segments.hop_ns[pair])
        live[rank] += int(segments.memory[pair, rank]) * (1 - 2 * direction)
        peak[rank] = max(peak[rank], live[rank])
        if gate == "admission" and microbatch not in admitted:
            admitted.add(microbatch)
            reserved = [reserved[each] + footprint[microbatch][each] for each in range(ranks)]
        left[microbatch] -= direction
        if gate == "admission" and left[microbatch] == 0:
            reserved = [reserved[each] - footprint[microbatch][each] for each in range(ranks)]
        if direction == 0 and rank < ranks - 1:
            queues[rank + 1][pair, 0] = end + hop
        elif direction == 1 and rank > 0:
            queues[rank - 1][pair, 1] = end + hop
        elif direction == 0:
            if not after[pair]:
                queues[rank][pair, 1] = end
            for target in after[pair]:
                if all((source, 0, rank) in ended for source in before[target]):
                    times = [ended[source, 0, rank] + wrap[source, target] for source in before[target]]
                    queues[0][target, 0] = max(times)
        else:
            for source in before[pair]:
                if all((target, 1, 0) in ended for target in after[source]):
                    times = [ended[target, 1, 0] + wrap[source, target] for target in after[source]]
                    queues[ranks - 1][source, 1] = max(times)
    return max(last), peak, orders


@pytest.mark.parametrize(
    ("cap", "makespan", "peaks"),
    [(None, 33, [8, 7, 4, 1]), (4, 33, [4, 4, 4, 1]), (3, 39, [3, 3, 3, 1]), (2, 51, [2, 2, 2, 1]), (1, 96, [1] * 4)],
)
@pytest.mark.parametrize("gate", [HARD, ADMISSION, SAFE])
def test_a_homogeneous_chain_under_caps(cap, makespan, peaks, gate):
    schedule = interleave(chain(), caps=cap, gate=gate)
    # Admission holds memory on all ranks until the last of them is through, and is stricter here.
    if gate != ADMISSION:
        assert (schedule.makespan_ns, schedule.peak.tolist()) == (makespan, peaks)
    assert schedule.makespan_ns >= bound_ns(chain()) == 33


@pytest.mark.parametrize(
    ("num_ranks", "cap", "literal", "admission"),
    [
        (1, 2, None, (12, [2])),
        (1, None, (12, [3]), (12, [3])),
        (2, 2, None, (24, [2, 2])),
        (2, 3, (19, [3, 3]), (24, [2, 2])),
        (2, 4, (15, [4, 3]), (15, [4, 3])),
        (2, None, (15, [4, 3]), (15, [4, 3])),
    ],
)
def test_the_literal_gate_deadlocks_and_admission_does_not(num_ranks, cap, literal, admission):
    segments = two_by_two(num_ranks)
    priority = np.array([[8, 1], [6, 3], [7, 2], [5, 4]])
    for gate, expected in ((HARD, literal), (ADMISSION, admission)):
        schedule = interleave(segments, priority, cap, gate)
        assert (schedule and (schedule.makespan_ns, schedule.peak.tolist())) == expected
    banker = interleave(segments, priority, cap, SAFE)
    assert banker.makespan_ns <= admission[0]
    if literal:
        assert banker.makespan_ns == literal[0]


def test_the_literal_gate_deadlocks_in_natural_order_too():
    assert interleave(two_by_two(2), caps=2, gate=HARD) is None
    assert interleave(two_by_two(2), caps=2, gate=SAFE).makespan_ns <= 24


@pytest.mark.parametrize(
    ("split", "num_segments", "makespan", "peaks"),
    [
        (True, 192, 6104.833, [29.083, 25.833, 22.417, 19.25]),
        (False, 96, 6708.5, [52.917, 49.917, 41.667, 34.833]),
    ],
)
def test_a_load_of_vision_and_language_without_cap(split, num_segments, makespan, peaks):
    segments = pipelines.vision_language(split=split)
    schedule = interleave(segments)
    assert 2 * segments.num_pairs == num_segments
    assert 2 * segments.num_groups == 64
    assert schedule.makespan_ns / MILLISECOND == pytest.approx(makespan, abs=5e-4)
    assert schedule.peak / UNIT == pytest.approx(peaks, abs=5e-4)
    work = (segments.forward_ns + segments.backward_ns).sum(axis=0) / MILLISECOND
    assert work == pytest.approx(5771.5)
    assert bound_ns(segments) / MILLISECOND > 5771.5


@pytest.mark.parametrize(
    ("gate", "name", "makespans", "exact"),
    [
        (
            HARD,
            "hard",
            [6104.83, 6104.83, 6123.5, 6335.17, None, None, None],
            [6104.83, 6104.83, 6104.08, 6335.17, None, None, None],
        ),
        (
            ADMISSION,
            "admission",
            [6021.5, 6302.08, 6575.92, 7073.25, 8751.58, 9140.83, 10041.58],
            [6021.5, 6302.08, 6575.92, 7365.92, 8728.92, 9140.83, 10060.42],
        ),
        (SAFE, None, None, [6104.83, 6104.83, 6104.08, 6335.17, 8066.58, 9294.17, 9750.08]),
    ],
)
def test_a_load_of_vision_and_language_under_caps(gate, name, makespans, exact):
    """The document's values were computed with times as fractions, whose rounding decides between passes that are ready
    at the same moment: four of fourteen differ in whole numbers. With fractions the same rules give all of them."""
    segments = pipelines.vision_language()
    ours, theirs = [], []
    for cap in CAPS:
        schedule = interleave(segments, caps=cap * UNIT, gate=gate)
        ours.append(schedule and round(schedule.makespan_ns / MILLISECOND, 2))
        if schedule:
            assert schedule.peak.max() <= cap * UNIT
        if name:
            priority = natural_priorities(segments)
            schedule = interleaved_slowly(segments, priority, cap * UNIT, name, ticks=MILLISECOND)
            theirs.append(schedule and round(schedule[0], 2))
    assert ours == exact
    if name:
        assert theirs == makespans


def test_a_cap_below_one_microbatch_is_refused_with_the_smallest_that_would_do():
    segments = pipelines.vision_language()
    for gate in (ADMISSION, SAFE):
        with pytest.raises(DoesNotFitError, match="the smallest sufficient limits") as refusal:
            interleave(segments, caps=9 * UNIT - 1, gate=gate)
        assert refusal.value.needed_bytes == 9 * UNIT
        assert least_caps(segments, gate).tolist() == [9 * UNIT] * 4


def test_memory_choices_of_three_nested_pairs():
    ones = np.ones((3, 1), dtype=np.int64)
    segments = Segments(
        num_ranks=1,
        microbatch=np.arange(3),
        group=np.arange(3),
        forward_ns=ones,
        backward_ns=ones,
        weight_ns=0 * ones,
        memory=ones,
        hop_ns=np.zeros(3),
        predecessor_starts=np.zeros(4),
        predecessors=np.zeros(0),
        wrap_ns=np.zeros(0),
        choice_of=0 * ones,
        choice_forward_ns=np.array([[1, 1]]),
        choice_backward_ns=np.array([[1, 0]]),
        choice_memory=np.array([[1, 4]]),
        choice_count=np.array([2]),
    )
    nested = retime(segments, np.array([[0, 1, 2, 2, 1, 0]]), np.array([[0, 0, 0, 1, 1, 1]]))
    for cap, time in ((9, 4), (6, 5), (3, 6)):
        schedule = pipelines.with_memory_choices(segments, nested, np.array([cap]))
        assert schedule.makespan_ns == time
        assert schedule.peak[0] <= cap
    assert pipelines.with_memory_choices(segments, nested, np.array([2])) is None


def test_orders_that_wait_for_each_other_are_refused():
    segments = two_by_two(1)
    with pytest.raises(PlanError, match="deadlock"):
        retime(segments, np.array([[1, 0, 2, 3, 3, 2, 0, 1]]), np.array([[0, 0, 0, 0, 1, 1, 1, 1]]))
    with pytest.raises(PlanError, match="pair 3 needs one forward"):
        retime(segments, np.array([[0, 1, 2, 2, 1, 0]]), np.array([[0, 0, 0, 1, 1, 1]]))


def test_segments_are_checked():
    segments = two_by_two(2)
    columns = {name: getattr(segments, name) for name in Segments.__dataclass_fields__}
    for name, value, reason in (
        ("group", np.array([0, 0, 0, 1]), "belongs to one microbatch"),
        ("predecessors", np.array([1, 2]), "smaller numbers"),
        ("memory", np.full((4, 2), 2), "leanest"),
        ("hop_ns", np.zeros(3), "shape"),
        ("microbatch", np.array([0, 0, 2, 2]), "without gaps"),
        ("weight_ns", np.full((4, 2), 3), "part of backward_ns"),
    ):
        with pytest.raises(WorkloadError, match=reason):
            Segments(**(columns | {name: value}))


@given(pipelines.pipelines(), st.integers(0, 99), st.integers(0, 12))
@settings(max_examples=150)
def test_the_compiled_interleaving_is_that_of_plain_python(segments, seed, room):
    priority = random_priorities(segments, seed)
    cap = int(footprints(segments).max()) + room
    for gate, name in ((NONE, "none"), (HARD, "hard"), (ADMISSION, "admission")):
        schedule = interleave(segments, priority, cap, gate)
        expected = interleaved_slowly(segments, priority, cap, name)
        assert (schedule is None) == (expected is None)
        if schedule:
            orders = [
                list(zip(pair, kind, strict=True))
                for pair, kind in zip(schedule.pair.tolist(), schedule.kind.tolist(), strict=True)
            ]
            assert (schedule.makespan_ns, schedule.peak.tolist(), orders) == expected


@given(pipelines.pipelines(), st.integers(0, 99), st.integers(0, 12))
@settings(max_examples=200)
def test_no_order_deadlocks_under_any_cap_that_lets_each_microbatch_through(segments, seed, room):
    priority = random_priorities(segments, seed)
    for gate in (ADMISSION, SAFE):
        caps = least_caps(segments, gate) + room
        schedule = interleave(segments, priority, caps, gate)
        assert (schedule.peak <= caps).all()
        assert schedule.makespan_ns >= bound_ns(segments)
        again = retime(segments, schedule.pair, schedule.kind)
        assert (again.start_ns == schedule.start_ns).all()
        assert (again.end_ns == schedule.end_ns).all()
        assert (again.peak == schedule.peak).all()


@given(pipelines.pipelines(), st.integers(0, 99), st.integers(0, 20))
@settings(max_examples=100)
def test_memory_choices_stay_under_the_cap_and_upgrade_as_far_as_it_allows(segments, seed, room):
    caps = least_caps(segments, SAFE) + room
    schedule = interleave(segments, random_priorities(segments, seed), caps, SAFE)
    upgraded = pipelines.with_memory_choices(segments, schedule, caps)
    assert (upgraded.peak <= caps).all()
    assert upgraded.makespan_ns >= bound_ns(segments)
    time = segments.choice_forward_ns + segments.choice_backward_ns
    assert (time[segments.choice_of, upgraded.choice] <= time[segments.choice_of, 0]).all()
    free = pipelines.with_memory_choices(segments, schedule, limits_of(segments, None))
    assert (time[segments.choice_of, free.choice] == time[segments.choice_of, fastest_choices(segments)]).all()
