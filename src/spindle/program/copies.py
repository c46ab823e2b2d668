"""When offloaded activations are copied to the host and back, as positions in the compute order of each rank.

    compute   ▐F1▌▐  ▌▐  ▌▐  ▌    ...    ▐  ▌▐  ▌▐B1▌
    to host       ▐ copy ▌
    to device                            ▐ copy ▌

Copies overlap compute and run in order, on one stream for each direction. Copies to the host start after their forward
pass; the pass `COPIES_AHEAD + 1` positions later waits for them, and their memory on the device is free from then on.
Copies back start together with the pass `COPIES_AHEAD` positions before their backward pass, when they get memory on
the device; the backward pass waits for them. Activations that would be copied back as soon as they have left stay on
the device. All of this follows from the order of passes, so the memory of a rank does not depend on times; and a pass
only waits for copies of earlier passes of its own rank, so copies cannot cause a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.program.columns import BACKWARD, FORWARD, Column, InstructionColumns, Jagged, columns_of
from spindle.program.instructions import Instruction
from spindle.program.program import Program

COPIES_AHEAD = 2  # a copy may overlap this many passes


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCopies:
    """The copies of one slot on one rank, as positions in the rank's compute order."""

    slot: int
    forward: int
    released: int  # the instruction that waits for the copies to the host
    fetched: int  # the instruction together with which the copies back start
    backward: int  # the first instruction of its backward pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyColumns:
    """The copies of all ranks as columns, by rank and in the order of forward passes; fields as in `OffloadCopies`."""

    rank: Column
    slot: Column
    forward: Column
    released: Column
    fetched: Column
    backward: Column


def copy_columns(program: Program) -> CopyColumns:
    """The copies of a program."""
    return _copies(program.compute_order, program.columns, [slot.offloaded for slot in program.plan.slots])


def copies_in(order: Sequence[Instruction], offloaded: Sequence[int]) -> list[OffloadCopies]:
    """The copies of one compute order, in the order of forward passes. `offloaded` is the number of offloaded layers of
    each slot."""
    return _listed(_copies(Jagged.concatenate([np.arange(len(order))]), columns_of(order), offloaded), 0)


def offload_copies(program: Program, rank: int) -> list[OffloadCopies]:
    """The copies of a rank, in the order of forward passes."""
    return _listed(copy_columns(program), rank)


def _listed(copies: CopyColumns, rank: int) -> list[OffloadCopies]:
    columns = (copies.slot, copies.forward, copies.released, copies.fetched, copies.backward)
    return [
        OffloadCopies(slot=slot, forward=forward, released=released, fetched=fetched, backward=backward)
        for slot, forward, released, fetched, backward in zip(
            *(column[copies.rank == rank].tolist() for column in columns), strict=True
        )
    ]


def _copies(order: Jagged, columns: InstructionColumns, offloaded: Sequence[int]) -> CopyColumns:
    """The copies of the compute orders of all ranks."""
    num_layers, num_ranks = np.array(offloaded, dtype=np.int64), len(order.sizes)
    number = order.values if num_layers.any() else order.values[:0]
    rank = np.repeat(np.arange(num_ranks), order.sizes)[: len(number)]
    place = np.arange(len(number)) - order.starts[rank]
    kind, slot = columns.kind[number], columns.index[number]
    # The first backward instruction by slot and rank: assigned in reverse, so that the first one stays.
    first_backward = np.zeros((len(num_layers), num_ranks), dtype=np.int64)
    passes = np.flatnonzero(kind == BACKWARD)[::-1]
    first_backward[slot[passes], rank[passes]] = place[passes]
    forward = np.flatnonzero((kind == FORWARD) & (num_layers[slot] > 0))
    rank, slot, place = rank[forward], slot[forward], place[forward]
    backward = first_backward[slot, rank]
    released, fetched = place + 1 + COPIES_AHEAD, backward - COPIES_AHEAD
    leaves = released < fetched
    return CopyColumns(
        rank=rank[leaves],
        slot=slot[leaves],
        forward=place[leaves],
        released=released[leaves],
        fetched=fetched[leaves],
        backward=backward[leaves],
    )
