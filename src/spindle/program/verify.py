"""Prove that a program is safe to run: it does what its plan says, every instruction runs once on each of its ranks and
on no other rank, every rank has its inputs, nothing deadlocks, and it fits into memory.

First the slots, links and buckets of the program are compared with the plan and the graph. These determine which ranks
take part in each instruction, which is then compared with the ranks that have it on a lane. Each check visits each
slot, link, bucket and instance once, so that programs for thousands of ranks can be verified before every use.

To find deadlocks, `verify` executes the program without times: it starts everything that can start, until nothing can.
Instances that have not finished by then are the deadlock that would have happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from spindle.errors import ProgramError
from spindle.plan import PASS_KINDS, WEIGHT, format_devices, setting_of, slot_links
from spindle.profile import Profile
from spindle.program.columns import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    GATHER,
    OPTIMIZER_STEP,
    SYNC_GRADIENTS,
    Jagged,
    sorted_unique,
    unique_objects,
)
from spindle.program.instances import Instances, instances_of
from spindle.program.instructions import (
    COMPUTE,
    SYNC,
    TRANSFER,
    Instruction,
    code,
    compute_lane,
    is_compute,
    lane_name,
    lane_of,
)
from spindle.program.launch_order import launch_order
from spindle.program.memory import Memory, refuse_overfull
from spindle.program.parameter_uses import gradient_uses
from spindle.program.program import Column, Flows, Program, SlotShape
from spindle.program.row_flows import bytes_per_row, common_scale, placement_key
from spindle.program.untimed import run_untimed


def verify(program: Program, profile: Profile) -> None:
    """Raise a ProgramError for the first violation, or a DoesNotFitError if a device has too little memory."""
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
    columns = program.columns
    flags = columns.makes_inputs, columns.makes_weights, columns.is_backward
    rows = (columns.kind, columns.index, columns.first, columns.last, *flags)
    order = np.lexsort(rows)
    is_same = np.logical_and.reduce([row[order][1:] == row[order][:-1] for row in rows])
    is_repeated = np.zeros(len(order), dtype=bool)
    is_repeated[order[1:][is_same]] = is_repeated[order[:-1][is_same]] = True
    num_slots = len(program.plan.slots)
    is_unknown = (columns.kind <= BACKWARD) & ((columns.index < 0) | (columns.index >= num_slots))
    for number in np.flatnonzero(is_repeated | is_unknown)[:1].tolist():
        instruction = program.instructions[number]
        if is_repeated[number]:
            count = program.instructions.count(instruction)
            raise ProgramError(f"{code(instruction)} is listed {count} times among the program's instructions")
        _refuse_unknown(instruction, "slot", int(columns.index[number]), num_slots)


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
    cuts: dict[tuple[int, int], bool] = {}
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
        is_gang = profile.gangs or (op.cost is not None and op.cost.gang)
        if shape.gang != is_gang:
            raise ProgramError(f"slot {number} ({slot.op}) has gang={shape.gang}, expected {is_gang}")
        if shape.sequence_degree != slot.sequence_degree:
            raise ProgramError(
                f"slot {number} ({slot.op}) has sequence degree {shape.sequence_degree}, expected "
                f"{slot.sequence_degree}"
            )
        num_replicas = len(slot.devices) // shape.tensor_degree
        key = (id(shape.bounds), num_replicas)
        if key not in cuts:
            bounds = shape.bounds
            cuts[key] = len(bounds) == num_replicas + 1 and not bounds[0] and not (np.diff(bounds) < 0).any()
        if not cuts[key]:
            raise ProgramError(
                f"slot {number} ({slot.op}): bounds {shape.bounds.tolist()} do not cut a batch into {num_replicas}"
            )


def _every_task_has_one_batch(program: Program, profile: Profile) -> None:
    """All slots of a task have the same batch: the plan's, or another one (a loader's short last batch)."""
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
    """Every slot has one forward, and a backward over each of its layers, last layers first, for input and for weight
    gradients. Which ranks run them is checked with the instances."""
    columns, slots = program.columns, program.plan.slots
    order = program.plan.order
    has_pass = np.zeros((len(PASS_KINDS), len(slots)), dtype=bool)
    has_pass[[PASS_KINDS.index(pass_.kind) for pass_ in order], [pass_.slot for pass_ in order]] = True
    backward = columns.of_kind(BACKWARD)
    for number in backward[~has_pass[columns.pass_kind[backward], columns.index[backward]]][:1]:
        raise ProgramError(f"{code(program.instructions[number])} is a pass that the plan does not have")
    # Lists by slot: the instructions that compute input gradients, and those that compute weight gradients.
    parts = [
        Jagged.group_by(columns.index[numbers], numbers, len(slots))
        for numbers in (backward[columns.makes_inputs[backward]], backward[columns.makes_weights[backward]])
    ]
    begins = np.array([slot.first for slot in slots], dtype=np.int64)
    ends = np.array([slot.last for slot in slots], dtype=np.int64)
    wrong = np.zeros((len(parts), len(slots)), dtype=bool)
    for is_wrong, chunks in zip(wrong, parts, strict=True):
        first, last = columns.first[chunks.values], columns.last[chunks.values]
        slot_of = np.repeat(np.arange(len(slots)), chunks.sizes)
        expected = np.append(0, first)[:-1]  # each chunk ends at the layer with which the previous one begins
        filled = chunks.sizes > 0
        expected[chunks.starts[:-1][filled]] = ends[filled]
        is_wrong[slot_of[last != expected]] = True
        is_wrong[filled] |= first[chunks.starts[1:][filled] - 1] != begins[filled]
        is_wrong[~filled] |= begins[~filled] != ends[~filled]
    is_uneven = parts[0].sizes != parts[1].sizes
    if not is_uneven.any():
        inputs, weights = (part.values for part in parts)
        differs = (columns.first[inputs] != columns.first[weights]) | (columns.last[inputs] != columns.last[weights])
        is_uneven[np.repeat(np.arange(len(slots)), parts[0].sizes)[differs]] = True
    is_missing = np.ones(len(slots), dtype=bool)
    is_missing[columns.index[columns.of_kind(FORWARD)]] = False
    for number in np.flatnonzero(wrong.any(axis=0) | is_uneven | is_missing)[:1].tolist():
        slot = slots[number]
        for is_wrong, chunks in zip(wrong[:, number], parts, strict=True):
            covered = chunks.values[chunks.starts[number] : chunks.starts[number + 1]]
            text = ", ".join(f"[{columns.first[chunk]}, {columns.last[chunk]})" for chunk in covered) or "none"
            if is_wrong:
                raise ProgramError(
                    f"the backward of slot {number} ({slot.op}) covers layers {text}, "
                    f"expected [{slot.first}, {slot.last}), last layers first"
                )
        if is_uneven[number]:
            raise ProgramError(f"slot {number} ({slot.op}) computes input and weight gradients in other chunks")
        raise ProgramError(f"slot {number} ({slot.op}) has no forward")


def _every_flow_has_its_link(program: Program, profile: Profile) -> None:
    """Every pair of slots with a data flow between them has one link, with one exchange in each direction, and the
    bytes per row that follow from the producer's op."""
    num_slots, num_links = len(program.slots), len(program.links)
    pairs = slot_links([shape.op for shape in program.slots], profile.graph)
    expected = np.array([producer * num_slots + consumer for producer, consumer in pairs], dtype=np.int64)
    producer = np.array([link.producer for link in program.links], dtype=np.int64)
    consumer = np.array([link.consumer for link in program.links], dtype=np.int64)
    actual = producer * num_slots + consumer
    for number in np.setxor1d(expected, actual)[:1].tolist():
        word = "no" if number in expected else "an unnecessary"
        raise ProgramError(f"there is {word} link from slot {number // num_slots} to slot {number % num_slots}")
    for number, count in Counter(actual.tolist()).items():
        if count > 1:
            ends = f"from slot {number // num_slots} to slot {number % num_slots}"
            raise ProgramError(f"there are {count} links {ends}, expected one")
    row_bytes = bytes_per_row(profile.graph, program.slots, producer, consumer)
    for number, (link, num_bytes) in enumerate(zip(program.links, row_bytes, strict=True)):
        if link.bytes_per_row != num_bytes:
            raise ProgramError(f"link {number} has {link.bytes_per_row:g} bytes per row, expected {num_bytes:g}")
    columns = program.columns
    exchanges = columns.of_kind(EXCHANGE)
    is_known = (columns.index[exchanges] >= 0) & (columns.index[exchanges] < num_links)
    known = exchanges[is_known]
    counts = np.bincount(2 * columns.index[known] + columns.is_backward[known], minlength=2 * num_links)
    for number in np.flatnonzero(counts != 1)[:1].tolist():
        raise ProgramError(f"link {number // 2} needs one exchange {'backward' if number % 2 else 'forward'}")
    for number in exchanges[~is_known].tolist():
        _refuse_unknown(program.instructions[number], "link", int(columns.index[number]), num_links)


