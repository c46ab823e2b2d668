"""Small pipelines for tests: the golden load of the reference document, and random ones."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.memory import choices_of, choose_memory
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.segments import Column, Segments

IMAGES = (24, 48, 26, 2, 16, 32, 31, 25, 19, 30, 22, 37, 13, 32, 8, 18)

# The load of vision and language in whole numbers, without rounding: a millisecond is 12 million, a unit of memory 12.
MILLISECOND = 12_000_000
UNIT = 12


def without_choices(
    *,
    microbatch: Column,
    group: Column,
    forward_ns: Column,
    backward_ns: Column,
    memory: Column,
    weight_ns: Column | None = None,
    predecessors: tuple[tuple[int, ...], ...] | list[list[int]],
    hop_ns: int = 0,
    wrap_ns: int = 0,
) -> Segments:
    """Segments whose stages have one memory choice each."""
    forward_ns, backward_ns, memory = (np.asarray(column) for column in (forward_ns, backward_ns, memory))
    pairs, ranks = forward_ns.shape
    entries = [entry for of_pair in predecessors for entry in of_pair]
    return Segments(
        num_ranks=ranks,
        microbatch=microbatch,
        group=group,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        weight_ns=np.zeros_like(backward_ns) if weight_ns is None else weight_ns,
        memory=memory,
        hop_ns=np.full(pairs, hop_ns),
        predecessor_starts=np.cumsum([0] + [len(of_pair) for of_pair in predecessors]),
        predecessors=np.array(entries, dtype=np.int64),
        wrap_ns=np.full(len(entries), wrap_ns),
        choice_of=np.arange(pairs * ranks).reshape(pairs, ranks),
        choice_forward_ns=forward_ns.reshape(-1, 1),
        choice_backward_ns=backward_ns.reshape(-1, 1),
        choice_memory=memory.reshape(-1, 1),
        choice_count=np.ones(pairs * ranks, dtype=np.int64),
    )


def with_memory_choices(
    segments: Segments, schedule: Schedule, caps: Column, base: Column | None = None
) -> Schedule | None:
    """The same orders with upgraded memory choices, timed again; None if they do not fit even with the base."""
    choice = np.zeros((segments.num_pairs, segments.num_ranks), dtype=np.int64) if base is None else base.copy()
    if not choose_memory(choices_of(segments), schedule.pair, schedule.kind, caps, choice):
        return None
    return retime(segments, schedule.pair, schedule.kind, choice)


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
