"""The Program: instructions, and for each rank and lane the order in which it runs them.

Everything is held in columns, because a program for thousands of ranks is mostly the same few hundred instructions
again and again: a lane is one list of instruction numbers for all ranks, cut where each rank begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.plan import Plan
from spindle.program.instructions import Instruction

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """How a slot's batch lies on its ranks: replica i of `tensor_degree` ranks holds rows `[bounds[i], bounds[i+1])`.

    An op without a batch is one row for each rank.
    """

    op: int
    ranks: Column
    bounds: Column
    tensor_degree: int
    gang: bool = False  # its ranks start together

    @property
    def num_rows(self) -> int:
        return int(self.bounds[-1])

    def rows_of_ranks(self) -> Column:
        """Rows that each rank works on, in the order of `ranks`."""
        return np.repeat(np.diff(self.bounds), self.tensor_degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """Rows `[first, last)` from a source rank to a destination rank, one entry for each pair."""

    source: Column
    destination: Column
    first: Column
    last: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Data that one slot hands to another: what moves forward, and what moves back as gradient.

    Rows are counted on the link's own scale, the finest that both sides can be cut on.
    """

    producer: int
    consumer: int
    bytes_per_row: float
    forward: Flows
    backward: Flows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that one group of ranks synchronises together, once the named backward instructions are done."""

    parameters: tuple[int, ...]
    num_bytes: int
    ranks: Column
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Instruction numbers of all ranks, rank after rank; rank r has `[starts[r], starts[r + 1])`."""

    starts: Column
    instructions: Column

    def of_rank(self, rank: int) -> Column:
        return self.instructions[self.starts[rank] : self.starts[rank + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    plan: Plan
    num_ranks: int
    instructions: tuple[Instruction, ...]
    lanes: tuple[Lane, ...]
    slots: tuple[SlotShape, ...]
    links: tuple[Link, ...]
    buckets: tuple[Bucket, ...]
    # Parameters with ranks that keep them from step to step, whether or not their slots use them.
    owning_ranks: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def num_instructions(self) -> int:
        """How many instructions all ranks run together."""
        return sum(len(lane.instructions) for lane in self.lanes)


def lane_from_pairs(num_ranks: int, instructions: Column, ranks: Column) -> Lane:
    """A lane from (instruction, rank) pairs that stand in program order."""
    by_rank = np.argsort(ranks, kind="stable")
    starts = np.zeros(num_ranks + 1, dtype=np.int64)
    np.cumsum(np.bincount(ranks, minlength=num_ranks), out=starts[1:])
    return Lane(starts=starts, instructions=instructions[by_rank])
