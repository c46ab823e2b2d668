"""Items that several devices share: slices of tokens, the trial of modules, attention over slices, times."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import spindle  # noqa: E402
from spindle.cluster import Link, cluster_named  # noqa: E402
from spindle.errors import PlanError, TrainingError  # noqa: E402
from spindle.models import EmulatedTensorGroup, sequence_attention  # noqa: E402
from spindle.profile import Curve, ItemTimes, Profile, all_to_all_s  # noqa: E402
from spindle.program import max_slices, slice_bounds  # noqa: E402
from spindle.run import CountedRows, ItemCode, ItemRows, SequenceCode, cut_slice, join_items, slice_rows  # noqa: E402
from spindle.train.analyze import _analyzed  # noqa: E402
from spindle.train.bind import bind, trace_all  # noqa: E402
from spindle.train.item_parts import shared_curve  # noqa: E402
from spindle.train.plan import _check_sequence_degrees  # noqa: E402
from spindle.train.probe import probe  # noqa: E402
from test_items import parts_of_items  # noqa: E402

WIDTH = 12


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9))
def test_slices_cover_an_item_evenly_and_begin_at_multiples(length, alignment, num_slices):
    bounds = slice_bounds(length, num_slices, alignment)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, length, num_slices + 1)
    assert all(bound % alignment == 0 for bound in bounds[:-1] if bound < length)
    if num_slices <= max_slices(length, alignment):
        sizes = [last - first for first, last in pairwise(bounds)]
        assert min(sizes) > 0
        assert max(sizes) - min(sizes) <= 2 * alignment - 1
        assert max(sizes) == alignment * -(-max_slices(length, alignment) // num_slices) or num_slices == 1


@settings(max_examples=200)
@given(parts_of_items(), st.sampled_from([(1, 1), (1, 4), (3, 2)]), st.data())
def test_joined_slices_and_parts_are_what_adding_each_into_a_zero_buffer_gives(drawn, ratio, data):
    """The oracle: every member of a sequence group adds the rows of its slice into a buffer of zeros, at its place, and
    all buffers are summed; backward mirrors it."""
    lengths, parts = drawn
    rows = ItemRows(axis=0, entry="lengths", numerator=ratio[0], denominator=ratio[1])
    sequence = SequenceCode(degrees=(2, 3), alignment=ratio[1])
    code = ItemCode(entries=(("x", "lengths"),), rows=(rows,), can_split=True, sequence=sequence)
    counts = rows.of({"lengths": lengths}, len(lengths))
    starts = [sum(counts[:item]) for item in range(len(counts))]
    buffer = torch.zeros(sum(counts), 2, dtype=torch.float64)
    joined_parts, ours, theirs = [], [], []
    for items in parts:
        bounds_of = [[0, counts[item]] for item in items]
        if len(items) == 1:
            degree = data.draw(st.sampled_from([1, 2, 3]))
            if sequence.allows(lengths[items[0]], degree):
                bounds_of = [slice_rows(code, {"lengths": lengths}, items[0], degree, 0)]
        slices = []
        for item, bounds in zip(items, bounds_of, strict=True):
            for first, last in pairwise(bounds):
                values = torch.randn(last - first, 2, dtype=torch.float64)
                ours.append(values.clone().requires_grad_())
                theirs.append(values.clone().requires_grad_())
                slices.append(ours[-1])
                place = torch.arange(starts[item] + first, starts[item] + last)
                buffer = buffer.index_add(0, place, theirs[-1])
        joined_parts.append((items, (torch.cat(slices),)))
    (joined,) = join_items(joined_parts, code, {"lengths": lengths}, "")
    assert torch.equal(joined, buffer)
    weights = torch.randn_like(buffer)
    (joined * weights).sum().backward()
    (buffer * weights).sum().backward()
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True))


def test_counts_of_tokens_become_those_of_the_slice():
    rows = ItemRows(axis=0, entry="lengths", numerator=1)
    rules = (rows, CountedRows(rows=rows, places=(1,), num_elements=2), CountedRows(rows=rows), None)
    tree = (torch.arange(10), torch.tensor([0, 10], dtype=torch.int32), 10, torch.ones(10, 10))
    tokens, ends, count, mask = cut_slice(tree, rules, (0, 4, 10), 1)
    assert tokens.tolist() == [4, 5, 6, 7, 8, 9]
    assert (ends.tolist(), ends.dtype, count) == ([0, 6], torch.int32, 6)
    assert mask is tree[3]
    assert tree[1].tolist() == [0, 10]
    # Where a later batch does not follow the rules of the first one.
    for number, leaf, message in (
        (0, torch.arange(9), "9 rows for an item of 10, expected 10"),
        (1, torch.tensor([0, 4, 10]), "3 counts for an item of 10, expected 2"),
        (1, torch.tensor([0, 9]), "a count of 9 for an item of 10, expected 10"),
        (2, 12, "a count of 12 for an item of 10, expected 10"),
    ):
        with pytest.raises(TrainingError, match=rf"passes {message} from layer to layer; .*degrees=\{{\.\.\.: 1\}}"):
            cut_slice((*tree[:number], leaf, *tree[number + 1 :]), rules, (0, 4, 10), 1)


# The trial.


class Block(nn.Module):
    """A block over the tokens of one or several items; attention by one of several functions."""

    def __init__(self, attention: str = "own tokens", heads: int = 6, key_heads: int = 6) -> None:
        super().__init__()
        self.attention, self.heads, self.key_heads = attention, heads, key_heads
        width = WIDTH // heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, key_heads * width), nn.Linear(WIDTH, key_heads * width)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shifted = nn.Linear(WIDTH, WIDTH)  # with its own weights for the token before: a convolution
        self.dropout = nn.Dropout(0.1 if attention == "dropout" else 0.0)

    def forward(self, x_PD: torch.Tensor, lengths: torch.Tensor, mask_PP: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (
            layer(x_PD).reshape(1, len(x_PD), heads, -1).transpose(1, 2)
            for layer, heads in ((self.query, self.heads), (self.key, self.key_heads), (self.value, self.key_heads))
        )
        item = torch.searchsorted(lengths.cumsum(0), torch.arange(len(x_PD)), right=True)
        same_item = item[:, None] == item[None]
        match self.attention:
            case "whole mask":
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_PP)
            case "grouped":
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same_item, enable_gqa=True)
            case "by hand":
                mixed = (q @ k.transpose(-1, -2)).masked_fill(~same_item, float("-inf")).softmax(-1) @ v
            case "neighbours":
                near = (torch.arange(len(x_PD))[:, None] - torch.arange(len(x_PD))).abs() < 5
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same_item & near)
            case "place":
                places = torch.arange(len(x_PD)) - (lengths.cumsum(0) - lengths)[item]
                mixed = F.scaled_dot_product_attention(q + 0.1 * places[:, None], k, v, attn_mask=same_item)
            case _:
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same_item)
        x_PD = x_PD + self.out(mixed.transpose(1, 2).reshape(x_PD.shape))
        if self.attention == "convolution":
            before = F.pad(x_PD, (0, 0, 1, 0))[:-1] * (item == F.pad(item, (1, 0), value=-1)[:-1])[:, None]
            x_PD = x_PD + self.shifted(before)
        return x_PD + self.dropout(self.mlp(x_PD).tanh()), lengths, mask_PP


class Encoder(nn.Module):
    """Positions, counted from the beginning of each item, are added before the blocks."""

    def __init__(self, output: str = "rows", **options) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(3, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(3))
        self.head, self.output = nn.Linear(WIDTH, WIDTH), output

    def forward(self, patches: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        item = torch.searchsorted(lengths.cumsum(0), torch.arange(len(patches)), right=True)
        first = (lengths.cumsum(0) - lengths)[item]
        x_PD = self.embed(patches) + self.places(torch.arange(len(patches)) - first)
        mask_PP = item[:, None] == item[None]
        for block in self.blocks:
            x_PD, lengths, mask_PP = block(x_PD, lengths, mask_PP)
        if self.output == "mean":
            total = torch.zeros(len(lengths), WIDTH, dtype=x_PD.dtype).index_add(0, item, x_PD)
            return self.head(total / lengths[:, None])
        return self.head(x_PD)


def probed(encoder, lengths=(5, 11, 8)):
    """A task over an encoder's items, traced, and what is known of it."""
    encoder = encoder.double()
    vision = spindle.module("vision", encoder)

    @spindle.task(batch_size=2, items={"patches": "lengths"})
    def describe(batch):
        return vision(batch["patches"], batch["lengths"]).square().sum() + batch["text"].sum()

    generator = torch.Generator().manual_seed(0)
    batch = {
        "text": torch.ones(2, 3),
        "lengths": torch.tensor(lengths),
        "patches": torch.randn(sum(lengths), 3, generator=generator, dtype=torch.float64),
    }
    traced = trace_all([describe], {"describe": batch})
    return traced, probe(traced, {"describe": batch}, shares_items=True)


