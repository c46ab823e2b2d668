"""Index arithmetic of the ragged reshard between encoders and the code that consumes their outputs: which rows of a
tensor belong to which items, and which slice of an item's tokens each member of a sequence group has.

The parts of an item call together have each item once, in any order. Concatenating their outputs gives the rows of all
items; joining puts these into the order of the items. Its adjoint gives each part the gradient of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def item_runs(rows: Sequence[int], items: Sequence[int]) -> list[tuple[int, int]]:
    """The rows `[first, last)` of these items, in the order of `items`; adjacent ranges are merged. Item i has
    `rows[i]` rows."""
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
    """Bounds of the slices of an item of this length, as equal as possible; all but the last are multiples of
    `alignment`. `num_slices` must be at most `max_slices`."""
    small, longer = divmod(max_slices(length, alignment), num_slices)
    shares = range(num_slices + 1)
    return tuple(min(length, alignment * (share * small + min(share, longer))) for share in shares)


def max_slices(length: int, alignment: int) -> int:
    """The largest number of slices that an item of this length may be cut into."""
    return -(-length // alignment)


@dataclass(frozen=True, slots=True)
class Join:
    """How the rows of parts become rows in item order: part p is split into runs of `sizes[p]` rows, and the runs are
    concatenated in `order`, which names each run by its part and its number in it."""

    sizes: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, int], ...]


def join_of(parts: Sequence[Sequence[int]], rows: Sequence[int]) -> Join:
    """The join of parts that together have each item once; item i has `rows[i]` rows."""
    place_of = {item: (part, place) for part, items in enumerate(parts) for place, item in enumerate(items)}
    assert sorted(place_of) == list(range(len(rows)))
    assert sum(map(len, parts)) == len(rows)
    runs: list[tuple[int, int, int]] = []  # part, position of its first item in the part, rows
    previous = (-1, -1)
    for item, count in enumerate(rows):
        part, place = place_of[item]
        if previous == (part, place - 1):
            runs[-1] = (part, runs[-1][1], runs[-1][2] + count)
        else:
            runs.append((part, place, count))
        previous = (part, place)
    in_part: list[list[int]] = [[] for _ in parts]  # the runs of each part, in the order of the part
    for number in sorted(range(len(runs)), key=lambda number: runs[number][:2]):
        in_part[runs[number][0]].append(number)
    position = {number: (part, place) for part, numbers in enumerate(in_part) for place, number in enumerate(numbers)}
    return Join(
        sizes=tuple(tuple(runs[number][2] for number in numbers) for numbers in in_part),
        order=tuple(position[number] for number in range(len(runs))),
    )
