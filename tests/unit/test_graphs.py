"""Captured slots, on a CPU that plays a GPU: gradients of replays are those of plain backward passes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from replay import graphs_without_cuda  # noqa: E402
from spindle.run.captured_slot import Chunk, SlotOutput  # noqa: E402
from spindle.run.gradients import Gradients  # noqa: E402
from spindle.run.graph_memory import GraphMemory  # noqa: E402
from spindle.run.graphs import Graphs  # noqa: E402
from spindle.run.step import Piece  # noqa: E402

STEPS = 3


@pytest.fixture
def linear():
    torch.manual_seed(0)
    with (
        graphs_without_cuda(),
        mock.patch.object(torch.cuda, "empty_cache"),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=0),
    ):
        yield nn.Linear(4, 4, bias=False).double()


def pooled(linear, rows):
    """A layer, and as another chunk the sum over its tokens, whose gradient has a stride of 0."""
    hidden = linear(rows)
    leaf = hidden.detach().requires_grad_()
    return SlotOutput([Piece((), hidden), Piece((leaf,), leaf.sum(1))], leaf.sum(1))


def weight_gradient(linear, graphs, slot, rows, gradient):
    """One step: the slot forward, then its chunks backward, as `Compute` has them."""
    linear.weight.grad = None
    _, made = graphs.forward(slot, {"rows": rows}, lambda nests: pooled(linear, nests["rows"]), {})
    pieces = list(made.pieces)
    graphs.backward(slot, 1, [gradient], lambda: Chunk([pieces[1].outputs], list(pieces[1].inputs), []), is_last=True)
    passed_on = [leaf.grad for leaf in pieces[1].inputs] if pieces else []
    graphs.backward(slot, 0, passed_on, lambda: Chunk([pieces[0].outputs], [], [linear.weight]), is_last=False)
    if not graphs.is_complete:
        graphs.finish()
    return linear.weight.grad


def test_a_gradient_of_stride_0_between_chunks_is_that_of_each_step(linear):
    gradients, slot = Gradients([]), SimpleNamespace(number=0, name="slot", lane=0)
    graphs = Graphs(gradients, {}, {}, GraphMemory(), lambda: None)
    with mock.patch.object(graphs, "has", return_value=True):
        for _ in range(STEPS):
            rows, gradient = torch.randn(2, 3, 4).double(), torch.randn(2, 4).double()
            actual = weight_gradient(linear, graphs, slot, rows, gradient)
            weight = linear.weight.detach().clone().requires_grad_()
            (expected,) = torch.autograd.grad(nn.functional.linear(rows, weight).sum(1), weight, gradient)
            torch.testing.assert_close(actual, expected)


def test_a_gradient_stays_where_backward_makes_it_until_there_are_no_graphs(linear):
    gradients, slot = Gradients([]), SimpleNamespace(number=0, name="slot", lane=0)
    graphs = Graphs(gradients, {}, {}, GraphMemory(), lambda: None)
    with mock.patch.object(graphs, "has", return_value=True):
        first, second = (
            weight_gradient(linear, graphs, slot, torch.randn(2, 3, 4).double(), torch.ones(2, 4).double())
            for _ in range(2)
        )
    assert first is second
    assert gradients.memory == [first]
    gradients.drop_graph_memory()
    assert gradients.memory == []
    assert not gradients.has_grad_buffer(linear.weight)