def sequence_of(encoder, lengths=(5, 11, 8)):
    """How an encoder's items may be shared, or why not."""
    _, facts = probed(encoder, lengths)
    return facts.items["describe", "vision#0"].sequence, facts.unshared_items.get(("describe", "vision#0"), "")


def test_encoders_whose_tokens_meet_in_attention_alone_can_be_shared():
    torch.manual_seed(0)
    own = F.scaled_dot_product_attention
    for attention in ("own tokens", "whole mask"):
        sequence, reason = sequence_of(Encoder(attention=attention))
        assert reason == ""
        assert sequence.degrees == (2, 3, 6)
        # Places count from the beginning of a slice, so members add them to all tokens, and cut behind that.
        assert sequence.whole_layers == 1
        assert sequence.exchanged_bytes[1] == 4 * 8 * WIDTH
    assert sequence_of(Encoder(attention="grouped", key_heads=2))[0].degrees == (2,)
    assert F.scaled_dot_product_attention is own


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "by hand"}, r"layer 1 of vision#0 gives different results .*attn_implementation='sdpa'"),
        ({"attention": "convolution"}, r"layer 1 of vision#0 gives different results .* it mixes them outside"),
        ({"attention": "place"}, r"layer 1 of vision#0 gives different results .* or uses their place"),
        ({"attention": "neighbours"}, r"layer 1 .* does not run on a slice .* hides some of them; make it from all"),
        ({"attention": "dropout"}, r"it draws random numbers \(dropout\?\)"),
        ({"output": "mean"}, r"its output has as many rows for short items as for long ones"),
        ({"heads": 1, "key_heads": 1}, r"its attention has 1 head, which no 2 to 8 devices can share evenly"),
        ({"lengths": (7, 7)}, r"the items of the first batch have one length"),
        ({"lengths": (1, 1, 1, 2)}, ""),
    ],
)
def test_other_encoders_say_why_they_cannot(options, reason):
    torch.manual_seed(0)
    lengths = options.pop("lengths", (5, 11, 8))
    sequence, text = sequence_of(Encoder(**options), lengths)
    assert (sequence is None) == bool(reason)
    if reason:
        assert re.search(reason, text), text


