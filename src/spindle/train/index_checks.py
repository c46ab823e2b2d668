"""Check indices before a GPU uses them.

On a CPU an index that is out of range raises an error that can be caught. On a GPU a kernel asserts, and the CUDA
context is unusable afterwards. Code that is tried on a part of its batch may well have such indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Check = Callable[..., None]


class IndexChecks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which an index that is out of range raises an IndexError. Every check waits for the GPU."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = getattr(func, "overloadpacket", func)  # higher-order operators (flex_attention) have no overloads
        check = _CHECKS.get(operator.__name__.removesuffix("_"))
        if check is not None:
            check(*args)
        return func(*args, **(kwargs or {}))


def _check(index: Any, first: int, end: int, ignored: int | None = None) -> None:
    if not isinstance(index, torch.Tensor) or index.dtype == torch.bool or index.numel() == 0:
        return
    is_wrong = (index < first) | (index >= end)
    if ignored is not None:
        is_wrong &= index != ignored
    if bool(is_wrong.any()):
        raise IndexError(f"an index is out of range: expected {first} to {end - 1}")


def _check_each(values: torch.Tensor, indices: Iterable[torch.Tensor | None], *_: Any) -> None:
    """Check `values[indices]`. A mask indexes as many dimensions as it has itself."""
    dimension = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            size = values.shape[dimension]
            _check(index, -size, size)
        dimension += index.dim() if index is not None and is_mask else 1


def _check_along(values: torch.Tensor, dimension: int, index: torch.Tensor, *_: Any) -> None:
    _check(index, 0, values.shape[dimension] if values.dim() else 1)


def _check_along_from_end(values: torch.Tensor, dimension: int, index: torch.Tensor, *_: Any) -> None:
    size = values.shape[dimension] if values.dim() else 1
    _check(index, -size, size)


def _check_rows(weight: torch.Tensor, index: torch.Tensor, *_: Any) -> None:
    _check(index, 0, weight.shape[0])


def _check_flat(values: torch.Tensor, index: torch.Tensor, *_: Any) -> None:
    _check(index, -values.numel(), values.numel())


def _check_classes(
    values: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1, ignored: int = -100
) -> None:
    _check(target, 0, values.shape[0 if values.dim() == 1 else 1], ignored)


def _check_places(values: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> None:
    num_places = int(torch.broadcast_tensors(values, mask)[1].sum())  # type: ignore[no-untyped-call]
    if num_places > source.numel():
        raise IndexError(f"a mask has {num_places} places for {source.numel()} values")


# By ATen operator, without the trailing underscore of in-place variants.
_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"), _check_each),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _check_along),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_reduce"), _check_along),
    "index_fill": _check_along_from_end,
    **dict.fromkeys(("embedding", "embedding_renorm", "_embedding_bag", "_embedding_bag_forward_only"), _check_rows),
    **dict.fromkeys(("take", "put"), _check_flat),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _check_classes),
    "masked_scatter": _check_places,
}
