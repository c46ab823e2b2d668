"""Indices out of range raise an error before they reach a kernel, and all others pass."""

import pytest
import torch
from torch.nn import functional as F

from spindle.train.index_checks import IndexChecks

values = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("name", "run", "legal", "illegal"),
    [
        ("index", lambda index: values[index.view(1)], 2, 3),
        ("index", lambda index: values[:, index.view(1)], -4, -5),
        ("index behind a mask", lambda index: values[None][values[None, :, 0] > 3, index.expand(2)], 3, 4),
        ("index_put", lambda index: values.clone().index_put_((index,), torch.zeros(4)), 2, 3),
        ("gather", lambda index: values.gather(1, index.view(1, 1)), 3, 4),
        ("scatter", lambda index: values.clone().scatter_(0, index.view(1, 1), 1.0), 2, 3),
        ("scatter_add", lambda index: values.scatter_add(1, index.view(1, 1), torch.ones(1, 1)), 3, -1),
        ("index_select", lambda index: values.index_select(0, index.view(1)), 2, 3),
        ("index_fill", lambda index: values.index_fill(0, index.view(1), 0.0), -3, -4),
        ("embedding, renormed", lambda index: F.embedding(index, values.clone(), max_norm=1.0), 2, 3),
        ("index_add", lambda index: values.index_add(0, index.view(1), torch.ones(1, 4)), 2, 3),
        ("embedding", lambda index: F.embedding(index, values), 2, 3),
        ("embedding", lambda index: F.embedding(index, values), 0, -1),
        ("take", lambda index: values.take(index), 11, 12),
        ("cross_entropy", lambda index: F.cross_entropy(values[:1], index.view(1)), 3, 4),
        ("cross_entropy, ignored", lambda index: F.cross_entropy(values[:1], index.view(1)), -100, -1),
    ],
)
def test_an_index_out_of_range_raises(name, run, legal, illegal):
    with IndexChecks():
        run(torch.tensor(legal))
        with pytest.raises(IndexError, match="an index is out of range: expected"):
            run(torch.tensor(illegal))


def test_a_mask_with_more_places_than_values_is_refused_too():
    mask = torch.tensor([True, True, False, False])
    with IndexChecks():
        values.masked_scatter(mask, torch.ones(6))
        with pytest.raises(IndexError, match="6 places for 5 values"):
            values.masked_scatter(mask, torch.ones(5))


def test_higher_order_operators_pass():
    with IndexChecks():
        result = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (values,))
    assert torch.equal(result, values + 1)


def test_gradients_pass():
    table = torch.ones(3, 2, requires_grad=True)
    with IndexChecks():
        table[torch.tensor([0, 2, 2])].sum().backward()
    assert table.grad is not None
    assert table.grad[:, 0].tolist() == [1, 0, 2]