@pytest.mark.parametrize(
    ("options", "degrees", "message"),
    [
        ({}, {"vision": 4}, r"4 devices cannot share the attention heads of vision#0; expected one of 1, 2, 3, 6"),
        ({}, {"language": 2}, r"no module has that name; there are vision"),
        ({"output": "mean"}, {"vision": 2}, r"several devices cannot share items of vision#0: its output has as many"),
    ],
)
def test_sequence_degrees_that_a_module_cannot_have_are_refused(options, degrees, message):
    torch.manual_seed(0)
    traced, facts = probed(Encoder(**options))
    workload = _analyzed(bind("training", traced, facts))
    with pytest.raises(PlanError, match=r"spindle\.Planning\(sequence_parallel_degrees=.*" + message):
        _check_sequence_degrees(workload, degrees)
    _check_sequence_degrees(workload, {"vision": 1})


def test_sequence_degrees_need_a_planner_that_shares_items():
    with pytest.raises(TrainingError, match=r"'vision': 2\}\): requires planner=\"colocate\" or \"upfront\""):
        spindle.Planning(planner="stage-0", sequence_parallel_degrees={"vision": 2})
    with pytest.raises(TrainingError, match=r"'vision': 0\}\): must be at least 1"):
        spindle.Planning(planner="colocate", sequence_parallel_degrees={"vision": 0})


