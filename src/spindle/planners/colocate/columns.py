"""From a profile with parts to passes on devices, and from their order back to a plan.

The language model is pipelined as usual: its chunks are stages on pipeline ranks, in 1F1B order. Chains that stand
whole on devices run in parts. All of it becomes one list of passes with what they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import MetaGraph
from spindle.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Piece, Plan, assemble_passes
from spindle.planners.balance import NOT_ALLOWED, assign_items
from spindle.planners.colocate.order import Order, Passes
from spindle.planners.options import SPREAD, Chain, Layout
from spindle.planners.pipeline.orders import interleaved, one_forward_one_backward
from spindle.planners.pipeline.rank_parameters import held_bytes, ranks_of_whole, setting_in
from spindle.planners.pipeline.segments import FORWARD as FORWARD_PASS
from spindle.planners.pipeline.segments import Column
from spindle.planners.pipeline.stage_costs import NS, Choice, Stage, StageCosts, StagePiece
from spindle.planners.pipeline.stages import Batch, batches_of, shares_of_replicas
from spindle.profile import Profile, bytes_text

# A number of microbatches beyond any batch. As `ahead`: all parts before the first microbatch of the language model; as
# `lag`: their backwards after its last.
EVERYTHING = 1 << 20
STRICT = -1  # as `slack`: the order of the 1F1B schedule
_WHOLE = 1024
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What an order keeps: nanoseconds of stages by pair and rank, and the share of parts' work that is recomputed, of
    all that could be, in 1 / `_WHOLE`."""

    stage_ns: Column
    recomputed: int


Known = dict[tuple[int, int, int, int], Stage]  # by profile, first op of a part, tensor and sequence degree
PART_CHOICES = 7  # memory choices of a part: fewer than of a stage, because parts are many and rarely equal


def replicas_of(
    profile: Profile, layout: Layout, known: Known | None = None, light_ends: bool = False
) -> list[Replica]:
    """Stages and parts of all replicas that have microbatches; `known` keeps what parts cost for other layouts. With
    `light_ends`, microbatches with little for encoders come first and last."""
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
        if light_ends:
            batch, parts = _with_light_ends(batch, parts)
        replicas.append(Replica(number=batch.replica, batch=batch, parts=tuple(parts)))
    return replicas


