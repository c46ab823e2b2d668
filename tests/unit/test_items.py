"""Items of batches: cut by item, joined in item order, declared and checked; their times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import spindle  # noqa: E402
from spindle.errors import ProfileError, TrainingError, WorkloadError  # noqa: E402
from spindle.profile import ItemTimes  # noqa: E402
from spindle.program import item_runs, join_of  # noqa: E402
from spindle.run import ItemCode, ItemRows, cut_items, join_items  # noqa: E402
from spindle.train.item_probe import row_rule  # noqa: E402
from spindle.train.items import lengths_in  # noqa: E402


@st.composite
def parts_of_items(draw):
    """Lengths of items, and parts that have each item once, in any order."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths) - 1)))) if len(lengths) > 1 else []
    bounds = [0, *cuts, len(lengths)]
    return tuple(lengths), [tuple(order[first:last]) for first, last in pairwise(bounds)]


@settings(max_examples=200)
@given(parts_of_items(), st.sampled_from([(1, 1), (1, 4), (3, 2)]))
def test_joined_parts_are_what_adding_each_into_a_zero_buffer_gives(drawn, ratio):
    """The oracle: every part adds its rows into a buffer of zeros, all buffers are summed; backward mirrors it."""
    lengths, parts = drawn
    rows = ItemRows(axis=0, entry="lengths", numerator=ratio[0], denominator=ratio[1])
    code = ItemCode(entries=(("x", "lengths"),), rows=(rows,), can_split=True)
    counts = rows.of({"lengths": lengths}, len(lengths))
    starts = [sum(counts[:item]) for item in range(len(counts))]
    outputs = [torch.randn(sum(counts[item] for item in items), 2, dtype=torch.float64) for items in parts]
    ours = [output.clone().requires_grad_() for output in outputs]
    theirs = [output.clone().requires_grad_() for output in outputs]
    joined = join_items(
        [(items, (tensor,)) for items, tensor in zip(parts, ours, strict=True)], code, {"lengths": lengths}, ""
    )[0]
    buffer = torch.zeros(sum(counts), 2, dtype=torch.float64)
    for items, tensor in zip(parts, theirs, strict=True):
        place = 0
        for item in items:
            index = torch.arange(starts[item], starts[item] + counts[item])
            buffer = buffer.index_add(0, index, tensor[place : place + counts[item]])
            place += counts[item]
    assert torch.equal(joined, buffer)
    weights = torch.randn_like(buffer)
    (joined * weights).sum().backward()
    (buffer * weights).sum().backward()
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True))


@given(parts_of_items(), st.data())
def test_cut_batches_have_the_rows_of_their_items(drawn, data):
    lengths, parts = drawn
    total = sum(lengths)
    batch = {"x": torch.arange(total), "grid": torch.arange(len(lengths)), "ids": torch.arange(3)}
    code = ItemCode(entries=(("x", "lengths"), ("grid", None)))
    ends = [sum(lengths[: item + 1]) for item in range(len(lengths))]
    items = data.draw(st.sampled_from(parts))
    cut = cut_items(batch, code, {"lengths": lengths}, items)
    expected = [row for item in items for row in range(ends[item] - lengths[item], ends[item])]
    assert cut["x"].tolist() == expected
    assert cut["grid"].tolist() == list(items)
    assert cut["ids"] is batch["ids"]
    # A rank that has only some of the items, in their own order.
    held = tuple(sorted({*items, *data.draw(st.sets(st.integers(0, len(lengths) - 1)))}))
    some = cut_items(batch, code, {"lengths": lengths}, held)
    assert cut_items(some, code, {"lengths": lengths}, items, held)["x"].tolist() == expected
    assert sum(last - first for first, last in item_runs(lengths, items)) == len(expected)
    assert sum(sum(sizes) for sizes in join_of(parts, lengths).sizes) == total


