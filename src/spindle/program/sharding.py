"""Which rank holds which slice of which parameter, and what ranks send each other when that changes.

A `Sharding` maps parameter → rank → slice: `weight_sharding` for the weights of a program, `optimizer_sharding` for the
optimizer state. `transfer(old, new)` lists what has to be sent when one becomes the other, at run time and for the
predicted cost of a new plan. Counts elements; knows neither bytes nor tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from spindle.graph import MetaGraph
from spindle.program.program import Bucket, Program


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: `[offset, offset + length)` along each dimension, like a chunk in the metadata of
    `torch.distributed.checkpoint`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.lengths)

    def overlap(self, box: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        if self == box:
            return self if self.num_elements else None
        offsets, lengths = [], []
        for offset, length, start, size in zip(self.offsets, self.lengths, box.offsets, box.lengths, strict=True):
            begin, end = max(offset, start), min(offset + length, start + size)
            if begin >= end:
                return None
            offsets.append(begin)
            lengths.append(end - begin)
        return Box(tuple(offsets), tuple(lengths))

    def without(self, inner: Box) -> list[Box]:
        """The elements outside `inner`, a box inside this one, as disjoint boxes: those before and after it along the
        first dimension, then, within its range of the first, along the second, and so on."""
        rest = []
        offsets, lengths = list(self.offsets), list(self.lengths)
        for dim, (offset, length) in enumerate(zip(inner.offsets, inner.lengths, strict=True)):
            end = offsets[dim] + lengths[dim]
            for begin, stop in ((offsets[dim], offset), (offset + length, end)):
                if begin < stop:
                    rest.append(
                        Box(
                            (*offsets[:dim], begin, *offsets[dim + 1 :]),
                            (*lengths[:dim], stop - begin, *lengths[dim + 1 :]),
                        )
                    )
            offsets[dim], lengths[dim] = offset, length
        return rest


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a parameter that a rank holds: elements `[first, last)`, in row-major order, of a box.

    A whole parameter and a tensor-parallel shard are all elements of a box; a ZeRO-1 shard is a range of them.
    """

    box: Box
    first: int
    last: int

    @classmethod
    def of_box(cls, box: Box) -> Slice:
        return cls(box, 0, box.num_elements)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Slice:
        return cls.of_box(Box((0,) * len(shape), tuple(shape)))

    @classmethod
    def shard(cls, shape: Sequence[int], dim: int, place: int, size: int) -> Slice:
        """Shard `place` of `size` along one dimension."""
        if size == 1:
            return cls.whole(shape)
        begin, end = shape[dim] * place // size, shape[dim] * (place + 1) // size
        offsets, lengths = [0] * len(shape), list(shape)
        offsets[dim], lengths[dim] = begin, end - begin
        return cls.of_box(Box(tuple(offsets), tuple(lengths)))

    @property
    def num_elements(self) -> int:
        return self.last - self.first

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds the slice. Even a range has as many dimensions as the parameter, because
        optimizers use the number of dimensions to decide on weight decay."""
        lengths = self.box.lengths
        if self.num_elements == self.box.num_elements:
            return lengths
        return (*(1 for _ in lengths[1:]), self.num_elements)

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """The slice as disjoint boxes, each contiguous in the slice's tensor, with its offset there."""
        begin = 0
        for offsets, lengths in _boxes_of_range(self.box.lengths, self.first, self.last):
            box = Box(tuple(a + b for a, b in zip(self.box.offsets, offsets, strict=True)), lengths)
            yield begin, box
            begin += box.num_elements


