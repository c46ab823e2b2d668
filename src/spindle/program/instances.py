"""The dependency graph of a program, which both `verify` and the simulator execute.

An *instance* is one instruction on one rank. It starts when the instances that it needs are done: the previous one on
its lane, and those that produce its data.

A *rendezvous* is work that one or more instances do together: a flow between two ranks, a collective, layers that a
gang of devices runs together, or one rank's own compute. It begins when all its members have started, and an instance
is done when all its rendezvous are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.errors import ProgramError
from spindle.program.columns import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    GATHER,
    OPTIMIZER_STEP,
    SYNC_GRADIENTS,
    Jagged,
    unique_objects,
)
from spindle.program.instructions import code, lane_name
from spindle.program.program import Column, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Columns by instance and by rendezvous. Jagged lists have a column of `..._starts`, as in `Jagged`."""

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
    rendezvous_instruction: Column  # the instruction of each rendezvous, for its duration

    @property
    def arrays(self) -> tuple[Column, ...]:
        """The common arguments of the compiled loops of `verify` and the simulator, in order."""
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
    """The instances of a program. Raises a ProgramError if an instruction is missing on one of its ranks, or is twice
    on a rank."""
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

    producers, consumers = _needs(program, where, instruction, rank)
    # On a lane, each instance waits for the one before it on the same rank.
    following = np.flatnonzero((rank[1:] == rank[:-1]) & (lane_number[1:] == lane_number[:-1]))
    source, target = np.append(producers, following), np.append(consumers, following + 1)
    followers = Jagged.group_by(source, target, len(instruction))

    owners, member_starts, members = _all_rendezvous(program, where)
    rendezvous_of_member = np.repeat(np.arange(len(owners)), np.diff(member_starts))
    rendezvous = Jagged.group_by(members, rendezvous_of_member, len(instruction))
    return Instances(
        instruction=instruction,
        rank=rank,
        lane=lane_number,
        num_needs=np.bincount(target, minlength=len(instruction)),
        follower_starts=followers.starts,
        followers=followers.values,
        rendezvous_starts=rendezvous.starts,
        rendezvous_ids=rendezvous.values,
        member_starts=member_starts,
        members=members,
        rendezvous_instruction=owners,
    )


def needed_pairs(program: Program) -> Column:
    """Pairs of instructions (producer, consumer): on every rank that runs both, the consumer needs the producer's
    data."""
    count, num_slots = len(program.instructions), len(program.slots)
    columns = program.columns
    steps = columns.of_kind(OPTIMIZER_STEP)
    forward = np.full(num_slots, -1, dtype=np.int64)
    forward[columns.index[columns.of_kind(FORWARD)]] = columns.of_kind(FORWARD)
    # Lists by slot: its instructions that compute input gradients, last layers first, and those that compute weight
    # gradients, which are the same instructions unless backward is split.
    backward = columns.of_kind(BACKWARD)
    makes_inputs, makes_weights = backward[columns.makes_inputs[backward]], backward[columns.makes_weights[backward]]
    inputs = Jagged.group_by(columns.index[makes_inputs], makes_inputs, num_slots)
    weights = Jagged.group_by(columns.index[makes_weights], makes_weights, num_slots)
    (first_input, last_input), (_, last_weight) = inputs.first_and_last, weights.first_and_last
    exchanges = columns.of_kind(EXCHANGE)
    exchange = np.full((len(program.links), 2), -1, dtype=np.int64)
    exchange[columns.index[exchanges], columns.is_backward[exchanges].astype(np.int64)] = exchanges
    # Inside a slot: its forward, then its backward chunks, then the optimizer. The weight gradients of a chunk wait for
    # its input gradients, and so does the next chunk.
    slots = np.flatnonzero(inputs.sizes)
    slot_of = np.repeat(np.arange(num_slots), inputs.sizes)
    is_split = np.zeros(num_slots, dtype=bool)
    is_split[slot_of[inputs.values != weights.values]] = True
    inside = slot_of[1:] == slot_of[:-1]
    split = is_split[slot_of]
    sections = [
        (forward[slots], first_input[slots], slots),
        (inputs.values[:-1][inside], inputs.values[1:][inside], slot_of[1:][inside]),
        (inputs.values[split], weights.values[split], slot_of[split]),
        (
            weights.values[:-1][inside & split[1:]],
            weights.values[1:][inside & split[1:]],
            slot_of[1:][inside & split[1:]],
        ),
        *((last_weight[slots], np.full(len(slots), step), slots) for step in steps),
    ]
    producers, consumers, of_slot = (np.concatenate(part) for part in zip(*sections, strict=True))
    in_turn = np.argsort(np.argsort(first_input[slots]))  # slots as their backwards are listed
    place_of_slot = np.zeros(num_slots, dtype=np.int64)
    place_of_slot[slots] = in_turn
    by_slot = np.argsort(place_of_slot[of_slot], kind="stable")
    blocks = [np.stack([producers, consumers], axis=1)[by_slot]]
    # Data between slots: through the exchange if rows move, and directly on a rank that keeps its rows.
    producer = np.array([link.producer for link in program.links], dtype=np.int64)
    consumer = np.array([link.consumer for link in program.links], dtype=np.int64)
    for exchanged, produced, consumed in (
        (exchange[:, 0], forward[producer], forward[consumer]),
        (exchange[:, 1], last_input[consumer], first_input[producer]),
    ):
        blocks.append(np.stack([produced, exchanged, exchanged, consumed, produced, consumed], axis=1))
    blocks[1:] = [np.concatenate(blocks[1:], axis=1).reshape(-1, 2)]
    # Gradients are reduced after the last backward that adds to them, and before the optimizer.
    for number in columns.of_kind(SYNC_GRADIENTS).tolist():
        after = np.array(program.buckets[columns.index[number]].after, dtype=np.int64)
        blocks.append(np.stack([after, np.full(len(after), number)], axis=1))
        blocks.append(np.stack([np.full(len(steps), number), steps], axis=1))
    # Parameters of a sharded optimizer are gathered before the forward of every slot that uses them.
    for number in columns.of_kind(GATHER).tolist():
        after = np.array(program.buckets[columns.index[number]].after, dtype=np.int64)
        blocks.append(np.stack([np.full(len(after), number), forward[columns.index[after]]], axis=1))
    pairs = np.concatenate(blocks)
    _, first = np.unique(pairs[:, 0] * count + pairs[:, 1], return_index=True)  # each pair once
    return pairs[np.sort(first)]


