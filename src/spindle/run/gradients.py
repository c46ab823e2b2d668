"""Where gradients stand while they are synchronised."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from spindle.run.shards import Flat, Piece, pieces_of


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the gradient of a parameter stands: one stretch, or several where it falls into several parts."""

    pieces: list[Piece]
    stretches: list[torch.Tensor]
    whole: torch.Tensor | None  # the stretch, if there is one


class Gradients:
    """One place for the gradient of each parameter, side by side for those that are synchronised together.

    Behind a bucket's gradients stand as many flags, whether its rank has them: where no rank has a gradient, one
    process would have none either. A bucket that is sharded is cut as its parameters are, and each part has these flags
    behind it, because a rank gets to see the sum of its own part alone.

    The memory of gradients that another program also synchronised together can be taken over from its `last` object.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        sharded: Mapping[int, Flat] | None = None,
        last: Gradients | None = None,
    ) -> None:
        self._buckets, self._sharded = buckets, sharded or {}
        self._bucket_of = {id(parameter): number for number, bucket in enumerate(buckets) for parameter in bucket}
        self._flats: dict[int, torch.Tensor] = {}
        self._standing: dict[int, _Place] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._taken: set[int] = set()  # parameters whose place is memory of graphs
        self._flags: dict[int, tuple[list[bool], torch.Tensor]] = {}
        if last is not None:
            self._take_over(last)

    def _take_over(self, last: Gradients) -> None:
        known = {tuple(map(id, bucket)): number for number, bucket in enumerate(last._buckets)}
        for number, bucket in enumerate(self._buckets):
            old = known.get(tuple(map(id, bucket)))
            if old in last._flats and self._sharded.get(number) is last._sharded.get(old):
                self._flats[number] = last._flats[old]
                self._standing.update((id(parameter), last._standing[id(parameter)]) for parameter in bucket)

    @property
    def memory(self) -> list[torch.Tensor]:
        """All that is kept for gradients."""
        return [*self._flats.values(), *self._places.values()]

    def place(self, parameter: nn.Parameter) -> torch.Tensor:
        """A tensor for the parameter's gradient, always the same one."""
        if id(parameter) not in self._places:
            part = None
            if id(parameter) in self._bucket_of:
                self._flat(self._bucket_of[id(parameter)])
                part = self._standing[id(parameter)].whole
            is_fit = part is not None and part.dtype == parameter.dtype
            self._places[id(parameter)] = part if part is not None and is_fit else torch.zeros_like(parameter)
        return self._places[id(parameter)]

    def is_free(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient may stay where backward makes it: it is not synchronised, and has no place."""
        return id(parameter) not in self._places and id(parameter) not in self._bucket_of

    def take(self, parameter: nn.Parameter, place: torch.Tensor | None) -> None:
        """From now on a parameter's gradient is here, in memory of graphs, unless it has a place."""
        if place is not None and id(parameter) not in self._places:
            self._places[id(parameter)] = place
            self._taken.add(id(parameter))

    def forget_taken(self) -> None:
        """Gives memory of graphs back, when there are no graphs any more: one gradient would hold all of their pool."""
        for parameter in self._taken:
            del self._places[parameter]
        self._taken.clear()

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Moves gradients to where they are synchronised, so that none stands twice for long. One that falls into
        several parts has to wait until it is complete."""
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters if self._bucket_of else ():
            gradient, bucket = parameter.grad, self._bucket_of.get(id(parameter))
            if gradient is None or bucket is None:
                continue
            if bucket not in self._flats:
                self._flat(bucket)
            whole = self._standing[id(parameter)].whole
            if whole is None or gradient is whole:
                continue
            if gradient.data_ptr() != whole.data_ptr():
                moves.append((whole, gradient))
            if whole.dtype == parameter.dtype:
                parameter.grad = whole
        _copy(moves)

    def gathered(self, bucket: int, unreached: Collection[int] = ()) -> torch.Tensor:
        """A bucket's gradients, as its parameters have them now, and their flags. Parameters keep no other memory.

        Of a sharded bucket, zeros for what no gradient reaches (by id) are no gradient: its ranks see parts alone, in
        which the gradient of something else may be zero, too.
        """
        flat, parameters = self._flat(bucket), self._buckets[bucket]
        is_sharded = bucket in self._sharded
        there = [
            parameter.grad is not None
            and not (is_sharded and id(parameter) in unreached and not bool(parameter.grad.any()))
            for parameter in parameters
        ]
        self.keep(parameters)
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters:
            standing = self._standing[id(parameter)]
            if parameter.grad is None:
                for stretch in standing.stretches:
                    stretch.zero_()
            elif standing.whole is None:
                line = parameter.grad.reshape(-1)
                moves += [
                    (stretch, line[piece.first : piece.last])
                    for piece, stretch in zip(standing.pieces, standing.stretches, strict=True)
                ]
            if is_sharded:
                parameter.grad = None
        _copy(moves)
        known = self._flags.get(bucket)
        if known is None or known[0] != there:
            known = self._flags[bucket] = (there, torch.tensor(there, dtype=flat.dtype, device=flat.device))
        flat.view(self._num_parts(bucket), -1)[:, -len(there) :] = known[1]
        return flat

    def has_all(self, bucket: int) -> bool:
        """Whether this rank had all of a bucket's gradients when they were last gathered."""
        return all(self._flags[bucket][0])

    def holders(self, bucket: int) -> list[float]:
        """How many ranks have each gradient of a bucket, once it was summed. On a GPU this waits for it."""
        parts = self._flat(bucket).view(self._num_parts(bucket), -1)
        mine = parts[self._sharded[bucket].place if bucket in self._sharded else 0]
        found: list[float] = mine[-len(self._buckets[bucket]) :].tolist()
        return found

    def spread(self, bucket: int, holders: Sequence[float] | None = None) -> None:
        """Parameters, or this rank's parts of them, take a bucket's gradients as they are now, but for those that no
        rank has, as far as that is known."""
        holders = holders if holders is not None else [1.0] * len(self._buckets[bucket])
        if bucket in self._sharded:
            flat = self._sharded[bucket]
            for parameter, count, owned in zip(flat.parameters, holders, flat.owned, strict=True):
                if owned is not None:
                    _, part = owned
                    part.grad = self._part(parameter, flat.place).view(part.shape) if count else None
            return
        for parameter, count in zip(self._buckets[bucket], holders, strict=True):
            whole = self._standing[id(parameter)].whole
            assert whole is not None
            if not count:
                parameter.grad = None
            elif whole.dtype != parameter.dtype:
                parameter.grad = whole.to(parameter.dtype)
            elif parameter.grad is not whole:
                parameter.grad = whole

    def _part(self, parameter: nn.Parameter, part: int) -> torch.Tensor:
        standing = self._standing[id(parameter)]
        places = [piece.part for piece in standing.pieces]
        return standing.stretches[places.index(part)]

    def _num_parts(self, bucket: int) -> int:
        return len(self._sharded[bucket].ranks) if bucket in self._sharded else 1

    def _flat(self, bucket: int) -> torch.Tensor:
        if bucket not in self._flats:
            parameters, num_parts = self._buckets[bucket], self._num_parts(bucket)
            part_size, pieces = pieces_of([parameter.numel() for parameter in parameters], num_parts)
            dtype = reduce(torch.promote_types, [parameter.dtype for parameter in parameters])
            flat = torch.zeros(num_parts * (part_size + len(parameters)), dtype=dtype, device=parameters[0].device)
            parts = flat.view(num_parts, -1)
            for parameter, some in zip(parameters, pieces, strict=True):
                stretches = [parts[one.part, one.begin : one.begin + one.last - one.first] for one in some]
                if len(stretches) == 1:
                    stretches = [stretches[0].view_as(parameter)]
                self._standing[id(parameter)] = _Place(some, stretches, stretches[0] if len(stretches) == 1 else None)
            self._flats[bucket] = flat
        return self._flats[bucket]


def _copy(moves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if moves:
        torch._foreach_copy_([place for place, _ in moves], [gradient for _, gradient in moves])


@dataclass(frozen=True, slots=True)
class GradientBuffers:
    """What an executor keeps for gradients, handed on to the executor of the next program: the parameters it trained,
    and where their gradients are."""

    parameters: tuple[nn.Parameter, ...]
    gradients: Gradients
