"""Where gradients stand while they are synchronised."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from spindle.run.gradients import Gradients  # noqa: E402
from spindle.run.ipc.sums import sum_into  # noqa: E402


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_a_bucket_holds_gradients_side_by_side_and_says_which_are_there():
    bucket = parameters(2, 3, 1)
    bucket[0].grad, bucket[2].grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    flat = Gradients([bucket]).fill_bucket(0)
    assert flat.tolist() == [1, 2, 0, 0, 0, 3, 1, 0, 1]


def test_what_was_summed_before_does_not_come_back():
    bucket = parameters(1, 1)
    gradients = Gradients([bucket])
    bucket[0].grad = torch.tensor([1.0])
    gradients.fill_bucket(0).mul_(5)  # as a sum over ranks does
    gradients.set_from_bucket(0, [2, 1])
    assert [parameter.grad.tolist() for parameter in bucket] == [[5], [0]]
    bucket[0].grad, bucket[1].grad = None, torch.tensor([7.0])
    assert gradients.fill_bucket(0).tolist() == [0, 7, 0, 1]
    gradients.set_from_bucket(0, [0, 1])
    assert bucket[0].grad is None
    assert bucket[1].grad.tolist() == [7]


def test_a_place_is_the_same_each_time_and_the_buckets_where_there_is_one():
    inside, alone = parameters(2, 2)
    gradients = Gradients([[inside]])
    for parameter in (inside, alone):
        place = gradients.grad_buffer(parameter)
        assert gradients.grad_buffer(parameter) is place
        assert place.shape == parameter.shape
    gradients.grad_buffer(inside).fill_(4)
    inside.grad = gradients.grad_buffer(inside)
    assert gradients.fill_bucket(0).tolist() == [4, 4, 1]


def test_types_may_be_mixed_in_a_bucket():
    bucket = [*parameters(1, dtype=torch.bfloat16), *parameters(1)]
    gradients = Gradients([bucket])
    for parameter in bucket:
        assert gradients.grad_buffer(parameter).dtype == parameter.dtype
        parameter.grad = torch.full_like(parameter, 1.5)
    assert gradients.fill_bucket(0).dtype == torch.float32
    gradients.set_from_bucket(0, [1, 1])
    assert [parameter.grad.dtype for parameter in bucket] == [torch.bfloat16, torch.float32]
    assert [parameter.grad.item() for parameter in bucket] == [1.5, 1.5]


def test_half_precision_is_summed_in_single():
    parts = [torch.full((5,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    into = torch.empty(5, dtype=torch.bfloat16)
    sum_into(into, parts)
    assert into.tolist() == [258.0] * 5


def test_parameters_keep_no_second_copy_of_what_a_bucket_holds():
    bucket = parameters(2, 3)
    bucket[0].grad = torch.tensor([1.0, 2.0])
    flat = Gradients([bucket]).fill_bucket(0)
    flat.mul_(2)
    assert bucket[0].grad.tolist() == [2, 4]
    assert bucket[1].grad is None
