"""Layers that tensor groups share: the numbers of one process whatever the degrees, and why some cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import tensors  # noqa: E402
from spindle import Planning, Trainer, module, task  # noqa: E402
from spindle.cluster import Cluster, cluster_named  # noqa: E402
from spindle.errors import ProfileError, WorkloadError  # noqa: E402
from spindle.graph import metagraph_of  # noqa: E402
from spindle.models import builtin_tp_plan, drop_tied_conflicts, resolve_styles  # noqa: E402
from spindle.planners import PlanOptions, make_plan  # noqa: E402
from spindle.profile import LayerSamples, roofline_profile, sampled_profile  # noqa: E402
from spindle.train import bind, trace_all  # noqa: E402
from spindle.train.tensor import find_sharing  # noqa: E402
from tensors import HEAD, PLAN, WIDTH, Attention, Language, Training  # noqa: E402

torch.set_num_threads(1)
MOST = 1e-9


def check(pool, num_ranks: int, training: Training) -> list[tensors.Difference]:
    answers = pool.run(num_ranks, "train_shared", training)
    for rank, one in enumerate(answers):
        assert one.loss < MOST, (rank, one)
        assert one.parameter < MOST, (rank, one)
    return answers


# Equal to one process.


def test_two_ranks_share_a_language_model_beside_a_module_that_they_do_not(pool):
    answers = check(pool, 2, Training(name="own", fits=(({"language": 2}, None),)))
    assert all(one.elements[0] < 0.6 * one.all_elements for one in answers)


def test_a_replan_from_degree_to_degree_keeps_the_state_of_adam(pool):
    degrees = (({"language": 1}, 3), ({"language": 2}, 4), ({"language": 4}, 5), ({"language": 2}, None))
    check(pool, 4, Training(name="own", fits=degrees))


@pytest.mark.parametrize("seed", range(10, 13))
def test_any_plan_has_the_numbers_of_one_process(pool, seed):
    """Groups of two and of four, side by side or not, with uneven shares, rounds and recomputation."""
    fits = (({"language": 2}, seed), ({"language": 4}, seed))
    check(pool, 4, Training(name="own", fits=fits, steps=2, optimizer="sgd"))


def test_clipping_counts_every_entry_once(pool):
    fits = (({"language": 2}, 7), ({"language": 4}, 8))
    check(pool, 4, Training(name="own", fits=fits, optimizer="sgd", options={"max_grad_norm": 0.1}))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ranks_with_the_same_shard_share_the_state_of_its_optimizer(pool, optimizer):
    fits = (({"language": 2}, 11), ({"language": 1}, 12), ({"language": 4}, 13), ({"language": 2}, 14))
    options = {"planning": Planning(shard_optimizer=True), "max_grad_norm": 0.5}
    check(pool, 4, Training(name="own", fits=fits, steps=2, optimizer=optimizer, options=options))


def test_blocks_that_recompute_themselves_meet_in_backward_too(pool):
    check(pool, 2, Training(name="own recomputing", fits=(({"language": 2}, 3),), optimizer="sgd"))


def test_slots_of_tensor_groups_are_not_captured_and_others_are(pool):
    fits = (({"language": 2}, 3),)
    answers = check(pool, 2, Training(name="own", fits=fits, steps=5, optimizer="sgd", captures=True))
    reasons = [text for text in answers[0].notices if "without a CUDA graph" in text]
    assert any("language" in text and "its tensor group meets inside it" in text for text in reasons)
    assert not any("vision" in text for text in reasons)


@pytest.mark.parametrize(("name", "optimizer"), [("Llama", "sgd"), ("Qwen2 tied", "adamw"), ("EuroBert", "sgd")])
def test_models_of_hugging_face_bring_their_plans(pool, name, optimizer):
    pytest.importorskip("transformers")
    fits = (({"language": 2}, None), ({"language": 1}, 2), ({"language": 2}, 3))
    answers = check(pool, 2, Training(name=name, fits=fits, optimizer=optimizer, steps=1))
    assert answers[0].elements[0] < 0.6 * answers[0].all_elements  # tables and logits are split, too


# What is found out, and what planners make of it.


def found(tasks, batches, *, has_values: bool = True):
    examples = batches(0)
    traced = trace_all(tasks, examples)
    sharing = find_sharing(traced, examples, has_values=has_values)
    return sharing, metagraph_of(bind("found", traced, sharing=sharing).workload)


@pytest.fixture(scope="module")
def own():
    return found(*tensors.own())


def test_degrees_are_those_that_divide_the_heads(own):
    sharing, _ = own
    assert sharing.most == {"language": WIDTH // HEAD}
    assert "8 devices cannot share one of its layers" in sharing.reasons["language"]


def test_what_planners_see_does_not_depend_on_weights_in_memory(own):
    assert own[1].fingerprint == found(*tensors.own(), has_values=False)[1].fingerprint


def test_a_planner_shares_layers_where_memory_asks_for_it(own):
    _, graph = own
    for memory, degree in ((2_000_000, 1), (300_000, 2), (190_000, 4)):
        (island,) = cluster_named("a800x4").islands
        small = replace(island, kind=replace(island.kind, memory_bytes=memory))
        profile = roofline_profile(graph, Cluster(name="small", islands=(small,)))
        plan = make_plan(profile, "wavefront", PlanOptions(evaluations=1_000))
        assert dict(plan.tensor_degrees)["language"] == degree


def test_what_was_measured_on_one_device_is_planned_for_several(own):
    _, graph = own
    samples = LayerSamples(rows=(1, 2, 3, 5), forward_s=(1e-3, 2e-3, 3e-3, 5e-3), backward_s=(2e-3, 4e-3, 6e-3, 1e-2))
    profile = sampled_profile(graph, cluster_named("a800x4"), {op.name: samples for op in graph.metaops})
    assert profile.degrees_of("language") == (1, 2, 4)
    assert profile.degrees_of("vision") == (1,)
    block = next(position for position, op in enumerate(graph.metaops) if op.module == "language" and op.num_layers > 1)
    whole, halves, _ = profile.curves[block]
    assert halves.num_devices == (2, 4)
    assert whole.forward_s[0] / 2 < halves.forward_s[0] < whole.forward_s[0]
    fixed = profile.with_degrees({"language": 4})
    assert fixed.degrees_of("language") == (4,)
    with pytest.raises(ProfileError, match=r"tensor degree 8 is given for module 'language', which can have 1, 2, 4"):
        profile.with_degrees({"language": 8})
    with pytest.raises(ProfileError, match=r"tensor degree 2 is given for 'audio', which is not a module"):
        profile.with_degrees({"audio": 2})


# Refusals.


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"head": "diagonal"}, r"unknown style 'diagonal'; known styles: all_reduce, colwise,"),
        ({"layers.*.up": "colwise"}, r"'layers\.\*\.up' matches no submodule of the Language"),
        ({"words": "colwise"}, r"style 'colwise' needs an nn\.Linear, but 'words' is a Embedding"),
    ],
)
def test_a_plan_that_names_what_there_is_not_is_refused(plan, sentence):
    with pytest.raises(WorkloadError, match=sentence):
        module("language", Language(), tensor_parallel=plan)


class CountedAttention(Attention):
    """Counts its heads, and finds out by itself how long a text is: no shape is wrong when it has half of them."""

    def forward(self, x):
        query, key, value = (
            one(x).view(x.shape[0], -1, WIDTH // HEAD, HEAD).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.out(mixed.reshape(x.shape[0], x.shape[1], -1))


def changed(change, **options):
    """The workload with other blocks."""
    tasks, batches = tensors.own(**options)
    for one in tasks[0].function.__closure__:
        if getattr(one.cell_contents, "name", "") == "language":
            for block in one.cell_contents.module.blocks:
                change(block)
    return tasks, batches


def test_heads_that_a_forward_counts_itself_are_noticed():
    def count(block):
        block.attention.__class__ = CountedAttention

    sharing, _ = found(*changed(count))
    assert sharing.most == {}
    assert "other numbers than one; a forward that counts heads" in sharing.reasons["language"]


def test_a_weight_whose_gradient_would_be_a_part_is_noticed():
    plan = {path: style for path, style in PLAN.items() if style != "replicated_with_grad_allreduce"}
    sharing, _ = found(*tensors.own(tensor_parallel=plan))
    assert sharing.most == {}
    assert "other gradients than one" in sharing.reasons["language"]


def test_half_a_plan_is_noticed():
    plan = {path: style for path, style in PLAN.items() if not path.endswith("down")}
    sharing, _ = found(*tensors.own(tensor_parallel=plan))
    assert sharing.most == {}
    assert "2 devices cannot share one of its layers" in sharing.reasons["language"]


def test_no_plan_means_no_groups():
    assert found(*tensors.own(tensor_parallel={}))[0].most == {}


def test_a_table_that_is_used_otherwise_too_stays_whole():
    language = Language()
    loose = {path: style for path, style in PLAN.items() if path != "head"}
    kept = drop_tied_conflicts(resolve_styles(language, loose), [language])
    assert "words" not in [one.path for one in kept]
    assert "words" in [one.path for one in drop_tied_conflicts(resolve_styles(language, PLAN), [language])]


def test_experts_stay_whole_and_attention_is_shared():
    pytest.importorskip("transformers")
    import hugging

    mixtral = module("language", hugging.made("Mixtral"))

    @task(batch_size=4)
    def predict(batch):
        return mixtral(**batch).logits.square().mean()

    assert any(style == "moe_tp_experts" for style in builtin_tp_plan(mixtral.module).values())
    sharing, _ = found([predict], lambda step: {"predict": hugging.batch_of("Mixtral", 4, 9)})
    assert sharing.most == {"language": 2}


def test_degrees_that_cannot_be_are_refused(pool):
    refused = pool.run(2, "refusal_of", {"vision": 2}, "adamw")
    assert all("'vision' has no tensor parallel plan; give one with spindle.module('vision'" in one for one in refused)
    refused = pool.run(2, "refusal_of", {"language": 4}, "adamw")
    assert all("tensor degree 4 is given for module 'language', which can have 1, 2" in one for one in refused)


def test_an_optimizer_that_needs_whole_parameters_is_refused(pool):
    refused = pool.run(2, "refusal_of", {"language": 2}, "adafactor")
    assert all("of which the optimizer cannot update parts: it does not update each element" in one for one in refused)


def test_one_process_has_no_groups():
    tasks, batches = tensors.own()
    trainer = Trainer(tasks, optimizer=lambda named: torch.optim.SGD([one for _, one in named], 0.1))
    with tensors.unmeasured():
        trainer.fit({one.name: [batches(0)[one.name]] for one in tasks}, steps=1, progress=False)
        trainer.replan(tensor_parallel_degrees={"language": 2})
        with pytest.raises(ProfileError, match=r"'language', which may have 1"):
            trainer.fit({one.name: [batches(0)[one.name]] for one in tasks}, steps=1, progress=False)
