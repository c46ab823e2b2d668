"""Convert the profile of a batch to the columns that the search works on, and its schedules back to a plan.

A microbatch is a task of the profile's graph. A stage is one chunk of a chain in one run (`runs`) and consists of a few
pieces of ops. Equal stages are costed once (`stage_costs`).

    Profile, Layout ── batches_of ─▶ Batch (Segments) ── search ─▶ Schedule ── plan_of ─▶ Plan
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.graph import MetaGraph
from spindle.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Piece, Plan, assemble_passes
from spindle.planners.options import SPREAD, Chain, Layout
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.rank_parameters import held_bytes, setting_in
from spindle.planners.pipeline.runs import runs_of
from spindle.planners.pipeline.segments import Column, Segments
from spindle.planners.pipeline.stage_costs import NS, Stage, StageCosts, StagePiece
from spindle.profile import Profile, bytes_text

_KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)  # as the columns number them


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One replica's share of a batch as segments, and the pieces and stages that their pairs stand for."""

    replica: int
    segments: Segments
    pieces: tuple[tuple[tuple[StagePiece, ...], ...], ...]  # by pair and rank
    stages: tuple[tuple[Stage, ...], ...]  # by pair and rank
    activation_budget: Column  # by rank: bytes available for activations
    update_ns: Column  # by rank: time of the optimizer step


def batches_of(profile: Profile, layout: Layout) -> list[Batch]:
    """The batch of a profile on the replicas of a layout, which share its microbatches evenly. Replicas without
    microbatches are left out."""
    costs = StageCosts(profile, layout)
    return [
        _batch(profile, layout, replica, tasks, costs)
        for replica, tasks in enumerate(shares_of_replicas(profile, layout))
        if tasks
    ]


def plan_of(
    profile: Profile, layout: Layout, planner: str, batches: Sequence[Batch], schedules: Sequence[Schedule]
) -> Plan:
    """The plan of the schedules of all replicas."""
    pieces: list[Piece] = []
    order: list[tuple[int, str]] = []
    for batch, schedule in zip(batches, schedules, strict=True):
        numbers: dict[tuple[int, int], list[int]] = {}
        for pair, ranks in enumerate(batch.pieces):
            for rank, stage_pieces in enumerate(ranks):
                chosen = 0 if schedule.choice is None else int(schedule.choice[pair, rank])
                choice = batch.stages[pair][rank].choices[chosen]
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
    """The tasks (microbatches) of each replica, in the order of the batch. Greedy: heaviest first, to the replica with
    the least work so far."""
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


