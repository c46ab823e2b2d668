"""What passes between the members of a tensor group, forward and backward.

A tensor is whole on every member, a part of a sum, or cut along a dimension. What is whole has the same gradient on
every member, or parts of its sum inside tensor parallel parts. Slices of a sequence need not be equally long.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

SEQUENCE = 1  # the dimension of tokens


class Members(Protocol):
    """A tensor group as one of its members sees it."""

    size: int
    place: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all members, a new tensor."""
        ...

    def add_up_shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This member's shard of the sum."""
        ...

    def join(self, tensor: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
        """The shards of all members side by side, which are so long together; None if that is not known."""
        ...


def shard_of(tensor: torch.Tensor, dim: int, size: int, place: int) -> torch.Tensor:
    """A member's part of a tensor, with memory of its own."""
    first, last = span_of(tensor.shape[dim], size, place)
    return tensor.narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)


def span_of(length: int, size: int, place: int) -> tuple[int, int]:
    """Where a member's part begins and ends."""
    return length * place // size, length * (place + 1) // size


class Entered:
    """What several parts take (queries, keys and values of one input) enters the group once, so that its gradient is
    added up once; and slices that several parts need whole are joined once. `length` is that of the sequence, while it
    is cut."""

    def __init__(self, members: Members) -> None:
        self.length: int | None = None
        self._members = members
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._wholes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # of slices
        self._slices: dict[int, tuple[torch.Tensor, _Again]] = {}  # of wholes, by their id

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (id(tensor), tensor._version)
        if key not in self._known:
            if id(tensor) in self._slices:
                entered = _crossed(_EnterJoined, self._slices[id(tensor)][0], tensor.detach(), self._members)
            else:
                entered = enter(tensor, self._members)
            self._known[key] = (tensor, entered)
        return self._known[key][1]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A sequence of which members have slices."""
        key = (id(part), part._version)
        if key not in self._wholes:
            whole = join(part, self._members, SEQUENCE, self.length)
            self._wholes[key] = (part, whole)
            self._slices[id(whole)] = (part, _Again(self._members, self.length))
        return self._wholes[key][1]

    def linear(self, tensor: torch.Tensor, module: nn.Linear) -> torch.Tensor | None:
        """A linear's output for a sequence that was joined, of which it keeps the slice; none for another tensor."""
        if id(tensor) not in self._slices:
            return None
        return _crossed(_Linear, self(tensor), *self._slices[id(tensor)], module.weight, module.bias)


def enter(tensor: torch.Tensor, members: Members) -> torch.Tensor:
    """From whole to parts: the members' gradients are added up."""
    return _crossed(_Enter, tensor, members)


def enter_all(tensors: list[torch.Tensor], members: Members) -> list[torch.Tensor]:
    """The same of many small ones: their gradients are added up in one go."""
    return list(_EnterAll.apply(members, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


def leave(tensor: torch.Tensor, members: Members) -> torch.Tensor:
    """From parts of a sum to the sum."""
    return _crossed(_Leave, tensor, members)


def leave_cut(tensor: torch.Tensor, members: Members) -> torch.Tensor:
    """From parts of a sum to slices of the sum."""
    return _crossed(_LeaveCut, tensor, members)


def join(tensor: torch.Tensor, members: Members, dim: int, length: int | None) -> torch.Tensor:
    """From shards side by side to the whole."""
    return _crossed(_Join, tensor, members, dim, length)


def cut(tensor: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
    """From the whole to this member's shard."""
    return _crossed(_Cut, tensor, members, dim)


def _crossed(how: Any, *given: Any) -> torch.Tensor:
    crossed: torch.Tensor = how.apply(*given)
    return crossed


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members = members
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.members.all_reduce(gradient), None


class _EnterAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, members: Members, *tensors: torch.Tensor) -> Any:
        ctx.members = members
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = ctx.members.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = torch.split(total, [gradient.numel() for gradient in gradients])
        return None, *(part.view(one.shape).to(one.dtype) for part, one in zip(parts, gradients, strict=True))


class _EnterJoined(torch.autograd.Function):
    """From slices to parts, with what they were joined to: gradients are added up where the slices are."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, whole: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members = members
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.members.add_up_shard(gradient, SEQUENCE), None, None


class _Again:
    """A sequence that backward joins again, once for all who need it there."""

    def __init__(self, members: Members, length: int | None) -> None:
        self.num_left = 0
        self._members, self._length = members, length
        self._whole: torch.Tensor | None = None

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        whole = self._members.join(part, SEQUENCE, self._length) if self._whole is None else self._whole
        self.num_left -= 1
        self._whole = whole if self.num_left > 0 else None
        return whole


class _Linear(torch.autograd.Function):
    """Keeps a slice of what it is given, where a linear would keep all of it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, part: torch.Tensor, again: _Again, weight: torch.Tensor, bias: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(part, weight)
        ctx.again, ctx.dtype = again, tensor.dtype
        again.num_left += weight.requires_grad
        return F.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part, weight = ctx.saved_tensors
        of_tensor = of_weight = of_bias = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            of_tensor = (gradient @ weight.to(gradient.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            of_weight = (rows.T @ ctx.again.joined(part).flatten(0, -2).to(rows.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[4]:
            of_bias = rows.sum(0).to(weight.dtype)
        return of_tensor, None, None, of_weight, of_bias


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, members: Members) -> torch.Tensor:
        return members.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _LeaveCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members, ctx.length = members, tensor.shape[SEQUENCE]
        return members.add_up_shard(tensor, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.members.join(gradient, SEQUENCE, ctx.length), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, members: Members, dim: int, length: int | None) -> torch.Tensor:
        ctx.members, ctx.dim = members, dim
        return members.join(tensor, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return shard_of(gradient, ctx.dim, ctx.members.size, ctx.members.place), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
        ctx.members, ctx.dim, ctx.length = members, dim, tensor.shape[dim]
        return shard_of(tensor, dim, members.size, members.place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.members.join(gradient, ctx.dim, ctx.length), None, None
