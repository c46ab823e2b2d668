"""Memory for gradients: flat buckets, in which they are synchronised."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from spindle.program import Piece, flat_pieces
from spindle.run.shards import Flat

_ALIGNED_ELEMENTS = 16


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a parameter's gradient is in a flat bucket: one range, or several where it falls into several parts."""

    pieces: list[Piece]
    ranges: list[torch.Tensor]
    whole: torch.Tensor | None  # the range, if there is only one


class Gradients:
    """The memory of all gradients of a rank; those that are synchronised together form a flat bucket.

    A bucket ends with one flag per gradient, whether this rank has it: where no rank has a gradient, a single process
    would have None. A sharded bucket is cut into parts as its parameters are, and each part ends with all these flags,
    because a rank sees the sum of its own part alone.

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
        self._locations: dict[int, _Location] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._taken: set[int] = set()  # parameters whose gradient is in memory of CUDA graphs
        self._flags: dict[int, tuple[list[bool], torch.Tensor]] = {}
        if last is not None:
            self._take_over(last)

    def _take_over(self, last: Gradients) -> None:
        known = {tuple(map(id, bucket)): number for number, bucket in enumerate(last._buckets)}
        for number, bucket in enumerate(self._buckets):
            old = known.get(tuple(map(id, bucket)))
            if old in last._flats and self._sharded.get(number) is last._sharded.get(old):
                self._flats[number] = last._flats[old]
                self._locations.update((id(parameter), last._locations[id(parameter)]) for parameter in bucket)

    @property
    def memory(self) -> list[torch.Tensor]:
        """All memory of gradients."""
        return [*self._flats.values(), *self._places.values()]

    def allocate(self) -> None:
        """Allocate all buckets, on the current stream, before several streams write to them."""
        for number, bucket in enumerate(self._buckets):
            if bucket:
                self._flat(number)

    def parameters_of(self, bucket: int) -> Sequence[nn.Parameter]:
        return self._buckets[bucket]

    def place(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor for a parameter's gradient, always the same one."""
        if id(parameter) not in self._places:
            part = None
            if id(parameter) in self._bucket_of:
                self._flat(self._bucket_of[id(parameter)])
                part = self._locations[id(parameter)].whole
            is_fit = part is not None and part.dtype == parameter.dtype
            self._places[id(parameter)] = part if part is not None and is_fit else torch.zeros_like(parameter)
        return self._places[id(parameter)]

    def is_free(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient may stay where autograd allocates it: it is not synchronised, and has no
        place."""
        return id(parameter) not in self._places and id(parameter) not in self._bucket_of

    def take(self, parameter: nn.Parameter, place: torch.Tensor | None) -> None:
        """Use memory of CUDA graphs for a parameter's gradient from now on, unless it has a place."""
        if place is not None and id(parameter) not in self._places:
            self._places[id(parameter)] = place
            self._taken.add(id(parameter))

    def forget_taken(self) -> None:
        """Drop gradients in memory of CUDA graphs, once these are dropped: one gradient would keep their whole pool
        alive."""
        for parameter in self._taken:
            del self._places[parameter]
        self._taken.clear()

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move gradients into their buckets, so that none takes memory twice for long. One that falls into several
        parts is copied once it is complete."""
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters if self._bucket_of else ():
            gradient, bucket = parameter.grad, self._bucket_of.get(id(parameter))
            if gradient is None or bucket is None:
                continue
            if bucket not in self._flats:
                self._flat(bucket)
            whole = self._locations[id(parameter)].whole
            if whole is None or gradient is whole:
                continue
            # It may lie there already, under another tensor object.
            if gradient.data_ptr() != whole.data_ptr():
                moves.append((whole, gradient))
            if whole.dtype == parameter.dtype:
                parameter.grad = whole
        _copy(moves)

    def gathered(self, bucket: int, unreached: Collection[int] = ()) -> torch.Tensor:
        """A flat bucket with the present gradients of its parameters and their flags. Parameters keep no other memory.

        In a sharded bucket, zeros for `unreached` parameters (by id) are no gradient: its ranks see parts only, in
        which the gradient of a reached parameter may be zero, too.
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
            location = self._locations[id(parameter)]
            if parameter.grad is None:
                # It still holds the sum of the last step; other ranks may have a gradient.
                for range_ in location.ranges:
                    range_.zero_()
            elif location.whole is None:
                line = parameter.grad.reshape(-1)
                moves += [
                    (range_, line[piece.first : piece.last])
                    for piece, range_ in zip(location.pieces, location.ranges, strict=True)
                ]
            if is_sharded:
                parameter.grad = None
        _copy(moves)
        # Flags change rarely, and a tensor made on the host each time would be copied to the GPU each time.
        known = self._flags.get(bucket)
        if known is None or known[0] != there:
            known = self._flags[bucket] = (there, torch.tensor(there, dtype=flat.dtype, device=flat.device))
        flat.view(self._num_parts(bucket), -1)[:, -len(there) :] = known[1]
        return flat

    def has_all(self, bucket: int) -> bool:
        """Whether this rank had all gradients of a bucket when it was last gathered."""
        return all(self._flags[bucket][0])

    def num_contributors(self, bucket: int) -> list[float]:
        """How many ranks have each gradient of a bucket, once it is summed. Synchronizes with a GPU."""
        parts = self._flat(bucket).view(self._num_parts(bucket), -1)
        mine = parts[self._sharded[bucket].place if bucket in self._sharded else 0]
        counts: list[float] = mine[-len(self._buckets[bucket]) :].tolist()
        return counts

    def spread(self, bucket: int, num_contributors: Sequence[float] | None = None) -> None:
        """Set the gradients of a bucket's parameters, or of this rank's parts of them, to its sums; None where no rank
        has one, if that is known."""
        num_contributors = num_contributors if num_contributors is not None else [1.0] * len(self._buckets[bucket])
        if bucket in self._sharded:
            flat = self._sharded[bucket]
            for parameter, count, part in zip(flat.parameters, num_contributors, flat.owned, strict=True):
                if part is not None:
                    part.grad = self._part(parameter, flat.place).view(part.shape) if count else None
            return
        for parameter, count in zip(self._buckets[bucket], num_contributors, strict=True):
            whole = self._locations[id(parameter)].whole
            assert whole is not None
            if not count:
                parameter.grad = None
            elif whole.dtype != parameter.dtype:
                parameter.grad = whole.to(parameter.dtype)
            elif parameter.grad is not whole:
                parameter.grad = whole

    def _part(self, parameter: nn.Parameter, part: int) -> torch.Tensor:
        location = self._locations[id(parameter)]
        places = [piece.part for piece in location.pieces]
        return location.ranges[places.index(part)]

    def _num_parts(self, bucket: int) -> int:
        return len(self._sharded[bucket].ranks) if bucket in self._sharded else 1

    def _flat(self, bucket: int) -> torch.Tensor:
        if bucket not in self._flats:
            parameters, num_parts = self._buckets[bucket], self._num_parts(bucket)
            part_size, pieces = flat_pieces([parameter.numel() for parameter in parameters], num_parts)
            # Gradients of several dtypes are summed in the widest.
            dtype = reduce(torch.promote_types, [parameter.dtype for parameter in parameters])
            row_size = part_size + len(parameters)
            if num_parts > 1:  # aligned, so that sums over ranks can be vectorized
                row_size = -(-row_size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
            flat = torch.zeros(num_parts * row_size, dtype=dtype, device=parameters[0].device)
            parts = flat.view(num_parts, -1)
            for parameter, own_pieces in zip(parameters, pieces, strict=True):
                ranges = [
                    parts[piece.part, piece.begin : piece.begin + piece.last - piece.first] for piece in own_pieces
                ]
                if len(ranges) == 1:
                    ranges = [ranges[0].view_as(parameter)]
                self._locations[id(parameter)] = _Location(own_pieces, ranges, ranges[0] if len(ranges) == 1 else None)
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
