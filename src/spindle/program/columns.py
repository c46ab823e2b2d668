"""Instructions as columns, and jagged lists as columns, so that numpy can process thousands of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spindle.plan import BACKWARD as BACKWARD_PASS
from spindle.plan import INPUT, PASS_KINDS, WEIGHT
from spindle.program.instructions import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
)

KINDS = (Forward, Backward, Exchange, SyncGradients, GatherParameters, OptimizerStep)
FORWARD, BACKWARD, EXCHANGE, SYNC_GRADIENTS, GATHER, OPTIMIZER_STEP = range(len(KINDS))
_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
_INDEX_OF: dict[type, Callable[[Any], int]] = {
    Forward: attrgetter("slot"),
    Backward: attrgetter("slot"),
    Exchange: attrgetter("link"),
    SyncGradients: attrgetter("bucket"),
    GatherParameters: attrgetter("bucket"),
    OptimizerStep: lambda instruction: -1,
}

T = TypeVar("T")
Column = NDArray[np.int64]
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(len(PASS_KINDS))
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InstructionColumns:
    """Columns by instruction: `kind` (a position in `KINDS`), and `index` of its slot, link or bucket.

    For backward passes, `[first, last)` are the layers, and `makes_inputs` and `makes_weights` say which gradients are
    computed. `is_backward` marks exchanges of gradients. Columns that do not apply are zero.
    """

    kind: Column
    index: Column
    first: Column
    last: Column
    makes_inputs: Flags
    makes_weights: Flags
    is_backward: Flags

    @property
    def pass_kind(self) -> Column:
        """For forward and backward passes, the position of their kind in `PASS_KINDS`; meaningless for others."""
        split = np.where(self.makes_inputs, _INPUT, _WEIGHT)
        backward = np.where(self.makes_inputs & self.makes_weights, _BACKWARD, split)
        return np.where(self.kind == FORWARD, _FORWARD, backward)

    def of_kind(self, kind: int) -> Column:
        """The numbers of the instructions of a kind."""
        return np.flatnonzero(self.kind == kind)


def columns_of(instructions: Sequence[Instruction]) -> InstructionColumns:
    kind = np.array([*map(_KIND_OF.__getitem__, map(type, instructions))], dtype=np.int64)
    index = np.array([_INDEX_OF[type(instruction)](instruction) for instruction in instructions], dtype=np.int64)
    first, last = np.zeros_like(kind), np.zeros_like(kind)
    makes_inputs, makes_weights, is_backward = (np.zeros(len(kind), dtype=bool) for _ in range(3))
    passes = [instruction for instruction in instructions if isinstance(instruction, Backward)]
    places = kind == BACKWARD
    first[places] = [instruction.first for instruction in passes]
    last[places] = [instruction.last for instruction in passes]
    makes_inputs[places] = [instruction.makes_inputs for instruction in passes]
    makes_weights[places] = [instruction.makes_weights for instruction in passes]
    is_backward[kind == EXCHANGE] = [
        instruction.backward for instruction in instructions if isinstance(instruction, Exchange)
    ]
    return InstructionColumns(
        kind=kind,
        index=index,
        first=first,
        last=last,
        makes_inputs=makes_inputs,
        makes_weights=makes_weights,
        is_backward=is_backward,
    )


def instructions_of(columns: InstructionColumns) -> tuple[Instruction, ...]:
    """The inverse of `columns_of`."""
    part_of = {(True, True): BACKWARD_PASS, (True, False): INPUT, (False, True): WEIGHT}
    rows = (columns.kind, columns.index, columns.first, columns.last)
    flags = (columns.makes_inputs, columns.makes_weights, columns.is_backward)
    instructions: list[Instruction] = []
    for kind, index, first, last, inputs, weights, backward in zip(
        *(column.tolist() for column in (*rows, *flags)), strict=True
    ):
        if kind == FORWARD:
            instructions.append(Forward(index))
        elif kind == BACKWARD:
            instructions.append(Backward(index, first, last, part_of[inputs, weights]))
        elif kind == EXCHANGE:
            instructions.append(Exchange(index, backward))
        elif kind == OPTIMIZER_STEP:
            instructions.append(OptimizerStep())
        else:
            instructions.append(SyncGradients(index) if kind == SYNC_GRADIENTS else GatherParameters(index))
    return tuple(instructions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jagged:
    """Lists of different lengths in one column: list i is `values[starts[i] : starts[i + 1]]`."""

    starts: Column
    values: Column

    @classmethod
    def concatenate(cls, lists: Sequence[Column]) -> Jagged:
        starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(np.array([len(values) for values in lists], dtype=np.int64), out=starts[1:])
        return cls(starts=starts, values=np.concatenate([np.zeros(0, dtype=np.int64), *lists]))

    @classmethod
    def group_by(cls, key: Column, value: Column, num_keys: int) -> Jagged:
        """A list for each key, with its values in the given order."""
        starts = np.zeros(num_keys + 1, dtype=np.int64)
        np.cumsum(np.bincount(key, minlength=num_keys), out=starts[1:])
        # A stable argsort of the keys; sorting (key, position) packed into one number is several times as fast.
        places = np.sort(key * len(key) + np.arange(len(key))) % max(1, len(key))
        return cls(starts=starts, values=value[places])

    @property
    def sizes(self) -> Column:
        sizes: Column = np.diff(self.starts)
        return sizes

    def of(self, number: int) -> Column:
        """The values of a list."""
        return self.values[self.starts[number] : self.starts[number + 1]]

    @property
    def first_and_last(self) -> tuple[Column, Column]:
        """The first and the last value of each list; -1 for empty lists."""
        first, last = (np.full(len(self.starts) - 1, -1, dtype=np.int64) for _ in range(2))
        filled = self.sizes > 0
        first[filled] = self.values[self.starts[:-1][filled]]
        last[filled] = self.values[self.starts[1:][filled] - 1]
        return first, last

    def take(self, lists: Column) -> Column:
        """The values of these lists, one list after another."""
        sizes = self.sizes[lists]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        values: Column = self.values[np.arange(total) + np.repeat(self.starts[lists] - (ends - sizes), sizes)]
        return values


def sorted_unique(num_numbers: int, *columns: Column | Sequence[int]) -> Column:
    """The distinct numbers in columns, in increasing order; all must be below `num_numbers`."""
    is_present = np.zeros(num_numbers, dtype=bool)
    for column in columns:
        is_present[np.asarray(column, dtype=np.int64)] = True
    return np.flatnonzero(is_present)


def unique_objects(items: Iterable[T]) -> tuple[list[T], Column]:
    """The distinct objects (by identity) among items, and for each item the position of its object."""
    listed = list(items)
    ids = [*map(id, listed)]
    objects = list(dict(zip(ids, listed, strict=True)).values())
    number_of = {id(item): number for number, item in enumerate(objects)}
    return objects, np.array([*map(number_of.__getitem__, ids)], dtype=np.int64)
