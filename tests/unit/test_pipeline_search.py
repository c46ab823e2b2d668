"""The search of planner `pipeline`: never worse than natural order, within memory, the same every time."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from spindle.errors import DoesNotFitError
from spindle.planners.bounds import bound_ns
from spindle.planners.pipeline.evaluate import bases_of, evaluate, load_of, scratch_of, starting_orders
from spindle.planners.pipeline.gates import SAFE, least_caps, limits_of
from spindle.planners.pipeline.interleave import interleave
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.search import search

# Orders per cap; SPINDLE_ORDERS=10000 is what is promised, and takes minutes.
NUM_ORDERS = int(os.environ.get("SPINDLE_ORDERS", "300"))


@pytest.mark.parametrize("cap", [9, 10, 12, 16, 20, 24, 32])
def test_random_orders_of_vision_and_language_never_deadlock(cap):
    segments = pipelines.vision_language()
    limits = limits_of(segments, cap * pipelines.UNIT)
    load = load_of(segments, limits, bases_of(segments, limits))
    scratch = scratch_of(segments)
    order = np.arange(2 * segments.num_groups)
    random = np.random.default_rng(cap)
    bound = bound_ns(segments)
    for _ in range(NUM_ORDERS):
        random.shuffle(order)
        for base in range(len(load.base_gate)):
            assert evaluate(load, base, order, scratch) >= bound
            assert (scratch.peak <= limits).all()


def test_no_starting_order_repeats_another_in_both_directions():
    # Only passes of one direction compete, so how an order mixes the directions makes no difference.
    orders = starting_orders(pipelines.vision_language())
    assert len({tuple(tuple(order[order % 2 == direction]) for direction in range(2)) for order in orders}) == len(
        orders
    )


@given(pipelines.pipelines(), st.integers(0, 99), st.integers(0, 20))
@settings(max_examples=60)
def test_a_search_is_no_worse_than_natural_order_and_stays_under_the_caps(segments, seed, room):
    caps = least_caps(segments, SAFE) + room
    result = search(segments, caps, evaluations=120, seed=seed)
    schedule = result.schedule
    assert result.bound_ns <= schedule.makespan_ns <= result.natural_ns
    assert schedule.makespan_ns <= interleave(segments, caps=caps).makespan_ns
    assert (schedule.peak <= caps).all()
    assert result.evaluations <= 120
    assert not result.is_cut
    assert result.improvements[-1][1] == schedule.makespan_ns
    again = retime(segments, schedule.pair, schedule.kind, schedule.choice)
    assert (again.start_ns == schedule.start_ns).all()
    assert (again.peak == schedule.peak).all()


@pytest.mark.parametrize("cap", [None, 16])
def test_the_same_seed_finds_the_same_schedule(cap):
    segments = pipelines.vision_language()
    caps = None if cap is None else cap * pipelines.UNIT
    first, second = (search(segments, caps, evaluations=600, seed=3) for _ in range(2))
    for name in ("pair", "kind", "start_ns", "end_ns", "choice"):
        assert getattr(first.schedule, name).tobytes() == getattr(second.schedule, name).tobytes()
    assert first.improvements == second.improvements
    assert first.schedule.makespan_ns < first.natural_ns


def test_a_time_limit_cuts_and_is_recorded():
    seen = []
    segments = pipelines.vision_language()
    result = search(
        segments, evaluations=10**7, time_limit_s=0.2, progress=lambda done, best: seen.append((done, best))
    )
    assert result.is_cut
    assert result.evaluations < 10**7
    assert result.schedule.makespan_ns <= min(best for _, best in seen)


def test_a_search_under_too_little_memory_is_refused():
    with pytest.raises(DoesNotFitError):
        search(pipelines.vision_language(), 8 * pipelines.UNIT)
