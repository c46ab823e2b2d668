"""From a profile with parts to passes on devices, and from their order back to a plan.

The language model is a pipeline as ever: its chunks are stages on pipeline ranks, in 1F1B order. Chains that stand
whole on devices run in parts. All of it becomes one list of passes with what they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import MetaGraph
from spindle.plan import BACKWARD, FORWARD, Piece, Plan, assemble_passes
from spindle.planners.balance import NOT_ALLOWED, assign_items
from spindle.planners.colocate.order import Order, Passes
from spindle.planners.options import SPREAD, Chain, Layout
from spindle.planners.pipeline.orders import interleaved, one_forward_one_backward
from spindle.planners.pipeline.segments import FORWARD as FORWARD_PASS
from spindle.planners.pipeline.segments import Column
from spindle.planners.pipeline.stages import (
    NS,
    Batch,
    Stage,
    StageCosts,
    StagePiece,
    batches_of,
    held_bytes,
    ranks_of_whole,
    setting_in,
    shares_of_replicas,
)
from spindle.profile import Profile, bytes_text

EVERYTHING = 1 << 20  # microbatches: as `ahead`, all before the first of the language model; as `lag`, behind its last
_SCALE = 8  # keys between those of two passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A call of a chain that stands whole: its microbatch (among the replica's), its pieces, and what it costs on
    sequence groups of 1, 2, ... tensor groups."""

    microbatch: int
    chain: Chain
    pieces: tuple[StagePiece, ...]
    stages: Mapping[int, Stage]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replica:
    """One replica's stages and parts."""

    number: int
    batch: Batch
    parts: tuple[Part, ...]


Known = dict[tuple[int, int, int, int], Stage]  # by profile, first op of a part, tensor and sequence degree
PART_CHOICES = 7  # of memory for a part: there are many of them, most unlike any other