def _every_row_arrives(program: Program) -> None:
    """Each rank of a consumer holds or receives each of its rows exactly once; likewise for gradients in backward."""
    links = program.links
    producer = np.array([link.producer for link in links], dtype=np.int64)
    consumer = np.array([link.consumer for link in links], dtype=np.int64)
    flows, flows_of = unique_objects(each for link in links for each in (link.forward, link.backward))
    numbers: dict[tuple[int, ...], int] = {}
    placement = np.array(
        [numbers.setdefault(placement_key(shape), len(numbers)) for shape in program.slots], dtype=np.int64
    )
    # By link and direction: the sending and the receiving slot. Equal placements with equal messages are checked once.
    source, target = (np.stack(ends, axis=1).ravel() for ends in ((producer, consumer), (consumer, producer)))
    keys = (placement[source] * len(numbers) + placement[target]) * len(flows) + flows_of
    for place in np.sort(np.unique(keys, return_index=True)[1]).tolist():
        source_shape, target_shape = program.slots[source[place]], program.slots[target[place]]
        problem = _wrong_rows(source_shape, target_shape, flows[flows_of[place]], program.num_ranks)
        if problem:
            what = "gradient" if place % 2 else "activation"
            raise ProgramError(f"link {place // 2}: {problem} ({what} rows for slot {target[place]})")


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
    # The rows that a rank holds and those that it receives, sorted, must exactly tile the rows that it needs.
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
    """The rows `[first, last)` of each rank, in units of `scale`; empty for ranks without rows."""
    first, last = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    bounds = shape.bounds * (scale // shape.num_slices)
    first[shape.ranks] = np.repeat(bounds[:-1], shape.tensor_degree)
    last[shape.ranks] = np.repeat(bounds[1:], shape.tensor_degree)
    return first, last


def _every_gradient_is_summed(program: Program, profile: Profile) -> None:
    """Each shard of a trainable parameter is in one bucket, over all ranks that hold it, after all its backwards.

    With a sharded optimizer, buckets are the same in every step. So a bucket may contain parameters that this step does
    not use; it is reduced after the backwards of all the others in it.
    """
    graph = profile.graph
    place = np.asarray(profile.cluster.place_in_island)
    layers_of_slot = [graph.metaops[shape.op].parameters for shape in program.slots]
    training, users = gradient_uses(program.instructions, layers_of_slot)
    # Parameters with the same uses share a column, so the ranks and backwards that follow from it are computed once.
    columns = {id(column): column for column in users.values()}
    after = {key: frozenset(training[use][0] for use in column.tolist()) for key, column in columns.items()}
    slots_of = {key: np.unique([training[use][1].slot for use in column.tolist()]) for key, column in columns.items()}
    # Each shard that several ranks hold must be in exactly one bucket.
    buckets: dict[int, list[int]] = defaultdict(list)
    for number, bucket in enumerate(program.buckets):
        for parameter in bucket.parameters:
            buckets[parameter].append(number)
    ranks_of_bucket = [tuple(bucket.ranks.tolist()) for bucket in program.buckets]
    after_bucket = [frozenset(bucket.after) for bucket in program.buckets]
    owning_ranks = dict(program.owning_ranks)
    slot_ranks = Jagged.concatenate([shape.ranks for shape in program.slots])
    expected_of: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = {}
    checked: set[tuple[int, int]] = set()
    gradient_bytes: dict[int, int] = {}  # of each trained parameter, or of one shard of it
    for parameter, column in users.items():
        if not graph.parameters[parameter].trainable:
            continue
        name, uses, owners = graph.parameters[parameter].name, id(column), owning_ranks.get(parameter, ())
        degree = program.slots[training[int(column[0])][1].slot].tensor_degree
        if (uses, owners) not in expected_of:
            ranks = sorted_unique(program.num_ranks, slot_ranks.take(slots_of[uses]), owners)
            groups = [ranks[place[ranks] % degree == shard] for shard in range(degree)]
            expected_of[uses, owners] = sorted(tuple(group.tolist()) for group in groups if len(group) > 1)
        gradient_bytes[parameter] = graph.parameters[parameter].elements_at(degree) * graph.numerics.gradient_bytes
        if sorted(ranks_of_bucket[number] for number in buckets[parameter]) != expected_of[uses, owners]:
            raise ProgramError(f"the gradient of {name} is not reduced once over exactly the ranks that hold it")
        for number in buckets[parameter]:
            if (uses, number) not in checked and not after[uses] <= after_bucket[number]:
                raise ProgramError(f"the gradient of {name} is not reduced after every backward that adds to it")
            checked.add((uses, number))
    for number, bucket in enumerate(program.buckets):
        untrained = [parameter for parameter in bucket.parameters if parameter not in gradient_bytes]
        if program.plan.shard_optimizer and len(untrained) < len(bucket.parameters):
            gradient_bytes |= {
                parameter: graph.parameters[parameter].num_elements * graph.numerics.gradient_bytes
                for parameter in untrained
                if graph.parameters[parameter].trainable and owning_ranks.get(parameter) == ranks_of_bucket[number]
            }
            untrained = [parameter for parameter in untrained if parameter not in gradient_bytes]
        if untrained or not bucket.parameters:
            name = graph.parameters[untrained[0]].name if untrained else "no parameter"
            raise ProgramError(f"bucket {number} reduces {name}, expected parameters that a slot trains")
        used = {id(users[parameter]) for parameter in bucket.parameters if parameter in users}
        if after_bucket[number] != frozenset[int]().union(*(after[uses] for uses in used)):
            raise ProgramError(f"bucket {number} is not reduced after exactly the backwards that add to it")
        num_bytes = sum(gradient_bytes[parameter] for parameter in bucket.parameters)
        if bucket.num_bytes != num_bytes:
            raise ProgramError(f"bucket {number} has {bucket.num_bytes} bytes of gradients, expected {num_bytes}")


def _every_bucket_has_its_collectives(program: Program) -> None:
    """Each bucket has one gradient reduction, and one gather of parameters if the optimizer is sharded.

    That a forward waits for the parameters of its layers follows from `instances_of`.
    """
    columns, num_buckets = program.columns, len(program.buckets)
    is_known = (columns.index >= 0) & (columns.index < num_buckets)
    reductions, gathers = (
        np.bincount(columns.index[(columns.kind == kind) & is_known], minlength=num_buckets)
        for kind in (SYNC_GRADIENTS, GATHER)
    )
    for number in np.flatnonzero((reductions != 1) | (gathers != program.plan.shard_optimizer))[:1].tolist():
        if reductions[number] != 1:
            raise ProgramError(f"bucket {number} needs one reduction of its gradients")
        word = "one gather" if program.plan.shard_optimizer else "no gather"
        raise ProgramError(f"bucket {number} needs {word} of its parameters")
    collective = (columns.kind == SYNC_GRADIENTS) | (columns.kind == GATHER)
    for number in np.flatnonzero(collective & ~is_known).tolist():
        _refuse_unknown(program.instructions[number], "bucket", int(columns.index[number]), num_buckets)


def _every_lane_has_its_instructions(program: Program) -> None:
    """Each lane has one list for each rank, of instructions that exist and belong on this lane."""
    plan, columns = program.plan, program.columns
    lane_numbers = np.array([COMPUTE, COMPUTE, TRANSFER, SYNC, SYNC, COMPUTE])[columns.kind]
    lanes = np.array([[compute_lane(slot.lane), compute_lane(slot.lane_of_weights)] for slot in plan.slots])
    passes = np.flatnonzero(columns.kind <= BACKWARD)
    on_weight_lane = columns.pass_kind[passes] == PASS_KINDS.index(WEIGHT)
    lane_numbers[passes] = lanes[columns.index[passes], on_weight_lane.astype(np.int64)]
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
    """Exactly the ranks that run a slot or hold a parameter run the optimizer step; even if they train nothing, they
    take part in gradient norms. A graph without parameters has no optimizer step."""
    expected = np.zeros(program.num_ranks, dtype=bool)
    if profile.graph.parameters:
        for ranks in {id(shape.ranks): shape.ranks for shape in program.slots}.values():
            expected[ranks] = True
        expected[[rank for _, ranks in program.owning_ranks for rank in ranks]] = True
    compute = program.lanes[COMPUTE]
    is_step = program.columns.kind == OPTIMIZER_STEP
    updates = np.zeros(program.num_ranks, dtype=bool)
    updates[np.repeat(np.arange(program.num_ranks), np.diff(compute.starts))[is_step[compute.instructions]]] = True
    wrong = np.flatnonzero(updates != expected)
    if len(wrong):
        text = "runs no optimizer step" if expected[wrong[0]] else "runs an optimizer step and has nothing to update"
        raise ProgramError(f"rank {wrong[0]} {text}")


def _no_other_rank_runs_it(program: Program, instances: Instances) -> None:
    """A rank runs only instructions that it takes part in. `instances_of` has checked that it runs all of them."""
    without_part = np.flatnonzero(np.diff(instances.rendezvous_starts) == 0)
    if len(without_part):
        name = code(program.instructions[instances.instruction[without_part[0]]])
        raise ProgramError(f"rank {instances.rank[without_part[0]]} runs {name} but takes no part in it")


def _passes_are_in_the_order_of_the_plan(program: Program) -> None:
    """Each compute lane runs its passes in the order of the plan. Another order without a deadlock would run, but not
    in the planned time and memory."""
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
    """The error message for a deadlock, which shows one cycle of instances that wait for each other."""
    is_stuck = np.zeros(instances.num_instances, dtype=bool)
    is_stuck[stuck] = True
    waits_for: dict[int, list[int]] = {int(instance): [] for instance in stuck}
    for instance in stuck:
        for follower in instances.followers[
            instances.follower_starts[instance] : instances.follower_starts[instance + 1]
        ]:
            if is_stuck[follower]:
                waits_for[int(follower)].append(int(instance))
    # An instance whose needs are done has started; it waits for members of its rendezvous that have not.
    blocked_by_needs = {instance for instance, sources in waits_for.items() if sources}
    for instance in stuck:
        if int(instance) in blocked_by_needs:
            continue
        first, last = instances.rendezvous_starts[instance : instance + 2]
        for rendezvous in instances.rendezvous_ids[first:last]:
            members = instances.members[instances.member_starts[rendezvous] : instances.member_starts[rendezvous + 1]]
            waits_for[int(instance)] += [int(member) for member in members if int(member) in blocked_by_needs]
    # Follow the waits until an instance comes up a second time, which closes a cycle.
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
