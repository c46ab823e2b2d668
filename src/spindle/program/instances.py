"""Every instruction on every rank, what it waits for and whom it meets: what both `verify` and the simulator execute.

An instance starts when those it needs are done: the one before it on its lane, and the ones that make its data. A
meeting is work that several instances do together: a flow between two ranks, a collective, a gang of devices that run
layers together, or one rank's own compute. A meeting begins when all its members have started; an instance is done when
all its meetings are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.errors import ProgramError
from spindle.program.instructions import (
    COMPUTE,
    SYNC,
    TRANSFER,
    Backward,
    Exchange,
    Forward,
    OptimizerStep,
    SyncGradients,
    code,
)
from spindle.program.program import Column, Program

_EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Columns by instance and by meeting. Lists of lists are one list, cut at `..._starts`."""

    instruction: Column
    rank: Column
    lane: Column
    num_needs: Column
    follower_starts: Column  # instances that wait for this one
    followers: Column
    meeting_starts: Column  # meetings of this instance
    meetings: Column
    member_starts: Column  # instances of this meeting
    members: Column
    # For timing: which instruction a meeting belongs to, and for flows which entry of their link.
    meeting_instruction: Column
    meeting_flow: Column

    @property
    def num_instances(self) -> int:
        return len(self.instruction)

    @property
    def num_meetings(self) -> int:
        return len(self.meeting_instruction)


def instances_of(program: Program, gangs: bool) -> Instances:
    """Unfolds a program. Raises a ProgramError when an instruction misses a partner or stands twice on one rank."""
    lanes = program.lanes
    sizes = [len(lane.instructions) for lane in lanes]
    instruction = np.concatenate([lane.instructions for lane in lanes])
    rank = np.concatenate([np.repeat(np.arange(program.num_ranks), np.diff(lane.starts)) for lane in lanes])
    lane_number = np.repeat(np.arange(len(lanes)), sizes)

    where = np.full((len(program.instructions), program.num_ranks), -1, dtype=np.int64)
    where[instruction, rank] = np.arange(len(instruction))
    if (where >= 0).sum() < len(instruction):
        repeated = np.flatnonzero(where[instruction, rank] != np.arange(len(instruction)))[0]
        name = code(program.instructions[instruction[repeated]])
        raise ProgramError(f"rank {rank[repeated]} runs {name} twice on its {_LANE_NAMES[lane_number[repeated]]} lane")

    sources, targets = _needs(program, where)
    # In a lane, each instance waits for the one before it on the same rank.
    following = np.flatnonzero((rank[1:] == rank[:-1]) & (lane_number[1:] == lane_number[:-1]))
    sources.append(following)
    targets.append(following + 1)
    source, target = np.concatenate(sources), np.concatenate(targets)
    follower_starts, followers = _cut_by(source, target, len(instruction))

    owners, member_starts, members, flows = _meetings(program, where, gangs)
    meeting_of_member = np.repeat(np.arange(len(owners)), np.diff(member_starts))
    meeting_starts, meetings = _cut_by(members, meeting_of_member, len(instruction))
    return Instances(
        instruction=instruction,
        rank=rank,
        lane=lane_number,
        num_needs=np.bincount(target, minlength=len(instruction)),
        follower_starts=follower_starts,
        followers=followers,
        meeting_starts=meeting_starts,
        meetings=meetings,
        member_starts=member_starts,
        members=members,
        meeting_instruction=owners,
        meeting_flow=flows,
    )


_LANE_NAMES = {COMPUTE: "compute", TRANSFER: "transfer", SYNC: "sync"}


def _cut_by(key: Column, value: Column, num_keys: int) -> tuple[Column, Column]:
    starts = np.zeros(num_keys + 1, dtype=np.int64)
    np.cumsum(np.bincount(key, minlength=num_keys), out=starts[1:])
    return starts, value[np.argsort(key, kind="stable")]


def _needs(program: Program, where: Column) -> tuple[list[Column], list[Column]]:
    """Pairs (made by, needed by) that follow from data, on every rank that has both."""
    forward: dict[int, int] = {}
    backward: dict[int, list[int]] = {}
    exchange: dict[tuple[int, bool], int] = {}
    syncs: list[int] = []
    optimizer: list[int] = []
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward(slot=slot):
                forward[slot] = number
            case Backward(slot=slot):
                backward.setdefault(slot, []).append(number)
            case Exchange(link=link_number, backward=is_backward):
                exchange[link_number, is_backward] = number
            case SyncGradients():
                syncs.append(number)
            case OptimizerStep():
                optimizer.append(number)
    pairs: list[tuple[int, int]] = []
    for slot, chunks in backward.items():
        pairs.append((forward[slot], chunks[0]))
        pairs += zip(chunks, chunks[1:], strict=False)
        pairs += [(chunks[-1], step) for step in optimizer]
    for number, link in enumerate(program.links):
        there, back = exchange[number, False], exchange[number, True]
        made, used = forward[link.producer], forward[link.consumer]
        pairs += [(made, there), (there, used), (made, used)]
        made, used = backward[link.consumer][-1], backward[link.producer][0]
        pairs += [(made, back), (back, used), (made, used)]
    for number in syncs:
        instruction = program.instructions[number]
        assert isinstance(instruction, SyncGradients)
        pairs += [(after, number) for after in program.buckets[instruction.bucket].after]
        pairs += [(number, step) for step in optimizer]

    sources, targets = [], []
    for made, used in dict.fromkeys(pairs):
        ranks = np.flatnonzero((where[made] >= 0) & (where[used] >= 0))
        sources.append(where[made, ranks])
        targets.append(where[used, ranks])
    return sources, targets


def _meetings(program: Program, where: Column, gangs: bool) -> tuple[Column, Column, Column, Column]:
    """Owners, members (cut by meeting) and flow entries of all meetings."""
    owners: list[Column] = []
    sizes: list[Column] = []
    members: list[Column] = []
    flow_entries: list[Column] = []

    def add(number: int, count: int, size: int, instances: Column, flows: Column | None = None) -> None:
        owners.append(np.full(count, number, dtype=np.int64))
        sizes.append(np.full(count, size, dtype=np.int64))
        members.append(instances)
        flow_entries.append(np.full(count, -1, dtype=np.int64) if flows is None else flows)

    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                shape = program.slots[slot]
                size = len(shape.ranks) if gangs else shape.tensor_degree
                add(number, len(shape.ranks) // size, size, _found(program, where, number, shape.ranks))
            case Exchange(link=link, backward=is_backward):
                flows = program.links[link].backward if is_backward else program.links[link].forward
                ends = np.stack([flows.source, flows.destination], axis=1).ravel()
                add(number, len(flows.source), 2, _found(program, where, number, ends), np.arange(len(flows.source)))
            case SyncGradients(bucket=bucket):
                ranks = program.buckets[bucket].ranks
                add(number, 1, len(ranks), _found(program, where, number, ranks))
            case OptimizerStep():
                instances = where[number][where[number] >= 0]
                add(number, len(instances), 1, instances)
    starts = np.zeros(sum(map(len, sizes)) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(sizes) if sizes else _EMPTY, out=starts[1:])
    return np.concatenate(owners), starts, np.concatenate(members), np.concatenate(flow_entries)


def _found(program: Program, where: Column, number: int, ranks: Column) -> Column:
    instances: Column = where[number, ranks]
    if (instances < 0).any():
        missing = ranks[int(np.flatnonzero(instances < 0)[0])]
        raise ProgramError(f"rank {missing} takes part in {code(program.instructions[number])} but does not run it")
    return instances
