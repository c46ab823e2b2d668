"""Orders of baselines: closed forms where there are some, and free of deadlock everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import pipelines
from spindle.planners.bounds import bound_ns
from spindle.planners.pipeline.orders import encoders_in_bubbles, interleaved, one_forward_one_backward, zero_bubble
from spindle.planners.pipeline.segments import BACKWARD, FORWARD, Segments, table_of
from spindle.planners.pipeline.walk import Walk, soonest, walk_soonest


def chunks(num_ranks: int, num_microbatches: int, num_chunks: int) -> Segments:
    """Forward 10, input 10, weight 10."""
    pairs = num_microbatches * num_chunks
    shape = (pairs, num_ranks)
    microbatch = np.repeat(np.arange(num_microbatches), num_chunks)
    return pipelines.without_choices(
        microbatch=microbatch,
        group=microbatch,
        forward_ns=np.full(shape, 10),
        backward_ns=np.full(shape, 20),
        weight_ns=np.full(shape, 10),
        memory=np.ones(shape, dtype=np.int64),
        predecessors=[[pair - 1] if pair % num_chunks else [] for pair in range(pairs)],
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 3), (4, 1), (1, 3), (3, 7)])
def test_1f1b_takes_its_closed_form_and_holds_as_many_as_there_are_ranks_after(ranks, microbatches):
    schedule = one_forward_one_backward(chunks(ranks, microbatches, 1))
    assert schedule.makespan_ns == 30 * (microbatches + ranks - 1)
    assert schedule.peak.tolist() == [min(ranks - rank, microbatches) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 12), (3, 6), (4, 6), (3, 7)])
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_divide_the_bubble(ranks, microbatches, num_chunks):
    schedule = interleaved(chunks(ranks, microbatches, num_chunks))
    assert schedule.makespan_ns == 30 * (microbatches * num_chunks + ranks - 1)
    if microbatches % ranks == 0:
        expected = [2 * (ranks - 1 - rank) + (num_chunks - 1) * ranks + 1 for rank in range(ranks)]
        assert schedule.peak.tolist() == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 6), (3, 7), (2, 5)])
def test_weight_passes_leave_a_third_of_the_bubble_in_no_more_memory(ranks, microbatches):
    segments = chunks(ranks, microbatches, 1)
    schedule = zero_bubble(segments)
    assert schedule.makespan_ns == 30 * microbatches + 10 * (ranks - 1) == bound_ns(segments)
    assert schedule.peak.max() <= one_forward_one_backward(segments).peak.max()


def test_encoders_leave_the_order_of_the_backbone_alone():
    segments = pipelines.vision_language()
    is_backbone = np.append(np.diff(segments.microbatch) > 0, True)
    schedule = encoders_in_bubbles(segments, is_backbone)
    for rank in range(4):
        own = [
            kind
            for pair, kind in zip(schedule.pair[rank].tolist(), schedule.kind[rank].tolist(), strict=True)
            if is_backbone[pair]
        ]
        warm = 4 - rank
        assert own == [FORWARD] * warm + [BACKWARD, FORWARD] * (16 - warm) + [BACKWARD] * warm
    tight = encoders_in_bubbles(segments, is_backbone, np.full(4, 30 * pipelines.UNIT))
    assert tight.peak.max() <= 30 * pipelines.UNIT < schedule.peak.max()


@given(pipelines.pipelines())
@settings(max_examples=100)
def test_no_order_of_a_baseline_waits_for_itself(segments):
    bound = bound_ns(segments)
    plain = one_forward_one_backward(segments)
    cut = zero_bubble(segments)
    ends = np.setdiff1d(np.arange(segments.num_pairs), segments.predecessors)
    starts = np.flatnonzero(np.diff(segments.predecessor_starts) == 0)
    is_after = len(ends) > segments.num_microbatches
    is_backbone = np.zeros(segments.num_pairs, dtype=bool)
    is_backbone[starts if is_after else ends] = True
    schedules = [plain, cut, interleaved(segments), encoders_in_bubbles(segments, is_backbone)]
    assert all(schedule.makespan_ns >= bound for schedule in schedules)
    assert cut.makespan_ns <= plain.makespan_ns
    assert cut.peak.max() <= plain.peak.max()


@given(pipelines.pipelines())
@settings(max_examples=60)
def test_the_compiled_walk_places_passes_as_the_walk_with_its_rule_does(segments):
    ranks, pairs = segments.num_ranks, segments.num_pairs
    lanes = [
        [[(pair, FORWARD) for pair in range(pairs)], [(pair, BACKWARD) for pair in reversed(range(pairs))]]
    ] * ranks
    table, columns = table_of(segments), np.array(lanes)
    expected = Walk(segments, table, lanes, soonest).run()
    pair, kind = (np.full((ranks, 2 * pairs), -1) for _ in range(2))
    times = segments.forward_ns.copy(), segments.backward_ns.copy()
    assert walk_soonest(table, *times, columns[..., 0].copy(), columns[..., 1].copy(), pair, kind)
    assert [list(zip(*row, strict=True)) for row in zip(pair.tolist(), kind.tolist(), strict=True)] == expected
