"""Hugging Face models, unchanged: cut into layers by one mechanism, with the numbers of the unsplit model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._pytree import tree_leaves  # noqa: E402

import hugging  # noqa: E402
from pool import Pool  # noqa: E402
from spindle.models import chain_of  # noqa: E402

ROWS, LENGTH = 4, 9
ELSEWHERE = ((ROWS, LENGTH), (3, LENGTH), (1, LENGTH), (5, 14))  # rows and lengths that it runs on


def loss_and_gradients(run, model, batch):
    model.zero_grad()
    output = run(**batch)
    floats = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
    loss = sum(one.square().mean() for one in floats)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, output


def unsplit(model):
    """The model itself, without the cache that decoders make for generation."""
    for one in model.modules():
        if getattr(getattr(one, "config", None), "use_cache", False):
            one.config.use_cache = False
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", hugging.MODELS)
def test_a_model_is_cut_and_has_the_numbers_of_the_unsplit_model(name):
    model = hugging.made(name)
    names = list(model.state_dict())
    chain = chain_of(model, **hugging.batch_of(name, ROWS, LENGTH))
    assert chain.reason == ""
    assert len(chain.layers) == hugging.MODELS[name].num_layers
    for rows, length in ELSEWHERE:
        batch = hugging.batch_of(name, rows, length)
        loss, gradients, output = loss_and_gradients(chain, model, batch)
        expected, theirs, plain = loss_and_gradients(unsplit(model), model, batch)
        assert type(output) is type(plain)
        assert torch.allclose(loss, expected, rtol=1e-9)
        for path, gradient in theirs.items():
            ours = gradients[path]
            assert (ours is None) == (gradient is None), path
            assert ours is None or torch.allclose(ours, gradient, rtol=1e-9, atol=1e-12), path
    assert list(model.state_dict()) == names
    used = {id(one) for layer in chain.layers for one in layer.parameters}
    assert used >= {id(one) for path, one in model.named_parameters() if theirs[path] is not None}


@pytest.fixture(scope="module")
def pool():
    one = Pool()
    yield one
    one.close()


@pytest.mark.parametrize("workload", hugging.WORKLOADS)
def test_two_processes_give_the_numbers_of_one(pool, workload):
    answers = pool.run(2, "compare_steps", workload, "plan 2", 3, 1.0)
    assert max(one.loss for one in answers) < 1e-9
    worst = max(answers, key=lambda one: one.gradient)
    assert worst.gradient < 1e-9, worst.worst
    assert frozenset().union(*(one.compared for one in answers)) == answers[0].expected
