"""Sequences that tensor groups cut: each member has some of the tokens, where these do not meet, and the numbers of one
process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import tensor_parallel  # noqa: E402
from spindle.models import EmulatedTensorGroup, apply_styles, resolve_styles, shard_of, split_dims  # noqa: E402
from tensor_parallel import PLAN, SEQUENCE_PLAN, WIDTH, Decoder, sharing  # noqa: E402
from test_tensor import degrees, find, trained  # noqa: E402

torch.set_num_threads(1)

BLOCK_PLAN = {path.removeprefix("blocks.*."): style for path, style in PLAN.items() if path.startswith("blocks")}
NORMS = {"before": "sequence_parallel", "after": "sequence_parallel"}


class Cut(nn.Module):
    """Remembers how many tokens there were."""

    def forward(self, x):
        self.seen = getattr(self, "seen", set()) | {x.shape[1]}
        return x


class WatchedDecoder(Decoder):
    """Weights of a block's own, beside those of its norms; and it counts tokens between its parts and inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.between, self.inside = nn.Parameter(torch.rand(WIDTH)), Cut(), Cut()
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), self.inside, nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(self.between(x)) * self.scale + self.feed(x)


class AfterNorm(nn.Module):
    """Norms behind sums, inside the parts that compute them, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"own": tensor_parallel.Attention(), "norm": nn.LayerNorm(WIDTH)})
        self.feed = Feed()
        self.attention.forward = lambda x: self.attention["norm"](x + self.attention["own"](x))

    def forward(self, x):
        return self.feed(self.attention(x))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x)))), x.shape


def rehearsed(part, plan, degree, x):
    """What each member gets, and gradients, beside those of one process; with the whole gradients of what is split."""
    styled = resolve_styles(part, plan, strict=True)
    dims, names = split_dims(styled), dict(part.named_parameters())
    seed = torch.randn(x.shape, dtype=x.dtype)

    def gradients(given, made, parameters):
        made = made[0] if isinstance(made, tuple) else made
        return [made.detach(), *torch.autograd.grad(made, [given, *parameters], seed)]

    whole = x.clone().requires_grad_()
    expected = gradients(whole, part(whole), names.values())
    rehearsal = EmulatedTensorGroup(degree)

    def member(place):
        given, shards = x.clone().requires_grad_(), {}
        for entry in styled:
            for name, parameter, dim in entry.split:
                shards[id(parameter)] = nn.Parameter(shard_of(parameter.detach(), dim, degree, place))
                entry.module._parameters[name] = shards[id(parameter)]
        try:
            with apply_styles(styled, rehearsal):
                mine = [shards.get(id(tensor), tensor) for tensor in names.values()]
                return gradients(given, part(given), mine)
        finally:
            for path, parameter in names.items():
                owner, _, name = path.rpartition(".")
                part.get_submodule(owner)._parameters[name] = parameter

    for place, ours in enumerate(rehearsal.run(member)):
        for name, actual, reference in zip(["output", "input", *names], ours, expected, strict=True):
            dim = dims.get(id(names.get(name)))
            part_of = reference if dim is None else shard_of(reference, dim, degree, place)
            assert actual.shape == part_of.shape
            assert (actual - part_of).norm() <= 1e-9 * max(reference.norm(), 1.0), name


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("cuts", [{"": "sequence_parallel"}, NORMS])
def test_a_block_has_the_numbers_of_one_process_however_long_a_sequence_is(length, degree, cuts):
    torch.manual_seed(length)
    block = WatchedDecoder().double()
    plan = {**BLOCK_PLAN, **cuts, "feed.0": "colwise", "feed.3": "rowwise"}
    rehearsed(block, plan, degree, torch.randn(2, length, WIDTH, dtype=torch.float64))
    assert block.between.seen == {length} | {
        length * (place + 1) // degree - length * place // degree for place in range(degree)
    }
    assert block.inside.seen == {length}


@pytest.mark.parametrize("cuts", [("attention",), ("attention.norm", "feed.norm")])
def test_norms_inside_parts_are_named_or_the_parts_are(cuts):
    torch.manual_seed(0)
    block = AfterNorm().double()
    plan = {f"attention.own.{path.partition('.')[2]}": style for path, style in BLOCK_PLAN.items() if "." in path}
    plan |= {"feed.up": "colwise", "feed.down": "rowwise", "": "sequence_parallel"}
    plan |= dict.fromkeys((*cuts, "feed"), "sequence_parallel")
    rehearsed(block, plan, 2, torch.randn(2, 5, WIDTH, dtype=torch.float64))


def test_members_drop_different_tokens():
    block = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).train()
    rehearsal, x = EmulatedTensorGroup(2), torch.ones(1, 8, WIDTH)
    styled = resolve_styles(block, {"0": "sequence_parallel"}, strict=True)

    def member(place):
        torch.manual_seed(5)
        with apply_styles(styled, rehearsal):
            return block[0](x), torch.rand(1)

    (first, number), (second, other_number) = rehearsal.run(member)
    assert torch.equal(first, second)
    assert not torch.equal(first[:, :4], first[:, 4:])
    assert torch.equal(number, other_number)  # what is drawn outside is the same for all


# On processes; test_combined.py has more of them.


def test_blocks_that_recompute_themselves_meet_in_backward_too(pool):
    trained(pool, 4, sharing("own cut recomputing", *degrees((4, "plan 3"))))


def test_a_model_of_hugging_face_needs_one_more_line(pool):
    pytest.importorskip("transformers")
    trained(pool, 2, sharing("Llama cut", *degrees((2, "plan 3"))))


# What is found out.


def share_of_blocks(sharing):
    return {cost for (task, _, kind), cost in sharing.costs.items() if task == "describe" and kind.startswith("Dec")}


def test_fewer_activations_are_kept_and_more_is_sent():
    ((sent, share),) = share_of_blocks(find(tensor_parallel.own())[0])
    ((sent_cut, share_cut),) = share_of_blocks(find(tensor_parallel.own(tensor_parallel=SEQUENCE_PLAN))[0])
    assert share < 0.9
    assert share_cut > 0.99
    assert sent_cut == 1.25 * sent  # what crosses a cut between layers is joined


class Mixing(Decoder):
    """Tokens meet outside of its parts."""

    def forward(self, x):
        return super().forward(x + x.mean(1, keepdim=True))


class Adding(Decoder):
    """Adds all tokens to some."""

    def forward(self, x):
        return super().forward(x) + torch.ones(1, tensor_parallel.LENGTH, 1, dtype=x.dtype)


@pytest.mark.parametrize(
    ("block", "sentence"), [(Mixing, "gives different results"), (Adding, "2 devices cannot share one of its layers")]
)
def test_tokens_that_meet_where_they_are_cut_are_noticed(block, sentence):
    sharing, _ = find(tensor_parallel.own(block=block, tensor_parallel=SEQUENCE_PLAN))
    assert sharing.most == {}
    assert sentence in sharing.reasons["language"]
    assert "let tokens interact only in parts inside it" in sharing.reasons["language"]
    assert find(tensor_parallel.own(block=block))[0].most == {"language": 4}
