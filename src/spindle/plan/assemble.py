"""Build a Plan from ordered pieces, as every planner does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from spindle.graph import MetaGraph
from spindle.plan.plan import FORWARD, DeviceLane, Pass, Plan, Slot
from spindle.plan.times import Key, pass_times
from spindle.profile import Profile, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next `num_layers` layers of an op (by its position in the graph) on these devices.

    A planner may set the earliest start (`not_before_s`, in folded time) and the wave; otherwise waves are labelled in
    start order.
    """

    op: int
    num_layers: int
    devices: tuple[int, ...]
    round: int = 0
    not_before_s: float = 0.0
    wave: int | None = None
    lane: int = 0
    weight_lane: int | None = None
    recomputed: int = 0
    offloaded: int = 0
    sequence_degree: int = 1


def assemble(profile: Profile, setting: Setting, planner: str, pieces: Iterable[Piece], seed: int = 0) -> Plan:
    """Build a mirrored plan (backward in the reverse order of forward) from pieces in an order that respects the flows.

    Each piece starts as soon as its data and its devices are ready. Consecutive pieces of one op on the same devices
    become one slot.
    """
    graph = profile.graph
    next_layer = [0] * len(graph.metaops)
    op_end = [0.0] * len(graph.metaops)
    lane_end: dict[DeviceLane, float] = {}
    lane_slot: dict[DeviceLane, int] = {}
    last_slot = [-1] * len(graph.metaops)
    slots: list[Slot] = []
    starts_s: list[float] = []  # in folded time
    for piece in pieces:
        layer_s = profile.curve(piece.op, setting).layer_s(len(piece.devices), setting.recompute[piece.op])
        first = next_layer[piece.op]
        next_layer[piece.op] = last = first + piece.num_layers
        lanes = [(device, piece.lane) for device in piece.devices]
        before = last_slot[piece.op]
        # Pieces become one slot only if nothing else has run on their lanes in between.
        extends_slot = (
            before >= 0
            and slots[before].devices == piece.devices
            and slots[before].lane == piece.lane
            and slots[before].weight_lane == piece.weight_lane
            and slots[before].round == piece.round
            and slots[before].sequence_degree == piece.sequence_degree
            and piece.not_before_s <= op_end[piece.op]
            and piece.wave in (None, slots[before].wave)
            and all(lane_slot[lane] == before for lane in lanes)
        )
        if extends_slot:
            # Computed from the slot's start, so that it equals, bit for bit, the end of a slot that was one piece.
            end_s = starts_s[before] + (last - slots[before].first) * layer_s
            slots[before] = replace(slots[before], last=last)
        else:
            producers = [op_end[piece.op]] if first else [op_end[producer] for producer in graph.predecessors[piece.op]]
            ready_s = max([0.0, *(lane_end.get(lane, 0.0) for lane in lanes), *producers])
            has_barrier = piece.not_before_s > ready_s
            starts_s.append(piece.not_before_s if has_barrier else ready_s)
            end_s = starts_s[-1] + piece.num_layers * layer_s
            last_slot[piece.op] = len(slots)
            slots.append(_slot(piece, graph, first, not_before_s=piece.not_before_s if has_barrier else 0.0))
        op_end[piece.op] = end_s
        for lane in lanes:
            lane_end[lane] = end_s
            lane_slot[lane] = last_slot[piece.op]
    by_start = sorted(range(len(slots)), key=lambda number: starts_s[number])
    in_order = [slots[number] for number in by_start]
    used = [(slot.wave, lane) for slot in in_order for lane in slot.lanes]
    if any(after.wave < before.wave for before, after in pairwise(in_order)) and len(set(used)) == len(used):
        # Start order depends on measured times, so waves written by hand may contradict it: label all slots anew.
        in_order = [replace(slot, wave=-1) for slot in in_order]
    return _plan(profile, setting, planner, label_waves(profile, in_order), max(op_end), seed)


