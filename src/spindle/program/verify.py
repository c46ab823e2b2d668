"""Prove that a program is safe to run: it does what its plan says, every instruction runs once on each of its ranks and
on no other, every rank has its inputs, nothing deadlocks, and it fits into memory.

What the columns of a program say (slots, links, buckets) is compared with the plan and the graph first. Then the ranks
that take part in an instruction follow from these columns, and are compared with the ranks that have it on a lane. Each
check visits each slot, link, bucket and instance once, so that programs for thousands of ranks are verified before
every use.

For deadlocks, `verify` executes the program without time: it starts everything that can start, until nothing can. What
is left over is the deadlock that would have happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from spindle.errors import ProgramError
from spindle.plan import format_devices, setting_of, slot_links
from spindle.profile import Profile
from spindle.program.instances import Instances, instances_of
from spindle.program.instructions import (
    COMPUTE,
    SYNC,
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
    code,
    is_compute,
    lane_name,
    lane_of,
)
from spindle.program.launch_order import launch_order
from spindle.program.memory import Memory, refuse_overfull
from spindle.program.program import Bucket, Column, Flows, Program, SlotShape
from spindle.program.row_flows import bytes_per_row, common_scale, placement_key
from spindle.program.untimed import run_untimed


def verify(program: Program, profile: Profile) -> None:
    """Raise a ProgramError for the first thing that is wrong, or a DoesNotFitError if there is too little memory."""
    _every_instruction_is_known(program, profile)
    _every_slot_has_its_shape(program, profile)
    _every_task_has_one_batch(program, profile)
    _every_slot_runs(program)
    _every_flow_has_its_link(program, profile)
    _every_row_arrives(program)
    _every_gradient_is_summed(program, profile)
    _every_bucket_has_its_collectives(program)
    _every_lane_has_its_instructions(program)
    _every_rank_updates(program, profile)
    instances = instances_of(program)
    _no_other_rank_runs_it(program, instances)
    stuck = np.flatnonzero(~run_untimed(*instances.arrays))
    if len(stuck):
        raise ProgramError(describe_deadlock(program, instances, stuck))
    launch_order(program)  # raises if there is none
    _passes_are_in_the_order_of_the_plan(program)
    refuse_overfull(Memory(program, profile).peaks_in_order(instances), profile)


def _every_instruction_is_known(program: Program, profile: Profile) -> None:
    """Each instruction is listed once, and slots of passes exist."""
    if program.num_ranks != profile.cluster.num_devices:
        raise ProgramError(f"the program has {program.num_ranks} ranks, the cluster {profile.cluster.num_devices}")
    for instruction, count in Counter(program.instructions).items():
        if count > 1:
            raise ProgramError(f"{code(instruction)} is listed {count} times among the program's instructions")
        if isinstance(instruction, Forward | Backward):
            _refuse_unknown(instruction, "slot", instruction.slot, len(program.plan.slots))


def _refuse_unknown(instruction: Instruction, what: str, index: int, count: int) -> None:
    """Refuse an instruction of a slot, link or bucket that does not exist."""
    if not 0 <= index < count:
        raise ProgramError(f"{code(instruction)} is of {what} {index}; the program has {count}")


def _every_slot_has_its_shape(program: Program, profile: Profile) -> None:
    """Each slot's op, ranks and tensor degree are those of the plan, and its replicas share the whole batch."""
    if len(program.slots) != len(program.plan.slots):
        raise ProgramError(f"the program has {len(program.slots)} slots, its plan {len(program.plan.slots)}")
    metaops, degrees = profile.graph.metaops, setting_of(program.plan, profile).tensor_degrees
    devices: dict[int, tuple[int, ...]] = {}  # by id of a column: slots share columns
    for number, (slot, shape) in enumerate(zip(program.plan.slots, program.slots, strict=True)):
        op = metaops[shape.op]
        if op.name != slot.op:
            raise ProgramError(f"slot {number} runs layers of {op.name}, expected {slot.op}")
        if id(shape.ranks) not in devices:
            devices[id(shape.ranks)] = tuple(shape.ranks.tolist())
        if devices[id(shape.ranks)] != slot.devices:
            ranks = format_devices(devices[id(shape.ranks)])
            raise ProgramError(
                f"slot {number} ({slot.op}) is on ranks {ranks}, expected {format_devices(slot.devices)}"
            )
        if shape.tensor_degree != degrees[shape.op]:
            raise ProgramError(
                f"slot {number} ({slot.op}) has tensor degree {shape.tensor_degree}, expected {degrees[shape.op]}"
            )
        is_gang = profile.gangs or (op.cost is not None and op.cost.meets)
        if shape.gang != is_gang:
            raise ProgramError(f"slot {number} ({slot.op}) has gang={shape.gang}, expected {is_gang}")
        if shape.sequence_degree != slot.sequence_degree:
            raise ProgramError(
                f"slot {number} ({slot.op}) has sequence degree {shape.sequence_degree}, expected "
                f"{slot.sequence_degree}"
            )
        num_replicas = len(slot.devices) // shape.tensor_degree
        if len(shape.bounds) != num_replicas + 1 or shape.bounds[0] or (np.diff(shape.bounds) < 0).any():
            raise ProgramError(
                f"slot {number} ({slot.op}): bounds {shape.bounds.tolist()} do not cut a batch into {num_replicas}"
            )


