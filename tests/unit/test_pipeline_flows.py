"""Pipelines of modules that call each other in any order: which chunks, which runs, and is there a plan?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import MetaGraph, MetaOp
from spindle.planners import PLANNERS, PlanOptions, make_plan, planners_of
from spindle.planners.pipeline.chains import (
    layer_counts,
    layer_loads,
    layout_of,
    mixed_chain,
    modules_in_rows,
    separate_chains,
)
from spindle.planners.pipeline.stages import batches_of
from spindle.profile import Curve, Profile
from spindle.recipes import MODELS, BatchOptions, step_of
from sweeps import chosen
from test_pipeline_plans import batch, cluster

PIPELINES = tuple(planner for planner in planners_of(is_pipeline=True) if not PLANNERS[planner].takes_parts)


def profile_of(tasks, num_layers, num_devices=2, frozen=()):
    """Tasks are lists of calls (module, indices of the calls that feed it); every layer takes a millisecond. Backward
    of frozen modules takes no time."""
    metaops, edges, curves = [], [], []
    for number, calls in enumerate(tasks):
        first = len(metaops)
        for place, (module, feeders) in enumerate(calls):
            edges += [(first + feeder, len(metaops)) for feeder in feeders]
            metaops.append(
                MetaOp(
                    name=f"t{number}/{module}#{place}",
                    num_layers=num_layers[module],
                    task=f"t{number}",
                    batch_size=1,
                    module=module,
                    call=f"{module}#{place}",
                    parameters=((),) * num_layers[module],
                )
            )
            scale = 0.0 if module in frozen else 1e-3
            curves.append((Curve(num_devices=(1,), forward_s=(1e-3,), backward_s=(2 * scale,), weight_s=(scale,)),))
    graph = MetaGraph(name="calls", metaops=tuple(metaops), edges=tuple(edges))
    return Profile(graph=graph, cluster=cluster(num_devices), curves=tuple(curves))


REFUSALS = {"optimus": "supports only encoders", "vpp": "needs more layers"}


def planned(profile, planner, num_ranks):
    """A plan, which is checked and verified as it is made; None if the planner does not support such modules."""
    try:
        return make_plan(profile, planner, PlanOptions(evaluations=3, pipeline_ranks=num_ranks))
    except (DoesNotFitError, PlanError) as error:
        if planner not in REFUSALS or REFUSALS[planner] not in str(error):
            raise
        return None


@pytest.mark.parametrize("planner", PIPELINES)
def test_a_batch_whose_first_microbatch_is_text_alone_has_a_plan(planner):
    assert planned(batch((0, 24, 7), num_devices=2, most=48, vision_layers=4, language_layers=6), planner, 2)


@pytest.mark.parametrize(
    ("name", "seed"),
    chosen([("vlm-s", 10), ("vlm-l", 31)], ("vlm-s", 4), ("vlm-m", 41), ("vlm-s-h20", 10), ("t2v-s", 4)),
)
def test_every_batch_of_the_papers_models_has_a_plan(name, seed):
    step = step_of(MODELS[name], MODELS[name].cluster, BatchOptions(num_microbatches=2, seed=seed))
    for planner in PIPELINES:
        profile = step.profile(step.sizes[-1] if PLANNERS[planner].splits_microbatches else {})
        assert planned(profile, planner, step.pipeline_ranks) or (planner, name) == ("optimus", "t2v-s")


def test_modules_come_in_the_order_of_all_tasks_flows():
    # The head is called alone first: by itself, that task would put it in front.
    profile = profile_of([[("head", [])], [("tower", []), ("head", [0])]], {"tower": 2, "head": 1})
    assert list(layer_counts(profile.graph)) == ["tower", "head"]
    assert modules_in_rows(profile.graph) == [("tower", "head")]


def test_modules_that_feed_each_other_come_before_what_they_feed():
    there, back = [("a", []), ("b", [0]), ("loss", [1])], [("b", []), ("a", [0])]
    profile = profile_of([[("loss", [])], there, back], {"a": 2, "b": 2, "loss": 1})
    assert list(layer_counts(profile.graph)) == ["a", "b", "loss"]


@pytest.mark.parametrize(
    ("calls", "num_runs"),
    [
        ([("a", []), ("b", [0]), ("c", [1])], 1),
        ([("a", []), ("a", []), ("b", [0, 1])], 1),  # both calls pass the chunks together
        ([("a", []), ("a", [0]), ("b", [1])], 2),
        ([("b", []), ("a", [0]), ("b", [1])], 2),
        ([("c", []), ("b", [0]), ("a", [1])], 3),
    ],
)
def test_a_microbatch_passes_one_chain_as_often_as_its_calls_ask(calls, num_runs):
    order = {"a": 2, "b": 2, "c": 2}
    profile = profile_of([[("a", []), ("b", [0]), ("c", [1])], calls], order)
    layout = layout_of(profile, 2, (mixed_chain({name: layer_loads(profile)[name] for name in order}, 2),))
    (replica,) = batches_of(profile, layout)
    assert replica.segments.num_pairs == 1 + num_runs


@st.composite
def tasks_of_modules(draw, min_modules=1):
    """Up to three tasks that call some of at most five modules, each call fed by some of those before it."""
    modules = [f"m{number}" for number in range(draw(st.integers(min_modules, 5)))]
    num_layers = {module: draw(st.integers(1, 3)) for module in modules}
    tasks = []
    for _ in range(draw(st.integers(1, 3))):
        calls = []
        for place in range(draw(st.integers(1, 6))):
            feeders = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
            calls.append((draw(st.sampled_from(modules)), sorted(feeders)))
        tasks.append(calls)
    return tasks, num_layers


@settings(max_examples=40, deadline=None)
@given(tasks_of_modules(), st.integers(1, 3), st.sampled_from(PIPELINES), st.sets(st.sampled_from(["m0", "m1", "m2"])))
def test_every_graph_of_modules_has_a_pipeline(drawn, num_ranks, planner, frozen):
    planned(profile_of(*drawn, num_devices=num_ranks, frozen=frozen), planner, num_ranks)


def test_layers_whose_backward_makes_weight_gradients_alone_can_be_a_chunk():
    # The first layer's input needs no gradient, so all its backward is the weights'.
    layers = [(1, 1e-3), (1, 2e-3)]
    metaops = tuple(
        MetaOp(
            name=f"t/vision[{place}]",
            num_layers=count,
            task="t",
            batch_size=1,
            module="vision",
            call="vision",
            first_layer=place,
            parameters=((),),
        )
        for place, (count, _) in enumerate(layers)
    )
    curves = tuple(
        (Curve(num_devices=(1,), forward_s=(1e-3,), backward_s=(backward_s,), weight_s=(1e-3,)),)
        for _, backward_s in layers
    )
    graph = MetaGraph(name="patches", metaops=metaops, edges=((0, 1),))
    profile = Profile(graph=graph, cluster=cluster(2), curves=curves)
    for planner in ("pipeline", "zb-h1"):
        assert planned(profile, planner, 2)
    # On the papers' model: as many chunks of vision as its 65 layers allow.
    step = step_of(MODELS["vlm-s"], MODELS["vlm-s"].cluster, BatchOptions(num_microbatches=1, seed=0))
    profile = step.profile(step.sizes[-1])
    rounds = {"vision": 16, "language": 1}
    layout = layout_of(profile, 4, separate_chains(layer_loads(profile), rounds, 4))
    assert batches_of(profile, layout)