def replicas_of(profile: Profile, layout: Layout, known: Known | None = None) -> list[Replica]:
    """Stages and parts of all replicas that have microbatches; `known` keeps what parts cost for other layouts."""
    known = {} if known is None else known
    graph, setting = profile.graph, setting_in(profile, layout)
    costs = StageCosts(profile, layout)
    chain_of = {module: chain for chain in layout.chains for module in chain.modules}
    is_whole = [chain_of[op.module or ""].placement != SPREAD for op in graph.metaops]
    calls = _connected(graph, is_whole)
    tasks_of = [tasks for tasks in shares_of_replicas(profile, layout) if tasks]
    replicas = []
    for batch, tasks in zip(batches_of(profile, layout), tasks_of, strict=True):
        microbatch_of = {task: number for number, task in enumerate(tasks)}
        parts = []
        for positions in calls:
            task = graph.metaops[positions[0]].task
            if task not in microbatch_of:
                continue
            pieces = tuple(StagePiece(position, 0, graph.metaops[position].num_layers) for position in positions)
            chain = chain_of[graph.metaops[positions[0]].module or ""]
            degree = chain.tensor_degree or layout.tensor_degree
            curves = [profile.curve(position, setting) for position in positions]
            shared = sorted(set.intersection(*({count // degree for count in curve.num_devices} for curve in curves)))
            stages = {}
            for count in shared:
                key = (id(profile), positions[0], degree, count)
                if key not in known:
                    known[key] = costs.stage(pieces, 0.0, degree, count, PART_CHOICES)
                stages[count] = known[key]
            parts.append(
                Part(
                    microbatch=microbatch_of[task],
                    chain=chain,
                    pieces=pieces,
                    stages=stages,
                )
            )
        replicas.append(Replica(number=batch.replica, batch=batch, parts=tuple(parts)))
    return replicas


def _connected(graph: MetaGraph, is_whole: Sequence[bool]) -> list[list[int]]:
    """Ops of chains that stand whole, in groups that read each other: a part is one group (an encoder's call, and that
    of its projector), in the order of the flows."""
    group_of: dict[int, list[int]] = {}
    for position in graph.order:
        if not is_whole[position]:
            continue
        joined: list[int] = []
        for source in graph.predecessors[position]:
            group = group_of.get(source, [])
            joined += [member for member in group if member not in joined]
        joined.append(position)
        group_of.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in group_of.values()}.values())


def assigned_parts(
    profile: Profile, layout: Layout, replica: Replica, groups: bool = True, in_turn: bool = False
) -> list[tuple[int, int]]:
    """For each part the first of its devices, counted inside the replica, and its sequence degree.

    Longest first, level over the step with the work of the stages that stand there. Without `groups` every part stays
    on one tensor group; `in_turn` goes round instead, as systems without balancing do.
    """
    num_devices = layout.num_ranks * layout.tensor_degree
    load = np.zeros(num_devices, dtype=np.int64)
    segments = replica.batch.segments
    by_rank = (segments.forward_ns + segments.backward_ns).sum(axis=0)
    load[layout.num_dedicated * layout.tensor_degree :] = np.repeat(by_rank, layout.tensor_degree)
    begin = replica.number * num_devices
    island = profile.cluster.island_of[begin : begin + num_devices]
    result: list[tuple[int, int]] = [(0, 1)] * len(replica.parts)
    for chain in {part.chain: None for part in replica.parts}:
        degree = chain.tensor_degree or layout.tensor_degree
        ranks = ranks_of_whole(layout, chain)
        devices = np.arange(len(ranks) * layout.tensor_degree)
        sizes = np.unique(np.asarray(island)[devices], return_counts=True)[1].tolist()
        numbers = [number for number, part in enumerate(replica.parts) if part.chain is chain]
        if in_turn:
            for place, number in enumerate(numbers):
                result[number] = (place * degree % len(devices) // degree * degree, 1)
            continue
        shared = sorted({count for number in numbers for count in replica.parts[number].stages}) if groups else [1]
        times = np.full((len(shared), len(numbers)), NOT_ALLOWED, dtype=np.int64)
        for column, number in enumerate(numbers):
            for row, count in enumerate(shared):
                stage = replica.parts[number].stages.get(count)
                if stage is not None:
                    fastest = stage.choices[-1]
                    times[row, column] = fastest.forward_ns + fastest.backward_ns
        assignment = assign_items(times, [degree * count for count in shared], sizes, load[devices])
        load[devices] = assignment.load_ns
        for column, number in enumerate(numbers):
            result[number] = int(assignment.first_device[column]), int(assignment.degree[column]) // degree
    return result


def activation_budgets(profile: Profile, layout: Layout, replica: Replica) -> Column:
    """By device of a replica: bytes for activations, beside weights, optimizer and the working space of a pass."""
    static, _ = held_bytes(profile, layout)
    working = np.zeros(layout.num_ranks, dtype=np.int64)
    of_stages = [[stage.working for stage in of_pair] for of_pair in replica.batch.stages]
    working[layout.num_dedicated :] = np.array(of_stages).max(axis=0)
    for part in replica.parts:
        for rank in ranks_of_whole(layout, part.chain):
            working[rank] = max(working[rank], min(stage.working for stage in part.stages.values()))
    budgets = profile.cluster.kind.memory_bytes - static - working
    if budgets.min() <= 0:
        rank = int(np.argmin(budgets))
        needed = int(static[rank] + working[rank])
        raise DoesNotFitError(
            f"{profile.graph.name} does not fit: a device of pipeline rank {rank} would need {bytes_text(needed)} "
            f"before it keeps any activations, of the {bytes_text(profile.cluster.kind.memory_bytes)} there",
            needed,
        )
    return np.repeat(budgets, layout.tensor_degree)


def passes_of(
    profile: Profile, layout: Layout, replica: Replica, devices: Sequence[tuple[int, int]], ahead: int, lag: int
) -> Passes:
    """All passes of a replica, with keys: the language model's by its own 1F1B schedule; parts `ahead` microbatches
    before their language model, and their backwards `lag` microbatches behind it."""
    segments, degree = replica.batch.segments, layout.tensor_degree
    pairs, ranks = segments.num_pairs, segments.num_ranks
    is_plain = np.bincount(segments.microbatch).max() == 1
    schedule = one_forward_one_backward(segments) if is_plain else interleaved(segments)
    num_stages = pairs * ranks
    num_entities = num_stages + len(replica.parts)
    first, count = np.empty(num_entities, dtype=np.int64), np.empty(num_entities, dtype=np.int64)
    first[:num_stages] = np.tile((layout.num_dedicated + np.arange(ranks)) * degree, pairs)
    count[:num_stages] = degree
    key = np.zeros(2 * num_entities, dtype=np.int64)
    needs: list[tuple[int, int, int]] = []

    def number(pair: int, rank: int, is_backward: int) -> int:
        return 2 * (pair * ranks + rank) + is_backward

    # Stages: the order of each rank, and the flows between them.
    first_start = np.zeros(segments.num_microbatches, dtype=np.int64)
    last_end = np.zeros(segments.num_microbatches, dtype=np.int64)
    entry: dict[int, int] = {}  # by microbatch: the pair that takes what encoders make
    starts = segments.predecessor_starts
    for pair in range(pairs):
        before = range(starts[pair], starts[pair + 1])
        if not len(before):
            entry.setdefault(int(segments.microbatch[pair]), pair)
        for edge in before:
            source, wrap = int(segments.predecessors[edge]), int(segments.wrap_ns[edge])
            needs.append((number(pair, 0, 0), number(source, ranks - 1, 0), wrap))
            needs.append((number(source, ranks - 1, 1), number(pair, 0, 1), wrap))
        hop = int(segments.hop_ns[pair])
        for rank in range(ranks):
            needs.append((number(pair, rank, 1), number(pair, rank, 0), 0))
            if rank:
                needs.append((number(pair, rank, 0), number(pair, rank - 1, 0), hop))
                needs.append((number(pair, rank - 1, 1), number(pair, rank, 1), hop))
    for rank in range(ranks):
        previous = -1
        for place in range(schedule.pair.shape[1]):
            pair = int(schedule.pair[rank, place])
            if pair < 0:
                break
            is_backward = int(schedule.kind[rank, place] != FORWARD_PASS)
            here = number(pair, rank, is_backward)
            key[here] = _SCALE * int(schedule.start_ns[rank, place]) + 4
            microbatch = int(segments.microbatch[pair])
            if rank == 0 and entry[microbatch] == pair:
                if is_backward:
                    last_end[microbatch] = int(schedule.end_ns[rank, place])
                else:
                    first_start[microbatch] = int(schedule.start_ns[rank, place])
            if previous >= 0:
                needs.append((here, previous, 0))
            previous = here
    # Parts, just in time by the schedule of the stages alone.
    forward_order = np.argsort(first_start, kind="stable")
    backward_order = np.argsort(last_end, kind="stable")
    forward_place, backward_place = np.argsort(forward_order), np.argsort(backward_order)
    beyond = _SCALE * (schedule.makespan_ns + 1)
    wire_ns, graph = _wire_ns(profile), profile.graph
    stage_of = {
        piece.op: (pair, rank)
        for pair, of_pair in enumerate(replica.batch.pieces)
        for rank, pieces in enumerate(of_pair)
        for piece in pieces
        if piece.first == 0
    }
    for index, (part, (device, sequence_degree)) in enumerate(zip(replica.parts, devices, strict=True)):
        entity = num_stages + index
        first[entity] = device
        count[entity] = sequence_degree * (part.chain.tensor_degree or degree)
        place = int(forward_place[part.microbatch])
        if place >= ahead:
            key[2 * entity] = _SCALE * int(first_start[forward_order[place - ahead]]) + 2
        else:
            key[2 * entity] = place - len(forward_place)
        place = int(backward_place[part.microbatch])
        if place + lag < len(backward_place):
            key[2 * entity + 1] = _SCALE * int(last_end[backward_order[place + lag]]) + 3
        else:
            key[2 * entity + 1] = beyond + place
        needs.append((2 * entity + 1, 2 * entity, 0))
        output_ns = wire_ns(part.stages[sequence_degree].output_bytes)
        fed = {op for piece in part.pieces for op in graph.successors[piece.op]}
        for pair, rank in sorted(stage_of[op] for op in fed if op in stage_of):
            needs.append((number(pair, rank, 0), 2 * entity, output_ns))
            needs.append((2 * entity + 1, number(pair, rank, 1), output_ns))
    choices = [stage.choices for of_pair in replica.batch.stages for stage in of_pair]
    choices += [
        part.stages[sequence_degree].choices for part, (_, sequence_degree) in zip(replica.parts, devices, strict=True)
    ]
    most = max(map(len, choices))
    padded = [of_entity + of_entity[-1:] * (most - len(of_entity)) for of_entity in choices]
    return Passes(
        first=first,
        count=count,
        is_part=np.arange(num_entities) >= num_stages,
        needs=np.array(needs, dtype=np.int64).reshape(-1, 3),
        key=key,
        choice_forward_ns=np.array([[choice.forward_ns for choice in row] for row in padded]),
        choice_backward_ns=np.array([[choice.backward_ns for choice in row] for row in padded]),
        choice_memory=np.array([[choice.memory for choice in row] for row in padded]),
        choice_count=np.array([len(row) for row in choices]),
        num_devices=layout.num_ranks * degree,
    )


def _wire_ns(profile: Profile) -> Callable[[float], int]:
    """Nanoseconds that so many bytes take to another device, at the slowest link there is."""
    islands = profile.cluster.islands
    links = [island.link for island in islands] + ([island.uplink for island in islands] if len(islands) > 1 else [])
    rate, latency_s = min(link.bytes_per_s for link in links), max(link.latency_s for link in links)
    return lambda num_bytes: round((num_bytes / rate + latency_s) * NS)


def plan_of_orders(
    profile: Profile,
    layout: Layout,
    planner: str,
    replicas: Sequence[Replica],
    assigned: Sequence[Sequence[tuple[int, int]]],
    orders: Sequence[Order],
) -> Plan:
    """The plan of the orders of all replicas."""
    pieces: list[Piece] = []
    timed: list[tuple[int, int, str, list[int]]] = []
    for replica, devices, order in zip(replicas, assigned, orders, strict=True):
        begin = replica.number * layout.num_ranks * layout.tensor_degree
        ranks = replica.batch.segments.num_ranks
        entities: list[tuple[Sequence[StagePiece], Stage, range, int]] = [
            (
                stage_pieces,
                stage,
                range(
                    begin + (layout.num_dedicated + rank) * layout.tensor_degree,
                    begin + (layout.num_dedicated + rank + 1) * layout.tensor_degree,
                ),
                1,
            )
            for of_pieces, of_stages in zip(replica.batch.pieces, replica.batch.stages, strict=True)
            for rank, (stage_pieces, stage) in enumerate(zip(of_pieces, of_stages, strict=True))
        ]
        assert len(entities) == replica.batch.segments.num_pairs * ranks
        for part, (device, shared) in zip(replica.parts, devices, strict=True):
            width = shared * (part.chain.tensor_degree or layout.tensor_degree)
            where = range(begin + device, begin + device + width)
            entities.append((part.pieces, part.stages[shared], where, shared))
        numbers: list[list[int]] = []
        for entity, (stage_pieces, stage, where, shared) in enumerate(entities):
            choice = stage.choices[int(order.choice[entity])]
            numbers.append(list(range(len(pieces), len(pieces) + len(stage_pieces))))
            pieces += [
                Piece(
                    op=piece.op,
                    num_layers=piece.last - piece.first,
                    devices=tuple(where),
                    recomputed=recomputed,
                    offloaded=offloaded,
                    sequence_degree=shared,
                )
                for piece, recomputed, offloaded in zip(stage_pieces, choice.recomputed, choice.offloaded, strict=True)
            ]
        for place, pass_ in enumerate(order.passes.tolist()):
            slots, kind = numbers[pass_ // 2], BACKWARD if pass_ % 2 else FORWARD
            timed.append((int(order.start_ns[pass_]), place, kind, slots if kind == FORWARD else slots[::-1]))
    if not pieces:
        raise PlanError("a plan needs at least one pass")
    timed.sort(key=lambda entry: entry[:2])
    listed = [(slot, kind) for _, _, kind, slots in timed for slot in slots]
    return assemble_passes(profile, setting_in(profile, layout), planner, pieces, listed)
