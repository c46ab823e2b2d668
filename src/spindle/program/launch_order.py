"""One global order in which all ranks launch communication.

NCCL runs each operation as a kernel that waits for its peers. Kernels of two communicators may not fit on a GPU at the
same time, so ranks that share two communicators must launch their operations in the same order, and so must any cycle
of ranks. Therefore all ranks follow one topological order of the program's instructions, in which a transfer or
collective comes as early as its inputs allow. Each rank launches its own part of that order.

This cannot deadlock, even if each rank ran communication strictly one operation at a time: take the first operation in
the global order that has not finished. On each of its ranks everything before it has finished, communication and the
compute that it needs, so it is the next operation there, and can run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np

from spindle.errors import ProgramError
from spindle.program.instances import needed_pairs
from spindle.program.instructions import Backward, Forward, Instruction, OptimizerStep, code
from spindle.program.program import Column, Program

Key = tuple[int, ...]


def launch_order(program: Program) -> Column:
    """The position of each instruction in the global order. Raises a ProgramError if there is no such order."""
    count = len(program.instructions)
    edges = _edges(program)
    followers: dict[int, list[int]] = defaultdict(list)
    num_needs = np.bincount(edges[:, 1], minlength=count)
    for before, after in edges.tolist():
        followers[before].append(after)
    keys = _keys(program)
    # Kahn's algorithm, with a heap for the priorities of what is ready.
    ready = [(keys[number], number) for number in range(count) if num_needs[number] == 0]
    heapq.heapify(ready)
    position = np.full(count, -1, dtype=np.int64)
    for next_position in range(count):
        if not ready:
            raise ProgramError(_describe_cycle(program, edges, position))
        _, number = heapq.heappop(ready)
        position[number] = next_position
        for follower in followers[number]:
            num_needs[follower] -= 1
            if num_needs[follower] == 0:
                heapq.heappush(ready, (keys[follower], follower))
    return position


def launches_collectives(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction on the compute lane launches collectives: those of a tensor-parallel group, or the
    reduction of a loss over its ranks."""
    if not isinstance(instruction, Forward | Backward):
        return False
    shape = program.slots[instruction.slot]
    return shape.group_size > 1


def _edges(program: Program) -> Column:
    """Pairs (before, after): neighbours on a lane of any rank, and dependencies through data."""
    count = len(program.instructions)
    needs = needed_pairs(program)
    pairs = [needs[:, 0] * count + needs[:, 1]]
    for lane in program.lanes:
        rank = np.repeat(np.arange(program.num_ranks), np.diff(lane.starts))
        neighbours = np.flatnonzero(rank[1:] == rank[:-1])
        pairs.append(lane.instructions[neighbours] * count + lane.instructions[neighbours + 1])
    edges: Column = np.stack(np.divmod(np.unique(np.concatenate(pairs)), count), axis=1)
    return edges


def _keys(program: Program) -> list[Key]:
    """Priorities of instructions that are ready at the same time: communication before compute, and compute in the
    order of the plan, so that communication is launched about when it is expected to run."""
    places = program.places.tolist()
    keys: list[Key] = []
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward():
                keys.append((1, places[number]))
            case Backward(first=first):
                keys.append((1, places[number], -first))
            case OptimizerStep():
                keys.append((2,))
            case _:
                keys.append((0,))
    return keys


def _describe_cycle(program: Program, edges: Column, position: Column) -> str:
    """The error message with one cycle among the instructions that have no position."""
    unplaced = {number for number in range(len(position)) if position[number] < 0}
    before: dict[int, int] = {
        after: first for first, after in edges.tolist() if first in unplaced and after in unplaced
    }
    number = min(unplaced & before.keys())
    path: list[int] = []
    while number not in path:
        path.append(number)
        number = before[number]
    cycle = [*path[path.index(number) :], number]
    text = " after ".join(code(program.instructions[member]) for member in cycle)
    return f"ranks would launch communication in different orders, which can deadlock under NCCL: {text}"