def _needs(program: Program, where: Column, instruction: Column, rank: Column) -> tuple[Column, Column]:
    """The instances (producers, consumers) of `needed_pairs`."""
    producer, consumer = needed_pairs(program).T
    instances = Jagged.group_by(instruction, np.arange(len(instruction)), len(program.instructions))
    producers = instances.take(producer)
    places = np.repeat(consumer * program.num_ranks, instances.sizes[producer]) + rank[producers]
    consumers = where.ravel()[places]
    has_both = consumers >= 0
    return producers[has_both], consumers[has_both]


def _all_rendezvous(program: Program, where: Column) -> tuple[Column, Column, Column]:
    """All rendezvous, in the order of instructions: their instructions, and their members as a jagged list (starts and
    values)."""
    columns = program.columns
    slots, buckets = [shape.ranks for shape in program.slots], [bucket.ranks for bucket in program.buckets]
    flows, flows_of = unique_objects(each for link in program.links for each in (link.forward, link.backward))
    pairs = [np.stack([each.source, each.destination], axis=1).ravel() for each in flows]
    steps = [np.flatnonzero(where[number] >= 0) for number in columns.of_kind(OPTIMIZER_STEP).tolist()]
    # Lists of ranks that take part in instructions, and how many of them meet in each rendezvous.
    lists = Jagged.concatenate([*slots, *pairs, *buckets, *steps])
    sizes = np.array(
        [
            *(shape.group_size for shape in program.slots),
            *(2 for _ in pairs),
            *(len(ranks) for ranks in buckets),
            *(1 for _ in steps),
        ],
        dtype=np.int64,
    )
    list_of = columns.index.copy()
    exchanges = columns.of_kind(EXCHANGE)
    list_of[exchanges] = len(slots) + flows_of[2 * columns.index[exchanges] + columns.is_backward[exchanges]]
    list_of[(columns.kind == SYNC_GRADIENTS) | (columns.kind == GATHER)] += len(slots) + len(pairs)
    list_of[columns.of_kind(OPTIMIZER_STEP)] = len(slots) + len(pairs) + len(buckets) + np.arange(len(steps))
    counts = lists.sizes[list_of] // sizes[list_of]
    owner = np.repeat(np.arange(len(list_of)), counts)
    starts = np.zeros(len(owner) + 1, dtype=np.int64)
    np.cumsum(np.repeat(sizes[list_of], counts), out=starts[1:])
    member_owner = np.repeat(np.arange(len(list_of)), lists.sizes[list_of])
    member_rank = lists.take(list_of)
    instances = where[member_owner, member_rank]
    if (instances < 0).any():  # a member does not have the instruction on its list
        missing = int(np.flatnonzero(instances < 0)[0])
        name = code(program.instructions[member_owner[missing]])
        raise ProgramError(f"rank {member_rank[missing]} takes part in {name} but does not run it")
    return owner, starts, instances
