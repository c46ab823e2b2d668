"""Where gradients stand while they are synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import nn


class Gradients:
    """One place for the gradient of each parameter, side by side for those that are synchronised together.

    Behind a bucket's gradients stand as many flags, whether its rank has them: where no rank has a gradient, one
    process would have none either.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        self._buckets = buckets
        self._bucket_of = {id(parameter): number for number, bucket in enumerate(buckets) for parameter in bucket}
        self._flats: dict[int, torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._flags: dict[int, tuple[list[bool], torch.Tensor]] = {}

    def place(self, parameter: nn.Parameter) -> torch.Tensor:
        """A tensor for the parameter's gradient, always the same one."""
        if id(parameter) not in self._places:
            part = None
            if id(parameter) in self._bucket_of:
                self._flat(self._bucket_of[id(parameter)])
                part = self._parts[id(parameter)]
            is_fit = part is not None and part.dtype == parameter.dtype
            self._places[id(parameter)] = part if part is not None and is_fit else torch.zeros_like(parameter)
        return self._places[id(parameter)]

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Moves gradients to where they are synchronised, so that none stands twice for long."""
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters:
            if parameter.grad is None or id(parameter) not in self._bucket_of:
                continue
            self._flat(self._bucket_of[id(parameter)])
            part = self._parts[id(parameter)]
            if parameter.grad.data_ptr() != part.data_ptr():
                moves.append((part, parameter.grad))
            if part.dtype == parameter.dtype:
                parameter.grad = part
        if moves:
            torch._foreach_copy_([part for part, _ in moves], [gradient for _, gradient in moves])

    def gathered(self, bucket: int) -> torch.Tensor:
        """A bucket's gradients, as its parameters have them now, and their flags. Parameters keep no other memory."""
        flat, parameters = self._flat(bucket), self._buckets[bucket]
        there = [parameter.grad is not None for parameter in parameters]
        self.keep(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                self._parts[id(parameter)].zero_()
        known = self._flags.get(bucket)
        if known is None or known[0] != there:
            known = self._flags[bucket] = (there, torch.tensor(there, dtype=flat.dtype, device=flat.device))
        flat[-len(there) :].copy_(known[1])
        return flat

    def has_all(self, bucket: int) -> bool:
        """Whether this rank had all of a bucket's gradients when they were last gathered."""
        return all(self._flags[bucket][0])

    def spread(self, bucket: int, holders: Sequence[float]) -> None:
        """Parameters take a bucket's gradients as they are now, but for those that no rank has."""
        for parameter, count in zip(self._buckets[bucket], holders, strict=True):
            part = self._parts[id(parameter)]
            if not count:
                parameter.grad = None
            elif part.dtype != parameter.dtype:
                parameter.grad = part.to(parameter.dtype)
            elif parameter.grad is not part:
                parameter.grad = part

    def _flat(self, bucket: int) -> torch.Tensor:
        if bucket not in self._flats:
            parameters = self._buckets[bucket]
            sizes = [parameter.numel() for parameter in parameters]
            dtype = reduce(torch.promote_types, [parameter.dtype for parameter in parameters])
            flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=parameters[0].device)
            for parameter, part in zip(parameters, torch.split(flat[: sum(sizes)], sizes), strict=True):
                self._parts[id(parameter)] = part.view_as(parameter)
            self._flats[bucket] = flat
        return self._flats[bucket]
