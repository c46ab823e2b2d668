"""ZeRO-1: parameters of which each rank updates a part, and the all-gather of updated parts.

The parameters of a bucket lie end to end in one flat tensor, which is cut into as many equal parts as the bucket has
ranks, wherever that falls. To the optimizer, a rank's part of a parameter is a parameter of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from spindle.errors import ProgramError
from spindle.program import Bucket, Program, Slice, flat_pieces, numbers_by_dtype
from spindle.run.flat_collectives import Request, start_all_gather
from spindle.run.lanes import uses_streams
from spindle.run.world import World, wait


class Flat:
    """The flat tensor of a bucket's parameters of one dtype, after they were attached."""

    def __init__(self, numbers: Sequence[int], parameters: Sequence[nn.Parameter], ranks: tuple[int, ...], rank: int):
        self.numbers, self.parameters, self.ranks, self.part_index = numbers, parameters, ranks, ranks.index(rank)
        self.owned: list[nn.Parameter | None] = []  # of each parameter: the part that this rank updates
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory

    def attach(self) -> None:
        """Move parameters into the flat tensor, unless they are there already."""
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        if self._memory is None:
            part_size, pieces = flat_pieces(sizes, len(self.ranks))
            self._memory = torch.zeros(part_size * len(self.ranks), dtype=first.dtype, device=first.device)
            own_part = self._memory[self.part_index * part_size :]
            for parameter, own_pieces in zip(self.parameters, pieces, strict=True):
                owned = None
                for piece in own_pieces:
                    if piece.part == self.part_index:
                        # a view into the flat tensor, so that the all-gather sees the optimizer's update at once
                        updated = Slice(Slice.whole(parameter.shape).box, piece.first, piece.last)
                        owned = nn.Parameter(own_part[piece.begin :][: updated.num_elements].view(updated.shape))
                self.owned.append(owned)
        for parameter, place in zip(self.parameters, torch.split(self.memory[: sum(sizes)], sizes), strict=True):
            if parameter.data_ptr() != place.data_ptr():  # otherwise it was attached by an earlier fit
                place.view_as(parameter).copy_(parameter.data)
                parameter.data = place.view_as(parameter)

    def release(self) -> None:
        """Give parameters memory of their own again."""
        for parameter in self.parameters if self._memory is not None else ():
            parameter.data = parameter.data.clone()
        self._memory = None
        self.owned.clear()


BucketKey = tuple[tuple[int, ...], tuple[int, ...]]  # the parameters of a bucket, and its ranks


class Shards:
    """The sharded buckets of one rank, shared by all executors of a plan.

    Programs of different steps number buckets differently and may lack some, so buckets are identified by their
    contents.
    """

    def __init__(self, program: Program, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._world = world
        self._has_lanes = uses_streams(program, world)
        dtypes = [parameter.dtype for parameter in parameters]
        self._flats: dict[BucketKey, list[Flat]] = {}  # one flat tensor per dtype
        for bucket in program.buckets:
            ranks = tuple(bucket.ranks.tolist())
            by_dtype = numbers_by_dtype(bucket, dtypes) if world.rank in ranks else []
            self._flats[_key(bucket)] = [
                Flat(numbers, [parameters[number] for number in numbers], ranks, world.rank) for numbers in by_dtype
            ]
        self._gathers: dict[BucketKey, list[Request]] = {}  # gathers in flight
        self._waited: dict[BucketKey, set[int]] = {}  # with lanes: the streams that have waited for them

    def __iter__(self) -> Iterator[Flat]:
        return (flat for flats in self._flats.values() for flat in flats)

    def of_bucket(self, bucket: Bucket) -> list[Flat]:
        """The flat tensors of a bucket of any program, one per dtype. Empty if other ranks hold it."""
        if _key(bucket) not in self._flats:
            raise ProgramError("a step has other buckets than those whose optimizer state was sharded")
        return self._flats[_key(bucket)]

    def attach(self) -> None:
        for flat in self:
            flat.attach()

    def release(self) -> None:
        self.wait_all()
        for flat in self:
            flat.release()

    @property
    def owned(self) -> dict[int, nn.Parameter | None]:
        """The part of each sharded parameter that this rank updates, by position. None if it updates nothing of it."""
        return {number: owned for flat in self for number, owned in zip(flat.numbers, flat.owned, strict=True)}

    def drop_gradients(self) -> None:
        for flat in self:
            for owned in flat.owned:
                if owned is not None:
                    owned.grad = None

    def start_gather(self, bucket: Bucket) -> None:
        """Start to gather the updated parts of a bucket."""
        requests = [start_all_gather(flat.memory, flat.ranks, self._world) for flat in self.of_bucket(bucket)]
        if requests:
            self._gathers[_key(bucket)], self._waited[_key(bucket)] = requests, set()

    def is_gathering(self, bucket: Bucket) -> bool:
        """Whether the gather of a bucket still has to be waited for; with several lanes, by the current lane."""
        key = _key(bucket)
        return key in self._gathers and not (self._has_lanes and _stream() in self._waited[key])

    def wait(self, bucket: Bucket) -> None:
        self._wait(_key(bucket))

    def _wait(self, key: BucketKey) -> None:
        for request in self._gathers.get(key, ()):
            wait(request)
        if self._has_lanes and key in self._waited:
            self._waited[key].add(_stream())
        else:
            self._gathers.pop(key, None)

    def wait_all(self) -> None:
        """Wait for all gathers in flight. Every parameter then has the values of the last update."""
        for key in list(self._gathers):
            self._wait(key)
        self._gathers.clear()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _key(bucket: Bucket) -> BucketKey:
    return bucket.parameters, tuple(bucket.ranks.tolist())
