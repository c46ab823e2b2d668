"""Which rank writes which box of a checkpoint: one of the ranks that hold it, balanced by bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from math import prod

from spindle.graph import MetaGraph
from spindle.program import Box, Program, Sharding, Slice, optimizer_sharding, weight_sharding

# Small enough that the replicas of a parameter can share the writing, and that checking needs little memory.
_BOX_BYTES = 16 << 20


def writers_of(sharding: Sharding, element_bytes: Callable[[str], int]) -> dict[str, list[tuple[Box, int]]]:
    """Tensor name → its boxes, each with the rank that writes it. `element_bytes` gives the bytes written per element
    of a tensor, including its optimizer state.

    Greedy: large boxes first, each to the owning rank with the fewest bytes so far. Deterministic, so that every rank
    computes the same assignment without communication.
    """
    boxes: list[tuple[int, str, Box, tuple[int, ...]]] = []
    for name, slices in sharding.items():
        ranks_of: dict[Slice, list[int]] = defaultdict(list)
        for rank, part in sorted(slices.items()):
            ranks_of[part].append(rank)
        size = element_bytes(name)
        for part, ranks in ranks_of.items():
            boxes += [
                (size * box.num_elements, name, box, tuple(ranks))
                for _, whole in part.boxes()
                for box in cut(whole, max(1, _BOX_BYTES // size))
            ]
    num_bytes: Counter[int] = Counter()
    writers: dict[str, list[tuple[Box, int]]] = {name: [] for name in sharding}
    for size, name, box, owning_ranks in sorted(boxes, key=lambda entry: (len(entry[3]) > 1, -entry[0])):
        writer = min(owning_ranks, key=lambda rank: (num_bytes[rank], rank))
        num_bytes[writer] += size
        writers[name].append((box, writer))
    return writers


def cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into pieces of at most `max_elements` elements."""
    if box.num_elements <= max_elements:
        if box.num_elements:
            yield box
        return
    dim = next(number for number, length in enumerate(box.lengths) if length > 1)
    rows = max(1, max_elements // prod(box.lengths[dim + 1 :]))
    for begin in range(0, box.lengths[dim], rows):
        lengths = list(box.lengths)
        offsets = list(box.offsets)
        offsets[dim], lengths[dim] = box.offsets[dim] + begin, min(rows, box.lengths[dim] - begin)
        yield from cut(Box(tuple(offsets), tuple(lengths)), max_elements)


def checkpoint_bytes(program: Program, graph: MetaGraph) -> dict[int, int]:
    """About how many bytes of a checkpoint each rank writes: parameters, and optimizer state of trainable ones."""
    numerics = graph.numerics
    weights = weight_sharding(program, graph)
    trained = optimizer_sharding(program, graph, weights)
    num_bytes: Counter[int] = Counter()

    def element_bytes(name: str) -> int:
        return round(numerics.parameter_bytes + (numerics.optimizer_bytes if name in trained else 0))

    for name, boxes in writers_of({**weights, **trained}, element_bytes).items():
        for box, rank in boxes:
            num_bytes[rank] += element_bytes(name) * box.num_elements
    return dict(num_bytes)
