"""The dependency graph of a program, which both `verify` and the simulator execute.

An *instance* is one instruction on one rank. It starts when the instances that it needs are done: the one before it on
its lane, and those that produce its data.

A *rendezvous* is work that several instances do together: a flow between two ranks, a collective, a gang of devices
that run layers together, or one rank's own compute. It begins when all its members have started, and an instance is
done when all its rendezvous are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spindle.errors import ProgramError
from spindle.program.instructions import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    OptimizerStep,
    SyncGradients,
    code,
    lane_name,
)
from spindle.program.program import Column, Program

_BLOCK = 1 << 22  # most entries of a table of (pairs, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Columns by instance and by rendezvous. Lists of lists are stored as one list, cut at `..._starts`."""

    instruction: Column
    rank: Column
    lane: Column
    num_needs: Column
    follower_starts: Column  # instances that wait for this one
    followers: Column
    rendezvous_starts: Column  # rendezvous of this instance
    rendezvous_ids: Column
    member_starts: Column  # instances of this rendezvous
    members: Column
    rendezvous_instruction: Column  # for timing: the instruction that a rendezvous belongs to

    @property
    def arrays(self) -> tuple[Column, ...]:
        """The arguments of the compiled loops of `verify` and the simulator, in order."""
        return (
            self.num_needs,
            self.follower_starts,
            self.followers,
            self.rendezvous_starts,
            self.rendezvous_ids,
            self.member_starts,
            self.members,
        )

    @property
    def num_instances(self) -> int:
        return len(self.instruction)

    @property
    def num_rendezvous(self) -> int:
        return len(self.rendezvous_instruction)


def instances_of(program: Program) -> Instances:
    """Unfold a program. Raises a ProgramError if an instruction lacks a partner, or is twice on one rank."""
    lanes = program.lanes
    sizes = [len(lane.instructions) for lane in lanes]
    instruction = np.concatenate([lane.instructions for lane in lanes])
    rank = np.concatenate([np.repeat(np.arange(program.num_ranks), np.diff(lane.starts)) for lane in lanes])
    lane_number = np.repeat(np.arange(len(lanes)), sizes)

    # The instance of each (instruction, rank), or -1.
    where = np.full((len(program.instructions), program.num_ranks), -1, dtype=np.int64)
    where[instruction, rank] = np.arange(len(instruction))
    if (where >= 0).sum() < len(instruction):
        repeated = np.flatnonzero(where[instruction, rank] != np.arange(len(instruction)))[0]
        name = code(program.instructions[instruction[repeated]])
        raise ProgramError(f"rank {rank[repeated]} runs {name} twice on its {lane_name(lane_number[repeated])} lane")

    sources, targets = _needs(program, where)
    # On a lane, each instance waits for the one before it on the same rank.
    following = np.flatnonzero((rank[1:] == rank[:-1]) & (lane_number[1:] == lane_number[:-1]))
    sources.append(following)
    targets.append(following + 1)
    source, target = np.concatenate(sources), np.concatenate(targets)
    follower_starts, followers = cut_by(source, target, len(instruction))

    owners, member_starts, members = _all_rendezvous(program, where)
    rendezvous_of_member = np.repeat(np.arange(len(owners)), np.diff(member_starts))
    rendezvous_starts, rendezvous_ids = cut_by(members, rendezvous_of_member, len(instruction))
    return Instances(
        instruction=instruction,
        rank=rank,
        lane=lane_number,
        num_needs=np.bincount(target, minlength=len(instruction)),
        follower_starts=follower_starts,
        followers=followers,
        rendezvous_starts=rendezvous_starts,
        rendezvous_ids=rendezvous_ids,
        member_starts=member_starts,
        members=members,
        rendezvous_instruction=owners,
    )


def cut_by(key: Column, value: Column, num_keys: int) -> tuple[Column, Column]:
    """Group values by key: where the values of each key start, and the values in the order of their keys."""
    starts = np.zeros(num_keys + 1, dtype=np.int64)
    np.cumsum(np.bincount(key, minlength=num_keys), out=starts[1:])
    return starts, value[np.argsort(key, kind="stable")]


