"""The instructions of a program, one class per kind.

An instruction is stored once, and appears in the lists of all ranks that take part in it; what differs between ranks
(rows, peers) is looked up in the program. Each rank has lanes that run concurrently, each in its own order: compute,
transfer, sync, and further compute lanes if the plan runs several slots on a device at the same time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.plan import BACKWARD, FORWARD, INPUT, PASS_LETTERS, WEIGHT, Plan

COMPUTE, TRANSFER, SYNC = range(3)
_LANES = ("compute", "transfer", "sync")


def compute_lane(lane: int) -> int:
    """The lane of a program for a slot's lane on its device."""
    return COMPUTE if lane == 0 else SYNC + lane


def is_compute(lane: int) -> bool:
    """Whether a lane of a program runs slots."""
    return lane == COMPUTE or lane > SYNC


def are_compute(lanes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`is_compute` of each lane."""
    computes: NDArray[np.bool_] = (lanes == COMPUTE) | (lanes > SYNC)
    return computes


def lane_name(lane: int) -> str:
    """The name of a lane of a program: compute, transfer, sync, compute1, compute2."""
    return _LANES[lane] if lane < len(_LANES) else f"compute{lane - SYNC}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of a slot's layers on this rank's share of the batch."""

    slot: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of layers `[first, last)` of a slot.

    A slot has several of these, last layers first, so that gradients are reduced while earlier layers still run. If its
    backward is split, each chunk has two instructions: input gradients (`part=INPUT`), and later weight gradients
    (`part=WEIGHT`).
    """

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
    """Send the rows of one link between the ranks of its producer and its consumer: activations forward, or their
    gradients backward. All sends and receives of an exchange are posted together and may complete in any order."""

    link: int
    backward: bool


@dataclass(frozen=True, slots=True)
class SyncGradients:
    """Reduce the gradients of one bucket over the ranks that hold its parameters: an all-reduce, or a reduce-scatter
    if the optimizer is sharded."""

    bucket: int


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """All-gather the parameters of one bucket, after each rank updated its shard in the previous step."""

    bucket: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update the parameters that this rank holds, or its shards of them."""


Instruction = Forward | Backward | Exchange | SyncGradients | GatherParameters | OptimizerStep


_PARTS = {letter: part for part, letter in PASS_LETTERS.items() if part != FORWARD}
_PASS = re.compile(r"([A-Z])(\d{1,9})\[(\d{1,9}):(\d{1,9})\]")


def code(instruction: Instruction) -> str:
    """The short name of an instruction in the text form of programs."""
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


def instruction_of_code(word: str) -> Instruction:
    """The inverse of `code`."""
    letter, digits = word[:1], word[1:]
    backward = _PASS.fullmatch(word)
    if backward is not None and letter in _PARTS:
        return Backward(int(backward[2]), int(backward[3]), int(backward[4]), _PARTS[letter])
    if word == "U":
        return OptimizerStep()
    if digits.isascii() and digits.isdigit() and len(digits) < 10:
        match letter:
            case "F":
                return Forward(int(digits))
            case "X" | "Y":
                return Exchange(int(digits), backward=letter == "Y")
            case "S":
                return SyncGradients(int(digits))
            case "G":
                return GatherParameters(int(digits))
    raise ValueError(f"{word!r} is not an instruction; expected for example F0, B0[0:4], X2 or U")


def lane_of(instruction: Instruction, plan: Plan) -> int:
    """The lane of a program that an instruction is on."""
    match instruction:
        case Backward(slot=slot, part=part):
            return compute_lane(plan.slots[slot].lane_of_weights if part == WEIGHT else plan.slots[slot].lane)
        case Forward(slot=slot):
            return compute_lane(plan.slots[slot].lane)
        case OptimizerStep():
            return COMPUTE
        case Exchange():
            return TRANSFER
        case SyncGradients() | GatherParameters():
            return SYNC
