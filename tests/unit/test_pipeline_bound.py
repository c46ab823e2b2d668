"""The bound of pipelines: no split, layout, order or baseline comes below it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle.errors import DoesNotFitError
from spindle.planners import Chain, PlanOptions, make_plan, pipeline_bound, pipeline_bound_s
from spindle.planners.pipeline.baselines import BASELINES
from spindle.planners.pipeline.chains import layout_of
from spindle.planners.pipeline.memory import fastest_choices
from spindle.planners.pipeline.retime import stage_columns
from spindle.planners.pipeline.segments import table_of
from spindle.planners.pipeline.stages import batches_of
from test_pipeline_plans import batch


def shortest_ns(segments):
    """The shortest of all active schedules (Giffler and Thompson), without a memory cap: one of them is optimal."""
    table, (forward, backward, _) = table_of(segments), stage_columns(segments, fastest_choices(segments))
    pairs, top = segments.num_pairs, segments.num_ranks - 1
    before, after, starts = table.predecessor_starts, table.successor_starts, {}
    for pair, rank in product(range(pairs), range(top + 1)):
        needs = [((pair, rank - 1, 0), int(table.hop_ns[pair]))]
        if rank == 0:
            edges = range(before[pair], before[pair + 1])
            needs = [((int(table.predecessors[e]), top, 0), int(table.predecessor_wrap[e])) for e in edges]
        starts[pair, rank, 0] = needs
        needs = [((pair, rank + 1, 1), int(table.hop_ns[pair]))]
        if rank == top:
            edges = range(after[pair], after[pair + 1])
            needs = [((int(table.successors[e]), 0, 1), int(table.successor_wrap[e])) for e in edges]
        starts[pair, rank, 1] = [*needs, ((pair, rank, 0), 0)]
    times = {(pair, rank, kind): int((forward, backward)[kind][pair, rank]) for pair, rank, kind in starts}
    best = sum(times.values()) + sum(wait for needs in starts.values() for _, wait in needs)

    def place(ends, last):
        nonlocal best
        if max(last) >= best:
            return
        if len(ends) == len(starts):
            best = max(last)
            return
        ready = {
            each: max([last[each[1]], *(ends[need] + wait for need, wait in needs)])
            for each, needs in starts.items()
            if each not in ends and all(need in ends for need, _ in needs)
        }
        first = min(ready, key=lambda each: (ready[each] + times[each], each))
        for each, start in ready.items():
            if each[1] == first[1] and (start < ready[first] + times[first] or each == first):
                end = start + times[each]
                place({**ends, each: end}, [end if rank == each[1] else busy for rank, busy in enumerate(last)])

    place({}, [0] * (top + 1))
    return best


def all_chains(modules, num_layers, num_chunks):
    """Modules in a row, cut in every way."""
    total = sum(num_layers)
    for cuts in combinations_with_replacement(range(total + 1), num_chunks - 1):
        yield Chain(modules=modules, num_layers=num_layers, bounds=(0, *cuts, total))


def all_layouts(profile, num_ranks, num_layers):
    """Two modules cut by themselves, passing the ranks once or the first one twice, and both in one chain."""
    vision, language = num_layers
    for rounds in (1, 2):
        for first in all_chains(("vision",), (vision,), rounds * num_ranks):
            for second in all_chains(("language",), (language,), num_ranks):
                yield layout_of(profile, num_ranks, (first, second))
        for chain in all_chains(("vision", "language"), num_layers, rounds * num_ranks):
            yield layout_of(profile, num_ranks, (chain,))


def faster(profile, share):
    """Encoder layers that take a share of their time."""
    curves = [
        tuple(
            replace(
                curve,
                forward_s=tuple(share * each for each in curve.forward_s),
                backward_s=tuple(share * each for each in curve.backward_s),
                weight_s=tuple(share * each for each in curve.weight_s),
            )
            for curve in of_op
        )
        if profile.graph.metaops[position].module == "vision"
        else of_op
        for position, of_op in enumerate(profile.curves)
    ]
    return replace(profile, curves=tuple(curves))


@pytest.mark.parametrize(("images", "num_layers"), [((12,), (2, 2)), ((24,), (2, 1)), ((6, 12), (1, 2))])
@pytest.mark.parametrize("share", [0.7, 1.0])
def test_no_split_layout_or_order_is_below_the_bound(images, num_layers, share):
    layers = {"vision_layers": num_layers[0], "language_layers": num_layers[1]}
    whole = faster(batch(images, num_devices=2, most=48, **layers), share)  # larger microbatches are more efficient
    split = batch(images, num_devices=2, most=12, **layers)
    bound_ns = pipeline_bound_s([whole, split], 2) * 1e9
    shortest = np.inf
    for profile in (whole, split):
        for layout in all_layouts(profile, 2, num_layers):
            (replica,) = batches_of(profile, layout)
            if replica.segments.num_pairs > 4:  # takes too long to enumerate
                continue
            slack = 2 * replica.segments.num_pairs  # a nanosecond for each stage, where nothing is recomputed
            length = shortest_ns(replica.segments) + replica.update_ns.min() + slack
            assert length >= bound_ns
            shortest = min(shortest, length)
    assert shortest <= 2 * bound_ns


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 3), st.sampled_from(["pipeline", *BASELINES])
)
@settings(max_examples=25)
def test_no_planner_is_below_the_bound(images, num_ranks, planner):
    profile = batch(images, num_devices=num_ranks, most=48 if planner != "pipeline" else 12, language_layers=6)
    try:
        plan = make_plan(profile, planner, PlanOptions(pipeline_ranks=num_ranks, evaluations=20))
    except DoesNotFitError:  # the encoder is too large for Optimus
        assert planner == "optimus"
        return
    assert plan.bound_s == pipeline_bound(profile, num_ranks).bound_s <= plan.makespan_s


def test_work_a_long_layer_and_a_long_microbatch_each_may_be_the_bound():
    many = pipeline_bound(batch((12,) * 8, num_devices=2), 2)
    assert many.bound_s == many.work_s
    smallest = pipeline_bound(batch((12,), num_devices=4), 4)
    assert smallest.bound_s == smallest.path_s
    single = pipeline_bound(batch((12,) * 8, num_devices=4, vision_layers=1, language_layers=1), 4)
    assert single.bound_s == single.layer_s
    replicas = pipeline_bound(batch((12,) * 8, num_devices=4), 2)
    assert replicas.work_s == pytest.approx(many.work_s / 2)