def _every_task_has_one_batch(program: Program, profile: Profile) -> None:
    """All slots of a task have the batch of the plan, or all have the same other one: a loader's short last batch."""
    if profile.gangs:
        return  # rows stand for devices
    shapes_of: dict[str, list[SlotShape]] = defaultdict(list)
    metaops = profile.graph.metaops
    for shape in program.slots:
        if metaops[shape.op].batch_size is not None:
            shapes_of[metaops[shape.op].task].append(shape)
    for task, shapes in shapes_of.items():
        num_rows = {shape.num_rows for shape in shapes}
        if len(num_rows) > 1 and any(shape.num_rows != metaops[shape.op].batch_size for shape in shapes):
            raise ProgramError(f"slots of task {task} have batches of {', '.join(map(str, sorted(num_rows)))} rows")


def _every_slot_runs(program: Program) -> None:
    """Every slot has a forward, and a backward over each of its layers, last layers first, for input and for weight
    gradients. That the right ranks run them is checked with the instances."""
    parts: list[dict[int, list[tuple[int, int]]]] = [
        {number: [] for number in range(len(program.plan.slots))} for _ in range(2)
    ]
    forwards = set()
    passes = {(pass_.slot, pass_.kind) for pass_ in program.plan.order}
    for instruction in program.instructions:
        if isinstance(instruction, Backward):
            if (instruction.slot, instruction.part) not in passes:
                raise ProgramError(f"{code(instruction)} is a pass that the plan does not have")
            for chunks, is_computed in zip(parts, (instruction.makes_inputs, instruction.makes_weights), strict=True):
                if is_computed:
                    chunks[instruction.slot].append((instruction.first, instruction.last))
        elif isinstance(instruction, Forward):
            forwards.add(instruction.slot)
    for number, slot in enumerate(program.plan.slots):
        for chunks in parts:
            covered = chunks[number]
            starts = [slot.last, *(first for first, _ in covered)]
            if [last for _, last in covered] != starts[:-1] or starts[-1] != slot.first:
                text = ", ".join(f"[{first}, {last})" for first, last in covered) or "none"
                raise ProgramError(
                    f"the backward of slot {number} ({slot.op}) covers layers {text}, "
                    f"expected [{slot.first}, {slot.last}), last layers first"
                )
        if parts[0][number] != parts[1][number]:
            raise ProgramError(f"slot {number} ({slot.op}) computes input and weight gradients in other chunks")
        if number not in forwards:
            raise ProgramError(f"slot {number} ({slot.op}) has no forward")


