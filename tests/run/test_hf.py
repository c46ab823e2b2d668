"""Hugging Face models, unchanged: cut into layers by one mechanism, with the numbers of the unsplit model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


import transformers as hf  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import hugging  # noqa: E402
from comparison import assert_close  # noqa: E402
from gpu import hugging_face  # noqa: E402
from programs import compare_steps  # noqa: E402
from spindle import Trainer, module, task  # noqa: E402
from spindle.models import as_when_compiling, chain_of  # noqa: E402
from spindle.train import trace_all  # noqa: E402
from sweeps import spread  # noqa: E402

torch.set_num_threads(1)  # several do nothing for tensors as small as these
ROWS, LENGTH = 4, 9
ELSEWHERE = ((5, 14), (1, LENGTH))  # rows and lengths that it runs on


def loss_and_gradients(run, model, batch):
    model.zero_grad()
    output = run(**batch)
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    loss = sum(leaf.square().mean() for leaf in floats)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, output


# CI has the models that were asked for first, and some of the others.
NUM_FIRST = [*hugging.MODELS].index("LLaVA") + 1
CHOSEN = [*[*hugging.MODELS][:NUM_FIRST], *spread([*hugging.MODELS][NUM_FIRST:], 3), *spread(hugging.FAMILIES, 6)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_is_cut_and_has_the_numbers_of_the_unsplit_model(name):
    expected_layers, expected_reason = hugging.ALL_MODELS[name].num_layers, hugging.ALL_MODELS[name].reason
    try:
        model = hugging.made(name)
    except AttributeError as error:
        if "module transformers has no attribute" not in str(error):
            raise
        pytest.skip(f"transformers {hf.__version__}: {error}")
    names = list(model.state_dict())
    chain = chain_of(model, **hugging.batch_of(name, ROWS, LENGTH))
    assert len(chain.layers) == expected_layers, chain.reason
    assert bool(chain.reason) == bool(expected_reason)
    assert expected_reason in chain.reason
    if chain.reason:
        return
    for rows, length in ELSEWHERE if name in [*hugging.MODELS][:NUM_FIRST] else ELSEWHERE[:1]:
        batch = hugging.batch_of(name, rows, length)
        loss, gradients, output = loss_and_gradients(chain, model, batch)
        expected, theirs, plain = loss_and_gradients(hugging.without_cache(model), model, batch)
        assert type(output) is type(plain)
        assert torch.allclose(loss, expected, rtol=1e-9)
        for path, gradient in theirs.items():
            ours = gradients[path]
            assert (ours is None) == (gradient is None), path
            assert ours is None or torch.allclose(ours, gradient, rtol=1e-9, atol=1e-12), path
    assert list(model.state_dict()) == names
    used = {id(parameter) for layer in chain.layers for parameter in layer.parameters}
    assert used >= {id(parameter) for path, parameter in model.named_parameters() if theirs[path] is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "asked"),
    [("Llama", ["attentions"]), ("Mixtral", ["hidden_states"]), ("Mixtral", ["attentions", "router_logits"])],
)
def test_tensors_made_inside_blocks_are_outputs_of_their_layers(name, asked):
    model = hugging.without_cache(hugging.made(name))
    model.set_attn_implementation("eager")  # which returns attention weights
    options = {f"output_{each}": True for each in asked}
    chain = chain_of(model, **hugging.batch_of(name, ROWS, LENGTH), **options)
    assert len(chain.layers) == 5, chain.reason
    batch = {**hugging.batch_of(name, *ELSEWHERE[0]), **options}
    loss, gradients, output = loss_and_gradients(chain, model, batch)
    expected, theirs, plain = loss_and_gradients(model, model, batch)
    assert all(len(output[each]) == len(plain[each]) >= 3 for each in asked)
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert all(torch.allclose(gradients[path], theirs[path], rtol=1e-9, atol=1e-12) for path in theirs)


def llama(**settings):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**hugging.GROUPED, **settings)).double()


def assert_same(model, **given):
    batch = {**hugging.batch_of("Llama", ROWS, LENGTH), **given}
    chain = chain_of(model, **batch)
    assert chain.reason == ""
    loss, gradients, output = loss_and_gradients(chain, model, batch)
    expected, theirs, plain = loss_and_gradients(model, model, batch)
    assert torch.allclose(loss, expected, rtol=1e-9)
    assert [leaf.shape for leaf in tree_leaves(output)] == [leaf.shape for leaf in tree_leaves(plain)]
    for path, gradient in theirs.items():
        assert torch.allclose(gradients[path], gradient, rtol=1e-9, atol=1e-12), path


def test_hidden_states_from_between_the_blocks_reach_the_output():
    assert_same(llama(use_cache=False), output_hidden_states=True)


def test_blocks_that_recompute_in_backward_do_so_as_layers():
    model = llama(use_cache=False)
    # Newer versions of transformers have renamed it.
    enable = "activation_checkpointing_enable"
    getattr(model, enable if hasattr(model, enable) else "gradient_checkpointing_enable")()
    assert_same(model.train())
    assert model.model.gradient_checkpointing


def test_a_model_built_without_memory_is_cut_and_planned_for():
    with torch.device("meta"):
        model = module("language", llama())

    @task(batch_size=ROWS)
    def predict(batch):
        return model(**batch).logits.square().mean()

    (traced,) = trace_all([predict], {"predict": hugging.batch_of("Llama", ROWS, LENGTH)})
    assert len(model.chain.layers) == 5
    assert traced.layers["language#0"][1].forward_flops > 0


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        ({"layerdrop": 0.3}, {}, "decides by chance which blocks run"),
        ({}, {"use_cache": True}, "a EncoderDecoderCache, which is not a nest of tensors; pass use_cache=False"),
    ],
)
def test_what_cannot_be_cut_says_why_and_what_to_pass(change, given, reason):
    model = hf.BartForConditionalGeneration(hf.BartConfig(**hugging.BOTH))
    for submodule in model.modules():
        for name, value in change.items():
            if hasattr(submodule, name):
                setattr(submodule, name, value)
    chain = chain_of(model.train(), **hugging.two_texts(ROWS, LENGTH), **given)
    assert len(chain.layers) == 1
    assert reason in chain.reason


def test_hooks_around_several_blocks_keep_a_model_whole():
    model = hf.BertModel(hf.BertConfig(**hugging.TEXT))
    model.encoder.register_forward_hook(lambda module, args, output: None)
    assert "its BertEncoder has hooks" in chain_of(model, **hugging.words(ROWS, LENGTH)).reason


def test_dropout_before_the_blocks_repeats_under_one_seed():
    def losses(seed):
        torch.manual_seed(0)
        model = module("text", hf.BertModel(hf.BertConfig(**hugging.TEXT, attention_probs_dropout_prob=0.0)))

        @task(batch_size=ROWS)
        def pull(batch):
            return model(**batch).last_hidden_state[:, :, 0].square().mean()

        trainer = Trainer(
            [pull], optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], 0.0), seed=seed
        )
        result = trainer.fit({"pull": [hugging.words(ROWS, LENGTH)]}, steps=3, progress=False)
        assert not result.notices
        assert len(model.chain.layers) == 5
        return [step["pull"] for step in result.losses]

    first = losses(1)
    assert first == losses(1)
    assert first != losses(2)
    assert len(set(first)) == 3


def test_the_script_for_gpus_runs_on_a_cpu():
    record = hugging_face.run_case("plain", "ViT", torch.device("cpu"))
    assert record.failure == ""
    assert record.num_layers == 5
    assert record.error_eager <= hugging_face.LIMIT
    assert "| ViT | 5 |" in hugging_face.table_of([record])


@pytest.mark.parametrize("workload", hugging.WORKLOADS)
def test_two_processes_give_the_numbers_of_one(pool, workload):
    answers = pool.run(2, compare_steps, workload, "plan 2", 2, 1.0)
    assert answers[0].most_layers >= 4
    assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient"))


def test_no_attention_mask_is_made_where_the_caller_gives_none():
    masking_utils = pytest.importorskip("transformers.masking_utils")
    with as_when_compiling():
        assert not masking_utils.is_tracing(None)
        assert masking_utils.is_tracing(torch.ones(2, 3))
    assert not masking_utils.is_tracing(torch.ones(2, 3))
