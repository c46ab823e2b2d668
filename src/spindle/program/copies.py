"""When offloaded activations go to the host and come back, as places in the compute order of each rank.

    compute   ▐F1▌▐  ▌▐  ▌▐  ▌    ...    ▐  ▌▐  ▌▐B1▌
    to host       ▐ copy ▌
    to device                            ▐ copy ▌

Copies run beside compute, in order, one stream for each direction. Those of a forward pass begin behind it; the pass
that stands `COPIES_AHEAD + 1` places after it waits for them, and their memory on the device is free from then on.
Those of a backward pass begin together with the pass that stands `COPIES_AHEAD` places before it, which is when they
get memory on the device; the backward pass waits for them. Activations that would come back as soon as they have left
stay on the device. All of this follows from the order of passes, so the memory of a rank does not depend on times; and
passes only wait for copies of earlier passes of their own rank, so copies add no deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle.program.instructions import Backward, Forward, Instruction
from spindle.program.program import Program

COPIES_AHEAD = 2  # passes beside which a copy may run


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCopies:
    """The copies of one slot on one rank: places in the rank's compute order."""

    slot: int
    forward: int
    released: int  # before this instruction the copies to the host have ended
    fetched: int  # with this instruction the copies back begin
    backward: int  # the first instruction of its backward pass


def offload_copies(program: Program, rank: int) -> list[OffloadCopies]:
    """The copies of a rank, in the order of forward passes."""
    if not any(slot.offloaded for slot in program.plan.slots):
        return []
    order = [program.instructions[number] for number in program.compute_of_rank(rank)]
    return copies_in(order, [slot.offloaded for slot in program.plan.slots])


def copies_in(order: Sequence[Instruction], offloaded: Sequence[int]) -> list[OffloadCopies]:
    """The same for a compute order; `offloaded` has the number of layers of each slot."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for place, instruction in enumerate(order):
        match instruction:
            case Forward(slot=slot):
                forward[slot] = place
            case Backward(slot=slot):
                backward.setdefault(slot, place)
            case _:
                pass
    copies = []
    for slot, place in forward.items():
        released, fetched = place + 1 + COPIES_AHEAD, backward[slot] - COPIES_AHEAD
        if offloaded[slot] and released < fetched:
            copies.append(
                OffloadCopies(slot=slot, forward=place, released=released, fetched=fetched, backward=backward[slot])
            )
    return copies
