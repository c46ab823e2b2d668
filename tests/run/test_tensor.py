"""Layers that tensor groups share: the numbers of one process whatever the degrees, and why some cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import tensor_parallel  # noqa: E402
from internals import sharing_found_once, unmeasured  # noqa: E402
from spindle import Planning, Trainer, module, task  # noqa: E402
from spindle.cluster import Cluster, cluster_named  # noqa: E402
from spindle.errors import ProfileError, SpindleError, WorkloadError  # noqa: E402
from spindle.graph import metagraph_of  # noqa: E402
from spindle.models import builtin_tp_plan, drop_tied_conflicts, resolve_styles  # noqa: E402
from spindle.planners import PlanOptions, make_plan  # noqa: E402
from spindle.profile import LayerSamples, roofline_profile, sampled_profile  # noqa: E402
from spindle.train import bind, trace_all  # noqa: E402
from spindle.train.tensor import find_sharing  # noqa: E402
from sweeps import chosen  # noqa: E402
from tensor_parallel import HEAD, PLAN, WIDTH, Attention, Language, sharing  # noqa: E402
from trainings import Fit, Trained, Training, adamw, assert_trained, sgd, train  # noqa: E402
from zoo import Workload  # noqa: E402

torch.set_num_threads(1)


def trained(pool, num_ranks: int, training: Training) -> list[Trained]:
    answers = pool.run(num_ranks, train, training)
    assert_trained(answers)
    return answers


def degrees(*fits: tuple[int, str | None], steps: int = 2) -> list[Fit]:
    """Fits one after the other, each with a tensor degree of the language model and a random plan, or a planner's."""
    return [Fit(steps=steps, degrees={"language": degree}, plan=plan) for degree, plan in fits]


# Equal to one process.


def test_two_ranks_share_a_language_model_beside_a_module_that_they_do_not(pool):
    answers = trained(pool, 2, sharing("own", *degrees((2, None)), optimizer=adamw))
    assert all(answer.trained_elements[0] < 0.6 * answer.all_elements for answer in answers)


def test_a_replan_from_degree_to_degree_keeps_the_state_of_adam(pool):
    fits = degrees((1, "plan 3"), (2, "plan 4"), (4, "plan 5"), (2, None))
    trained(pool, 4, sharing("own", *fits, optimizer=adamw))


@pytest.mark.parametrize("seed", chosen([10, 11], 12))
def test_any_plan_has_the_numbers_of_one_process(pool, seed):
    """Groups of two and of four, side by side or not, with uneven shares, rounds and recomputation."""
    trained(pool, 4, sharing("own", *degrees((2, f"plan {seed}"), (4, f"plan {seed}"))))


def test_clipping_counts_every_entry_once(pool):
    trained(pool, 4, sharing("own", *degrees((2, "plan 7"), (4, "plan 8")), options={"max_grad_norm": 0.1}))


@pytest.mark.parametrize("optimizer", chosen([adamw], sgd))
def test_ranks_with_the_same_shard_share_the_state_of_its_optimizer(pool, optimizer):
    fits = degrees((2, "plan 11"), (1, "plan 12"), (4, "plan 13"), (2, "plan 14"))
    training = sharing("own", *fits, optimizer=optimizer, options={"max_grad_norm": 0.5})
    assert_trained(pool.run(4, train, training, shard_optimizer=True))


def test_blocks_that_recompute_themselves_meet_in_backward_too(pool):
    trained(pool, 2, sharing("own recomputing", *degrees((2, "plan 3"))))


def test_slots_of_tensor_groups_are_not_captured_and_others_are(pool):
    answers = trained(pool, 2, sharing("own", *degrees((2, "plan 3"), steps=5), captures=True))
    reasons = [text for text in answers[0].notices if "without a CUDA graph" in text]
    assert any("language" in text and "its tensor-parallel group communicates inside it" in text for text in reasons)
    assert not any("vision" in text for text in reasons)


@pytest.mark.parametrize(("name", "optimizer"), chosen([("Qwen2 tied", adamw), ("EuroBert", sgd)], ("Llama", sgd)))
def test_models_of_hugging_face_bring_their_plans(pool, name, optimizer):
    pytest.importorskip("transformers")
    fits = degrees((2, None), (1, "plan 2"), (2, "plan 3"), steps=1)
    answers = trained(pool, 2, sharing(name, *fits, optimizer=optimizer))
    assert answers[0].trained_elements[0] < 0.6 * answers[0].all_elements  # tables and logits are split, too


# What is found out, and what planners make of it.


def find(workload: Workload, *, has_values: bool = True):
    """How the modules of a workload can be shared, and its graph."""
    examples = workload.batches(0)
    traced = trace_all(workload.tasks, examples)
    sharing = find_sharing(traced, examples, has_values=has_values)
    return sharing, metagraph_of(bind("found", traced, sharing=sharing).workload)


