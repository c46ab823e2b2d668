"""Planner `pipeline` and the pipelines of others, from a profile of a batch to a simulated step."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from pipelines import IMAGES
from spindle.cluster import Cluster, DeviceKind, Island, Link
from spindle.errors import DoesNotFitError, InputError, PlanError
from spindle.graph import MetaGraph, MetaOp
from spindle.plan import check, forward_spans
from spindle.planners import (
    PLANNERS,
    Chain,
    Layout,
    PlanOptions,
    choose_layout,
    make_plan,
    pipeline_bound_s,
    pipeline_layout,
    search_pipeline,
)
from spindle.planners.pipeline.baselines import BASELINES, plan_in_order
from spindle.planners.pipeline.chains import layer_loads, layout_of, lightest_cuts, mixed_chain, separate_chains
from spindle.planners.pipeline.choose import natural_rounds
from spindle.planners.pipeline.interleave import interleave
from spindle.planners.pipeline.stages import batches_of, plan_of
from spindle.profile import Curve, Profile
from spindle.program import lower, verify
from spindle.recipes import BatchOptions, batches, step_of
from spindle.recipes.multimodal import MODELS
from spindle.simulate import simulate
from spindle.workload import LayerCost, Parameter

UNLIMITED = 1 << 62


def cluster(num_devices, memory_bytes=UNLIMITED):
    link = Link(bytes_per_s=UNLIMITED)
    kind = DeviceKind(name="any", peak_flops=UNLIMITED, memory_bytes=memory_bytes, memory_bytes_per_s=UNLIMITED)
    return Cluster(name="small", islands=(Island(kind=kind, num_devices=num_devices, link=link, uplink=link),))


def batch(
    images, *, num_devices=4, vision_layers=8, language_layers=4, memory_bytes=UNLIMITED, saved_bytes=0.0, most=12
):
    """Encoder layers of 25 ms for 12 images and language layers of 20.5 ms; backward twice, half of it for weights."""
    metaops, edges, curves = [], [], []

    def add(task, module, call, layers, parameters, time_ms):
        cost = LayerCost(
            forward_flops=1,
            backward_flops=2,
            traffic_bytes=0,
            saved_bytes=saved_bytes * time_ms,
            output_bytes=saved_bytes * time_ms / 10,
        )
        metaops.append(
            MetaOp(
                name=f"{task}/{call}",
                num_layers=layers,
                task=task,
                batch_size=1,
                module=module,
                call=call,
                cost=cost,
                parameters=tuple((parameters + layer,) for layer in range(layers)),
            )
        )
        times = (time_ms * 1e-3,), (2 * time_ms * 1e-3,)
        curves.append((Curve(num_devices=(1,), forward_s=times[0], backward_s=times[1], weight_s=times[0]),))
        return len(metaops) - 1

    for number, count in enumerate(images):
        parts = -(-count // most)
        sizes = [count // parts + (part < count % parts) for part in range(parts)]
        task = f"m{number:02}"
        ends = [
            add(task, "vision", f"vision.{part}", vision_layers, 0, 25 * size / 12) for part, size in enumerate(sizes)
        ]
        language = add(task, "language", "language", language_layers, vision_layers, 20.5)
        edges += [(end, language) for end in ends]
    parameters = tuple(
        Parameter(name=f"p{number}", num_elements=1) for number in range(vision_layers + language_layers)
    )
    graph = MetaGraph(name="vlm", metaops=tuple(metaops), edges=tuple(edges), parameters=parameters)
    return Profile(graph=graph, cluster=cluster(num_devices, memory_bytes), curves=tuple(curves))


def separate(profile, num_ranks, rounds):
    return layout_of(profile, num_ranks, separate_chains(layer_loads(profile), rounds, num_ranks))


@pytest.mark.parametrize(("most", "expected_ms"), [(12, 6104.833333), (48, 6708.5)])
def test_the_golden_load_takes_its_time_in_the_simulator(most, expected_ms):
    profile = batch(IMAGES, most=most)
    layout = separate(profile, 4, {"vision": 2, "language": 1})
    (replica,) = batches_of(profile, layout)
    plan = plan_of(profile, layout, "pipeline", [replica], [interleave(replica.segments)])
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    assert plan.folded_s * 1e3 == pytest.approx(expected_ms, abs=1e-3)
    assert simulate(program, profile).makespan_s * 1e3 == pytest.approx(expected_ms, abs=1e-3)


def test_modules_pass_the_ranks_as_often_as_their_time_asks():
    # T = (10, 25) gives K = (1, 2): DIP's rule, floor of the ratio.
    profile = batch((12,), vision_layers=1, language_layers=1)
    assert natural_rounds(profile) == {"vision": 1, "language": 1}
    assert natural_rounds(batch((24,), vision_layers=4, language_layers=2, most=24)) == {"vision": 4, "language": 1}


def test_sixty_three_layers_in_eight_chunks():
    cuts = lightest_cuts(np.ones(63), 8)
    assert sorted(np.diff(cuts)) == [7] + [8] * 7


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 5))
def test_no_cuts_are_lighter(loads, num_chunks):
    weights = np.array(loads, dtype=float)
    ends = np.concatenate([[0.0], np.cumsum(weights)])
    best = min(
        max(np.diff(ends[[0, *cuts, len(loads)]]))
        for cuts in itertools.combinations_with_replacement(range(len(loads) + 1), num_chunks - 1)
    )
    bounds = lightest_cuts(weights, num_chunks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(loads), num_chunks + 1)
    assert max(np.diff(ends[list(bounds)])) == pytest.approx(best)


def test_chains_give_ranks_equal_work():
    profile = batch((12, 24, 0, 30), vision_layers=9, language_layers=6)
    (vision, language) = separate_chains(layer_loads(profile), {"vision": 2, "language": 1}, 2)
    loads = layer_loads(profile)
    ranks = np.zeros(2)
    for chain in (vision, language):
        ends = np.concatenate([[0.0], np.cumsum(loads[chain.modules[0]])])
        ranks += np.diff(ends[list(chain.bounds)]).reshape(-1, 2).sum(axis=0)
    assert max(ranks) / min(ranks) < 1.1


def test_a_layout_that_does_not_divide_the_devices_is_refused():
    with pytest.raises(PlanError, match="3 pipeline ranks of 1 devices need a multiple of 3 devices, got 4"):
        layout_of(batch((12,)), 3, ())
    with pytest.raises(PlanError, match="multiple of as many chunks"):
        Layout(
            num_ranks=2,
            num_replicas=1,
            tensor_degree=1,
            chains=(Chain(modules=("a",), num_layers=(3,), bounds=(0, 1, 2, 3)),),
        )


def finished(plan, profile):
    """What every finished plan holds to."""
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    timeline = simulate(program, profile)
    assert timeline.makespan_s == pytest.approx(plan.makespan_s)
    assert plan.makespan_s >= plan.bound_s * (1 - 1e-9)
    assert timeline.peak_bytes().max() <= profile.cluster.kind.memory_bytes
    return timeline


@pytest.mark.parametrize("planner", BASELINES)
def test_every_baseline_has_a_legal_plan(planner):
    profile = batch((24, 7, 0, 30, 12), num_devices=2, most=48, vision_layers=4, language_layers=6)
    plan = make_plan(profile, planner, PlanOptions(pipeline_ranks=2))
    finished(plan, profile)
    assert plan.planner == planner
    assert re.match(r"chunks on each rank: \d.*, cut by (time|parameters); microbatches ", plan.settings)


@pytest.mark.parametrize("planner", ["static", "vpp", "optimus"])
def test_a_tuned_baseline_is_no_slower_than_any_of_its_settings(planner):
    profile = batch((24, 7, 0, 30, 12, 44, 19), num_devices=2, most=48, vision_layers=6, language_layers=8)
    plan = make_plan(profile, planner, PlanOptions(pipeline_ranks=2))
    baseline = BASELINES[planner]
    for layout in baseline.layouts(profile, 2):
        for microbatch_order in baseline.microbatch_orders[:1]:
            repeated = plan_in_order(profile, layout, planner, baseline.order, microbatch_order)
            assert plan.makespan_s <= repeated.makespan_s * (1 + 1e-9)


def test_sorting_microbatches_changes_their_order_and_nothing_else():
    profile = batch((4, 30, 12, 24), num_devices=2, most=48)
    layout = layout_of(profile, 2, (mixed_chain(layer_loads(profile), 2),))
    order = BASELINES["1f1b"].order
    first = {}
    for microbatch_order in ("natural", "falling", "rising"):
        plan = plan_in_order(profile, layout, "1f1b", order, microbatch_order)
        finished(plan, profile)
        tasks = [slot.op.split("/")[0] for slot in plan.slots if slot.devices == (0,)]
        first[microbatch_order] = list(dict.fromkeys(tasks))
    assert first["natural"] == ["m00", "m01", "m02", "m03"]
    assert first["falling"] == ["m01", "m03", "m02", "m00"] == first["rising"][::-1]


def test_an_unknown_planner_is_refused():
    with pytest.raises(
        InputError, match=r"no planner is called 'gpipe'; there are wavefront, paper.*pipeline, colocate.*optimus"
    ):
        make_plan(batch((12,)), "gpipe")


def test_without_modules_there_is_no_pipeline():
    with pytest.raises(PlanError, match="a pipeline cuts modules into chunks, but op 'vision' belongs to no module"):
        make_plan(small.two_towers(4), "pipeline")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_replicas_share_the_microbatches_and_sum_their_gradients(num_replicas):
    profile = batch((24, 7, 0, 30, 12, 19), num_devices=2 * num_replicas)
    layout = pipeline_layout(profile, 2)
    assert layout.num_replicas == num_replicas
    plan, results = search_pipeline(profile, PlanOptions(evaluations=50, layouts=(layout,)))
    finished(plan, profile)
    assert len(results) == num_replicas
    program = lower(plan, profile)
    assert all(len(bucket.ranks) == num_replicas for bucket in program.buckets)
    assert bool(program.buckets) == (num_replicas > 1)
    devices_of = {}
    for slot in plan.slots:
        devices_of.setdefault(slot.op.split("/")[0], set()).update(device // 2 for device in slot.devices)
    assert all(len(replicas) == 1 for replicas in devices_of.values())


def test_the_same_seed_gives_the_same_plan():
    profile = batch((24, 7, 0, 30, 12, 19))
    layout = pipeline_layout(profile, 4)
    plans = [search_pipeline(profile, PlanOptions(evaluations=200, seed=3, layouts=(layout,)))[0] for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].evaluations <= 200 + len(plans[0].passes)


def test_memory_is_kept_to_and_costs_time():
    free = batch((24, 40, 12, 30, 12, 19, 0, 44), saved_bytes=1e6)
    layout = pipeline_layout(free, 4)
    unbound, _ = search_pipeline(free, PlanOptions(evaluations=100, layouts=(layout,)))
    peak = finished(unbound, free).peak_bytes().max()
    tight = batch((24, 40, 12, 30, 12, 19, 0, 44), saved_bytes=1e6, memory_bytes=int(0.5 * peak))
    plan, _ = search_pipeline(tight, PlanOptions(evaluations=100, layouts=(layout,)))
    finished(plan, tight)
    assert plan.makespan_s >= unbound.makespan_s
    assert any(slot.recomputed for slot in plan.slots)
    full = batch((24, 40), saved_bytes=1e6, memory_bytes=int(0.01 * peak))
    with pytest.raises(DoesNotFitError):
        search_pipeline(full, PlanOptions(evaluations=10, layouts=(layout,)))


def mixed_batch(images, num_ranks, **layers):
    profile = batch(images, num_devices=num_ranks, most=48, **layers)
    layout = layout_of(profile, num_ranks, (mixed_chain(layer_loads(profile), num_ranks),))
    (replica,) = batches_of(profile, layout)
    return replica, profile


def test_a_mixed_chain_puts_layers_of_two_modules_on_one_rank():
    replica, profile = mixed_batch((12,), 2, vision_layers=1, language_layers=3)
    modules = [{profile.graph.metaops[piece.op].module for piece in some} for some in replica.pieces[0]]
    assert modules == [{"vision", "language"}, {"language"}]


def test_text_alone_has_nothing_to_do_where_only_the_encoder_stands():
    replica, _ = mixed_batch((12, 0), 4, vision_layers=3, language_layers=2)
    assert replica.segments.num_pairs == 2
    assert [bool(some) for some in replica.pieces[1]] == [False, False, True, True]


@pytest.mark.parametrize("name", ["vlm-s", "t2v-s"])
def test_ours_is_faster_than_what_others_do_on_the_papers_models(name):
    step = step_of(MODELS[name], MODELS[name].cluster, BatchOptions(num_microbatches=6, seed=1))
    times = {}
    profiles = step.split_profiles()
    bound_s = pipeline_bound_s(profiles, step.pipeline_ranks)
    chosen, layout = choose_layout(profiles, step.pipeline_ranks)
    options = PlanOptions(evaluations=30, pipeline_ranks=step.pipeline_ranks, bound_s=bound_s)
    for planner in ("pipeline", *BASELINES):
        is_ours = PLANNERS[planner].splits_microbatches
        profile = chosen if is_ours else step.whole
        try:
            plan = make_plan(profile, planner, replace(options, layouts=(layout,)) if is_ours else options)
        except DoesNotFitError:  # 1F1B keeps too many images alive, and Optimus knows no video
            assert (planner, name) in (("1f1b", "vlm-s"), ("optimus", "t2v-s"))
            continue
        times[planner] = plan.makespan_s
        if planner in ("pipeline", "vpp"):
            finished(plan, profile)
    assert min(times, key=times.get) == "pipeline"
    assert 0 < step.peak_s < times["pipeline"]


def test_a_cluster_that_the_model_does_not_divide_is_refused():
    from spindle.cluster import cluster_named

    with pytest.raises(PlanError, match="needs a multiple of 16 devices"):
        step_of(MODELS["vlm-s"], cluster_named("h800x24"))


def test_batches_come_from_a_file_of_lengths(tmp_path):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"text_tokens": 8000}\n{"text_tokens": 100, "images": 40}\n' * 3)
    drawn = list(batches(MODELS["vlm-s"], 2, seed=0, samples=lengths))
    assert len(drawn) == 3
    with pytest.raises(InputError, match="its samples make 6 microbatches, a batch has 9"):
        next(batches(MODELS["vlm-s"], 9, seed=0, samples=lengths))


def test_a_plan_with_other_slots_first_is_still_in_start_order():
    profile = batch((12, 24))
    plan = make_plan(profile, "pipeline", PlanOptions(evaluations=5, pipeline_ranks=4))
    starts = [span.start_s for span in forward_spans(plan, profile)]
    assert starts == sorted(starts)
    with pytest.raises(PlanError):
        check(replace(plan, passes=plan.passes[::-1]), profile)
