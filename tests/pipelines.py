"""Small pipelines for tests: golden loads of the reference document, random ones, and an oracle of the interleaving."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from spindle.planners.pipeline.segments import Segments, without_choices

IMAGES = (24, 48, 26, 2, 16, 32, 31, 25, 19, 30, 22, 37, 13, 32, 8, 18)

# The load of vision and language in whole numbers, without rounding: a millisecond is 12 million, a unit of memory 12.
MILLISECOND = 12_000_000
UNIT = 12


def chain(num_ranks: int = 4, num_microbatches: int = 8) -> Segments:
    """One segment per microbatch, F=1, B=2, one unit of memory."""
    shape = (num_microbatches, num_ranks)
    return without_choices(
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
    return without_choices(
        microbatch=np.array([0, 0, 1, 1]),
        group=np.arange(4),
        forward_ns=np.ones(shape, dtype=np.int64),
        backward_ns=np.full(shape, 2),
        memory=np.ones(shape, dtype=np.int64),
        predecessors=[[], [0], [], [2]],
    )


def vision_language(images: tuple[int, ...] = IMAGES, *, split: bool = True, num_ranks: int = 4) -> Segments:
    """Section 4.3: encoder chunks of 25 ms per 12 images, two per rank; language model 20.5 ms; backward twice."""
    microbatch: list[int] = []
    group: list[int] = []
    forward: list[int] = []
    memory: list[int] = []
    predecessors: list[list[int]] = []

    def add(of_microbatch: int, of_group: int, time: int, size: int, before: list[int]) -> int:
        for column, value in ((microbatch, of_microbatch), (group, of_group), (forward, time), (memory, size)):
            column.append(value)
        predecessors.append(before)
        return len(microbatch) - 1

    groups = 0
    for number, count in enumerate(images):
        num_parts = (-(-count // 12) if split else 1) if count else 0
        ends = []
        for part in range(num_parts):
            size = count // num_parts + (part < count % num_parts)
            first = add(number, groups, 25_000_000 * size, size, [])
            ends.append(add(number, groups, 25_000_000 * size, size, [first]))
        groups += num_parts > 0
        add(number, groups, 41 * MILLISECOND // 2, UNIT, ends)
        groups += 1
    times = np.repeat(np.array(forward)[:, None], num_ranks, axis=1)
    return without_choices(
        microbatch=np.array(microbatch),
        group=np.array(group),
        forward_ns=times,
        backward_ns=2 * times,
        memory=np.repeat(np.array(memory)[:, None], num_ranks, axis=1),
        predecessors=predecessors,
    )


@st.composite
def pipelines(draw: st.DrawFn) -> Segments:
    """Small pipelines: encoders before a language model or decoders after it, text alone, chunks, hops, choices."""
    num_ranks = draw(st.integers(1, 4))
    is_after = draw(st.booleans())
    num_chunks, language_chunks = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    microbatch: list[int] = []
    group: list[int] = []
    predecessors: list[list[int]] = []
    groups = 0

    def add_chain(number: int, length: int, before: list[int]) -> int:
        for _ in range(length):
            microbatch.append(number)
            group.append(groups)
            predecessors.append(before)
            before = [len(microbatch) - 1]
        return len(microbatch) - 1

    for number in range(draw(st.integers(1, 5))):
        num_parts = draw(st.integers(0, 3))
        last = [add_chain(number, language_chunks, [])] if is_after else []
        groups += is_after
        ends = [add_chain(number, num_chunks, last) for _ in range(num_parts)]
        groups += num_parts > 0
        if not is_after:
            add_chain(number, language_chunks, ends)
            groups += 1
    pairs = len(microbatch)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_choices = draw(st.integers(1, 4))
    rows = pairs * num_ranks
    memory = np.sort(random.integers(0, 9, (rows, num_choices)), axis=1)
    forward = random.integers(1, 7, (rows, num_choices))
    backward = -np.sort(-random.integers(1, 13, (rows, num_choices)), axis=1)
    choice_of = np.arange(rows).reshape(pairs, num_ranks)
    return Segments(
        num_ranks=num_ranks,
        microbatch=np.array(microbatch),
        group=np.array(group),
        forward_ns=forward[choice_of, 0],
        backward_ns=backward[choice_of, 0],
        weight_ns=backward.min(axis=1)[choice_of] // 2,
        memory=memory[choice_of, 0],
        hop_ns=random.integers(0, 3, pairs),
        predecessor_starts=np.cumsum([0] + [len(of_pair) for of_pair in predecessors]),
        predecessors=np.array([entry for of_pair in predecessors for entry in of_pair], dtype=np.int64),
        wrap_ns=random.integers(0, 3, sum(map(len, predecessors))),
        choice_of=choice_of,
        choice_forward_ns=forward,
        choice_backward_ns=backward,
        choice_memory=memory,
        choice_count=random.integers(1, num_choices + 1, rows),
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
        (one, pair): int(segments.wrap_ns[starts[pair] + place])
        for pair in range(pairs)
        for place, one in enumerate(before[pair])
    }
    after = [[other for other in range(pairs) if pair in before[other]] for pair in range(pairs)]
    footprint = [segments.memory[segments.microbatch == one].sum(axis=0) for one in range(segments.num_microbatches)]
    left = [int((segments.microbatch == one).sum()) * ranks for one in range(segments.num_microbatches)]
    ended: dict[tuple[int, int, int], float] = {}
    queues: list[dict[tuple[int, int], float]] = [{} for _ in range(ranks)]
    queues[0] = {(pair, 0): 0 for pair in range(pairs) if not before[pair]}
    admitted: set[int] = set()
    last, turn = [0] * ranks, [1] * ranks
    live, peak, reserved = ([0] * ranks for _ in range(3))
    orders: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]

    def may_start(rank: int, pair: int, direction: int) -> bool:
        one = segments.microbatch[pair]
        if direction or gate == "none" or one in admitted:
            return True
        if gate == "hard":
            return live[rank] + segments.memory[pair, rank] <= cap
        return all(reserved[other] + footprint[one][other] <= cap for other in range(ranks))

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
        one, hop = segments.microbatch[pair], int(segments.hop_ns[pair])
        live[rank] += int(segments.memory[pair, rank]) * (1 - 2 * direction)
        peak[rank] = max(peak[rank], live[rank])
        if gate == "admission" and one not in admitted:
            admitted.add(one)
            reserved = [reserved[other] + footprint[one][other] for other in range(ranks)]
        left[one] -= direction
        if gate == "admission" and left[one] == 0:
            reserved = [reserved[other] - footprint[one][other] for other in range(ranks)]
        if direction == 0 and rank < ranks - 1:
            queues[rank + 1][pair, 0] = end + hop
        elif direction == 1 and rank > 0:
            queues[rank - 1][pair, 1] = end + hop
        elif direction == 0:
            if not after[pair]:
                queues[rank][pair, 1] = end
            for other in after[pair]:
                if all((one, 0, rank) in ended for one in before[other]):
                    queues[0][other, 0] = max(ended[one, 0, rank] + wrap[one, other] for one in before[other])
        else:
            for other in before[pair]:
                if all((one, 1, 0) in ended for one in after[other]):
                    queues[ranks - 1][other, 1] = max(ended[one, 1, 0] + wrap[other, one] for one in after[other])
    return max(last), peak, orders
