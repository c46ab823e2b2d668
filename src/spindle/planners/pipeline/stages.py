"""From a profile of a batch to the columns that the search works on, and from its schedules back to a plan.

A microbatch is a task of the profile's graph. A stage is one chunk of a chain for one call (a sub-microbatch), or for
one microbatch where the chain passes several modules; it is a few pieces of ops. Stages that are alike, in space and in
time, are worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import MetaGraph
from spindle.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Piece, Plan, assemble_passes
from spindle.planners.options import DEDICATED, FIRST, SPREAD, Chain, Layout
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.segments import Column, Segments
from spindle.profile import Curve, Profile, Setting, backward_bytes, bytes_text, saved_bytes, state_bytes
from spindle.workload import LayerCost

NS = 1e9
MOST_CHOICES = 10  # of memory for a stage; DIP keeps about as many
_KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)  # as the columns number them


@dataclass(frozen=True, slots=True)
class StagePiece:
    """Layers `[first, last)` of an op, as numbered in it."""

    op: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to keep a stage's activations: for each piece, how many layers are recomputed and how many offloaded."""

    forward_ns: int
    backward_ns: int
    memory: int
    recomputed: tuple[int, ...]
    offloaded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage costs, whichever microbatch it is for. Choices rise in memory."""

    weight_ns: int
    output_bytes: float
    working: int  # bytes while its backward runs
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One replica's part of a batch as segments, with what their numbers stand for."""

    replica: int
    segments: Segments
    pieces: tuple[tuple[tuple[StagePiece, ...], ...], ...]  # by pair and rank
    stages: tuple[tuple[Stage, ...], ...]  # by pair and rank
    activation_budget: Column  # by rank: bytes for activations
    update_ns: Column  # by rank: the optimizer's step


def batches_of(profile: Profile, layout: Layout) -> list[Batch]:
    """The batch of a profile on the replicas of a layout, which share its microbatches evenly. With fewer microbatches
    than replicas some have none."""
    known = StageCosts(profile, layout)
    return [
        _batch(profile, layout, replica, tasks, known)
        for replica, tasks in enumerate(shares_of_replicas(profile, layout))
        if tasks
    ]


def setting_in(profile: Profile, layout: Layout) -> Setting:
    """The setting of a layout: the tensor degree of each module, and whether the optimizer is sharded."""
    degrees = {
        module: chain.tensor_degree or layout.tensor_degree
        for chain in layout.chains
        for module in chain.modules
        if module in profile.graph.modules
    }
    return profile.setting(degrees, shard_optimizer=layout.shards_optimizer)


def plan_of(
    profile: Profile, layout: Layout, planner: str, batches: Sequence[Batch], schedules: Sequence[Schedule]
) -> Plan:
    """The plan of one schedule for each replica."""
    pieces: list[Piece] = []
    order: list[tuple[int, str]] = []
    for batch, schedule in zip(batches, schedules, strict=True):
        numbers: dict[tuple[int, int], list[int]] = {}
        for pair, ranks in enumerate(batch.pieces):
            for rank, stage_pieces in enumerate(ranks):
                taken = 0 if schedule.choice is None else int(schedule.choice[pair, rank])
                choice = batch.stages[pair][rank].choices[taken]
                numbers[pair, rank] = list(range(len(pieces), len(pieces) + len(stage_pieces)))
                pieces += [
                    Piece(
                        op=piece.op,
                        num_layers=piece.last - piece.first,
                        devices=layout.devices(batch.replica, rank),
                        recomputed=recomputed,
                        offloaded=offloaded,
                    )
                    for piece, recomputed, offloaded in zip(
                        stage_pieces, choice.recomputed, choice.offloaded, strict=True
                    )
                ]
        rank_of, place = np.nonzero(schedule.pair >= 0)
        by_start = np.argsort(schedule.start_ns[rank_of, place], kind="stable")
        for rank, position in zip(rank_of[by_start].tolist(), place[by_start].tolist(), strict=True):
            slots, kind = numbers[schedule.pair[rank, position], rank], int(schedule.kind[rank, position])
            order += [(slot, _KINDS[kind]) for slot in (slots if _KINDS[kind] == FORWARD else reversed(slots))]
    setting = replace(profile.default_setting, shard_optimizer=layout.shards_optimizer)
    return assemble_passes(profile, setting, planner, pieces, order)


