"""One global order in which all ranks launch communication.

NCCL runs each operation as a kernel that waits for its peers. Kernels of two communicators may not fit on a GPU at the
same time, so ranks that share two communicators must launch their operations in the same order, and so must any cycle
of ranks. Therefore all ranks follow one topological order of the program's instructions, in which a transfer or
collective comes as early as its inputs allow. Each rank launches its own part of that order.

This cannot deadlock, even if each rank ran communication strictly one operation at a time: take the first operation in
the global order that has not finished. On each of its ranks everything before it has finished, communication and the
compute that it needs, so it is the next operation there and can run.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import ProgramError
from spindle.program.columns import BACKWARD, FORWARD, OPTIMIZER_STEP, Jagged
from spindle.program.instances import needed_pairs
from spindle.program.instructions import Backward, Forward, Instruction, code
from spindle.program.program import Column, Program
from spindle.program.topological import topological_order


def launch_order(program: Program) -> Column:
    """The position of each instruction in the global launch order. Raises a ProgramError if there is no such order."""
    count = len(program.instructions)
    before, after = _edges(program)
    # Renumber instructions by priority, because `topological_order` takes the lowest number that is ready.
    by_priority = _by_priority(program)
    priority = np.empty_like(by_priority)
    priority[by_priority] = np.arange(count)
    followers = Jagged.group_by(priority[before], priority[after], count)
    order = by_priority[
        topological_order(np.bincount(priority[after], minlength=count), followers.starts, followers.values)
    ]
    position = np.full(count, -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    if len(order) < count:
        raise ProgramError(_describe_cycle(program, np.stack([before, after], axis=1), position))
    return position


def launches_collectives(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction on a compute lane launches collectives: of its tensor-parallel or sequence groups, or to
    reduce a loss over its ranks."""
    if not isinstance(instruction, Forward | Backward):
        return False
    shape = program.slots[instruction.slot]
    return shape.group_size > 1


def _edges(program: Program) -> tuple[Column, Column]:
    """Pairs (before, after) of instructions: neighbours on a lane of a rank, and dependencies through data. Neighbours
    on several ranks are listed once for each rank."""
    pairs = [needed_pairs(program)]
    for lane in program.lanes:
        rank = np.repeat(np.arange(program.num_ranks), np.diff(lane.starts))
        neighbours = np.flatnonzero(rank[1:] == rank[:-1])
        pairs.append(np.stack([lane.instructions[neighbours], lane.instructions[neighbours + 1]], axis=1))
    before, after = np.concatenate(pairs).T
    return before, after


def _by_priority(program: Program) -> Column:
    """Instructions by decreasing priority among those that are ready at the same time: communication before compute,
    and compute in the order of the plan, last layers of a backward first. So communication is launched about when it is
    expected to run."""
    columns = program.columns
    is_pass = (columns.kind == FORWARD) | (columns.kind == BACKWARD)
    group = np.where(is_pass, 1, np.where(columns.kind == OPTIMIZER_STEP, 2, 0))
    return np.lexsort((-columns.first, np.where(is_pass, program.places, 0), group))


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