def _every_flow_has_its_link(program: Program, profile: Profile) -> None:
    """Every pair of slots between which data flows has one link, with one exchange in each direction, and rows of the
    size that the producer's op gives."""
    expected = set(slot_links([shape.op for shape in program.slots], profile.graph))
    actual = Counter((link.producer, link.consumer) for link in program.links)
    for producer, consumer in sorted(expected.symmetric_difference(actual)):
        word = "no" if (producer, consumer) in expected else "an unnecessary"
        raise ProgramError(f"there is {word} link from slot {producer} to slot {consumer}")
    for (producer, consumer), count in actual.items():
        if count > 1:
            raise ProgramError(f"there are {count} links from slot {producer} to slot {consumer}, expected one")
    for number, link in enumerate(program.links):
        row_bytes = bytes_per_row(profile.graph, program.slots[link.producer], program.slots[link.consumer])
        if link.bytes_per_row != row_bytes:
            raise ProgramError(f"link {number} has {link.bytes_per_row:g} bytes per row, expected {row_bytes:g}")
    exchanges = Counter(instruction for instruction in program.instructions if isinstance(instruction, Exchange))
    for number in range(len(program.links)):
        for backward in (False, True):
            if exchanges[Exchange(link=number, backward=backward)] != 1:
                raise ProgramError(f"link {number} needs one exchange {'backward' if backward else 'forward'}")
    for exchange in exchanges:
        _refuse_unknown(exchange, "link", exchange.link, len(program.links))


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
    peers = np.concatenate([flows.source, flows.destination])
    if len(peers) and not 0 <= peers.min() <= peers.max() < num_ranks:
        return f"there is no rank {peers.min() if peers.min() < 0 else peers.max()}, only 0 to {num_ranks - 1}"
    has_no_rows = flows.first >= flows.last
    if has_no_rows.any():
        return f"rank {flows.source[int(np.argmax(has_no_rows))]} sends a message without rows"
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
    has_rows = np.zeros(num_ranks, dtype=bool)
    has_rows[ranks] = True
    missing = np.flatnonzero((want_first < want_last) & ~has_rows)
    return f"rank {missing[0]} needs rows and has none" if len(missing) else ""