def _batch(profile: Profile, layout: Layout, replica: int, tasks: Sequence[str], costs: StageCosts) -> Batch:
    """One replica's batch, with the chains that are spread over ranks. Planner `colocate` adds chains that ranks have
    as a whole."""
    graph, num_ranks = profile.graph, layout.num_spread_ranks
    transfers = _TransferTimes(profile, layout)
    microbatch_of = {task: number for number, task in enumerate(tasks)}
    group_of: dict[tuple[str, Chain], int] = {}
    microbatch, group, hop_ns = [], [], []
    starts, predecessors, wrap_ns = [0], [], []
    pieces: list[tuple[tuple[StagePiece, ...], ...]] = []
    stages: list[tuple[Stage, ...]] = []
    last_pair: dict[int, int] = {}  # by run: its last pair so far
    # A run that passes the ranks K times is K pairs in a row, each the predecessor of the next.
    for number, run in enumerate(runs_of(graph, layout, tasks)):
        if run.chain.placement != SPREAD:
            continue
        cut = [_between(graph, run.ops, first, last) for first, last in pairwise(run.chain.bounds)]
        received = sum(run.feeds.values())
        chunks: list[Stage] = []
        for stage_pieces in cut:
            chunks.append(costs.stage(stage_pieces, received))
            received = chunks[-1].output_bytes if stage_pieces else received  # an empty stage passes its input on
        for round_ in range(layout.rounds_of(run.chain)):
            round_chunks = slice(round_ * num_ranks, (round_ + 1) * num_ranks)
            feeds = sorted((source, size) for source, size in run.feeds.items() if source in last_pair)
            before = [(last_pair[source], num_bytes) for source, num_bytes in feeds]
            if round_:
                before = [(last_pair[number], chunks[round_chunks.start - 1].output_bytes)]
            last_pair[number] = len(pieces)
            microbatch.append(microbatch_of[run.task])
            group.append(group_of.setdefault((run.task, run.chain), len(group_of)))
            hops = [transfers.hop_ns(rank, stage.output_bytes) for rank, stage in enumerate(chunks[round_chunks][:-1])]
            hop_ns.append(round(sum(hops) / max(1, len(hops))))
            predecessors += [pair for pair, _ in before]
            wrap_ns += [transfers.wrap_ns(num_bytes) for _, num_bytes in before]
            starts.append(len(predecessors))
            pieces.append(tuple(cut[round_chunks]))
            stages.append(tuple(chunks[round_chunks]))
    tables, row_of = _tables(stages)
    rows = np.array([[row_of[id(stage)] for stage in of_pair] for of_pair in stages])
    # What weights and the working space of the largest stage leave for activations.
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
    """The pieces of ops between two cuts of a chain."""
    parts = []
    for begin, op in ops:
        low, high = max(first, begin), min(last, begin + graph.metaops[op].num_layers)
        if low < high:
            parts.append(StagePiece(op, low - begin, high - begin))
    return tuple(parts)


def _tables(stages: Iterable[Sequence[Stage]]) -> tuple[tuple[Column, Column, Column, Column], dict[int, int]]:
    """Tables of memory choices with a row for each distinct stage: forward, backward, memory and number of choices; and
    id of a stage → its row."""
    distinct = list({id(stage): stage for of_pair in stages for stage in of_pair}.values())
    width = max(len(stage.choices) for stage in distinct)
    shape = (len(distinct), width)
    forward, backward, memory = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for row, stage in enumerate(distinct):
        padded = stage.choices + stage.choices[-1:] * (width - len(stage.choices))
        forward[row] = [choice.forward_ns for choice in padded]
        backward[row] = [choice.backward_ns for choice in padded]
        memory[row] = [choice.memory for choice in padded]
    counts = np.array([len(stage.choices) for stage in distinct], dtype=np.int64)
    return (forward, backward, memory, counts), {id(stage): row for row, stage in enumerate(distinct)}


class _TransferTimes:
    """Times of transfers between ranks. Every member of a tensor group sends to its counterpart in the next group."""

    def __init__(self, profile: Profile, layout: Layout) -> None:
        cluster, degree = profile.cluster, layout.tensor_degree
        spread = range(layout.num_dedicated, layout.num_ranks)
        island = [cluster.island_of[layout.devices(0, rank)[0]] for rank in spread]

        def between(source: int, target: int) -> tuple[float, float]:
            """Seconds per byte, and latency. The members of a tensor group share the uplink of their island."""
            here, there = cluster.islands[island[source]], cluster.islands[island[target]]
            if island[source] == island[target]:
                return 1 / here.link.bytes_per_s, here.link.latency_s
            slowest = max(1 / here.link.bytes_per_s, degree / here.uplink.bytes_per_s)
            return max(slowest, degree / there.uplink.bytes_per_s), max(here.uplink.latency_s, there.uplink.latency_s)

        self._hops = [between(source, target) for source, target in pairwise(range(len(island)))]
        self._wrap = between(len(island) - 1, 0) if len(island) > 1 else (0.0, 0.0)

    def hop_ns(self, rank: int, num_bytes: float) -> int:
        """The time from a rank to the next one."""
        return round((num_bytes * self._hops[rank][0] + self._hops[rank][1]) * NS) if num_bytes else 0

    def wrap_ns(self, num_bytes: float) -> int:
        """The time from the last rank back to the first."""
        return round((num_bytes * self._wrap[0] + self._wrap[1]) * NS) if num_bytes else 0