def shares_of_replicas(profile: Profile, layout: Layout) -> list[list[str]]:
    """Tasks for each replica: heaviest first to the lightest so far, each replica in the order of the batch."""
    tasks, num_replicas = list(profile.graph.tasks), layout.num_replicas
    if num_replicas == 1:
        return [tasks]
    setting = setting_in(profile, layout)
    load: dict[str, float] = dict.fromkeys(tasks, 0.0)
    for position, op in enumerate(profile.graph.metaops):
        curve = profile.curve(position, setting)
        load[op.task] += op.num_layers * curve.layer_s(curve.num_devices[0])
    total = [0.0] * num_replicas
    share_of: dict[str, int] = {}
    for task in sorted(tasks, key=lambda task: -load[task]):
        share_of[task] = min(range(num_replicas), key=lambda replica: (total[replica], replica))
        total[share_of[task]] += load[task]
    return [[task for task in tasks if share_of[task] == replica] for replica in range(num_replicas)]


@dataclass(slots=True)
class _Run:
    """What passes a chain from end to end once: ops by where they begin in it, and the runs that feed it, with the
    bytes."""

    task: str
    chain: Chain
    ops: list[tuple[int, int]]
    feeds: dict[int, float]


def _runs(graph: MetaGraph, layout: Layout, tasks: Sequence[str]) -> list[_Run]:
    """Runs in the order of microbatches and flows."""
    for module in graph.modules:
        if module not in layout.modules:
            placed = ", ".join(sorted(layout.modules))
            raise PlanError(f"chunks are placed for {placed}; this batch has {module!r}, too")
    # By task: calls in the order of their last ops, whose outputs are those of the calls.
    calls: dict[str, dict[str, list[int]]] = {task: {} for task in tasks}
    for position in graph.order:
        op = graph.metaops[position]
        if op.task in calls:
            before = calls[op.task].pop(op.call or "", [])
            calls[op.task][op.call or ""] = [*before, position]
    runs: list[_Run] = []
    run_of: dict[int, int] = {}
    for task in tasks:
        for chain, ops in _calls_in_runs(graph, layout, list(calls[task].values())):
            run_of.update(dict.fromkeys(ops, len(runs)))
            begins = dict(zip(chain.modules, np.cumsum([0, *chain.num_layers]).tolist(), strict=False))
            metaops = [(graph.metaops[op], op) for op in ops]
            by_layer = [(begins[metaop.module or ""] + metaop.first_layer, op) for metaop, op in metaops]
            runs.append(_Run(task, chain, sorted(by_layer), {}))
    for producer, consumer in graph.edges:
        source, target = run_of.get(producer), run_of.get(consumer)
        if source is not None and target is not None and source != target:
            cost = graph.metaops[producer].cost
            rows = graph.metaops[producer].batch_size or 1
            runs[target].feeds[source] = 0.0 if cost is None else rows * cost.cut_bytes_at(layout.tensor_degree)
    return runs