# Attention.


def member_attention(mask, size=2, heads=4):
    """Attention of nine tokens on two members, of which the first has five."""
    group = EmulatedTensorGroup(size)
    bounds = slice_bounds(9, size)
    q = torch.randn(1, heads, 9, 3)

    def member(place):
        own = q[:, :, bounds[place] : bounds[place + 1]]
        with sequence_attention(group, bounds):
            return F.scaled_dot_product_attention(own, own, own, attn_mask=None if mask is None else mask(place))

    return group.run(member)


def test_masks_that_cannot_be_of_all_tokens_are_refused():
    assert member_attention(lambda place: torch.ones(5 - place, 5 - place, dtype=torch.bool))[0].shape[2] == 5
    assert member_attention(lambda place: torch.zeros(1, 5 - place))[0].shape[2] == 5
    with pytest.raises(TrainingError, match=r"mask of shape \(5, 5\), made from 5 of the 9 tokens .* hides some"):
        member_attention(lambda place: torch.ones(5, 5, dtype=torch.bool).tril())
    with pytest.raises(TrainingError, match=r"mask of shape \(5, 9\)"):
        member_attention(lambda place: torch.ones(5, 9, dtype=torch.bool))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(TrainingError, match=r"attention with 4 heads cannot be shared by 3 devices: .* divides 4"):
        member_attention(None, size=3)


# Times.


def test_a_shared_item_takes_its_longest_slice_and_the_exchanges():
    cluster = cluster_named("cpux4")
    rows = ItemRows(axis=0, entry="lengths", numerator=1, denominator=4)
    code = SequenceCode(degrees=(2, 3, 6), alignment=4, whole_layers=1, attended=rows, exchanged_bytes=(0.0, 100.0))
    link = Link(bytes_per_s=1e3, latency_s=0.0, collective_s=0.5)
    curve = Curve(num_devices=(1,), forward_s=(10.0,), backward_s=(20.0,), launch_s=(6.0, 1.0))
    profile = Profile.__new__(Profile)
    for name, value in (("cluster", cluster), ("all_to_all", link)):
        object.__setattr__(profile, name, value)
    # Ten rows are three multiples of four: 8 and 2 on two members, 4, 4 and 2 on three; six cannot share them.
    shared = shared_curve(curve, None, 10, code, 1, profile, None)
    assert shared.num_devices == (1, 2, 3)
    assert all_to_all_s(800, 2, link, count=2) == pytest.approx(0.4 + 1.0)
    assert shared.forward_s == pytest.approx((10.0, 8.0 + 1.4, 6.0 + 400 * 2 / 3 / 1e3 + 1.0))
    assert shared.backward_s == pytest.approx((20.0, 16.0 + 1.4, 8.0 + 400 * 2 / 3 / 1e3 + 1.0))
    # Every member runs what comes before the blocks on all tokens.
    assert shared_curve(curve, None, 10, code, 0, profile, None).forward_s == (10.0, 10.0, 10.0)
    assert shared_curve(curve, None, 10, code, 1, profile, 1).num_devices == (1,)
    # No slice takes less than a whole item as short as it.
    times = ItemTimes(lengths=(2, 10), forward_s=(9.0, 10.0), backward_s=(1.0, 20.0), together=(10,))
    assert shared_curve(curve, times, 10, code, 1, profile, None).forward_s[2] > 9.0