@pytest.fixture(scope="module")
def own():
    return find(tensor_parallel.own())


def test_degrees_are_those_that_divide_the_heads(own):
    sharing, _ = own
    assert sharing.most == {"language": WIDTH // HEAD}
    assert "8 devices cannot share one of its layers" in sharing.reasons["language"]


def test_what_planners_see_does_not_depend_on_weights_in_memory(own):
    assert own[1].fingerprint == find(tensor_parallel.own(), has_values=False)[1].fingerprint


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
            linear(x).view(x.shape[0], -1, WIDTH // HEAD, HEAD).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.out(mixed.reshape(x.shape[0], x.shape[1], -1))


def changed(change, **options) -> Workload:
    """The workload with other blocks."""
    workload = tensor_parallel.own(**options)
    for block in workload.handles["language"].module.blocks:
        change(block)
    return workload


def test_heads_that_a_forward_counts_itself_are_noticed():
    def count(block):
        block.attention.__class__ = CountedAttention

    sharing, _ = find(changed(count))
    assert sharing.most == {}
    assert "gives different results; a forward that uses its own number of heads" in sharing.reasons["language"]


def test_a_weight_whose_gradient_would_be_a_part_is_noticed():
    plan = {path: style for path, style in PLAN.items() if style != "replicated_with_grad_allreduce"}
    sharing, _ = find(tensor_parallel.own(tensor_parallel=plan))
    assert sharing.most == {}
    assert "gives different gradients" in sharing.reasons["language"]


def test_half_a_plan_is_noticed():
    plan = {path: style for path, style in PLAN.items() if not path.endswith("down")}
    sharing, _ = find(tensor_parallel.own(tensor_parallel=plan))
    assert sharing.most == {}
    assert "2 devices cannot share one of its layers" in sharing.reasons["language"]


def test_no_plan_means_no_groups():
    assert find(tensor_parallel.own(tensor_parallel={}))[0].most == {}


def test_a_table_that_is_used_otherwise_too_stays_whole():
    language = Language()
    loose = {path: style for path, style in PLAN.items() if path != "head"}
    untied = drop_tied_conflicts(resolve_styles(language, loose), [language])
    assert "words" not in [style.path for style in untied]
    assert "words" in [style.path for style in drop_tied_conflicts(resolve_styles(language, PLAN), [language])]


def test_experts_stay_whole_and_attention_is_shared():
    pytest.importorskip("transformers")
    import hugging

    mixtral = module("language", hugging.made("Mixtral"))

    @task(batch_size=4)
    def predict(batch):
        return mixtral(**batch).logits.square().mean()

    assert any(style == "moe_tp_experts" for style in builtin_tp_plan(mixtral.module).values())
    sharing, _ = find(Workload(tasks=[predict], batches=lambda step: {"predict": hugging.batch_of("Mixtral", 4, 9)}))
    assert sharing.most == {"language": 2}


def refusal_of(rank: int, num_ranks: int, degrees: dict[str, int], optimizer: Callable[..., Any] = adamw) -> str:
    """What a Trainer says to these degrees, or this optimizer."""
    workload = tensor_parallel.own()
    with unmeasured(), sharing_found_once("own"):
        planning = Planning(tensor_parallel_degrees=degrees)
        trainer = Trainer(workload.tasks, optimizer=optimizer, planning=planning)
        try:
            trainer.fit({name: [batch] for name, batch in workload.batches(0).items()}, steps=1, progress=False)
        except SpindleError as error:
            return str(error)
    return ""


def adafactor(named) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([parameter for _, parameter in named])


def test_degrees_that_cannot_be_are_refused(pool):
    for message in pool.run(2, refusal_of, {"vision": 2}):
        assert "'vision' has no tensor parallel plan; give one with spindle.module('vision'" in message
    for message in pool.run(2, refusal_of, {"language": 4}):
        assert "tensor degree 4 is given for module 'language', which can have 1, 2" in message


def test_an_optimizer_that_needs_whole_parameters_is_refused(pool):
    for message in pool.run(2, refusal_of, {"language": 2}, adafactor):
        assert "of which the optimizer cannot update parts: it does not update each element" in message


def test_one_process_has_no_groups():
    workload = tensor_parallel.own()
    trainer = Trainer(workload.tasks, optimizer=sgd)
    loaders = {name: [batch] for name, batch in workload.batches(0).items()}
    with unmeasured():
        trainer.fit(loaders, steps=1, progress=False)
        trainer.replan(tensor_parallel_degrees={"language": 2})
        with pytest.raises(ProfileError, match=r"'language', which can have 1"):
            trainer.fit(loaders, steps=1, progress=False)
