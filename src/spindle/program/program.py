"""The Program: instructions, and for each rank and lane the order in which it runs them.

Everything is stored in columns, because a program for thousands of ranks consists of the same few hundred instructions
over and over: a lane is one list of instruction numbers for all ranks, cut where each rank begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spindle.plan import PASS_KINDS, Pass, Plan
from spindle.program.columns import BACKWARD, InstructionColumns, Jagged, columns_of, instructions_of
from spindle.program.instructions import COMPUTE, SYNC, Instruction, is_compute

Column = NDArray[np.int64]

NUM_LANES = SYNC + 1  # lanes of a program whose devices run one slot at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """How the batch of a slot is split: replica i, of `tensor_degree` ranks, has rows `[bounds[i], bounds[i+1])`.

    An op without a batch has one row for each replica. With a `sequence_degree` s, each row is s slices of its tokens:
    `bounds` count slices, and neighbouring groups share rows.
    """

    op: int
    ranks: Column
    bounds: Column
    tensor_degree: int
    gang: bool = False  # its ranks start their passes together
    sequence_degree: int = 1

    @property
    def num_slices(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_rows(self) -> int:
        return self.num_slices // self.sequence_degree

    @property
    def group_size(self) -> int:
        """The number of ranks that run collectives with each other, or start together, in a pass."""
        return len(self.ranks) if self.gang else self.tensor_degree * self.sequence_degree

    def rows_of_ranks(self) -> NDArray[np.int64] | NDArray[np.float64]:
        """The number of rows of each rank, in the order of `ranks`; fractions if a sequence group shares them."""
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

    Rows are counted in a unit of the link's own, the largest of which the shares of both slots are integer multiples.
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
    """Instruction numbers of all ranks: rank r runs `instructions[starts[r] : starts[r + 1]]`, in this order."""

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
    # Parameter → ranks that hold it from step to step, even if none of their slots uses it.
    owning_ranks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    columns: InstructionColumns = field(init=False, repr=False, compare=False)  # `instructions` as columns

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", columns_of(self.instructions))

    def __reduce__(self) -> Any:
        """Pickle passes and instructions as columns: tens of thousands of small objects take longer to pickle than to
        create again."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        values["plan"] = replace(self.plan, passes=())
        values["instructions"] = self.columns
        passes = [pass_.slot for pass_ in self.plan.passes], [pass_.kind for pass_ in self.plan.passes]
        return _unpickled, (values, passes)

    @property
    def compute_order(self) -> Jagged:
        """For each rank, the instruction numbers of all its compute lanes in the order of the plan, in which its host
        launches them."""
        if len(self.lanes) == NUM_LANES:
            return Jagged(starts=self.lanes[COMPUTE].starts, values=self.lanes[COMPUTE].instructions)
        lanes = [lane for number, lane in enumerate(self.lanes) if is_compute(number)]
        ranks = np.concatenate([np.repeat(np.arange(self.num_ranks), np.diff(lane.starts)) for lane in lanes])
        numbers = np.concatenate([lane.instructions for lane in lanes])
        order = np.lexsort((numbers, self.places[numbers], ranks))
        return Jagged.group_by(ranks[order], numbers[order], self.num_ranks)

    def compute_of_rank(self, rank: int) -> list[int]:
        """The instruction numbers of a rank's compute order."""
        numbers: list[int] = self.compute_order.of(rank).tolist()
        return numbers

    @property
    def places(self) -> Column:
        """For each instruction, the position of its pass in the order of the plan; for anything but forward and
        backward, the number of passes."""
        order, columns = self.plan.order, self.columns
        # By kind of pass and slot. On a weight lane, the weight gradients of a chunk are launched right after its input
        # gradients, so both have the same place.
        place = np.zeros((len(PASS_KINDS), len(self.plan.slots)), dtype=np.int64)
        kinds = [PASS_KINDS.index(pass_.kind) for pass_ in order]
        place[kinds, [pass_.slot for pass_ in order]] = np.arange(len(order))
        _, _, inputs, weights = place
        has_weight_lane = [slot.has_weight_lane for slot in self.plan.slots]
        weights[has_weight_lane] = inputs[has_weight_lane]
        places = np.full(len(self.instructions), len(order))
        is_pass = np.flatnonzero(columns.kind <= BACKWARD)
        places[is_pass] = place[columns.pass_kind[is_pass], columns.index[is_pass]]
        return places

    @property
    def num_instructions(self) -> int:
        """The number of instructions of all ranks together; an instruction counts once for each rank that runs it."""
        return sum(len(lane.instructions) for lane in self.lanes)


def _unpickled(values: dict[str, Any], passes: tuple[list[int], list[str]]) -> Program:
    listed = tuple([Pass(slot=slot, kind=kind) for slot, kind in zip(*passes, strict=True)])
    values["plan"] = replace(values["plan"], passes=listed)
    values["instructions"] = instructions_of(values["instructions"])
    return Program(**values)


def lane_from_pairs(num_ranks: int, instructions: Column, ranks: Column) -> Lane:
    """A lane from (instruction, rank) pairs in program order."""
    by_rank = Jagged.group_by(ranks, instructions, num_ranks)
    return Lane(starts=by_rank.starts, instructions=by_rank.values)
