"""The Program: instructions, and for each rank and lane the order in which it runs them.

Everything is stored in columns, because a program for thousands of ranks consists of the same few hundred instructions
over and over: a lane is one list of instruction numbers for all ranks, cut where each rank begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.plan import FORWARD, INPUT, Plan
from spindle.program.instructions import SYNC, Backward, Forward, Instruction, is_compute

Column = NDArray[np.int64]

NUM_LANES = SYNC + 1  # of a program whose devices run one slot at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """How the batch of a slot is split: replica i, of `tensor_degree` ranks, has rows `[bounds[i], bounds[i+1])`.

    An op without a batch is one row for each rank. With a `sequence_degree` s, each row is s slices of its tokens:
    `bounds` count slices, and neighbouring groups share rows.
    """

    op: int
    ranks: Column
    bounds: Column
    tensor_degree: int
    gang: bool = False  # its ranks start together
    sequence_degree: int = 1

    @property
    def num_slices(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_rows(self) -> int:
        return self.num_slices // self.sequence_degree

    @property
    def group_size(self) -> int:
        """How many ranks run collectives with each other inside a pass."""
        return len(self.ranks) if self.gang else self.tensor_degree * self.sequence_degree

    def rows_of_ranks(self) -> NDArray[np.int64] | NDArray[np.float64]:
        """The number of rows of each rank, in the order of `ranks`; fractions where a sequence group shares them."""
        slices = np.repeat(np.diff(self.bounds), self.tensor_degree)
        return slices if self.sequence_degree == 1 else slices / self.sequence_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """Messages: rows `[first, last)` from a source rank to a destination rank, one entry each."""

    source: Column
    destination: Column
    first: Column
    last: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Data that one slot sends to another: activations forward, gradients backward.

    Rows are counted on a scale of the link's own, the coarsest on which the shares of both slots are whole numbers.
    """

    producer: int
    consumer: int
    bytes_per_row: float
    forward: Flows
    backward: Flows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients one group of ranks reduces together, after these backward instructions."""

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
    # By parameter: ranks that hold it from step to step, whether or not their slots use it.
    owning_ranks: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def compute_of_rank(self, rank: int) -> list[int]:
        """Instruction numbers of all compute lanes of a rank, in the order of the plan: that in which a host launches
        them."""
        numbers = [
            number
            for lane, columns in enumerate(self.lanes)
            if is_compute(lane)
            for number in columns.of_rank(rank).tolist()
        ]
        if len(self.lanes) == NUM_LANES:
            return numbers
        places = self.places
        return sorted(numbers, key=lambda number: (places[number], number))

    @property
    def places(self) -> Column:
        """By instruction: the position of its pass in the order of the plan; the last one for anything but forward and
        backward."""
        place = {(pass_.slot, pass_.kind): number for number, pass_ in enumerate(self.plan.order)}
        places = np.full(len(self.instructions), len(place))
        for number, instruction in enumerate(self.instructions):
            match instruction:
                case Forward(slot=slot):
                    places[number] = place[slot, FORWARD]
                case Backward(slot=slot, part=part):
                    # Chunk by chunk: weight gradients are launched right behind their input gradients.
                    is_weight_lane = self.plan.slots[slot].has_weight_lane
                    places[number] = place[slot, INPUT if is_weight_lane else part]
                case _:
                    pass
        return places

    @property
    def num_instructions(self) -> int:
        """The number of instructions of all ranks together."""
        return sum(len(lane.instructions) for lane in self.lanes)


def lane_from_pairs(num_ranks: int, instructions: Column, ranks: Column) -> Lane:
    """A lane from (instruction, rank) pairs in program order."""
    by_rank = np.argsort(ranks, kind="stable")
    starts = np.zeros(num_ranks + 1, dtype=np.int64)
    np.cumsum(np.bincount(ranks, minlength=num_ranks), out=starts[1:])
    return Lane(starts=starts, instructions=instructions[by_rank])