def test_outputs_whose_rows_do_not_follow_from_lengths_are_refused():
    rows = ItemRows(axis=0, entry="lengths", numerator=1, denominator=4)
    code = ItemCode(entries=(("x", "lengths"),), rows=(rows,), can_split=True)
    outputs = [((0,), (torch.zeros(2, 1),)), ((1,), (torch.zeros(3, 1),))]
    with pytest.raises(TrainingError, match=r"returned 3 rows for 1 items, .* 1 for every 4 of 'lengths': expected 2"):
        join_items(outputs, code, {"lengths": (8, 8)}, "describe/vision#0")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({8: 2, 16: 4}, (1, 4)),
        ({7: 2, 16: 4, 1: 1}, (1, 4)),  # rounded up
        ({8: 8, 12: 12}, (1, 1)),
        ({8: 5, 16: 5}, None),
        ({64: 16}, (1, 4)),
    ],
)
def test_rows_of_an_output_are_a_ratio_of_the_length_or_fixed(counts, expected):
    rule = row_rule(0, "lengths", counts)
    if expected is None:
        assert (rule.entry, rule.numerator) == (None, 5)
    else:
        assert (rule.entry, rule.numerator, rule.denominator) == ("lengths", *expected)
    assert row_rule(0, "lengths", {8: 3, 16: 2}) is None


def task_of(items):
    @spindle.task(batch_size=2, items=items)
    def describe(batch):
        return batch

    return describe


@pytest.mark.parametrize(
    ("items", "batch", "message"),
    [
        ({"x": "n", "y": 1}, {"x": 4, "n": [4]}, r"names an entry that a batch lacks; it has 'x', 'n'"),
        (
            {"x": "n"},
            {"x": 4},
            r"needs integers 'n', the rows of each item, in a tensor with one dimension, got a None",
        ),
        ({"x": "n"}, {"x": 4, "n": [1.5, 2.5]}, r"needs integers 'n', .*, got a tensor of float32 with shape \(2,\)"),
        ({"x": "n"}, {"x": 4, "n": [[2], [2]]}, r"in a tensor with one dimension, got a tensor of int64 with shape"),
        ({"x": "n"}, {"x": 5, "n": [2, 2]}, r"'n' adds up to 4, but 'x' has 5 rows"),
        ({"x": "n"}, {"x": 4, "n": [4, 0]}, r"item 1 has 0 rows of 'x'; leave items without rows out"),
        ({"x": "n", "y": 1}, {"x": 4, "n": [2, 2], "y": 3}, r"'y' has 3 rows and the batch 2 items; give it one"),
        ({"x": "n"}, {"x": "image", "n": [4]}, r"items=\{'x': 'n'\} needs a tensor with rows for each item, got a str"),
    ],
)
def test_items_of_a_batch_are_checked(items, batch, message):
    make = {int: torch.zeros, list: torch.tensor, str: str}
    made = {name: make[type(value)](value) for name, value in batch.items()}
    with pytest.raises(TrainingError, match=message):
        lengths_in(task_of(items), made)
    assert lengths_in(task_of(items), {"ids": torch.zeros(2)}) == {}


def test_items_are_declared_by_names_or_one():
    with pytest.raises(WorkloadError, match=r"items=\{'x': 2\}\): expected the name of the entry"):
        task_of({"x": 2})
    with pytest.raises(WorkloadError, match=r"items=\['x'\]\): expected a dict of entries of a batch"):
        task_of(["x"])
    with pytest.raises(TrainingError, match="got a list; let its loader yield dicts"):
        lengths_in(task_of({"x": 1}), [1])


def test_times_of_items_between_measured_lengths():
    times = ItemTimes(lengths=(1, 2, 4), forward_s=(1.0, 4.0, 16.0), backward_s=(2.0, 4.0, 8.0), together=(2, 4))
    assert times.at(3) == pytest.approx((9.0, 6.0))  # a parabola, and a line
    assert times.at(8)[1] == pytest.approx(16.0)
    # Items that launches bound alone are worth their work together: a third of the batch takes a third of its time.
    bound = ItemTimes(lengths=(1, 2, 4), forward_s=(4.0, 4.0, 4.0), backward_s=(4.0, 4.0, 4.0), together=(1,) * 30)
    assert bound.of_part((1,) * 10, (30.0, 30.0)) == pytest.approx((10.0, 10.0))
    assert bound.of_part((1,) * 2, (30.0, 30.0)) == pytest.approx((4.0, 4.0))
    assert times.of_part((2, 4), (18.0, 12.0)) == pytest.approx((18.0, 12.0))
    assert times.of_part((4,), (18.0, 12.0)) == pytest.approx((16.0, 8.0))
    with pytest.raises(ProfileError, match="must be increasing"):
        ItemTimes(lengths=(2, 1), forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), together=())