def _intervals(shape: SlotShape, scale: int, num_ranks: int) -> tuple[Column, Column]:
    """The rows `[first, last)` of each rank; empty for ranks without rows."""
    first, last = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    bounds = shape.bounds * (scale // shape.num_slices)
    first[shape.ranks] = np.repeat(bounds[:-1], shape.tensor_degree)
    last[shape.ranks] = np.repeat(bounds[1:], shape.tensor_degree)
    return first, last


def _every_gradient_is_summed(program: Program, profile: Profile) -> None:
    """Each shard of a trainable parameter is in one bucket, over all ranks that hold it, after all its backwards.

    Where ranks update parts of what they hold from step to step, buckets are the same in every step: one may have
    parameters that this step does not use, and is reduced after the backwards of all others in it.
    """
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
    owning_ranks = dict(program.owning_ranks)
    ranks_of: dict[tuple[tuple[int, ...], tuple[int, ...]], Column] = {}
    gradient_bytes: dict[int, int] = {}  # of the parameters that are trained, or of one shard
    for parameter, slots in slots_using.items():
        if not graph.parameters[parameter].trainable:
            continue
        name, key = graph.parameters[parameter].name, (tuple(dict.fromkeys(slots)), owning_ranks.get(parameter, ()))
        if key not in ranks_of:
            used = [program.slots[slot].ranks for slot in key[0]]
            ranks_of[key] = np.unique(np.concatenate([*used, np.array(key[1], dtype=np.int64)]))
        degree = program.slots[key[0][0]].tensor_degree
        gradient_bytes[parameter] = graph.parameters[parameter].elements_at(degree) * graph.numerics.gradient_bytes
        groups = [ranks_of[key][place[ranks_of[key]] % degree == shard] for shard in range(degree)]
        expected = sorted(tuple(group.tolist()) for group in groups if len(group) > 1)
        if sorted(tuple(bucket.ranks.tolist()) for bucket in buckets[parameter]) != expected:
            raise ProgramError(f"the gradient of {name} is not reduced once over exactly the ranks that hold it")
        if not all(after[parameter] <= set(bucket.after) for bucket in buckets[parameter]):
            raise ProgramError(f"the gradient of {name} is not reduced after every backward that adds to it")
    for number, bucket in enumerate(program.buckets):
        untrained = [parameter for parameter in bucket.parameters if parameter not in gradient_bytes]
        if program.plan.shard_optimizer and len(untrained) < len(bucket.parameters):
            ranks = tuple(bucket.ranks.tolist())
            gradient_bytes |= {
                parameter: graph.parameters[parameter].num_elements * graph.numerics.gradient_bytes
                for parameter in untrained
                if graph.parameters[parameter].trainable and owning_ranks.get(parameter) == ranks
            }
            untrained = [parameter for parameter in untrained if parameter not in gradient_bytes]
        if untrained or not bucket.parameters:
            name = graph.parameters[untrained[0]].name if untrained else "no parameter"
            raise ProgramError(f"bucket {number} reduces {name}, expected parameters that a slot trains")
        if set(bucket.after) != set[int]().union(*(after[parameter] for parameter in bucket.parameters)):
            raise ProgramError(f"bucket {number} is reduced after other backwards than those that add to it")
        num_bytes = sum(gradient_bytes[parameter] for parameter in bucket.parameters)
        if bucket.num_bytes != num_bytes:
            raise ProgramError(f"bucket {number} has {bucket.num_bytes} bytes of gradients, expected {num_bytes}")


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
    for instruction in counts:
        if isinstance(instruction, SyncGradients | GatherParameters):
            _refuse_unknown(instruction, "bucket", instruction.bucket, len(program.buckets))


def _every_lane_has_its_instructions(program: Program) -> None:
    """Lanes are cut into one list for each rank, of instructions that exist and belong on this lane."""
    plan = program.plan
    lane_numbers = np.array([lane_of(instruction, plan) for instruction in program.instructions])
    if len(program.lanes) != SYNC + plan.num_lanes:
        raise ProgramError(f"the program has {len(program.lanes)} lanes, expected {SYNC + plan.num_lanes}")
    for number, lane in enumerate(program.lanes):
        name = lane_name(number)
        starts = lane.starts
        if len(starts) != program.num_ranks + 1 or starts[0] or starts[-1] != len(lane.instructions):
            raise ProgramError(f"the {name} lane is not cut into the instructions of {program.num_ranks} ranks")
        is_listed = (lane.instructions >= 0) & (lane.instructions < len(lane_numbers))
        if not is_listed.all():
            raise ProgramError(
                f"the {name} lane has instruction {lane.instructions[~is_listed][0]}, which is not listed"
            )
        is_misplaced = lane_numbers[lane.instructions] != number
        if is_misplaced.any():
            instruction = program.instructions[lane.instructions[int(np.argmax(is_misplaced))]]
            raise ProgramError(
                f"{code(instruction)} is on the {name} lane, expected {lane_name(lane_of(instruction, plan))}"
            )


def _every_rank_updates(program: Program, profile: Profile) -> None:
    """Ranks that run a slot or hold a parameter run the optimizer step, and no others do: also those that train nothing
    take part in gradient norms. A graph without parameters has no step."""
    expected = np.zeros(program.num_ranks, dtype=bool)
    if profile.graph.parameters:
        for ranks in {id(shape.ranks): shape.ranks for shape in program.slots}.values():
            expected[ranks] = True
        expected[[rank for _, ranks in program.owning_ranks for rank in ranks]] = True
    compute = program.lanes[COMPUTE]
    is_step = np.array([isinstance(instruction, OptimizerStep) for instruction in program.instructions])
    updates = np.zeros(program.num_ranks, dtype=bool)
    updates[np.repeat(np.arange(program.num_ranks), np.diff(compute.starts))[is_step[compute.instructions]]] = True
    wrong = np.flatnonzero(updates != expected)
    if len(wrong):
        text = "runs no optimizer step" if expected[wrong[0]] else "runs an optimizer step and has nothing to update"
        raise ProgramError(f"rank {wrong[0]} {text}")


def _no_other_rank_runs_it(program: Program, instances: Instances) -> None:
    """A rank runs only what it takes part in. That it runs all of that is checked by `instances_of`."""
    without_part = np.flatnonzero(np.diff(instances.rendezvous_starts) == 0)
    if len(without_part):
        name = code(program.instructions[instances.instruction[without_part[0]]])
        raise ProgramError(f"rank {instances.rank[without_part[0]]} runs {name} but takes no part in it")


def _passes_are_in_the_order_of_the_plan(program: Program) -> None:
    """The order on each compute lane of a rank is the plan's. Another order without a deadlock would run, but not in
    the time and memory that were planned."""
    places = program.places
    for lane in (lane for number, lane in enumerate(program.lanes) if is_compute(number)):
        rank = np.repeat(np.arange(program.num_ranks), np.diff(lane.starts))
        along = places[lane.instructions]
        swapped = np.flatnonzero((rank[1:] == rank[:-1]) & (along[1:] < along[:-1]))
        if len(swapped):
            before, after = (code(program.instructions[number]) for number in lane.instructions[swapped[0] :][:2])
            raise ProgramError(
                f"rank {rank[swapped[0]]} runs {before} before {after}, its plan has them in the opposite order"
            )


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
    # An instance that waits for nothing on its own rank waits for members of its rendezvous that do.
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