def needed_pairs(program: Program) -> Column:
    """Pairs of instructions (producer, consumer) that depend on each other through data, on every rank that has
    both."""
    forward: dict[int, int] = {}
    backward: dict[int, list[int]] = {}  # by slot: what computes input gradients, last layers first
    weights: dict[int, list[int]] = {}  # and weight gradients: the same instructions unless backward is split
    exchange: dict[tuple[int, bool], int] = {}
    syncs: list[int] = []
    gathers: list[tuple[int, int]] = []  # with the bucket
    optimizer: list[int] = []
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward(slot=slot):
                forward[slot] = number
            case Backward(slot=slot):
                if instruction.makes_inputs:
                    backward.setdefault(slot, []).append(number)
                if instruction.makes_weights:
                    weights.setdefault(slot, []).append(number)
            case Exchange(link=link_number, backward=is_backward):
                exchange[link_number, is_backward] = number
            case SyncGradients():
                syncs.append(number)
            case GatherParameters(bucket=bucket):
                gathers.append((number, bucket))
            case OptimizerStep():
                optimizer.append(number)
    pairs: list[tuple[int, int]] = []
    # A slot's forward, then its backward chunks, then the optimizer. Weight gradients of a chunk wait for its input
    # gradients, which the chunk before it goes on from.
    for slot, chunks in backward.items():
        pairs.append((forward[slot], chunks[0]))
        pairs += pairwise(chunks)
        if weights[slot] != chunks:
            pairs += zip(chunks, weights[slot], strict=True)
            pairs += pairwise(weights[slot])
        pairs += [(weights[slot][-1], step) for step in optimizer]
    # Data between slots: through the exchange where rows move, and directly on a rank that keeps them.
    for number, link in enumerate(program.links):
        send_forward, send_backward = exchange[number, False], exchange[number, True]
        producer, consumer = forward[link.producer], forward[link.consumer]
        pairs += [(producer, send_forward), (send_forward, consumer), (producer, consumer)]
        producer, consumer = backward[link.consumer][-1], backward[link.producer][0]
        pairs += [(producer, send_backward), (send_backward, consumer), (producer, consumer)]
    # Gradients: reduced after the last backward that adds to them, and before the optimizer.
    for number in syncs:
        instruction = program.instructions[number]
        assert isinstance(instruction, SyncGradients)
        pairs += [(after, number) for after in program.buckets[instruction.bucket].after]
        pairs += [(number, step) for step in optimizer]
    # Parameters of a sharded optimizer: gathered before the forward of every slot that uses them.
    for number, bucket in gathers:
        for after in program.buckets[bucket].after:
            backward_pass = program.instructions[after]
            assert isinstance(backward_pass, Backward)
            pairs.append((number, forward[backward_pass.slot]))

    return np.array(list(dict.fromkeys(pairs)), dtype=np.int64).reshape(-1, 2)


def _needs(program: Program, where: Column) -> tuple[list[Column], list[Column]]:
    """The instances (producers, consumers) of `needed_pairs`."""
    pairs = needed_pairs(program)
    sources, targets = [], []
    # In blocks of pairs: with thousands of ranks, one table for all pairs would be huge.
    step = max(1, _BLOCK // program.num_ranks)
    for start in range(0, len(pairs), step):
        producers, consumers = where[pairs[start : start + step, 0]], where[pairs[start : start + step, 1]]
        both = (producers >= 0) & (consumers >= 0)
        sources.append(producers[both])
        targets.append(consumers[both])
    return sources, targets


def _all_rendezvous(program: Program, where: Column) -> tuple[Column, Column, Column]:
    """All rendezvous in the order of instructions: their instructions, where their members start, and their members."""
    owners: list[int] = []  # by instruction
    counts: list[int] = []  # its number of rendezvous
    sizes: list[int] = []  # members of each
    ranks: list[Column] = []  # ranks of all members
    size: int
    members: Column
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                shape = program.slots[slot]
                size = shape.group_size
                members = shape.ranks
            case Exchange(link=link, backward=is_backward):
                flows = program.links[link].backward if is_backward else program.links[link].forward
                size, members = 2, np.stack([flows.source, flows.destination], axis=1).ravel()
            case SyncGradients(bucket=bucket) | GatherParameters(bucket=bucket):
                members = program.buckets[bucket].ranks
                size = len(members)
            case OptimizerStep():
                size, members = 1, np.flatnonzero(where[number] >= 0)
        owners.append(number)
        counts.append(len(members) // size)
        sizes.append(size)
        ranks.append(members)
    owner = np.repeat(owners, counts)
    starts = np.zeros(len(owner) + 1, dtype=np.int64)
    np.cumsum(np.repeat(sizes, counts), out=starts[1:])
    member_owner = np.repeat(owners, [len(members) for members in ranks])
    member_rank = np.concatenate(ranks)
    instances = where[member_owner, member_rank]
    if (instances < 0).any():  # a member does not have the instruction on its list
        missing = int(np.flatnonzero(instances < 0)[0])
        name = code(program.instructions[member_owner[missing]])
        raise ProgramError(f"rank {member_rank[missing]} takes part in {name} but does not run it")
    return owner, starts, instances
