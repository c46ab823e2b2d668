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
    """Where a parameter's gradient is in a flat bucket: one range, or several if it spans several parts."""

    pieces: list[Piece]
    ranges: list[torch.Tensor]
    whole: torch.Tensor | None  # the range, if there is only one


class Gradients:
    """The memory of all gradients of a rank. Gradients that are synchronised together form a flat bucket.

    A bucket ends with one flag per gradient that says whether this rank has it: if no rank has a gradient, a single
    process would have None. A sharded bucket is split into parts like its parameters. Each part ends with all flags,
    because a rank only sees the sum of its own part.

    Buckets that the previous program also had are reused from its object, `previous`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        sharded: Mapping[int, Flat] | None = None,
        previous: Gradients | None = None,
    ) -> None:
        self._buckets, self._sharded = buckets, sharded or {}
        self._bucket_of = {id(parameter): number for number, bucket in enumerate(buckets) for parameter in bucket}
        self._flats: dict[int, torch.Tensor] = {}
        self._locations: dict[int, _Location] = {}
        self._grad_buffers: dict[int, torch.Tensor] = {}
        self._in_graphs: set[int] = set()  # parameters whose gradient is in memory of CUDA graphs
        self._flags: dict[int, tuple[list[bool], torch.Tensor]] = {}
        if previous is not None:
            self._reuse_memory(previous)

    def _reuse_memory(self, previous: Gradients) -> None:
        known = {tuple(map(id, bucket)): number for number, bucket in enumerate(previous._buckets)}
        for number, bucket in enumerate(self._buckets):
            old = known.get(tuple(map(id, bucket)))
            if old in previous._flats and self._sharded.get(number) is previous._sharded.get(old):
                self._flats[number] = previous._flats[old]
                self._locations.update((id(parameter), previous._locations[id(parameter)]) for parameter in bucket)

    @property
    def memory(self) -> list[torch.Tensor]:
        """All memory of gradients."""
        return [*self._flats.values(), *self._grad_buffers.values()]

    def allocate(self) -> None:
        """Allocate all buckets on the current stream, before several streams write to them."""
        for number, bucket in enumerate(self._buckets):
            if bucket:
                self._flat(number)

    def parameters_of(self, bucket: int) -> Sequence[nn.Parameter]:
        return self._buckets[bucket]

    def grad_buffer(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor into which a parameter's gradient is written: its range of a bucket, or memory of its own. Always
        the same tensor."""
        if id(parameter) not in self._grad_buffers:
            part = None
            if id(parameter) in self._bucket_of:
                self._flat(self._bucket_of[id(parameter)])
                part = self._locations[id(parameter)].whole
            is_fit = part is not None and part.dtype == parameter.dtype
            self._grad_buffers[id(parameter)] = part if part is not None and is_fit else torch.zeros_like(parameter)
        return self._grad_buffers[id(parameter)]

    def has_grad_buffer(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient belongs in a certain tensor. If not, it may stay where autograd allocates
        it."""
        return id(parameter) in self._grad_buffers or id(parameter) in self._bucket_of

    def use_graph_memory(self, parameter: nn.Parameter, buffer: torch.Tensor | None) -> None:
        """From now on, use memory of CUDA graphs for a parameter's gradient, unless it has a buffer already."""
        if buffer is not None and id(parameter) not in self._grad_buffers:
            self._grad_buffers[id(parameter)] = buffer
            self._in_graphs.add(id(parameter))

    def drop_graph_memory(self) -> None:
        """Drop references to memory of CUDA graphs after the graphs were dropped: a single gradient would keep their
        whole pool alive."""
        for parameter in self._in_graphs:
            del self._grad_buffers[parameter]
        self._in_graphs.clear()

    def move_to_buckets(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move gradients into their buckets, so that none is held twice for long. A gradient that spans several parts
        is moved by `fill_bucket`."""
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
            # it may be there already, under another tensor object
            if gradient.data_ptr() != whole.data_ptr():
                moves.append((whole, gradient))
            if whole.dtype == parameter.dtype:
                parameter.grad = whole
        _copy(moves)

    def fill_bucket(self, bucket: int, unreached: Collection[int] = ()) -> torch.Tensor:
        """Write the gradients of a bucket's parameters and their flags into the bucket, and return it. No gradient has
        other memory afterwards.

        In a sharded bucket, zeros count as no gradient for the `unreached` parameters (by id): its ranks only see
        parts, in which the gradient of a reached parameter may be zero, too.
        """
        flat, parameters = self._flat(bucket), self._buckets[bucket]
        is_sharded = bucket in self._sharded
        is_present = [
            parameter.grad is not None
            and not (is_sharded and id(parameter) in unreached and not bool(parameter.grad.any()))
            for parameter in parameters
        ]
        self.move_to_buckets(parameters)
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters:
            location = self._locations[id(parameter)]
            if parameter.grad is None:
                # the bucket still holds the sum of the last step, and other ranks may have a gradient
                for range_ in location.ranges:
                    range_.zero_()
            elif location.whole is None:
                flat_gradient = parameter.grad.reshape(-1)
                moves += [
                    (range_, flat_gradient[piece.first : piece.last])
                    for piece, range_ in zip(location.pieces, location.ranges, strict=True)
                ]
            if is_sharded:
                parameter.grad = None
        _copy(moves)
        # flags rarely change, and a new tensor on the host would be copied to the GPU every time
        known = self._flags.get(bucket)
        if known is None or known[0] != is_present:
            known = self._flags[bucket] = (is_present, torch.tensor(is_present, dtype=flat.dtype, device=flat.device))
        flat.view(self._num_parts(bucket), -1)[:, -len(is_present) :] = known[1]
        return flat

    def has_all(self, bucket: int) -> bool:
        """Whether this rank had all gradients of a bucket when it was last gathered."""
        return all(self._flags[bucket][0])

    def num_contributors(self, bucket: int) -> list[float]:
        """How many ranks have each gradient of a bucket, after it was summed. Synchronizes with the GPU."""
        parts = self._flat(bucket).view(self._num_parts(bucket), -1)
        own_part = parts[self._sharded[bucket].part_index if bucket in self._sharded else 0]
        counts: list[float] = own_part[-len(self._buckets[bucket]) :].tolist()
        return counts

    def set_from_bucket(self, bucket: int, num_contributors: Sequence[float] | None = None) -> None:
        """Set the gradients of a bucket's parameters, or of this rank's parts of them, to the sums. None if it is known
        that no rank has a gradient."""
        num_contributors = num_contributors if num_contributors is not None else [1.0] * len(self._buckets[bucket])
        if bucket in self._sharded:
            flat = self._sharded[bucket]
            for parameter, count, part in zip(flat.parameters, num_contributors, flat.owned, strict=True):
                if part is not None:
                    part.grad = self._part(parameter, flat.part_index).view(part.shape) if count else None
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
            # gradients of several dtypes are summed in the widest one
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
        torch._foreach_copy_([target for target, _ in moves], [gradient for _, gradient in moves])


@dataclass(frozen=True, slots=True)
class GradientBuffers:
    """What an executor hands on to the executor of the next program: the parameters that it trained, and where their
    gradients are."""

    parameters: tuple[nn.Parameter, ...]
    gradients: Gradients
