"""The comparison that all equality tests share: what differs, is missing or is not a number is never close."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from comparison import Comparison, assert_close  # noqa: E402
from pool import largest_error  # noqa: E402

LOSSES = [{"pair": 1.0, "answer": 2.0}, {"pair": 0.5}]
TENSORS = {"first": torch.ones(3), "second": torch.full((2, 2), 2.0), "third": torch.zeros(2)}
KINDS = ("loss", "gradient", "parameter")


def compared(losses=LOSSES, gradients=TENSORS, parameters=TENSORS, adam_learning_rate=None) -> Comparison:
    comparison = Comparison(adam_learning_rate=adam_learning_rate)
    comparison.add_losses(losses, LOSSES)
    comparison.add_tensors("gradient", gradients, TENSORS)
    comparison.add_tensors("parameter", parameters, TENSORS)
    return comparison


def with_nan(name: str) -> dict[str, torch.Tensor]:
    """The tensors with one NaN among the elements of one of them."""
    tensors = {path: tensor.clone() for path, tensor in TENSORS.items()}
    tensors[name].view(-1)[1] = math.nan
    return tensors


def test_equal_values_are_close():
    assert_close([compared(), compared()], kinds=KINDS)
    assert largest_error([compared()]) == 0.0


@pytest.mark.parametrize("task", ["pair", "answer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_among_losses_fails(task, rank):
    comparisons = [compared(), compared()]
    comparisons[rank] = compared(losses=[{**LOSSES[0], task: math.nan}, LOSSES[1]])
    with pytest.raises(AssertionError, match=f"rank {rank}: loss {task} in step 0: error nan"):
        assert_close(comparisons, kinds=KINDS)
    assert math.isnan(largest_error(comparisons))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("kind", ["gradient", "parameter"])
@pytest.mark.parametrize("adam_learning_rate", [None, 0.05])
def test_a_nan_in_a_gradient_or_a_parameter_fails(kind, name, adam_learning_rate):
    comparison = compared(**{f"{kind}s": with_nan(name)}, adam_learning_rate=adam_learning_rate)
    with pytest.raises(AssertionError, match=f"rank 1: {kind} {name}: error nan"):
        assert_close([compared(), comparison], kinds=KINDS)


@pytest.mark.parametrize("kind", ["gradient", "parameter", "buffer"])
def test_a_nan_in_the_reference_fails_even_where_ours_has_it_too(kind):
    comparison = compared()
    comparison.add_tensors(kind, with_nan("second"), with_nan("second"))
    with pytest.raises(AssertionError, match=f"{kind} second: error nan"):
        assert_close([comparison], kinds=KINDS)


def test_a_nan_is_not_hidden_by_errors_that_come_before_or_after():
    for values in ([math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]):
        comparison = Comparison()
        for number, error in enumerate(values):
            comparison.add("loss", str(number), error)
        assert math.isnan(comparison.largest["loss"][0])


def test_values_that_only_one_side_has_fail():
    for comparison in (
        compared(losses=LOSSES[:1]),
        compared(losses=[*LOSSES, {"pair": 1.0}]),
        compared(losses=[LOSSES[0], {"answer": 0.5}]),
        compared(gradients={**TENSORS, "first": None}),
        compared(gradients={**TENSORS, "fourth": torch.ones(1)}),
        compared(parameters={**TENSORS, "first": torch.ones(1)}),  # which would broadcast
        compared(parameters={**TENSORS, "third": torch.full((2,), 1e-3)}),
    ):
        with pytest.raises(AssertionError):
            assert_close([comparison], kinds=KINDS)


def test_what_no_rank_compares_fails():
    half = {"first": TENSORS["first"], "second": TENSORS["second"]}
    assert_close([compared(gradients=half), compared(gradients={"third": TENSORS["third"]})], kinds=KINDS)
    with pytest.raises(AssertionError, match=r"gradient: not compared on any rank: \['third'\]"):
        assert_close([compared(gradients=half), compared(gradients=half)], kinds=KINDS)
    with pytest.raises(AssertionError, match="no buffer was compared"):
        assert_close([compared()], kinds=("buffer",))


def test_a_gradient_that_both_lack_is_no_difference():
    comparison = Comparison()
    comparison.add_tensors("gradient", {"first": TENSORS["first"], "unused": None}, {**TENSORS, "unused": None})
    assert comparison.compared["gradient"] == {"first"}
    assert comparison.largest["gradient"][0] == 0.0
