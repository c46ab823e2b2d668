"""From a plan to a program: transfers by interval overlap, the mirrored backward, gradients synchronised as they
become ready, parameters gathered before they are used where each rank has updated a part of them.

A pass for each of these, in this order: shapes of slots, links between them, backward chunks, gradient buckets, and
last the order on every rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from spindle.plan import BACKWARD, FOLDED, FORWARD, INPUT, WEIGHT, Plan, Slot, setting_of, slot_links, spans
from spindle.profile import Profile, Setting
from spindle.program.instructions import (
    COMPUTE,
    SYNC,
    TRANSFER,
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
    compute_lane,
)
from spindle.program.program import Bucket, Column, Flows, Lane, Link, Program, SlotShape, lane_from_pairs
from spindle.program.row_flows import bytes_per_row, flows_between, placement_key, share_bounds

# Gradients are reduced while backward still runs; smaller chunks overlap more and cost more messages. A small model has
# a few chunks. Where the measured fixed cost of a collective is large, a chunk has as many bytes as take that long.
CHUNK_BYTES = 64e6
_SMALL_CHUNK_BYTES, _NUM_CHUNKS = 1e6, 8
_WEIGHT_CHUNKS = 8  # of a slot whose weight gradients have a lane: those of a chunk run beside the chunk before it


def lower(
    plan: Plan,
    profile: Profile,
    rows: Mapping[str, int] | None = None,
    owning_ranks: Mapping[int, tuple[int, ...]] | None = None,
) -> Program:
    """Lower a legal plan to a program; does not check the plan again.

    `rows` gives the batch size of a task for a step in which it differs from the plan (a loader's short last batch).
    `owning_ranks` gives, by parameter, devices that keep it from step to step even if no slot of this plan uses it
    there: they get its gradient, too.
    """
    setting = setting_of(plan, profile)
    position = {op.name: index for index, op in enumerate(profile.graph.metaops)}
    ops = [position[slot.op] for slot in plan.slots]
    columns: dict[tuple[tuple[int, ...], int, int], tuple[Column, Column]] = {}
    shapes = tuple(
        _shape(profile, setting, slot, op, rows or {}, columns) for slot, op in zip(plan.slots, ops, strict=True)
    )
    links = _links(profile, ops, shapes)
    # Listed passes are one instruction each: weight gradients are complete only after the last of many passes, so
    # cutting one gains nothing.
    chunk_bytes = math.inf if plan.passes else _chunk_bytes(profile)
    chunks = [_chunks(profile, setting, slot, op, chunk_bytes) for slot, op in zip(plan.slots, ops, strict=True)]
    split = {pass_.slot for pass_ in plan.order if pass_.kind == WEIGHT}

    instructions: list[Instruction] = [Forward(slot=number) for number in range(len(plan.slots))]
    numbers: dict[Key, list[int]] = {(number, FORWARD): [number] for number in range(len(plan.slots))}
    for number, bounds in enumerate(chunks):
        for first, last in bounds:
            for part in (INPUT, WEIGHT) if number in split else (BACKWARD,):
                numbers.setdefault((number, part), []).append(len(instructions))
                instructions.append(Backward(slot=number, first=first, last=last, part=part))
    clock = _clock(plan, profile)
    ready = _ready(plan, instructions, clock)
    owning_ranks = owning_ranks or {}
    buckets = _buckets(plan, profile, setting, ops, instructions, ready, owning_ranks)
    link_base = len(instructions)
    for number in range(len(links)):
        instructions += [Exchange(link=number, backward=False), Exchange(link=number, backward=True)]
    bucket_base = len(instructions)
    instructions += [SyncGradients(bucket=number) for number in range(len(buckets))]
    gather_base = len(instructions)
    if plan.shard_optimizer:
        instructions += [GatherParameters(bucket=number) for number in range(len(buckets))]
    instructions.append(OptimizerStep())

    orders: dict[int, Order] = {compute_lane(lane): [] for lane in range(plan.num_lanes)}
    for pass_ in plan.order:
        slot = plan.slots[pass_.slot]
        lane = compute_lane(slot.lane_of_weights if pass_.kind == WEIGHT else slot.lane)
        orders[lane] += [(number, shapes[pass_.slot].ranks) for number in numbers[pass_.slot, pass_.kind]]
    orders[TRANSFER] = _transfer_order(plan, links, link_base, clock)
    if profile.graph.parameters:
        # Also on ranks whose parameters no microbatch of this step uses: schedulers and norms are those of all ranks.
        everywhere = [*(shape.ranks for shape in shapes), *(bucket.ranks for bucket in buckets)]
        everywhere += [np.asarray(ranks) for ranks in owning_ranks.values()]
        orders[COMPUTE].append((len(instructions) - 1, np.unique(np.concatenate(everywhere))))
    sync: Order = []
    if plan.shard_optimizer:
        # In the order in which the step needs them: one order for all ranks, here as below.
        uses = [min(_place_of(plan, instructions[backward]) for backward in bucket.after) for bucket in buckets]
        order = sorted(range(len(buckets)), key=lambda number: (uses[number], number))
        sync += [(gather_base + number, buckets[number].ranks) for number in order]
    sync += [(bucket_base + number, bucket.ranks) for number, bucket in enumerate(buckets)]
    orders[SYNC] = sync
    return Program(
        plan=plan,
        num_ranks=profile.cluster.num_devices,
        instructions=tuple(instructions),
        lanes=tuple(_lane(profile.cluster.num_devices, order) for _, order in sorted(orders.items())),
        slots=shapes,
        links=tuple(links),
        buckets=buckets,
        owning_ranks=tuple(sorted(owning_ranks.items())),
    )


def _place_of(plan: Plan, instruction: Instruction) -> tuple[int, int, int]:
    """The position of a backward instruction's layers in the forward order: round, slot, layer."""
    assert isinstance(instruction, Backward)
    return plan.slots[instruction.slot].round, instruction.slot, instruction.first


def _shape(
    profile: Profile,
    setting: Setting,
    slot: Slot,
    op: int,
    rows: Mapping[str, int],
    columns: dict[tuple[tuple[int, ...], int, int], tuple[Column, Column]],
) -> SlotShape:
    """How the rows of a slot are spread over its ranks. Slots with equal spreads share columns."""
    degree = setting.tensor_degrees[op]
    num_replicas = len(slot.devices) // degree
    metaop = profile.graph.metaops[op]
    num_rows, cost = rows.get(metaop.task, metaop.batch_size), metaop.cost
    if num_rows is None or profile.gangs:
        # The time on n devices is all that is known; whatever they share, each has an equal part of it.
        num_rows = num_replicas
    num_slices = num_rows * slot.sequence_degree
    key = (slot.devices, num_slices, num_replicas)
    if key not in columns:
        columns[key] = (np.asarray(slot.devices, dtype=np.int64), share_bounds(num_slices, num_replicas))
    ranks, bounds = columns[key]
    return SlotShape(
        op=op,
        ranks=ranks,
        bounds=bounds,
        tensor_degree=degree,
        gang=profile.gangs or (cost is not None and cost.meets),
        sequence_degree=slot.sequence_degree,
    )


def _links(profile: Profile, ops: list[int], shapes: tuple[SlotShape, ...]) -> list[Link]:
    links = []
    known: dict[tuple[int, ...], tuple[Flows, Flows]] = {}  # slots with equal placements have equal exchanges
    for producer, consumer in slot_links(ops, profile.graph):
        giver, taker = shapes[producer], shapes[consumer]
        key = (*placement_key(giver), *placement_key(taker))
        if key not in known:
            known[key] = (flows_between(giver, taker), flows_between(taker, giver))
        forward, backward = known[key]
        links.append(
            Link(
                producer=producer,
                consumer=consumer,
                bytes_per_row=bytes_per_row(profile.graph, giver, taker),
                forward=forward,
                backward=backward,
            )
        )
    return links


def _chunk_bytes(profile: Profile) -> float:
    """Bytes of gradients that are synchronised together."""
    numerics = profile.graph.numerics
    elements = sum(parameter.num_elements for parameter in profile.graph.parameters if parameter.trainable)
    links = [island.link for island in profile.cluster.islands]
    wanted = max(CHUNK_BYTES, *((link.collective_s or 0.0) * link.bytes_per_s / 2 for link in links))
    return min(wanted, max(_SMALL_CHUNK_BYTES, elements * numerics.gradient_bytes / _NUM_CHUNKS))


def _chunks(profile: Profile, setting: Setting, slot: Slot, op: int, chunk_bytes: float) -> list[tuple[int, int]]:
    """Layer ranges whose backward runs as one instruction, last layers first."""
    graph = profile.graph
    most_layers = -(-slot.num_layers // _WEIGHT_CHUNKS) if slot.has_weight_lane else slot.num_layers
    if not graph.metaops[op].parameters or profile.cluster.num_devices == 1:
        ends = range(slot.last, slot.first, -most_layers)
        return [(max(slot.first, end - most_layers), end) for end in ends]
    chunks: list[tuple[int, int]] = []
    last, num_bytes = slot.last, 0.0
    for layer in range(slot.last - 1, slot.first - 1, -1):
        parameters = graph.metaops[op].parameters[layer]
        num_bytes += sum(graph.parameters[parameter].num_elements for parameter in parameters)
        is_full = num_bytes * graph.numerics.gradient_bytes / setting.tensor_degrees[op] >= chunk_bytes
        if is_full or last - layer == most_layers or layer == slot.first:
            chunks.append((layer, last))
            last, num_bytes = layer, 0.0
    return chunks


def _clock(plan: Plan, profile: Profile) -> dict[Key, tuple[int, float, float]]:
    """By pass: a phase of the step, and from when to when in it. Passes and transfers are sorted by this clock.

    Folded slots have two phases for each round: forward in folded time, then backward in the same time reversed.
    """
    clock: dict[Key, tuple[int, float, float]] = {}
    for span in spans(plan, profile):
        phase = 2 * plan.slots[span.slot].round
        if span.kind == FOLDED:
            clock[span.slot, FORWARD] = (phase, span.start_s, span.end_s)
            for kind in (INPUT, WEIGHT) if plan.slots[span.slot].has_weight_lane else (BACKWARD,):
                clock[span.slot, kind] = (phase + 1, -span.end_s, -span.start_s)
        else:
            clock[span.slot, span.kind] = (phase, span.start_s, span.end_s)
    return clock


def _ready(
    plan: Plan, instructions: Sequence[Instruction], clock: Mapping[Key, tuple[int, float, float]]
) -> dict[int, tuple[int, float]]:
    """When each backward instruction ends; chunks of later layers end earlier, in proportion to their layers."""
    ready: dict[int, tuple[int, float]] = {}
    for number, instruction in enumerate(instructions):
        if isinstance(instruction, Backward):
            slot = plan.slots[instruction.slot]
            phase, start_s, end_s = clock[instruction.slot, instruction.part]
            layer_s = (end_s - start_s) / slot.num_layers
            ready[number] = (phase, end_s - (instruction.first - slot.first) * layer_s)
    return ready


def _buckets(
    plan: Plan,
    profile: Profile,
    setting: Setting,
    ops: list[int],
    instructions: list[Instruction],
    ready: dict[int, tuple[int, float]],
    owning_ranks: Mapping[int, tuple[int, ...]],
) -> tuple[Bucket, ...]:
    """Parameters grouped by their ranks and by the backward instructions they depend on, in the order in which they
    become ready.

    A parameter of tensor degree d is d shards; a device always holds the same one, so each shard has its own group.
    """
    graph = profile.graph
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)  # parameter -> (slot, backward instruction)
    for backward, instruction in enumerate(instructions):
        if isinstance(instruction, Backward) and instruction.makes_weights:
            for layer in graph.metaops[ops[instruction.slot]].parameters[instruction.first : instruction.last]:
                for parameter in layer:
                    users[parameter].append((instruction.slot, backward))

    # Where ranks share the optimizer state of what they hold from step to step, buckets must be the same in every step:
    # a block of parameters is reduced after all backwards that add to any of it, or left out.
    blocks = _blocks(profile, owning_ranks) if plan.shard_optimizer else []
    block_of: dict[int, int] = {}
    own_uses = dict(users)
    for number, block in enumerate(blocks):
        uses = [use for parameter in block for use in users.get(parameter, ())]
        if uses:
            users.update(dict.fromkeys(block, uses))
            block_of.update(dict.fromkeys(block, number))
    groups: dict[tuple[Users, tuple[int, ...], int, int, int | None], list[int]] = defaultdict(list)
    for parameter, uses in sorted(users.items()):
        if graph.parameters[parameter].trainable:
            slots = tuple(sorted({slot for slot, _ in uses}))
            after = tuple(sorted({backward for _, backward in uses}))
            # Weights that this step does not use are sharded as those that they are reduced with.
            degree = setting.tensor_degrees[ops[own_uses.get(parameter, uses)[0][0]]]
            using = (slots, owning_ranks.get(parameter, ()))
            for shard in range(degree):
                groups[using, after, degree, shard, block_of.get(parameter)].append(parameter)

    place = np.asarray(profile.cluster.place_in_island)
    ranks_of: dict[tuple[Users, int, int], Column] = {}
    buckets: list[tuple[tuple[int, float], Bucket]] = []
    for (using, after, degree, shard, _), parameters in groups.items():
        if (using, degree, shard) not in ranks_of:
            slots, idle_owners = using
            ranks = np.unique([*(device for slot in slots for device in plan.slots[slot].devices), *idle_owners])
            ranks_of[using, degree, shard] = ranks[place[ranks] % degree == shard]
        ranks = ranks_of[using, degree, shard]
        if len(ranks) > 1:
            elements = sum(graph.parameters[parameter].elements_at(degree) for parameter in parameters)
            bucket = Bucket(
                parameters=tuple(parameters),
                num_bytes=elements * graph.numerics.gradient_bytes,
                ranks=ranks,
                after=after,
            )
            buckets.append((max(ready[backward] for backward in after), bucket))
    # One global order for all ranks, so that overlapping groups cannot wait for each other in a circle.
    buckets.sort(key=lambda entry: (entry[0], entry[1].parameters))
    return tuple(bucket for _, bucket in buckets)


def _blocks(profile: Profile, owning_ranks: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """Trainable parameters that the same ranks hold from step to step, in order, a chunk of bytes in each block. They
    follow from the owners alone, whatever the passes of a step use."""
    graph = profile.graph
    chunk_bytes = _chunk_bytes(profile)
    blocks: list[list[int]] = []
    open_blocks: dict[tuple[int, ...], tuple[list[int], float]] = {}
    for parameter, ranks in sorted(owning_ranks.items()):
        if not graph.parameters[parameter].trainable:
            continue
        block, num_bytes = open_blocks.get(ranks, ([], 0.0))
        if not block or num_bytes >= chunk_bytes:
            block, num_bytes = [], 0.0
            blocks.append(block)
        block.append(parameter)
        num_bytes += graph.parameters[parameter].num_elements * graph.numerics.gradient_bytes
        open_blocks[ranks] = block, num_bytes
    return blocks


Key = tuple[int, str]  # a slot and a kind of pass
Order = list[tuple[int, Column]]
Users = tuple[tuple[int, ...], tuple[int, ...]]  # slots, and devices that keep a parameter without a slot


def _transfer_order(
    plan: Plan, links: list[Link], link_base: int, clock: Mapping[Key, tuple[int, float, float]]
) -> Order:
    """Exchanges as the passes end that make what is sent: as a whole the order of one run of the plan, so that no rank
    waits for another in a circle. What one pass sends to several goes in the order of links, mirrored in backward where
    the plan is."""
    place = {(pass_.slot, pass_.kind): number for number, pass_ in enumerate(plan.order)}
    backward = [INPUT if (number, INPUT) in place else BACKWARD for number in range(len(plan.slots))]

    def end_of(source: Key) -> tuple[int, float, int]:
        phase, _, end_s = clock[source]
        return phase, end_s, place[source]

    keyed: list[tuple[tuple[int, float, int], int, int, Column]] = []
    for number, link in enumerate(links):
        forward_end, backward_end = end_of((link.producer, FORWARD)), end_of((link.consumer, backward[link.consumer]))
        keyed.append((forward_end, number, link_base + 2 * number, _ranks_of(link.forward)))
        mirrored = number if plan.passes else -number
        keyed.append((backward_end, mirrored, link_base + 2 * number + 1, _ranks_of(link.backward)))
    return [(number, ranks) for _, _, number, ranks in sorted(keyed, key=lambda entry: entry[:2])]


def _ranks_of(flows: Flows) -> Column:
    return np.unique(np.concatenate([flows.source, flows.destination]))


def _lane(num_ranks: int, order: Order) -> Lane:
    if not order:
        return lane_from_pairs(num_ranks, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    instructions = np.concatenate([np.full(len(ranks), number, dtype=np.int64) for number, ranks in order])
    return lane_from_pairs(num_ranks, instructions, np.concatenate([ranks for _, ranks in order]))