def _calls_in_runs(
    graph: MetaGraph, layout: Layout, calls: Sequence[Sequence[int]]
) -> Iterator[tuple[Chain, list[int]]]:
    """The chain and the ops of each run of a microbatch; a run comes behind those that feed it, otherwise in the order
    of chains. `calls` are lists of ops, in an order of the flows.

    A call of a module that is cut by itself is a run. Calls of a chain of several modules share a run as long as they
    pass the chain together: a call goes into another one if its module stands in front of one that is in the run, if it
    reads another call of its module there, or if it reads what another run made of the run's output. So no run waits
    for itself, whatever a task calls, how often and in which order.
    """
    place_of = {
        module: (number, place)
        for number, chain in enumerate(layout.chains)
        for place, module in enumerate(chain.modules)
    }
    chain_of: list[int] = []  # by run, like the next two
    members: list[list[Sequence[int]]] = []
    feeders: list[set[int]] = []
    run_of: dict[int, int] = {}

    def place(call: Sequence[int]) -> int:
        return place_of[graph.metaops[call[0]].module or ""][1]

    def can_join(run: int, call: Sequence[int], producers: set[int]) -> bool:
        if any(place(member) > place(call) for member in members[run]):
            return False
        if any(place(member) == place(call) and not producers.isdisjoint(member) for member in members[run]):
            return False
        upstream = {run_of[producer] for producer in producers} - {run}
        pending = list(upstream)
        while pending:
            new = feeders[pending.pop()] - upstream
            upstream |= new
            pending += new
        return run not in upstream

    for call in calls:
        chain_number, _ = place_of[graph.metaops[call[0]].module or ""]
        producers = {producer for op in call for producer in graph.predecessors[op]}.difference(call)
        number = len(members)
        if len(layout.chains[chain_number].modules) > 1:
            of_chain = [run for run, of_run in enumerate(chain_of) if of_run == chain_number]
            number = next((run for run in of_chain if can_join(run, call, producers)), number)
        if number == len(members):
            chain_of.append(chain_number)
            members.append([])
            feeders.append(set())
        members[number].append(call)
        feeders[number] |= {run_of[producer] for producer in producers} - {number}
        run_of.update(dict.fromkeys(call, number))
    left = sorted(range(len(members)), key=lambda run: chain_of[run])
    while left:
        run = next(run for run in left if feeders[run].isdisjoint(left))
        left.remove(run)
        yield layout.chains[chain_of[run]], [op for call in members[run] for op in call]


def _batch(profile: Profile, layout: Layout, replica: int, tasks: Sequence[str], known: StageCosts) -> Batch:
    """Stages of the chains that are spread over ranks; what stands whole is the business of planner `colocate`."""
    graph, num_ranks = profile.graph, layout.num_spread_ranks
    wire = _Wire(profile, layout)
    microbatch_of = {task: number for number, task in enumerate(tasks)}
    group_of: dict[tuple[str, Chain], int] = {}
    microbatch, group, hop_ns = [], [], []
    starts, predecessors, wrap_ns = [0], [], []
    pieces: list[tuple[tuple[StagePiece, ...], ...]] = []
    stages: list[tuple[Stage, ...]] = []
    last_pair: dict[int, int] = {}
    for number, run in enumerate(_runs(graph, layout, tasks)):
        if run.chain.placement != SPREAD:
            continue
        cut = [_between(graph, run.ops, first, last) for first, last in pairwise(run.chain.bounds)]
        received = sum(run.feeds.values())
        chunks: list[Stage] = []
        for stage_pieces in cut:
            chunks.append(known.stage(stage_pieces, received))
            received = chunks[-1].output_bytes if stage_pieces else received
        for turn in range(layout.rounds_of(run.chain)):
            here = slice(turn * num_ranks, (turn + 1) * num_ranks)
            feeds = sorted((source, size) for source, size in run.feeds.items() if source in last_pair)
            before = [(last_pair[source], num_bytes) for source, num_bytes in feeds]
            if turn:
                before = [(last_pair[number], chunks[here.start - 1].output_bytes)]
            last_pair[number] = len(pieces)
            microbatch.append(microbatch_of[run.task])
            group.append(group_of.setdefault((run.task, run.chain), len(group_of)))
            hops = [wire.hop_ns(rank, stage.output_bytes) for rank, stage in enumerate(chunks[here][:-1])]
            hop_ns.append(round(sum(hops) / max(1, len(hops))))
            predecessors += [pair for pair, _ in before]
            wrap_ns += [wire.wrap_ns(num_bytes) for _, num_bytes in before]
            starts.append(len(predecessors))
            pieces.append(tuple(cut[here]))
            stages.append(tuple(chunks[here]))
    tables, row_of = _tables(stages)
    rows = np.array([[row_of[id(stage)] for stage in of_pair] for of_pair in stages])
    static, update_ns = (column[layout.num_dedicated :] for column in held_bytes(profile, layout))
    working = np.array([[stage.working for stage in of_pair] for of_pair in stages]).max(axis=0)
    activation_budget = profile.cluster.kind.memory_bytes - static - working
    if activation_budget.min() <= 0:
        rank = int(np.argmin(activation_budget))
        raise DoesNotFitError(
            f"{graph.name} does not fit: pipeline rank {rank} would need "
            f"{bytes_text(int(static[rank] + working[rank]))} before it keeps any activations, "
            f"of the {bytes_text(profile.cluster.kind.memory_bytes)} there",
            int(static[rank] + working[rank]),
        )
    segments = Segments(
        num_ranks=num_ranks,
        microbatch=np.array(microbatch),
        group=np.array(group),
        forward_ns=tables[0][rows, 0],
        backward_ns=tables[1][rows, 0],
        weight_ns=np.array([[stage.weight_ns for stage in of_pair] for of_pair in stages]),
        memory=tables[2][rows, 0],
        hop_ns=np.array(hop_ns),
        predecessor_starts=np.array(starts),
        predecessors=np.array(predecessors, dtype=np.int64),
        wrap_ns=np.array(wrap_ns, dtype=np.int64),
        choice_of=rows,
        choice_forward_ns=tables[0],
        choice_backward_ns=tables[1],
        choice_memory=tables[2],
        choice_count=tables[3],
    )
    return Batch(
        replica=replica,
        segments=segments,
        pieces=tuple(pieces),
        stages=tuple(stages),
        activation_budget=activation_budget,
        update_ns=update_ns,
    )