def _with_light_ends(batch: Batch, parts: Sequence[Part]) -> tuple[Batch, list[Part]]:
    """The microbatches renumbered: as many as there are ranks, those with the least work in parts, come first and last
    alternately, because no work hides their parts while the pipeline fills and drains."""
    segments = batch.segments
    work = np.zeros(segments.num_microbatches, dtype=np.int64)
    for part in parts:
        work[part.microbatch] += part.stages[min(part.stages)].ends[0].forward_ns
    lightest = np.argsort(work, kind="stable")[: segments.num_ranks].tolist()
    others = [number for number in range(len(work)) if number not in lightest]
    order = [*lightest[::2], *others, *lightest[1::2][::-1]]
    number = np.empty(len(work), dtype=np.int64)
    number[order] = np.arange(len(work))
    return (
        replace(batch, segments=replace(segments, microbatch=number[segments.microbatch])),
        [replace(part, microbatch=int(number[part.microbatch])) for part in parts],
    )


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
    profile: Profile,
    layout: Layout,
    replica: Replica,
    groups: bool = True,
    in_turn: bool = False,
    block: int = EVERYTHING,
    seen: Seen | None = None,
    longest: int = 0,
) -> list[tuple[int, int]]:
    """For each part the first of its devices, counted inside the replica, and its sequence degree.

    Longest first, level with the work of the stages that stand there, over blocks of so many microbatches, one after
    another. Items that would take more than `longest` percent of a device's mean time in parts are shared in any case.
    `seen` is how long passes take in an order, with what they recompute there; without it, stages recompute all they
    can and parts nothing. Without `groups` every part stays on one tensor group; `in_turn` goes round instead, as
    systems without balancing do.
    """
    num_devices = layout.num_ranks * layout.tensor_degree
    segments = replica.batch.segments
    num_blocks = -(-segments.num_microbatches // block)
    by_rank = (segments.forward_ns + segments.backward_ns if seen is None else seen.stage_ns).sum(axis=0)
    of_stages = np.zeros(num_devices, dtype=np.int64)
    of_stages[layout.num_dedicated * layout.tensor_degree :] = np.repeat(by_rank, layout.tensor_degree)
    of_parts = np.zeros(num_devices, dtype=np.int64)
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
                    fastest, leanest = (choice.forward_ns + choice.backward_ns for choice in stage.ends)
                    times[row, column] = fastest + (leanest - fastest) * (seen.recomputed if seen else 0) // _WHOLE
        most_ns = int(NOT_ALLOWED)
        if longest:
            most_ns = max(1, int(times[0].sum()) * degree * longest // (100 * len(devices)))
        block_of = np.array([replica.parts[number].microbatch // block for number in numbers])
        for number_of_block in range(num_blocks):
            # Stages do their work evenly over the step.
            before = (of_parts + of_stages * (number_of_block + 1) // num_blocks)[devices]
            columns = np.flatnonzero(block_of == number_of_block)
            assignment = assign_items(times[:, columns], [degree * count for count in shared], sizes, before, most_ns)
            of_parts[devices] += assignment.load_ns - before
            for place, column in enumerate(columns.tolist()):
                result[numbers[column]] = int(assignment.first_device[place]), int(assignment.degree[place]) // degree
    return result


def seen_in(replica: Replica, devices: Sequence[tuple[int, int]], order: Order) -> Seen:
    """How long passes take in an order of these parts."""
    segments = replica.batch.segments
    num_stages = segments.num_pairs * segments.num_ranks
    choice = order.choice[:num_stages].reshape(segments.num_pairs, segments.num_ranks)
    times = segments.choice_forward_ns + segments.choice_backward_ns
    least = most = taken = 0
    for part, (_, degree), number in zip(replica.parts, devices, order.choice[num_stages:].tolist(), strict=True):
        stage = part.stages[degree]
        fastest, leanest = (each.forward_ns + each.backward_ns for each in stage.ends)
        least, most = least + fastest, most + leanest
        taken += stage.choices[number].forward_ns + stage.choices[number].backward_ns
    return Seen(stage_ns=times[segments.choice_of, choice], recomputed=_WHOLE * (taken - least) // max(1, most - least))


def activation_budgets(profile: Profile, layout: Layout, replica: Replica) -> Column:
    """By device of a replica: bytes for activations, beside weights, optimizer and the working space of a pass."""
    static, _ = held_bytes(profile, layout)
    working = np.zeros(layout.num_ranks, dtype=np.int64)
    of_stages = [[stage.working for stage in of_pair] for of_pair in replica.batch.stages]
    working[layout.num_dedicated :] = np.array(of_stages).max(axis=0)
    for part in replica.parts:
        for rank in ranks_of_whole(layout, part.chain):
            working[rank] = max(working[rank], min(stage.working for stage in part.stages.values()))
    _refuse(profile, static + working)
    return np.repeat(profile.cluster.kind.memory_bytes - static - working, layout.tensor_degree)


def refuse_weights(profile: Profile, layout: Layout) -> None:
    """Refuses a layout whose weights, gradients and optimizer alone leave no memory."""
    _refuse(profile, held_bytes(profile, layout)[0])


def _refuse(profile: Profile, needed_bytes: Column) -> None:
    """Refuses bytes by rank that take all memory."""
    if needed_bytes.max() >= profile.cluster.kind.memory_bytes:
        rank = int(np.argmax(needed_bytes))
        needed = int(needed_bytes[rank])
        raise DoesNotFitError(
            f"{profile.graph.name} does not fit: a device of pipeline rank {rank} would need {bytes_text(needed)} "
            f"before it keeps any activations, of the {bytes_text(profile.cluster.kind.memory_bytes)} there",
            needed,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """What the passes of a replica are wherever its parts stand. Tables of memory choices have times forward and
    backward, what is kept, copied and recomputed: [5, stages, choices], and of parts by sequence degree [5, degrees,
    parts, choices]."""

    first: Column  # of stages
    key: Column  # of their forwards and backwards, by pass
    place_held: Column
    needs: Column
    split: Column
    weight_ns: Column  # of the gradients of weights, by entity of `split`
    weight_key: Column
    weight_place: Column
    first_start: Column  # of microbatches on the first rank, rising
    last_end: Column
    forward_place: Column  # by microbatch: its place in these
    backward_place: Column
    makespan_ns: int
    foresees: bool
    tables: Column
    choice_count: Column
    microbatch: Column  # by part
    tensor_degree: Column
    degrees: tuple[int, ...]
    part_tables: Column
    part_choice_count: Column  # [degrees, parts]
    output_ns: Column  # [degrees, parts]
    edge_part: Column  # from parts to the stages that they feed
    edge_stage: Column


def template_of(
    profile: Profile, layout: Layout, replica: Replica, slack: int = STRICT, num_split: int = 0
) -> Template:
    """The language model's passes in its own 1F1B schedule, and what parts cost.

    The language model's forwards keep their order on a rank, and so do its backwards; a forward waits for the backward
    that comes `slack` backwards earlier in the schedule than the one before it. So the rank never holds more than the
    schedule does with so many microbatches more in flight, and goes on with what is there when the other is late.
    `STRICT` keeps the order of the schedule. The backwards of the last `num_split` microbatches are cut where that is
    known: gradients of inputs, for which the rank before waits, then those of weights.
    """
    segments, degree = replica.batch.segments, layout.tensor_degree
    pairs, ranks = segments.num_pairs, segments.num_ranks
    is_plain = np.bincount(segments.microbatch).max() == 1
    schedule = one_forward_one_backward(segments) if is_plain else interleaved(segments)
    num_stages = pairs * ranks
    num_entities = num_stages + len(replica.parts)
    key = np.zeros(2 * num_stages, dtype=np.int64)
    place_held = np.zeros(2 * num_stages, dtype=np.int64)
    first_split = pairs - num_split * (pairs // segments.num_microbatches)
    split: list[int] = []
    weight_key: list[int] = []
    weight_place: list[int] = []
    needs: list[tuple[int, int, int]] = []

    def number(pair: int, rank: int, is_backward: int) -> int:
        return 2 * (pair * ranks + rank) + is_backward

    # The order of each rank, and the flows between them.
    first_start = np.zeros(segments.num_microbatches, dtype=np.int64)
    last_end = np.zeros(segments.num_microbatches, dtype=np.int64)
    entry: dict[int, int] = {}  # by microbatch: the pair that takes what encoders make
    starts = segments.predecessor_starts.tolist()
    microbatch_of = segments.microbatch.tolist()
    for pair in range(pairs):
        before = range(starts[pair], starts[pair + 1])
        if not len(before):
            entry.setdefault(microbatch_of[pair], pair)
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
        previous, forward = -1, -1
        backwards: list[int] = []  # or what frees activations last
        passes = zip(*(column[rank].tolist() for column in (schedule.pair, schedule.kind)), strict=True)
        times = zip(*(column[rank].tolist() for column in (schedule.start_ns, schedule.end_ns)), strict=True)
        for place, ((pair, kind), (start_ns, end_ns)) in enumerate(zip(passes, times, strict=True)):
            if pair < 0:
                break
            is_backward = int(kind != FORWARD_PASS)
            pass_number = number(pair, rank, is_backward)
            key[pass_number] = _SCALE * start_ns + 4
            if rank == 0 and entry[microbatch_of[pair]] == pair:
                if is_backward:
                    last_end[microbatch_of[pair]] = end_ns
                else:
                    first_start[microbatch_of[pair]] = start_ns
            if slack == STRICT:
                place_held[pass_number] = place
                needs += [(pass_number, previous, 0)] * (previous >= 0)
                previous = pass_number
            elif is_backward:
                place_held[pass_number] = 2 * len(backwards) + 1
                needs += [(pass_number, before, 0) for before in backwards[-1:]]
                if len(backwards) >= first_split and segments.weight_ns[pair, rank]:
                    backwards.append(2 * num_entities + len(split))
                    needs.append((backwards[-1], pass_number, 0))
                    weight_key.append(int(key[pass_number]) + 1)
                    weight_place.append(int(place_held[pass_number]))
                    split.append(pair * ranks + rank)
                else:
                    backwards.append(pass_number)
            else:
                num_before = max(0, len(backwards) - slack)
                place_held[pass_number] = 2 * num_before
                needs += [(pass_number, before, 0) for before in backwards[num_before - 1 : num_before]]
                needs += [(pass_number, forward, 0)] * (forward >= 0)
                forward = pass_number
    forward_order = np.argsort(first_start, kind="stable")
    backward_order = np.argsort(last_end, kind="stable")
    # Parts: what they cost by sequence degree, and which stages they feed.
    parts, graph, wire_ns = replica.parts, profile.graph, _wire_ns(profile)
    stage_of = {
        piece.op: pair * ranks + rank
        for pair, of_pair in enumerate(replica.batch.pieces)
        for rank, pieces in enumerate(of_pair)
        for piece in pieces
        if piece.first == 0
    }
    edges = [
        (index, stage)
        for index, part in enumerate(parts)
        for stage in sorted(
            stage_of[op] for op in {op for piece in part.pieces for op in graph.successors[piece.op]} if op in stage_of
        )
    ]
    of_stages = [stage.choices for of_pair in replica.batch.stages for stage in of_pair]
    degrees = tuple(sorted({count for part in parts for count in part.stages}))
    by_degree = [[part.stages.get(count, part.stages[min(part.stages)]) for part in parts] for count in degrees]
    most = max([*map(len, of_stages), *(len(stage.choices) for of_degree in by_degree for stage in of_degree)])
    return Template(
        first=np.tile((layout.num_dedicated + np.arange(ranks)) * degree, pairs),
        key=key,
        place_held=place_held,
        needs=np.array(needs, dtype=np.int64).reshape(-1, 3),
        split=np.array(split, dtype=np.int64),
        weight_ns=segments.weight_ns.ravel()[np.array(split, dtype=np.int64)],
        weight_key=np.array(weight_key, dtype=np.int64),
        weight_place=np.array(weight_place, dtype=np.int64),
        first_start=first_start[forward_order],
        last_end=last_end[backward_order],
        forward_place=np.argsort(forward_order),
        backward_place=np.argsort(backward_order),
        makespan_ns=schedule.makespan_ns,
        foresees=slack != STRICT,
        tables=_tables(of_stages, most),
        choice_count=np.array([len(row) for row in of_stages]),
        microbatch=np.array([part.microbatch for part in parts], dtype=np.int64),
        tensor_degree=np.array([part.chain.tensor_degree or degree for part in parts], dtype=np.int64),
        degrees=degrees,
        part_tables=np.stack(
            [_tables([stage.choices for stage in of_degree], most) for of_degree in by_degree]
            or [np.zeros((5, 0, most), dtype=np.int64)],
            axis=1,
        ),
        part_choice_count=np.array([[len(stage.choices) for stage in of_degree] for of_degree in by_degree]),
        output_ns=np.array([[wire_ns(stage.output_bytes) for stage in of_degree] for of_degree in by_degree]),
        edge_part=np.array([part for part, _ in edges], dtype=np.int64),
        edge_stage=np.array([stage for _, stage in edges], dtype=np.int64),
    )


def key_of_ns(time_ns: int) -> int:
    """How far two keys lie apart whose passes begin so many nanoseconds apart."""
    return _SCALE * time_ns


def _tables(choices: Sequence[Sequence[Choice]], most: int) -> Column:
    """[5, rows, most]: times, what is kept, copied and recomputed, the last of a row repeated."""
    rows: dict[int, NDArray[np.int64]] = {}
    for row in choices:
        if id(row) not in rows:
            padded = [*row, *[row[-1]] * (most - len(row))]
            rows[id(row)] = np.array(
                [(of.forward_ns, of.backward_ns, of.memory, of.copied, of.recomputed_bytes) for of in padded]
            )
    tables = np.array([rows[id(row)] for row in choices], dtype=np.int64).reshape(len(choices), most, 5)
    return np.ascontiguousarray(np.moveaxis(tables, 2, 0))


def passes_of(
    layout: Layout, template: Template, devices: Sequence[tuple[int, int]], ahead: int, lag: int, block: int = 1
) -> Passes:
    """All passes of a replica whose parts stand on these devices, with keys: the language model's by its own schedule;
    parts `ahead` microbatches before the first microbatch of their block, and their backwards `lag` microbatches behind
    its last."""
    num_stages, num_parts = len(template.first), len(devices)
    first, sequence_degree = np.array(devices, dtype=np.int64).reshape(-1, 2).T
    # Parts just in time by the schedule of the stages alone.
    num_microbatches = len(template.first_start)
    key = np.empty((num_parts, 2), dtype=np.int64)
    place = template.forward_place[template.microbatch] // block * block
    starts = _SCALE * template.first_start[np.maximum(0, place - ahead)] + 2
    key[:, 0] = np.where(place >= ahead, starts, place - num_microbatches)
    place = template.backward_place[template.microbatch] // block * block + block
    place = np.minimum(place, num_microbatches) - 1
    ends = _SCALE * template.last_end[np.minimum(num_microbatches - 1, place + lag)] + 3
    key[:, 1] = np.where(place + lag < num_microbatches, ends, _SCALE * (template.makespan_ns + 1) + place)
    entity, row = num_stages + np.arange(num_parts), np.searchsorted(template.degrees, sequence_degree)
    part, stage = template.edge_part, template.edge_stage
    output_ns = template.output_ns[row[part], part] if len(part) else part
    needs = [
        template.needs,
        np.stack([2 * entity + 1, 2 * entity, np.zeros_like(entity)], axis=1),
        np.stack([2 * stage, 2 * entity[part], output_ns], axis=1),
        np.stack([2 * entity[part] + 1, 2 * stage + 1, output_ns], axis=1),
    ]
    tables = np.concatenate([template.tables, template.part_tables[:, row, np.arange(num_parts)]], axis=1)
    counts = [template.choice_count, *([template.part_choice_count[row, np.arange(num_parts)]] if num_parts else [])]
    return Passes(
        first=np.concatenate([template.first, first]),
        count=np.concatenate([np.full(num_stages, layout.tensor_degree), sequence_degree * template.tensor_degree]),
        is_part=np.arange(num_stages + num_parts) >= num_stages,
        needs=np.concatenate(needs),
        key=np.concatenate([template.key, key.ravel(), template.weight_key]),
        place_held=np.concatenate([template.place_held, np.zeros(2 * num_parts, np.int64), template.weight_place]),
        foresees=template.foresees,
        split=template.split,
        weight_ns=template.weight_ns,
        choice_forward_ns=tables[0],
        choice_backward_ns=tables[1],
        choice_memory=tables[2],
        choice_copied=tables[3],
        choice_recomputed=tables[4],
        choice_count=np.concatenate(counts),
        num_devices=layout.num_ranks * layout.tensor_degree,
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
        split = order.split.tolist()
        kinds = [FORWARD, BACKWARD] * len(entities) + [WEIGHT] * len(split)
        for entity in split:
            kinds[2 * entity + 1] = INPUT
        for place, pass_ in enumerate(order.passes.tolist()):
            entity = pass_ // 2 if pass_ < 2 * len(entities) else split[pass_ - 2 * len(entities)]
            slots, kind = numbers[entity], kinds[pass_]
            timed.append((int(order.start_ns[pass_]), place, kind, slots if kind == FORWARD else slots[::-1]))
    if not pieces:
        raise PlanError("a plan needs at least one pass")
    timed.sort(key=lambda entry: entry[:2])
    listed = [(slot, kind) for _, _, kind, slots in timed for slot in slots]
    return assemble_passes(profile, setting_in(profile, layout), planner, pieces, listed)
