"""Lower a plan to a program: transfers by interval overlap, the mirrored backward, gradients reduced as they become
ready, and, with a sharded optimizer, parameters gathered before they are used.

One function for each, in this order: shapes of slots, links between them, backward chunks, gradient buckets, and the
order of instructions on every rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from spindle.plan import (
    BACKWARD,
    INPUT,
    PASS_KINDS,
    WEIGHT,
    Pass,
    Plan,
    Slot,
    pass_times,
    setting_of,
    slot_links,
    spans,
)
from spindle.profile import Profile, Setting
from spindle.program.columns import InstructionColumns, Jagged, columns_of, sorted_unique, unique_objects
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
from spindle.program.parameter_uses import gradient_uses
from spindle.program.program import Bucket, Column, Flows, Link, Program, SlotShape, lane_from_pairs
from spindle.program.row_flows import bytes_per_row, flows_between, placement_key, share_bounds

# Gradients are reduced while backward still runs; smaller chunks overlap more and need more messages. A small model has
# `_NUM_CHUNKS` chunks. If the measured fixed cost of a collective is large, chunks are so large that reducing their
# bytes takes as long.
CHUNK_BYTES = 64e6
_SMALL_CHUNK_BYTES, _NUM_CHUNKS = 1e6, 8
_WEIGHT_CHUNKS = 8  # chunks of a slot with a weight lane: weight gradients of one overlap input gradients of the next


def lower(
    plan: Plan,
    profile: Profile,
    rows: Mapping[str, int] | None = None,
    owning_ranks: Mapping[int, tuple[int, ...]] | None = None,
) -> Program:
    """Lower a legal plan to a program; does not check the plan again.

    `rows` gives the batch sizes of tasks that differ from the plan in this step (a loader's short last batch).
    `owning_ranks` gives, by parameter, the devices that keep it from step to step, even if no slot of this plan uses it
    there: they receive its gradient, too.
    """
    setting = setting_of(plan, profile)
    ops = [profile.graph.positions[slot.op] for slot in plan.slots]
    shapes = _shapes(plan, profile, setting, ops, rows or {})
    links = _links(profile, ops, shapes)
    # If the plan lists passes, each backward is a single chunk: weight gradients are complete only after the last of
    # many microbatches, so smaller chunks gain nothing.
    chunk_bytes = math.inf if plan.passes else _chunk_bytes(profile)
    order = plan.order
    split = {pass_.slot for pass_ in order if pass_.kind == WEIGHT}

    instructions: list[Instruction] = [Forward(slot=number) for number in range(len(plan.slots))]
    for number, (slot, op) in enumerate(zip(plan.slots, ops, strict=True)):
        for first, last in _chunks(profile, setting, slot, op, chunk_bytes):
            for part in (INPUT, WEIGHT) if number in split else (BACKWARD,):
                instructions.append(Backward(slot=number, first=first, last=last, part=part))
    passes = columns_of(instructions)
    clock = _clock(plan, profile, setting, ops, order)
    slot_ranks = Jagged.concatenate([shape.ranks for shape in shapes])
    owning_ranks = owning_ranks or {}
    buckets = _buckets(plan, profile, setting, ops, instructions, _ready(plan, passes, clock), slot_ranks, owning_ranks)
    link_base = len(instructions)
    for number in range(len(links)):
        instructions += [Exchange(link=number, backward=False), Exchange(link=number, backward=True)]
    bucket_base = len(instructions)
    instructions += [SyncGradients(bucket=number) for number in range(len(buckets))]
    gather_base = len(instructions)
    if plan.shard_optimizer:
        instructions += [GatherParameters(bucket=number) for number in range(len(buckets))]
    instructions.append(OptimizerStep())

    orders = _compute_orders(plan, order, passes, slot_ranks)
    orders[TRANSFER] = _transfer_order(plan, links, link_base, clock)
    if profile.graph.parameters:
        # Ranks whose parameters no microbatch of this step uses update as well: learning-rate schedulers advance on all
        # ranks, and gradient norms are reduced over all of them.
        everywhere = [slot_ranks.values, *(bucket.ranks for bucket in buckets)]
        everywhere += [np.array(ranks, dtype=np.int64) for ranks in set(owning_ranks.values())]
        updating = sorted_unique(profile.cluster.num_devices, *everywhere)
        numbers, ranks = orders[COMPUTE]
        step = np.full(len(updating), len(instructions) - 1)
        orders[COMPUTE] = np.append(numbers, step), np.append(ranks, updating)
    number_of_bucket = np.arange(len(buckets))
    collectives, reduced = bucket_base + number_of_bucket, number_of_bucket
    if plan.shard_optimizer:
        # Gathers come in the order in which the step needs them; like reductions, in one order for all ranks.
        places = _dense_ranks(_rounds(plan)[passes.index], passes.index, passes.first)
        uses = np.array([places[list(bucket.after)].min() for bucket in buckets], dtype=np.int64)
        gathered = np.argsort(uses, kind="stable")
        collectives, reduced = np.append(gather_base + gathered, collectives), np.append(gathered, reduced)
    orders[SYNC] = _on_ranks(collectives, Jagged.concatenate([bucket.ranks for bucket in buckets]), reduced)
    return Program(
        plan=plan,
        num_ranks=profile.cluster.num_devices,
        instructions=tuple(instructions),
        lanes=tuple(lane_from_pairs(profile.cluster.num_devices, *orders[lane]) for lane in sorted(orders)),
        slots=shapes,
        links=tuple(links),
        buckets=buckets,
        owning_ranks=tuple(sorted(owning_ranks.items())),
    )


def _rounds(plan: Plan) -> Column:
    """The round of each slot."""
    return np.array([slot.round for slot in plan.slots], dtype=np.int64)


def _dense_ranks(*columns: np.ndarray) -> Column:
    """The rank of each row in lexicographic order, by the first column first; equal rows have equal ranks."""
    order = np.lexsort(columns[::-1])
    ranks = np.zeros(len(order), dtype=np.int64)
    for column in columns:
        ranks[1:] |= column[order][1:] != column[order][:-1]
    result = np.empty_like(ranks)
    result[order] = np.cumsum(ranks)
    return result


def _shapes(
    plan: Plan, profile: Profile, setting: Setting, ops: Sequence[int], rows: Mapping[str, int]
) -> tuple[SlotShape, ...]:
    """How the rows of each slot are spread over its ranks. Slots with equal placements share columns."""
    columns: dict[tuple[tuple[int, ...], int, int], tuple[Column, Column]] = {}
    shapes = []
    for slot, op in zip(plan.slots, ops, strict=True):
        degree, metaop = setting.tensor_degrees[op], profile.graph.metaops[op]
        num_replicas = len(slot.devices) // degree
        num_rows, cost = rows.get(metaop.task, metaop.batch_size), metaop.cost
        if num_rows is None or profile.gangs:
            # Only the time on n devices is known, not what they share: one row for each replica.
            num_rows = num_replicas
        num_slices = num_rows * slot.sequence_degree
        key = (slot.devices, num_slices, num_replicas)
        if key not in columns:
            columns[key] = (np.asarray(slot.devices, dtype=np.int64), share_bounds(num_slices, num_replicas))
        ranks, bounds = columns[key]
        shapes.append(
            SlotShape(
                op=op,
                ranks=ranks,
                bounds=bounds,
                tensor_degree=degree,
                gang=profile.gangs or (cost is not None and cost.gang),
                sequence_degree=slot.sequence_degree,
            )
        )
    return tuple(shapes)


def _links(profile: Profile, ops: list[int], shapes: tuple[SlotShape, ...]) -> list[Link]:
    links = []
    known: dict[tuple[int, ...], tuple[Flows, Flows]] = {}  # slots with equal placements have equal exchanges
    pairs = slot_links(ops, profile.graph)
    producers, consumers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    row_bytes = bytes_per_row(profile.graph, shapes, producers, consumers)
    placements = [placement_key(shape) for shape in shapes]
    for (producer, consumer), num_bytes in zip(pairs, row_bytes, strict=True):
        key = placements[producer] + placements[consumer]
        if key not in known:
            source, target = shapes[producer], shapes[consumer]
            known[key] = (flows_between(source, target), flows_between(target, source))
        forward, backward = known[key]
        links.append(
            Link(producer=producer, consumer=consumer, bytes_per_row=num_bytes, forward=forward, backward=backward)
        )
    return links


def _chunk_bytes(profile: Profile) -> float:
    """Bytes of gradients to reduce together."""
    numerics = profile.graph.numerics
    elements = sum(parameter.num_elements for parameter in profile.graph.parameters if parameter.trainable)
    links = [island.link for island in profile.cluster.islands]
    wanted = max(CHUNK_BYTES, *((link.collective_s or 0.0) * link.bytes_per_s / 2 for link in links))
    return min(wanted, max(_SMALL_CHUNK_BYTES, elements * numerics.gradient_bytes / _NUM_CHUNKS))


def _chunks(profile: Profile, setting: Setting, slot: Slot, op: int, chunk_bytes: float) -> list[tuple[int, int]]:
    """Layer ranges whose backward runs as one instruction, last layers first."""
    graph = profile.graph
    if chunk_bytes == math.inf and not slot.has_weight_lane:
        return [(slot.first, slot.last)]
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Clock:
    """By kind of pass and slot: the phase of the step that it is in, its start and end in that phase, and its position
    in the order of the plan. Passes and transfers are sorted by this clock."""

    phase: Column
    start_s: np.ndarray
    end_s: np.ndarray
    place: Column


def _clock(plan: Plan, profile: Profile, setting: Setting, ops: Sequence[int], order: Sequence[Pass]) -> _Clock:
    """The clock of a plan. A mirrored plan has two phases in each round: forward in folded time, then backward in
    reversed folded time."""
    shape = (len(PASS_KINDS), len(plan.slots))
    phase, start_s, end_s = np.tile(2 * _rounds(plan), (len(PASS_KINDS), 1)), np.zeros(shape), np.zeros(shape)
    kind, slot = _kinds(order), _slots(order)
    if plan.passes:
        keys = [(pass_.slot, pass_.kind) for pass_ in order]
        start_s[kind, slot], end_s[kind, slot] = pass_times(plan.slots, ops, keys, profile, setting)
    else:
        forward, *backward = range(len(PASS_KINDS))
        folded = spans(plan, profile)
        start_s[:], end_s[:] = [span.start_s for span in folded], [span.end_s for span in folded]
        start_s[backward], end_s[backward] = -end_s[forward], -start_s[forward]
        phase[backward] += 1
    place = np.zeros(shape, dtype=np.int64)
    place[kind, slot] = np.arange(len(order))
    return _Clock(phase=phase, start_s=start_s, end_s=end_s, place=place)


def _kinds(order: Sequence[Pass]) -> Column:
    """The position of each pass's kind in `PASS_KINDS`."""
    number_of = {kind: number for number, kind in enumerate(PASS_KINDS)}
    return np.array([number_of[pass_.kind] for pass_ in order], dtype=np.int64)


def _slots(order: Sequence[Pass]) -> Column:
    return np.array([pass_.slot for pass_ in order], dtype=np.int64)


def _ready(plan: Plan, passes: InstructionColumns, clock: _Clock) -> Column:
    """For each instruction, the rank of its backward's end among all ends. Chunks of later layers end earlier, in
    proportion to the number of layers."""
    kind, slot = passes.pass_kind, passes.index
    num_layers = np.array([slot.num_layers for slot in plan.slots])
    begins = np.array([slot.first for slot in plan.slots])
    start_s, end_s = clock.start_s[kind, slot], clock.end_s[kind, slot]
    layer_s = (end_s - start_s) / num_layers[slot]
    return _dense_ranks(clock.phase[kind, slot], end_s - (passes.first - begins[slot]) * layer_s)


def _buckets(
    plan: Plan,
    profile: Profile,
    setting: Setting,
    ops: Sequence[int],
    instructions: Sequence[Instruction],
    ready: Column,
    slot_ranks: Jagged,
    owning_ranks: Mapping[int, tuple[int, ...]],
) -> tuple[Bucket, ...]:
    """Gradient buckets: parameters grouped by their ranks and by the backward instructions they depend on, in the order
    in which they become ready.

    A parameter of tensor degree d is d shards; a device always holds the same one, so each shard has its own group.
    """
    graph = profile.graph
    training, users = gradient_uses(instructions, [graph.metaops[op].parameters for op in ops])

    # With a sharded optimizer, shards stay from step to step, so buckets must be the same in every step: a block of
    # parameters is reduced after all backwards that add to any of them, or, if there are none, left out.
    blocks = _blocks(profile, owning_ranks) if plan.shard_optimizer else []
    block_of: dict[int, int] = {}
    own_uses = dict(users)
    for number, block in enumerate(blocks):
        uses = {id(users[parameter]): users[parameter] for parameter in block if parameter in users}
        if uses:
            users.update(dict.fromkeys(block, np.unique(np.concatenate(list(uses.values())))))
            block_of.update(dict.fromkeys(block, number))
    # Parameters with the same uses share a column, so the identity of the column is the key.
    groups: dict[tuple[int, tuple[int, ...], int, int, int | None], list[int]] = defaultdict(list)
    for parameter, column in sorted(users.items(), key=itemgetter(0)):
        if graph.parameters[parameter].trainable:
            # A parameter that this step does not use has the tensor degree of the parameters it is reduced with.
            first_use = training[int(own_uses.get(parameter, column)[0])][1]
            degree = setting.tensor_degrees[ops[first_use.slot]]
            idle_owners = owning_ranks.get(parameter, ())
            for shard in range(degree):
                groups[id(column), idle_owners, degree, shard, block_of.get(parameter)].append(parameter)

    place = np.asarray(profile.cluster.place_in_island)
    numbers = np.array([number for number, _ in training], dtype=np.int64)
    slots = np.array([instruction.slot for _, instruction in training], dtype=np.int64)
    after_of: dict[int, tuple[tuple[int, ...], int]] = {}
    ranks_of: dict[tuple[int, tuple[int, ...]], Column] = {}
    buckets: list[tuple[int, Bucket]] = []
    for (use, idle_owners, degree, shard, _), parameters in groups.items():
        column = users[parameters[0]]
        if use not in after_of:
            after_of[use] = tuple(numbers[column].tolist()), int(ready[numbers[column]].max())
        if (use, idle_owners) not in ranks_of:
            used_on = slot_ranks.take(np.unique(slots[column]))
            ranks_of[use, idle_owners] = sorted_unique(profile.cluster.num_devices, used_on, idle_owners)
        ranks = ranks_of[use, idle_owners]
        ranks = ranks[place[ranks] % degree == shard]
        if len(ranks) > 1:
            after, ready_at = after_of[use]
            elements = sum(graph.parameters[parameter].elements_at(degree) for parameter in parameters)
            bucket = Bucket(
                parameters=tuple(parameters),
                num_bytes=elements * graph.numerics.gradient_bytes,
                ranks=ranks,
                after=after,
            )
            buckets.append((ready_at, bucket))
    # One global order for all ranks, so that overlapping groups cannot wait for each other in a cycle.
    buckets.sort(key=lambda entry: (entry[0], entry[1].parameters))
    return tuple(bucket for _, bucket in buckets)


def _blocks(profile: Profile, owning_ranks: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """Blocks of trainable parameters with the same owning ranks, about a chunk of bytes each. They depend on the owners
    alone, so they are the same whatever the passes of a step use."""
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


Order = tuple[Column, Column]  # instructions and ranks, pair by pair


def _on_ranks(numbers: Column, ranks: Jagged, lists: Column) -> Order:
    """Instructions in order, each with the ranks of one list: instruction i with `ranks.of(lists[i])`."""
    return np.repeat(numbers, ranks.sizes[lists]), ranks.take(lists)


def _compute_orders(
    plan: Plan, order: Sequence[Pass], passes: InstructionColumns, slot_ranks: Jagged
) -> dict[int, Order]:
    """For each compute lane of the program, the instructions of its passes in the order of the plan."""
    keys = passes.pass_kind * len(plan.slots) + passes.index
    by_pass = Jagged.group_by(keys, np.arange(len(keys)), len(PASS_KINDS) * len(plan.slots))
    wanted = _kinds(order) * len(plan.slots) + _slots(order)
    lanes = np.array(
        [
            plan.slots[pass_.slot].lane_of_weights if pass_.kind == WEIGHT else plan.slots[pass_.slot].lane
            for pass_ in order
        ]
    )
    orders = {}
    for lane in range(plan.num_lanes):
        numbers = by_pass.take(wanted[lanes == lane])
        orders[compute_lane(lane)] = _on_ranks(numbers, slot_ranks, passes.index[numbers])
    return orders


def _transfer_order(plan: Plan, links: Sequence[Link], link_base: int, clock: _Clock) -> Order:
    """Exchanges in the order in which the passes that produce their data end. This is the order of one run of the plan,
    so ranks cannot wait for each other in a cycle. Exchanges after the same pass are in the order of links, which is
    reversed in the backward of a mirrored plan."""
    is_split = np.zeros(len(plan.slots), dtype=bool)
    is_split[[pass_.slot for pass_ in plan.order if pass_.kind == INPUT]] = True
    producer = np.array([link.producer for link in links], dtype=np.int64)
    consumer = np.array([link.consumer for link in links], dtype=np.int64)
    # By link and direction: the kind and the slot of the pass that produces the data.
    kind = np.stack([np.zeros_like(consumer), np.where(is_split[consumer], 2, 1)], axis=1).ravel()
    slot = np.stack([producer, consumer], axis=1).ravel()
    number = np.arange(len(links))
    number = np.stack([number, number if plan.passes else -number], axis=1).ravel()
    order = np.lexsort((number, clock.place[kind, slot], clock.end_s[kind, slot], clock.phase[kind, slot]))
    flows, flows_of = unique_objects(each for link in links for each in (link.forward, link.backward))
    return _on_ranks(link_base + order, Jagged.concatenate([_ranks_of(each) for each in flows]), flows_of[order])


def _ranks_of(flows: Flows) -> Column:
    return np.unique(np.concatenate([flows.source, flows.destination]))
