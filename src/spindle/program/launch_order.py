"""In which order does a rank launch its communication, when kernels of several communicators may not run side by side?

NCCL runs each operation as a kernel that waits for its peers. Two kernels of different communicators may not both find
room on a GPU, so ranks that share two communicators must launch their operations in the same order, and so must any
circle of ranks. All ranks therefore follow one order of the whole program's instructions: a topological order in which
a transfer or a collective comes as soon as what it needs. A rank launches its own part of it.

Why this cannot deadlock, even if a rank's communication ran strictly one operation at a time: take the first operation,
in the common order, that has not finished. On each of its ranks everything before it has finished, communication as
well as the compute that it needs, so it is the next one there, and it can run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np

from spindle.errors import ProgramError
from spindle.plan import FORWARD
from spindle.program.instances import needed_pairs
from spindle.program.instructions import COMPUTE, Backward, Forward, Instruction, code, lane_of
from spindle.program.program import Column, Program

Key = tuple[int, ...]


def launch_order(program: Program) -> Column:
    """The place of each instruction in one order for all ranks. Raises a ProgramError where there is none."""
    count = len(program.instructions)
    edges = _edges(program)
    followers: dict[int, list[int]] = defaultdict(list)
    num_needs = np.bincount(edges[:, 1], minlength=count)
    for before, after in edges.tolist():
        followers[before].append(after)
    keys = _keys(program)
    ready = [(keys[number], number) for number in range(count) if num_needs[number] == 0]
    heapq.heapify(ready)
    place = np.full(count, -1, dtype=np.int64)
    for position in range(count):
        if not ready:
            raise ProgramError(_describe_circle(program, edges, place))
        _, number = heapq.heappop(ready)
        place[number] = position
        for follower in followers[number]:
            num_needs[follower] -= 1
            if num_needs[follower] == 0:
                heapq.heappush(ready, (keys[follower], follower))
    return place


def launches_collectives(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction on the compute lane launches collectives: those of a tensor parallel group, or the sum of
    a loss over its ranks."""
    if not isinstance(instruction, Forward | Backward):
        return False
    shape = program.slots[instruction.slot]
    return shape.tensor_degree > 1 or (shape.gang and len(shape.ranks) > 1)


def _edges(program: Program) -> Column:
    """Pairs (before, after): neighbours on a lane of any rank, and what data asks for."""
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
    """Which of several instructions that could come next does: communication before compute, and compute in the plan's
    own order, so that communication stands where it is expected to happen."""
    place = {(pass_.slot, pass_.kind): number for number, pass_ in enumerate(program.plan.order)}
    keys: list[Key] = []
    for instruction in program.instructions:
        match instruction:
            case Forward(slot=slot):
                keys.append((1, place[slot, FORWARD]))
            case Backward(slot=slot, first=first, part=part):
                keys.append((1, place[slot, part], -first))
            case _ if lane_of(instruction) == COMPUTE:
                keys.append((2,))
            case _:
                keys.append((0,))
    return keys


def _describe_circle(program: Program, edges: Column, place: Column) -> str:
    """Who would have to come before whom."""
    left = {number for number in range(len(place)) if place[number] < 0}
    before: dict[int, int] = {after: first for first, after in edges.tolist() if first in left and after in left}
    number = min(left & before.keys())
    path: list[int] = []
    while number not in path:
        path.append(number)
        number = before[number]
    circle = [*path[path.index(number) :], number]
    text = " after ".join(code(program.instructions[number]) for number in circle)
    return f"ranks would launch communication in different orders, which can deadlock under NCCL: {text}"
