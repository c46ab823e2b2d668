"""Which rows of a tensor belong to which items: cutting by item, and joining parts in item order; which slices of an
item's tokens the members of a sequence group have. In integers.

The parts of an item call have each item once between them, in any order. Their outputs, one after another, hold the
rows of all items; joining puts them into the order of the items. Its adjoint sends each part the gradient of its own
rows. Together that is the ragged reshard between encoders and the code that mixes their outputs with other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def item_runs(rows: Sequence[int], items: Sequence[int]) -> list[tuple[int, int]]:
    """The rows `[first, last)` of these items, in their order, where item i has `rows[i]` rows; neighbours are
    merged."""
    ends = [0, *accumulate(rows)]
    runs: list[tuple[int, int]] = []
    for item in items:
        first, last = ends[item], ends[item + 1]
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return runs


def slice_bounds(length: int, num_slices: int, alignment: int = 1) -> tuple[int, ...]:
    """Bounds of the slices of an item of this length: multiples of `alignment` but for the end, as equal as can be. The
    item must have a multiple for each slice to begin at (`most_slices`)."""
    small, longer = divmod(most_slices(length, alignment), num_slices)
    shares = range(num_slices + 1)
    return tuple(min(length, alignment * (share * small + min(share, longer))) for share in shares)


def most_slices(length: int, alignment: int) -> int:
    """How many slices an item of this length may have."""
    return -(-length // alignment)


@dataclass(frozen=True, slots=True)
class Join:
    """How the rows of parts become rows in item order: each part is split into runs of so many rows, and the runs are
    concatenated in `order`, by part and number."""

    sizes: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, int], ...]


def join_of(parts: Sequence[Sequence[int]], rows: Sequence[int]) -> Join:
    """The join of parts that have each of `len(rows)` items once between them; item i has `rows[i]` rows."""
    place_of = {item: (part, place) for part, items in enumerate(parts) for place, item in enumerate(items)}
    assert sorted(place_of) == list(range(len(rows)))
    assert sum(map(len, parts)) == len(rows)
    runs: list[tuple[int, int, int]] = []  # part, place of the first item in it, rows
    previous = (-1, -1)
    for item, count in enumerate(rows):
        part, place = place_of[item]
        if previous == (part, place - 1):
            runs[-1] = (part, runs[-1][1], runs[-1][2] + count)
        else:
            runs.append((part, place, count))
        previous = (part, place)
    in_part: list[list[int]] = [[] for _ in parts]  # numbers of runs, in the part's own order
    for number in sorted(range(len(runs)), key=lambda number: runs[number][:2]):
        in_part[runs[number][0]].append(number)
    position = {number: (part, place) for part, numbers in enumerate(in_part) for place, number in enumerate(numbers)}
    return Join(
        sizes=tuple(tuple(runs[number][2] for number in numbers) for numbers in in_part),
        order=tuple(position[number] for number in range(len(runs))),
    )