def _between(graph: MetaGraph, ops: Iterable[tuple[int, int]], first: int, last: int) -> tuple[StagePiece, ...]:
    """The parts of ops that lie between two cuts of a chain."""
    parts = []
    for begin, op in ops:
        low, high = max(first, begin), min(last, begin + graph.metaops[op].num_layers)
        if low < high:
            parts.append(StagePiece(op, low - begin, high - begin))
    return tuple(parts)


def _tables(stages: Iterable[Sequence[Stage]]) -> tuple[tuple[Column, Column, Column, Column], dict[int, int]]:
    """Memory choices of the stages that differ: forward, backward, memory, how many; and the row of each stage."""
    distinct = list({id(stage): stage for of_pair in stages for stage in of_pair}.values())
    most = max(len(stage.choices) for stage in distinct)
    shape = (len(distinct), most)
    forward, backward, memory = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for row, stage in enumerate(distinct):
        padded = stage.choices + stage.choices[-1:] * (most - len(stage.choices))
        forward[row] = [choice.forward_ns for choice in padded]
        backward[row] = [choice.backward_ns for choice in padded]
        memory[row] = [choice.memory for choice in padded]
    counts = np.array([len(stage.choices) for stage in distinct], dtype=np.int64)
    return (forward, backward, memory, counts), {id(stage): row for row, stage in enumerate(distinct)}