def assemble_passes(
    profile: Profile,
    setting: Setting,
    planner: str,
    pieces: Sequence[Piece],
    order: Sequence[Key],
) -> Plan:
    """Build a plan from pieces, each a slot of its own, and an order of their passes, which must respect the flows.
    Passes name slots by the positions of their pieces."""
    graph = profile.graph
    next_layer = [0] * len(graph.metaops)
    slots: list[Slot] = []
    for piece in pieces:
        slots.append(_slot(piece, graph, next_layer[piece.op]))
        next_layer[piece.op] += piece.num_layers
    start_s, end_s = pass_times(slots, [piece.op for piece in pieces], order, profile, setting)
    starts_s = {number: start for (number, kind), start in zip(order, start_s.tolist(), strict=True) if kind == FORWARD}
    by_start = sorted(range(len(slots)), key=lambda number: (starts_s[number], number))
    number_after_sort = {number: index for index, number in enumerate(by_start)}
    ordered = label_waves(profile, [slots[number] for number in by_start])
    in_order = [order[place] for place in np.argsort(start_s, kind="stable").tolist()]
    passes = tuple(Pass(slot=number_after_sort[number], kind=kind) for number, kind in in_order)
    plan = _plan(profile, setting, planner, ordered, float(end_s.max()))
    return replace(plan, passes=passes)


def _slot(piece: Piece, graph: MetaGraph, first: int, not_before_s: float = 0.0) -> Slot:
    op = graph.metaops[piece.op]
    return Slot(
        op=op.name,
        first=first,
        last=first + piece.num_layers,
        devices=piece.devices,
        wave=-1 if piece.wave is None else piece.wave,
        microbatch=op.microbatch,
        lane=piece.lane,
        weight_lane=piece.weight_lane,
        round=piece.round,
        recomputed=piece.recomputed,
        offloaded=piece.offloaded,
        not_before_s=not_before_s,
        sequence_degree=piece.sequence_degree,
    )


def _plan(
    profile: Profile, setting: Setting, planner: str, slots: Sequence[Slot], folded_s: float, seed: int = 0
) -> Plan:
    graph = profile.graph
    return Plan(
        workload=graph.name,
        fingerprint=graph.fingerprint,
        cluster=profile.cluster.name,
        num_devices=profile.cluster.num_devices,
        planner=planner,
        slots=tuple(slots),
        tensor_degrees=tuple(
            sorted(
                {
                    op.module: degree
                    for op, degree in zip(graph.metaops, setting.tensor_degrees, strict=True)
                    if op.module is not None
                }.items()
            )
        ),
        recompute=tuple(op.name for op, recomputed in zip(graph.metaops, setting.recompute, strict=True) if recomputed),
        shard_optimizer=setting.shard_optimizer,
        folded_s=folded_s,
        seed=seed,
    )


def label_waves(profile: Profile, slots: Sequence[Slot]) -> list[Slot]:
    """Label slots that have no wave, in start order: a slot opens a new wave if the current one already uses one of its
    lanes or produces its input."""
    graph = profile.graph
    wave = 0
    lanes: set[DeviceLane] = set()
    ops: set[int] = set()
    labelled = []
    for slot in slots:
        op = graph.positions[slot.op]
        if slot.wave >= 0:
            labelled.append(slot)
            continue
        own_lanes = slot.lanes
        if not lanes.isdisjoint(own_lanes) or op in ops or not ops.isdisjoint(graph.predecessors[op]):
            wave, lanes, ops = wave + 1, set(), set()
        lanes.update(own_lanes)
        ops.add(op)
        labelled.append(replace(slot, wave=wave))
    return labelled


def slots_per_op(plan: Plan) -> float:
    """Mean number of slots per op; consecutive slots on the same devices count once."""
    count = 0
    last: dict[str, tuple[int, ...]] = {}
    for slot in plan.slots:
        if last.get(slot.op) != slot.devices:
            count += 1
        last[slot.op] = slot.devices
    return count / len(last)


def relaxed(plan: Plan, profile: Profile, setting: Setting) -> Plan:
    """The plan without barriers (`not_before_s`): the same slots in the same order, each as early as data and devices
    allow."""
    pieces = [
        Piece(
            op=profile.graph.positions[slot.op],
            num_layers=slot.num_layers,
            devices=slot.devices,
            round=slot.round,
            lane=slot.lane,
            weight_lane=slot.weight_lane,
            sequence_degree=slot.sequence_degree,
        )
        for slot in plan.slots
    ]
    return replace(assemble(profile, setting, plan.planner, pieces, plan.seed), quotas=plan.quotas)
