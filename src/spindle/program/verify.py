"""Prove that a program is safe to run: every rank has its inputs, nothing runs twice, nothing deadlocks, it fits.

For deadlocks, `verify` executes the program without time: it starts everything that can start, until nothing can. What
is left over is the deadlock that would have happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from spindle.errors import ProgramError
from spindle.plan import slot_links
from spindle.profile import Profile
from spindle.program.instances import Instances, instances_of
from spindle.program.instructions import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
    code,
    lane_of,
)
from spindle.program.launch_order import launch_order
from spindle.program.memory import Memory, refuse_overfull
from spindle.program.program import Bucket, Column, Flows, Program, SlotShape
from spindle.program.row_flows import common_scale, placement_key
from spindle.program.untimed import run_untimed


def verify(program: Program, profile: Profile) -> None:
    """Raise a ProgramError for the first thing that is wrong, or a DoesNotFitError if there is too little memory."""
    _every_slot_runs(program)
    _every_flow_has_its_link(program, profile)
    _every_row_arrives(program)
    _every_gradient_is_summed(program, profile)
    _every_bucket_has_its_collectives(program)
    instances = instances_of(program)
    stuck = np.flatnonzero(~run_untimed(*instances.arrays))
    if len(stuck):
        raise ProgramError(describe_deadlock(program, instances, stuck))
    launch_order(program)  # raises if there is none
    refuse_overfull(Memory(program, profile).peaks_in_order(instances), profile)


def _every_slot_runs(program: Program) -> None:
    """Every slot has a forward, and a backward over each of its layers, for input and for weight gradients. That the
    right ranks run them is checked by `instances_of`."""
    parts: list[dict[int, list[tuple[int, int]]]] = [
        {number: [] for number in range(len(program.plan.slots))} for _ in range(2)
    ]
    forwards = set()
    for instruction in program.instructions:
        if isinstance(instruction, Backward):
            for chunks, is_computed in zip(parts, (instruction.makes_inputs, instruction.makes_weights), strict=True):
                if is_computed:
                    chunks[instruction.slot].append((instruction.first, instruction.last))
        elif isinstance(instruction, Forward):
            forwards.add(instruction.slot)
    for number, slot in enumerate(program.plan.slots):
        for chunks in parts:
            covered = sorted(chunks[number])
            ends = [slot.first, *(last for _, last in covered)]
            if [first for first, _ in covered] != ends[:-1] or ends[-1] != slot.last:
                text = ", ".join(f"[{first}, {last})" for first, last in covered) or "none"
                raise ProgramError(
                    f"the backward of slot {number} ({slot.op}) covers layers {text}, "
                    f"expected [{slot.first}, {slot.last})"
                )
        if number not in forwards:
            raise ProgramError(f"slot {number} ({slot.op}) has no forward")


def _every_flow_has_its_link(program: Program, profile: Profile) -> None:
    """Every pair of slots between which data flows has one link, with one exchange in each direction."""
    expected = set(slot_links([shape.op for shape in program.slots], profile.graph))
    actual = [(link.producer, link.consumer) for link in program.links]
    for producer, consumer in sorted(expected.symmetric_difference(actual)):
        word = "no" if (producer, consumer) in expected else "an unnecessary"
        raise ProgramError(f"there is {word} link from slot {producer} to slot {consumer}")
    exchanges = Counter(instruction for instruction in program.instructions if isinstance(instruction, Exchange))
    for number in range(len(program.links)):
        for backward in (False, True):
            if exchanges[Exchange(link=number, backward=backward)] != 1:
                raise ProgramError(f"link {number} needs one exchange {'backward' if backward else 'forward'}")


def _every_row_arrives(program: Program) -> None:
    """Each rank of a consumer holds or receives each of its rows exactly once; likewise the gradients, backward."""
    checked: set[tuple[int, ...]] = set()
    for number, link in enumerate(program.links):
        for source, target, flows, what in (
            (link.producer, link.consumer, link.forward, "activation"),
            (link.consumer, link.producer, link.backward, "gradient"),
        ):
            key = (*placement_key(program.slots[source]), *placement_key(program.slots[target]), id(flows))
            if key in checked:
                continue
            checked.add(key)
            problem = _wrong_rows(program.slots[source], program.slots[target], flows, program.num_ranks)
            if problem:
                raise ProgramError(f"link {number}: {problem} ({what} rows for slot {target})")


def _wrong_rows(source: SlotShape, target: SlotShape, flows: Flows, num_ranks: int) -> str:
    """What is wrong with the flows of a link; empty if nothing is."""
    scale = common_scale(source, target)
    had_first, had_last = _intervals(source, scale, num_ranks)
    want_first, want_last = _intervals(target, scale, num_ranks)
    sends_what_it_lacks = (flows.first < had_first[flows.source]) | (flows.last > had_last[flows.source])
    if sends_what_it_lacks.any():
        return f"rank {flows.source[int(np.argmax(sends_what_it_lacks))]} sends rows that it does not hold"
    # The rows that a rank holds and those that it receives, sorted, must tile the rows that it needs.
    ranks = np.concatenate([target.ranks, flows.destination])
    first = np.concatenate([np.maximum(had_first, want_first)[target.ranks], flows.first])
    last = np.concatenate([np.minimum(had_last, want_last)[target.ranks], flows.last])
    is_empty = first >= last
    ranks, first, last = ranks[~is_empty], first[~is_empty], last[~is_empty]
    order = np.lexsort((first, ranks))
    ranks, first, last = ranks[order], first[order], last[order]
    opens = np.append(True, ranks[1:] != ranks[:-1])
    closes = np.append(ranks[1:] != ranks[:-1], True)
    expected = np.where(opens, want_first[ranks], np.append(0, last[:-1]))
    wrong = (first != expected) | (closes & (last != want_last[ranks]))
    if wrong.any():
        return f"rank {ranks[int(np.argmax(wrong))]} needs other rows than those it holds and receives"
    missing = np.setdiff1d(target.ranks[want_first[target.ranks] < want_last[target.ranks]], ranks)
    return f"rank {missing[0]} needs rows and has none" if len(missing) else ""


def _intervals(shape: SlotShape, scale: int, num_ranks: int) -> tuple[Column, Column]:
    """The rows `[first, last)` of each rank; empty for ranks without rows."""
    first, last = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    bounds = shape.bounds * (scale // shape.num_rows)
    first[shape.ranks] = np.repeat(bounds[:-1], shape.tensor_degree)
    last[shape.ranks] = np.repeat(bounds[1:], shape.tensor_degree)
    return first, last


def _every_gradient_is_summed(program: Program, profile: Profile) -> None:
    """Each shard of a trainable parameter is in one bucket, over all ranks that hold it, after all its backwards."""
    graph = profile.graph
    place = np.asarray(profile.cluster.place_in_island)
    after: dict[int, set[int]] = defaultdict(set)
    slots_using: dict[int, list[int]] = defaultdict(list)
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Backward) and instruction.makes_weights:
            op = graph.metaops[program.slots[instruction.slot].op]
            for layer in range(instruction.first, instruction.last) if op.parameters else ():
                for parameter in op.parameters[layer]:
                    after[parameter].add(number)
                    slots_using[parameter].append(instruction.slot)
    # Compare with the buckets that there are: one for each shard that several ranks hold.
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in program.buckets:
        for parameter in bucket.parameters:
            buckets[parameter].append(bucket)
    updated = {int(rank) for rank in _ranks_running(program, OptimizerStep())}
    owning_ranks = dict(program.owning_ranks)
    ranks_of: dict[tuple[tuple[int, ...], tuple[int, ...]], Column] = {}
    for parameter, slots in slots_using.items():
        if not graph.parameters[parameter].trainable:
            continue
        name, key = graph.parameters[parameter].name, (tuple(dict.fromkeys(slots)), owning_ranks.get(parameter, ()))
        if key not in ranks_of:
            used = [program.slots[slot].ranks for slot in key[0]]
            ranks_of[key] = np.unique(np.concatenate([*used, np.array(key[1], dtype=np.int64)]))
            never_updated = set(ranks_of[key].tolist()) - updated
            if never_updated:
                raise ProgramError(f"rank {min(never_updated)} holds {name} and never updates it")
        degree = program.slots[key[0][0]].tensor_degree
        groups = [ranks_of[key][place[ranks_of[key]] % degree == shard] for shard in range(degree)]
        expected = sorted(tuple(group.tolist()) for group in groups if len(group) > 1)
        if sorted(tuple(bucket.ranks.tolist()) for bucket in buckets[parameter]) != expected:
            raise ProgramError(f"the gradient of {name} is not reduced once over exactly the ranks that hold it")
        if any(set(bucket.after) != after[parameter] for bucket in buckets[parameter]):
            raise ProgramError(f"the gradient of {name} is not reduced after every backward that adds to it")


def _every_bucket_has_its_collectives(program: Program) -> None:
    """Each bucket has one gradient reduction, and one gather of parameters if the optimizer is sharded.

    That a forward waits for the parameters of its layers follows from `instances_of`.
    """
    counts = Counter(program.instructions)
    for number in range(len(program.buckets)):
        if counts[SyncGradients(bucket=number)] != 1:
            raise ProgramError(f"bucket {number} needs one reduction of its gradients")
        if counts[GatherParameters(bucket=number)] != program.plan.shard_optimizer:
            word = "one gather" if program.plan.shard_optimizer else "no gather"
            raise ProgramError(f"bucket {number} needs {word} of its parameters")


def _ranks_running(program: Program, instruction: Instruction) -> Column:
    """The ranks that run an instruction."""
    if instruction not in program.instructions:
        return np.zeros(0, dtype=np.int64)
    number = program.instructions.index(instruction)
    lane = program.lanes[lane_of(instruction)]
    ranks: Column = np.repeat(np.arange(program.num_ranks), np.diff(lane.starts))[lane.instructions == number]
    return ranks


def describe_deadlock(program: Program, instances: Instances, stuck: Column) -> str:
    """The error message for a deadlock, with one cycle of instances that wait for each other."""
    is_stuck = np.zeros(instances.num_instances, dtype=bool)
    is_stuck[stuck] = True
    waits_for: dict[int, list[int]] = {int(instance): [] for instance in stuck}
    for instance in stuck:
        for follower in instances.followers[
            instances.follower_starts[instance] : instances.follower_starts[instance + 1]
        ]:
            if is_stuck[follower]:
                waits_for[int(follower)].append(int(instance))
    # An instance that waits for nobody on its own rank waits for members of its rendezvous that do.
    blocked_by_needs = {instance for instance, sources in waits_for.items() if sources}
    for instance in stuck:
        if int(instance) in blocked_by_needs:
            continue
        first, last = instances.rendezvous_starts[instance : instance + 2]
        for rendezvous in instances.rendezvous_ids[first:last]:
            members = instances.members[instances.member_starts[rendezvous] : instances.member_starts[rendezvous + 1]]
            waits_for[int(instance)] += [int(member) for member in members if int(member) in blocked_by_needs]
    # Follow the waits until an instance comes up a second time: that is a cycle.
    path: list[int] = []
    instance = int(stuck[0])
    while instance not in path and waits_for[instance]:
        path.append(instance)
        instance = waits_for[instance][0]
    cycle = path[path.index(instance) :] if instance in path else path
    lines = [
        f"    rank {instances.rank[member]} {code(program.instructions[instances.instruction[member]])}"
        for member in cycle
    ]
    return (
        f"deadlock: {len(stuck)} instructions cannot run; each of these waits for the next, the last for the first:\n"
        + "\n".join(lines)
    )