def _boxes_of_range(
    lengths: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and lengths of boxes that cover elements `[first, last)` of a row-major box: the end of its first row,
    whole rows, and the beginning of its last row. Partial rows are ranges themselves, in one dimension less."""
    if first >= last:
        return
    if last - first == prod(lengths):
        yield (0,) * len(lengths), lengths
        return
    row_size = prod(lengths[1:])
    row, begin = divmod(first, row_size)
    # The end of the first row, if the range begins inside it. The range may end inside the same row.
    if begin:
        end = min(row_size, begin + last - first)
        for offsets, sizes in _boxes_of_range(lengths[1:], begin, end):
            yield (row, *offsets), (1, *sizes)
        row, first = row + 1, first + end - begin
    # Whole rows, as one box.
    num_rows = (last - first) // row_size
    if num_rows:
        yield (row, *(0 for _ in lengths[1:])), (num_rows, *lengths[1:])
        row, first = row + num_rows, first + num_rows * row_size
    # The beginning of the last row; nothing if `first == last` by now.
    for offsets, sizes in _boxes_of_range(lengths[1:], 0, last - first):
        yield (row, *offsets), (1, *sizes)


# Parameter → rank → the slice that it holds, for ranks that hold any of it; never modified.
Sharding = Mapping[str, Mapping[int, Slice]]


def main_replicas(slices: Mapping[int, Slice]) -> dict[int, Slice]:
    """Each distinct slice of a parameter once, with the first rank that holds it."""
    first_ranks: dict[Slice, int] = {}
    for rank, part in sorted(slices.items()):
        first_ranks.setdefault(part, rank)
    return {rank: part for part, rank in first_ranks.items()}


def keep_unused(new: Sharding, old: Sharding) -> dict[str, Mapping[int, Slice]]:
    """`new`, and the parameters of `old` that it lacks: each slice of these stays with one rank until it is used
    again."""
    return {**new, **{name: main_replicas(slices) for name, slices in old.items() if name not in new}}


# Shardings of a program.


def weight_sharding(
    program: Program,
    graph: MetaGraph,
    shapes: Sequence[Sequence[int]] | None = None,
    split_dims: Mapping[int, int] | None = None,
) -> dict[str, Mapping[int, Slice]]:
    """Which slice of each parameter each rank holds: those of its slots, and those that it owns (`owning_ranks`).

    `shapes` and `split_dims` are by position of the parameter in the graph. Without them parameters are treated as
    one-dimensional, which is enough to count what is sent. A parameter that no rank holds is not in the map.
    """
    sharding: dict[str, Mapping[int, Slice]] = {}
    for number, places in enumerate(_tensor_places(program, graph)):
        parameter = graph.parameters[number]
        shape = (parameter.num_elements,) if shapes is None else tuple(shapes[number])
        dim = (split_dims or {}).get(number, 0)
        if places:
            sharding[parameter.name] = {
                rank: Slice.shard(shape, dim, place, size) for rank, (place, size) in sorted(places.items())
            }
    return sharding


def _tensor_places(program: Program, graph: MetaGraph) -> list[dict[int, tuple[int, int]]]:
    """For each parameter, rank → (tensor-parallel shard that it holds, number of shards)."""
    places: list[dict[int, tuple[int, int]]] = [{} for _ in graph.parameters]
    for shape, slot in zip(program.slots, program.plan.slots, strict=True):
        layers = graph.metaops[shape.op].parameters[slot.first : slot.last]
        for number in {number for layer in layers for number in layer}:
            # A parameter that no style splits (a norm inside a split layer) is whole on every member of the group.
            degree = shape.tensor_degree if graph.parameters[number].is_split else 1
            ranks = enumerate(shape.ranks.tolist())
            places[number].update((rank, (position % degree, degree)) for position, rank in ranks)
    # Owning ranks hold the shard that they would hold if a slot on all of them used the parameter.
    for number, owning_ranks in program.owning_ranks:
        degree = next((size for _, size in places[number].values()), 1)
        for position, rank in enumerate(owning_ranks):
            places[number].setdefault(rank, (position % degree, degree))
    return places


def optimizer_sharding(
    program: Program, graph: MetaGraph, weights: Sharding, dtypes: Sequence[Hashable] | None = None
) -> dict[str, Mapping[int, Slice]]:
    """Which slice of each trainable parameter each rank updates: all that it holds, or, with a sharded optimizer, its
    part of each flat bucket (ZeRO-1)."""
    sharding: dict[str, Mapping[int, Slice]] = {
        parameter.name: weights[parameter.name]
        for parameter in graph.parameters
        if parameter.trainable and parameter.name in weights
    }
    for bucket in program.buckets if program.plan.shard_optimizer else ():
        ranks = bucket.ranks.tolist()
        for numbers in numbers_by_dtype(bucket, dtypes):
            names = [graph.parameters[number].name for number in numbers]
            held = [weights[name][ranks[0]] for name in names]  # the ranks of a bucket hold the same shards
            _, pieces = flat_pieces([part.num_elements for part in held], len(ranks))
            for name, part, pieces_of_parameter in zip(names, held, pieces, strict=True):
                # A parameter with tensor-parallel shards is in a bucket for each shard: keep the entries of ranks whose
                # shards are in other buckets.
                updated = {rank: part for rank, part in sharding[name].items() if rank not in ranks}
                updated |= {
                    ranks[piece.part]: Slice(part.box, piece.first, piece.last) for piece in pieces_of_parameter
                }
                sharding[name] = updated
    return sharding


def numbers_by_dtype(bucket: Bucket, dtypes: Sequence[Hashable] | None = None) -> list[list[int]]:
    """A bucket's parameters, by position in the graph: one list for each dtype, because each dtype is a flat tensor."""
    numbers: dict[Hashable, list[int]] = {}
    for number in bucket.parameters:
        numbers.setdefault(None if dtypes is None else dtypes[number], []).append(number)
    return list(numbers.values())


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[first, last)` of a tensor, which lie in one part of a flat tensor, from `begin` on."""

    part: int
    begin: int
    first: int
    last: int


def flat_pieces(sizes: Sequence[int], num_parts: int) -> tuple[int, list[list[Piece]]]:
    """Lay tensors of these sizes end to end and cut the result into equal parts, wherever the cuts fall. Returns the
    size of a part, and the pieces of each tensor."""
    part_size = max(1, -(-sum(sizes) // num_parts))  # rounded up: the last part may be padded
    pieces: list[list[Piece]] = []
    start = 0
    for size in sizes:
        pieces.append([])
        first = 0
        while first < size:
            part, begin = divmod(start + first, part_size)
            last = min(size, first + part_size - begin)
            pieces[-1].append(Piece(part, begin, first, last))
            first = last
        if not size:
            pieces[-1].append(Piece(0, 0, 0, 0))  # an empty tensor needs an owner, too
        start += size
    return part_size, pieces


# Transfers from one sharding to another.


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a parameter that one rank sends to another; it lies inside one box of each one's slice."""

    parameter: str
    source: int
    destination: int
    box: Box


def transfer(old: Sharding, new: Sharding, island_of: Sequence[int] | None = None) -> list[Transfer]:
    """What ranks that hold their slices under `old` send each other so that each holds its slices under `new`.

    Every element that a rank lacks is sent to it once, and none that it has. Of the ranks that hold an element, one in
    the destination's island is preferred, and among these the one that has sent least so far; large parameters are
    assigned first, as in longest-processing-time scheduling. Parameters that `old` does not have are left out. The
    result depends on the two maps alone, so every rank computes the same list; the transfers of one parameter are
    consecutive.
    """
    transfers: list[Transfer] = []
    num_sent: Counter[int] = Counter()
    sizes = {name: max(part.num_elements for part in slices.values()) for name, slices in new.items() if slices}
    for name in sorted(sizes.keys() & old.keys(), key=lambda name: (-sizes[name], name)):
        # Ranks with equal slices are interchangeable as sources: their boxes are computed once.
        replicas: dict[Slice, list[int]] = defaultdict(list)
        for rank, part in sorted(old[name].items()):
            replicas[part].append(rank)
        sources = [(box, ranks) for part, ranks in replicas.items() for _, box in part.boxes()]
        for destination, part in sorted(new[name].items()):
            for box, source in _received(part, old[name].get(destination), destination, sources, num_sent, island_of):
                num_sent[source] += box.num_elements
                transfers.append(Transfer(name, source, destination, box))
    return transfers


def _received(
    part: Slice,
    own: Slice | None,
    destination: int,
    sources: Sequence[tuple[Box, Sequence[int]]],
    num_sent: Mapping[int, int],
    island_of: Sequence[int] | None,
) -> Iterator[tuple[Box, int]]:
    """The boxes of a slice that a rank lacks, each with the rank that sends it. Callers may update `num_sent` between
    boxes."""
    if part == own:
        return
    # What the rank already has is never sent.
    missing = [box for _, box in part.boxes()]
    for _, present in own.boxes() if own is not None else ():
        missing = [rest for box in missing for rest in _outside(box, present)]

    def cost(rank: int) -> tuple[bool, int, int]:
        return island_of is not None and island_of[rank] != island_of[destination], num_sent[rank], rank

    # Take a missing box, let the cheapest source send what it has of it, and put back the rest. Every iteration covers
    # at least one element, so the loop ends.
    while missing:
        box = missing.pop()
        overlaps = [(overlap, ranks) for held, ranks in sources if (overlap := held.overlap(box)) is not None]
        assert overlaps, f"no rank holds {box}, which rank {destination} is to have"
        candidates = [(overlap, rank) for overlap, ranks in overlaps for rank in ranks]
        overlap, source = min(candidates, key=lambda candidate: cost(candidate[1]))
        yield overlap, source
        missing += box.without(overlap)


def _outside(box: Box, present: Box) -> list[Box]:
    overlap = box.overlap(present)
    return [box] if overlap is None else box.without(overlap)