class StageCosts:
    """Stages by what they cost, each worked out once."""

    def __init__(self, profile: Profile, layout: Layout) -> None:
        self._profile, self._degree = profile, layout.tensor_degree
        self._setting = setting_in(profile, layout)
        # No rank keeps more than this, so if every stage offloads at most this share of what it keeps, what stages have
        # on the host at any one time fits there.
        kind = profile.cluster.kind
        most_kept_bytes = kind.memory_bytes - int(held_bytes(profile, layout)[0].min())
        self._host_share = kind.host_memory_bytes / max(1, most_kept_bytes)
        self._known: dict[object, Stage] = {}

    def stage(
        self,
        pieces: Sequence[StagePiece],
        received_bytes: float,
        tensor_degree: int | None = None,
        sequence_degree: int = 1,
        most_choices: int | None = None,
    ) -> Stage:
        """A stage on one tensor group, of the layout's size unless another is given; or on a sequence group. With
        `most_choices`, only so many numbers of recomputed layers, and nothing offloaded."""
        degree = tensor_degree or self._degree
        facts = tuple(
            (
                self._profile.graph.metaops[piece.op].cost,
                self._profile.curve(piece.op, self._setting),
                piece.last - piece.first,
                self._profile.graph.metaops[piece.op].batch_size,
            )
            for piece in pieces
        )
        key = (facts, received_bytes if pieces else 0.0, degree, sequence_degree, most_choices)
        if key not in self._known:
            self._known[key] = self._cost(pieces, facts, received_bytes, degree, sequence_degree, most_choices)
        return self._known[key]

    def _cost(
        self,
        pieces: Sequence[StagePiece],
        facts: Sequence[tuple[LayerCost | None, Curve, int, int | None]],
        received_bytes: float,
        degree: int,
        sequence_degree: int,
        most_choices: int | None,
    ) -> Stage:
        """The times of a stage, and its memory choices (DIP §4.3).

        A choice recomputes some layers and offloads others. Copies run beside compute, so they are free here, and a
        stage offloads no more than can be copied in the time of its forward pass; what passes wait for them is
        simulated with the whole plan. All counts of recomputed layers are tried, each with nothing offloaded and with
        the most that can be. Every pass of layers takes 1 ns at least, so that passes start in the order of the flows.
        """
        if not pieces:
            return Stage(0, 0.0, 0, (Choice(0, 0, 0, (), ()),))
        # Data, by piece: layers, seconds of a layer forward and backward, rows, and whether the user asked for it to be
        # recomputed as a whole, which then is no choice.
        ops = [self._profile.graph.metaops[piece.op] for piece in pieces]
        counts = [count for _, _, count, _ in facts]
        num_devices = degree * sequence_degree
        times = [curve.times_s(num_devices) for _, curve, _, _ in facts]
        weight_times = [curve.weight_time_s(num_devices) for _, curve, _, _ in facts]
        rows = [op.batch_size or 1 for op in ops]
        is_recomputed = [self._setting.recompute[piece.op] for piece in pieces]
        # Bytes that a layer keeps from forward to backward: as it is, and if it is recomputed.
        saved = [
            saved_bytes(op, count, 1, degree, recompute) // sequence_degree
            for op, count, recompute in zip(ops, rows, is_recomputed, strict=True)
        ]
        recomputed_saved = [
            saved_bytes(op, count, 1, degree, True) // sequence_degree for op, count in zip(ops, rows, strict=True)
        ]
        # Times of the stage as it is.
        forward_s = sum(count * forward for count, (forward, _) in zip(counts, times, strict=True))
        backward_s = sum(
            count * (backward + forward * recompute)
            for count, (forward, backward), recompute in zip(counts, times, is_recomputed, strict=True)
        )
        weight_s = 0.0
        if None not in weight_times:
            weight_s = sum(count * (weight or 0.0) for count, weight in zip(counts, weight_times, strict=True))
        # The layers that free most bytes for each second of recomputation are the first to be recomputed.
        gains = [
            (whole - less) / max(forward, 1e-12)
            for whole, less, (forward, _) in zip(saved, recomputed_saved, times, strict=True)
        ]
        ranking = sorted(range(len(pieces)), key=lambda number: -gains[number])

        def choice(num_recomputed: int, num_offloaded: int) -> Choice:
            recomputed, offloaded = [0] * len(pieces), [0] * len(pieces)
            for number in ranking:
                if is_recomputed[number]:
                    continue
                recomputed[number] = min(num_recomputed, counts[number])
                num_recomputed -= recomputed[number]
                offloaded[number] = min(num_offloaded, counts[number] - recomputed[number])
                num_offloaded -= offloaded[number]
            memory = sum(
                (count - on_recompute - on_host) * whole + on_recompute * less
                for count, on_recompute, on_host, whole, less in zip(
                    counts, recomputed, offloaded, saved, recomputed_saved, strict=True
                )
            )
            recompute_s = sum(count * forward for count, (forward, _) in zip(recomputed, times, strict=True))
            return Choice(
                max(1, round(forward_s * NS)),
                max(1, round((backward_s + recompute_s) * NS)) + any(offloaded),  # 1 ns makes "keep" win ties
                int(memory + received_bytes),
                tuple(recomputed),
                tuple(offloaded),
            )

        # With each number of recomputed layers, nothing is offloaded, or as much as can be copied beside the forward
        # pass and the host has memory for.
        copied_bytes = forward_s * self._profile.cluster.kind.host_bytes_per_s
        total = sum(counts)
        steps = total if most_choices is None else min(total, most_choices - 1)
        counts_recomputed = [total * number // steps for number in range(steps + 1)]
        choices = [choice(num_recomputed, 0) for num_recomputed in counts_recomputed]
        num_offloaded = total  # at most; fewer with every layer that is recomputed
        for num_recomputed in counts_recomputed[:-1] if most_choices is None else ():
            num_offloaded = min(num_offloaded, total - num_recomputed)
            while num_offloaded:
                candidate = choice(num_recomputed, num_offloaded)
                host_bytes = sum(count * size for count, size in zip(candidate.offloaded, saved, strict=True))
                if host_bytes <= min(copied_bytes, self._host_share * candidate.memory):
                    choices.append(candidate)
                    break
                num_offloaded -= 1
        last = ops[-1].cost
        return Stage(
            min(round(weight_s * NS), choice(0, 0).backward_ns - 1),
            0.0 if last is None else rows[-1] * last.cut_bytes_at(degree),
            max(backward_bytes(op, count, degree, True) for op, count in zip(ops, rows, strict=True))
            // sequence_degree,
            _worth_having(choices),
        )


def _worth_having(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """The leanest, the fastest, and the fastest of each of some equal ranges of memory between (DIP §4.3)."""

    def time_ns(choice: Choice) -> int:
        return choice.forward_ns + choice.backward_ns

    falling: list[Choice] = []  # rising memory, each faster than those before
    for choice in sorted(choices, key=lambda choice: (choice.memory, time_ns(choice))):
        if not falling or time_ns(choice) < time_ns(falling[-1]):
            falling.append(choice)
    if len(falling) <= MOST_CHOICES:
        return tuple(falling)
    least, most = falling[0].memory, falling[-1].memory
    width = (most - least) / (MOST_CHOICES - 2)
    buckets: dict[int, Choice] = {}
    for choice in falling[1:-1]:  # later ones are faster
        buckets[min(int((choice.memory - least) / width), MOST_CHOICES - 3)] = choice
    return (falling[0], *(buckets[key] for key in sorted(buckets)), falling[-1])


class _Wire:
    """How long it takes from one rank to the next: every member of a tensor group gets its own from its counterpart."""

    def __init__(self, profile: Profile, layout: Layout) -> None:
        cluster, degree = profile.cluster, layout.tensor_degree
        spread = range(layout.num_dedicated, layout.num_ranks)
        island = [cluster.island_of[layout.devices(0, rank)[0]] for rank in spread]

        def between(source: int, target: int) -> tuple[float, float]:
            """Seconds per byte, and before the first."""
            inside, first = cluster.islands[island[source]], cluster.islands[island[target]]
            if island[source] == island[target]:
                return 1 / inside.link.bytes_per_s, inside.link.latency_s
            slowest = max(1 / inside.link.bytes_per_s, degree / inside.uplink.bytes_per_s)
            return max(slowest, degree / first.uplink.bytes_per_s), max(inside.uplink.latency_s, first.uplink.latency_s)

        self._hops = [between(source, target) for source, target in pairwise(range(len(island)))]
        self._wrap = between(len(island) - 1, 0) if len(island) > 1 else (0.0, 0.0)

    def hop_ns(self, rank: int, num_bytes: float) -> int:
        """From a rank to the next."""
        return round((num_bytes * self._hops[rank][0] + self._hops[rank][1]) * NS) if num_bytes else 0

    def wrap_ns(self, num_bytes: float) -> int:
        return round((num_bytes * self._wrap[0] + self._wrap[1]) * NS) if num_bytes else 0


def held_by_ranks(graph: MetaGraph, layout: Layout) -> list[set[int]]:
    """The parameters of the chunks on each rank, as far as a graph has them."""
    parameters: dict[tuple[str, int], tuple[int, ...]] = {}
    for op in graph.metaops:
        for layer, used in enumerate(op.parameters):
            parameters[op.module or "", op.first_layer + layer] = used
    held: list[set[int]] = [set() for _ in range(layout.num_ranks)]
    for chain in layout.chains:
        counts = zip(chain.modules, chain.num_layers, strict=True)
        places = [(module, layer) for module, count in counts for layer in range(count)]
        if chain.placement != SPREAD:
            for rank in ranks_of_whole(layout, chain):
                held[rank].update(parameter for place in places for parameter in parameters.get(place, ()))
            continue
        for chunk, (first, last) in enumerate(pairwise(chain.bounds)):
            for place in places[first:last]:
                rank = layout.num_dedicated + chunk % layout.num_spread_ranks
                held[rank].update(parameters.get(place, ()))
    return held


def ranks_of_whole(layout: Layout, chain: Chain) -> range:
    """The pipeline ranks on whose devices a chain stands whole."""
    if chain.placement == FIRST:
        return range(1)
    return range(layout.num_dedicated if chain.placement == DEDICATED else layout.num_ranks)


def owning_ranks_in(graph: MetaGraph, layout: Layout) -> dict[int, tuple[int, ...]]:
    """By parameter: the devices of its chunk, in all replicas."""
    devices_of: dict[int, list[int]] = {}
    for replica in range(layout.num_replicas):
        for rank, parameters in enumerate(held_by_ranks(graph, layout)):
            for parameter in parameters:
                devices_of.setdefault(parameter, []).extend(layout.devices(replica, rank))
    return {parameter: tuple(sorted(devices)) for parameter, devices in devices_of.items()}


def held_bytes(profile: Profile, layout: Layout) -> tuple[Column, Column]:
    """Bytes of weights, gradients and optimizer on a device of each rank, and the nanoseconds of its optimizer's step.

    Where a chain stands whole on several groups, or there are replicas, they share the optimizer state, if the layout
    says so.
    """
    graph = profile.graph
    degree_of: dict[int, int] = {}
    owners_of: dict[int, int] = {}
    num_replicas = layout.num_replicas if layout.shards_optimizer else 1
    for chain in layout.chains:
        degree = chain.tensor_degree or layout.tensor_degree
        seen: set[tuple[str | None, int]] = set()
        for op in graph.metaops if chain.placement != SPREAD else ():
            if op.module in chain.modules and (op.module, op.first_layer) not in seen:
                seen.add((op.module, op.first_layer))
                num_groups = len(ranks_of_whole(layout, chain)) * layout.tensor_degree // degree
                for parameter in (parameter for layer in op.parameters for parameter in layer):
                    degree_of[parameter] = degree
                    owners_of[parameter] = num_groups * num_replicas if layout.shards_optimizer else 1
    static = np.zeros(layout.num_ranks, dtype=np.int64)
    elements = np.zeros(layout.num_ranks)
    for rank, parameters in enumerate(held_by_ranks(graph, layout)):
        for parameter in parameters:
            degree, owners = degree_of.get(parameter, layout.tensor_degree), owners_of.get(parameter, num_replicas)
            static[rank] += state_bytes(graph, parameter, degree, owners)
            if graph.parameters[parameter].trainable:
                elements[rank] += graph.parameters[parameter].elements_at(degree) / owners
    moved = elements * graph.numerics.update_bytes / profile.cluster.kind.memory_bytes_per_s
    return static, np.ceil(moved * NS).astype(np.int64)
