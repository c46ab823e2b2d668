"""What a rank can be told to do, one class for each kind.

An instruction is written once and stands in the lists of every rank that takes part in it; what differs from rank to
rank (which rows, which peers) is looked up in the program. Each rank has three lanes that run side by side, each in its
own order: compute, transfer, and sync.
"""

from __future__ import annotations

from dataclasses import dataclass

from spindle.plan import BACKWARD, INPUT, WEIGHT
from spindle.plan.text import PASS_LETTERS

COMPUTE, TRANSFER, SYNC = range(3)
LANES = ("compute", "transfer", "sync")


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a slot's layers forward on this rank's share."""

    slot: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run layers `[first, last)` of a slot backward. A slot's backward comes in several of these, last layers first,
    so that gradients can be synchronised while earlier layers still run. Or it comes in two parts, each over all of its
    layers: the gradients of inputs, then those of weights."""

    slot: int
    first: int
    last: int
    part: str = BACKWARD

    @property
    def makes_inputs(self) -> bool:
        return self.part != WEIGHT

    @property
    def makes_weights(self) -> bool:
        return self.part != INPUT


@dataclass(frozen=True, slots=True)
class Exchange:
    """Move the rows of one link between its producer's and its consumer's ranks: activations forward, their gradients
    backward. All sends and receives of one exchange go at once, in no order."""

    link: int
    backward: bool


@dataclass(frozen=True, slots=True)
class SyncGradients:
    """Sum the gradients of one bucket of parameters over the ranks that hold them: all of them on every rank, or, where
    the optimizer is sharded, on each rank those that it updates."""

    bucket: int


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Bring together what each rank of a bucket has updated of its parameters, in the step before."""

    bucket: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update every parameter this rank holds, or its part of those that are sharded."""


Instruction = Forward | Backward | Exchange | SyncGradients | GatherParameters | OptimizerStep


def code(instruction: Instruction) -> str:
    """The short name that text forms use."""
    match instruction:
        case Forward(slot=slot):
            return f"F{slot}"
        case Backward(slot=slot, first=first, last=last, part=part):
            return f"{PASS_LETTERS[part]}{slot}[{first}:{last}]"
        case Exchange(link=link, backward=backward):
            return f"{'Y' if backward else 'X'}{link}"
        case SyncGradients(bucket=bucket):
            return f"S{bucket}"
        case GatherParameters(bucket=bucket):
            return f"G{bucket}"
        case OptimizerStep():
            return "U"


def lane_of(instruction: Instruction) -> int:
    match instruction:
        case Forward() | Backward() | OptimizerStep():
            return COMPUTE
        case Exchange():
            return TRANSFER
        case SyncGradients() | GatherParameters():
            return SYNC
