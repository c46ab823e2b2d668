"""Saved tensors that are offloaded: what is copied, and when it is on the device."""

from __future__ import annotations

import weakref

import pytest

from spindle.program import COPIES_AHEAD, Backward, Forward, copies_in

torch = pytest.importorskip("torch")

from spindle.run.op_code import LayerCode  # noqa: E402
from spindle.run.recompute_offload import HostOffload  # noqa: E402

# A forward, some passes of other slots, and the backward.
BETWEEN = 2 * COPIES_AHEAD + 2
ORDER = [Forward(0), *(Forward(1 + number) for number in range(BETWEEN)), Backward(0, 0, 1)]
ORDER += [Backward(1 + number, 0, 1) for number in range(BETWEEN)]
OFFLOADED = [1] + [0] * BETWEEN


def offload_of(order=ORDER, offloaded=OFFLOADED):
    return HostOffload(torch.device("cpu"), copies_in(order, offloaded))


def attend(weight, x):
    """Saves its input three times over, and other tensors."""
    query, key, value = (x @ part for part in weight)
    return ((query @ key.T).softmax(-1) @ value,)


def test_activations_are_off_the_device_between_forward_and_backward():
    weight = torch.nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(attend(weight, x)[0].square().sum(), [x])
    offload, layer = offload_of(), LayerCode(run=attend, axes=(0,), parameters=(weight,))
    hidden = x * 1
    kept = weakref.ref(hidden.untyped_storage())
    offload.before(0)
    with offload.saved_tensors(0, layer):
        (output,) = attend(weight, hidden)
    del hidden
    (copies,) = copies_in(ORDER, OFFLOADED)
    for place in range(1, copies.backward + 1):
        assert (kept() is None) == (place > copies.released)
        offload.before(place)
    assert not len(offload)
    (gradient,) = torch.autograd.grad(output.square().sum(), [x])
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_several_ops_save_is_copied_once():
    weight = torch.nn.Parameter(torch.randn(3, 4, 4))
    x = torch.randn(5, 4, requires_grad=True)
    offload, layer = offload_of(), LayerCode(run=attend, axes=(0,), parameters=(weight,))
    with offload.saved_tensors(0, layer):
        attend(weight, x)
    # The input once, queries, keys and values, and the probabilities.
    assert offload.num_bytes == 4 * (4 * 5 * 4 + 5 * 5)


def test_activations_that_would_come_back_at_once_stay():
    assert 0 in offload_of()
    assert 0 not in offload_of([entry for entry in ORDER if entry not in (Forward(BETWEEN), Forward(BETWEEN - 1))])


def test_a_step_begins_with_nothing_of_one_that_failed():
    weight = torch.nn.Parameter(torch.randn(3, 4, 4))
    offload, layer = offload_of(), LayerCode(run=attend, axes=(0,), parameters=(weight,))
    with offload.saved_tensors(0, layer):
        attend(weight, torch.randn(5, 4, requires_grad=True))
    assert len(offload)
    offload.begin()
    assert not len(offload)
