"""What passes between the members of a tensor-parallel group, forward and backward.

Inside a group a tensor is *whole* (equal on every member), *partial* (a summand: the value is the sum over members), or
*sharded* along a dimension. Each function below maps one state to another, and its autograd function maps the gradient
back, as in Megatron's `tensor_parallel/mappings.py`:

    copy_to_group            whole → whole          backward: all-reduce
    reduce_from_group        partial → whole        backward: identity
    scatter_to_group         whole → sharded        backward: all-gather
    gather_from_group        sharded → whole        backward: own shard
    reduce_scatter_sequence  partial → sharded      backward: all-gather      (along the sequence)

Shards of a sequence may differ in length.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

SEQUENCE = 1  # the dimension of tokens


class TensorGroup(Protocol):
    """A tensor-parallel group as one of its members sees it. `group_rank` is the member's number, from 0."""

    size: int
    group_rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all members, as a new tensor."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This member's shard of the sum over all members."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
        """The shards of all members, concatenated. `length` is their total length; None if it is not known."""
        ...


def shard_of(tensor: torch.Tensor, dim: int, size: int, group_rank: int) -> torch.Tensor:
    """Copy one member's shard of a tensor into memory of its own."""
    first, last = span_of(tensor.shape[dim], size, group_rank)
    return tensor.narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)


def span_of(length: int, size: int, group_rank: int) -> tuple[int, int]:
    """Where one member's shard begins and ends."""
    return length * group_rank // size, length * (group_rank + 1) // size


class GroupInputs:
    """The tensors that have been mapped into a group during one run of a layer, so that each is mapped once.

    Queries, keys and values are projections of one input: it is copied to the group once, and its gradient is reduced
    once. A sharded sequence that several modules need whole is gathered once. `sequence_length` is the total length
    while the sequence is sharded, else None.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.sequence_length: int | None = None
        self._group = group
        # Keyed by id and version; the values hold the key's tensor, so that its id is not reused.
        self._copied: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._gathered: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._shards: dict[int, tuple[torch.Tensor, _Regather]] = {}  # by the id of the gathered tensor

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor for use by sharded modules; its gradient is the sum of theirs."""
        key = (id(tensor), tensor._version)
        if key not in self._copied:
            if id(tensor) in self._shards:  # its gradient goes straight to the shards, without an all-reduce
                copied = _apply(_CopyGathered, self._shards[id(tensor)][0], tensor.detach(), self._group)
            else:
                copied = copy_to_group(tensor, self._group)
            self._copied[key] = (tensor, copied)
        return self._copied[key][1]

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole of a sequence that is sharded over the group."""
        key = (id(shard), shard._version)
        if key not in self._gathered:
            whole = gather_from_group(shard, self._group, SEQUENCE, self.sequence_length)
            self._gathered[key] = (shard, whole)
            self._shards[id(whole)] = (shard, _Regather(self._group, self.sequence_length))
        return self._gathered[key][1]

    def linear(self, tensor: torch.Tensor, module: nn.Linear) -> torch.Tensor | None:
        """A linear's output for a gathered sequence, saving only the shard for backward; None for other tensors."""
        if id(tensor) not in self._shards:
            return None
        return _apply(_LinearOfGathered, self.copied(tensor), *self._shards[id(tensor)], module.weight, module.bias)


def copy_to_group(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """A whole tensor for use by sharded modules: their partial gradients are all-reduced."""
    return _apply(_Copy, tensor, group)


def copy_all_to_group(tensors: list[torch.Tensor], group: TensorGroup) -> list[torch.Tensor]:
    """Like `copy_to_group`, with one all-reduce for the gradients of many small tensors."""
    return list(_CopyAll.apply(group, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


def reduce_from_group(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """All-reduce partial tensors to their sum."""
    return _apply(_Reduce, tensor, group)


def reduce_scatter_sequence(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Reduce-scatter partial tensors to shards of their sum, along the sequence."""
    return _apply(_ReduceScatter, tensor, group)


def gather_from_group(tensor: torch.Tensor, group: TensorGroup, dim: int, length: int | None) -> torch.Tensor:
    """All-gather shards to the whole."""
    return _apply(_Gather, tensor, group, dim, length)


def scatter_to_group(tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
    """This member's shard of a whole tensor."""
    return _apply(_Scatter, tensor, group, dim)


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    output: torch.Tensor = function.apply(*arguments)
    return output


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.all_reduce(gradient), None


class _CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: torch.Tensor) -> Any:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = ctx.group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        sums = torch.split(total, [gradient.numel() for gradient in gradients])
        return None, *(
            flat.view(gradient.shape).to(gradient.dtype) for flat, gradient in zip(sums, gradients, strict=True)
        )


class _CopyGathered(torch.autograd.Function):
    """`_Copy` of a gathered sequence: its gradient is reduce-scattered straight to the shards it was gathered from."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, whole: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.reduce_scatter(gradient, SEQUENCE), None, None


class _Regather:
    """Gathers a sequence again in backward, once for all linears that need it there (`num_left`)."""

    def __init__(self, group: TensorGroup, length: int | None) -> None:
        self.num_left = 0
        self._group, self._length = group, length
        self._whole: torch.Tensor | None = None

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        whole = self._group.all_gather(shard, SEQUENCE, self._length) if self._whole is None else self._whole
        self.num_left -= 1
        self._whole = whole if self.num_left > 0 else None
        return whole


class _LinearOfGathered(torch.autograd.Function):
    """A linear that saves the shard of its input for backward, where `F.linear` would save the gathered whole."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, shard: torch.Tensor, regather: _Regather, weight: torch.Tensor, bias: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(shard, weight)
        ctx.regather, ctx.dtype = regather, tensor.dtype
        regather.num_left += weight.requires_grad
        return F.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shard, weight = ctx.saved_tensors
        input_gradient = weight_gradient = bias_gradient = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            input_gradient = (gradient @ weight.to(gradient.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            inputs = ctx.regather.gathered(shard).flatten(0, -2)
            weight_gradient = (rows.T @ inputs.to(rows.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[4]:
            bias_gradient = rows.sum(0).to(weight.dtype)
        return input_gradient, None, None, weight_gradient, bias_gradient


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group, ctx.length = group, tensor.shape[SEQUENCE]
        return group.reduce_scatter(tensor, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.all_gather(gradient, SEQUENCE, ctx.length), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, dim: int, length: int | None) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(tensor, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return shard_of(gradient, ctx.dim, ctx.group.size, ctx.group.group_rank), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, tensor.shape[dim]
        return shard_of(tensor, dim, group.size, group.group_rank)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.all_gather(gradient, ctx.dim, ctx.length), None, None
