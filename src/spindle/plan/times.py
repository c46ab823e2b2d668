"""Which passes a pass depends on, and when it runs by curves alone. Transfers and copies of offloaded activations take
no time here; the simulator adds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spindle.errors import PlanError, ProfileError
from spindle.graph import MetaGraph, MetaOp
from spindle.plan.earliest import run_passes
from spindle.plan.plan import BACKWARD, FORWARD, INPUT, PASS_KINDS, WEIGHT, DeviceLane, Plan, Slot, setting_of
from spindle.profile import Curve, Profile, Setting, saved_bytes

Column = NDArray[np.int64]
Seconds = NDArray[np.float64]
Key = tuple[int, str]  # a slot and a kind of pass
FOLDED = "folded"  # forward and backward of a slot together


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a pass runs. Kind `folded` stands for both passes of a slot whose backward mirrors its forward."""

    slot: int
    kind: str
    start_s: float
    end_s: float


def spans(plan: Plan, profile: Profile) -> tuple[Span, ...]:
    """When every pass of a plan runs: in the plan's order, as early as its data and the lanes of its devices allow.

    Mirrored plans have one span per slot, in folded time, which counts forward and backward together.
    """
    setting = setting_of(plan, profile)
    ops = [profile.graph.positions[slot.op] for slot in plan.slots]
    if plan.passes:
        return pass_spans(plan.slots, ops, [(pass_.slot, pass_.kind) for pass_ in plan.passes], profile, setting)
    return _folded_spans(plan.slots, ops, profile, setting)


def forward_spans(plan: Plan, profile: Profile) -> tuple[Span, ...]:
    """The span of each slot's forward pass; for mirrored plans, its span in folded time."""
    starting = [span for span in spans(plan, profile) if span.kind in (FORWARD, FOLDED)]
    return tuple(sorted(starting, key=lambda span: span.slot))


def _folded_spans(slots: Sequence[Slot], ops: Sequence[int], profile: Profile, setting: Setting) -> tuple[Span, ...]:
    op_end: dict[int, float] = {}
    lane_end: dict[DeviceLane, float] = {}
    timed: list[Span] = []
    for number, (slot, op) in enumerate(zip(slots, ops, strict=True)):
        # Later layers of an op wait only for its earlier ones, which have already waited for its producers.
        producers = [op] if slot.first else profile.graph.predecessors[op]
        ready_s = [op_end.get(producer, 0.0) for producer in producers]
        start_s = max([slot.not_before_s, *ready_s, *(lane_end.get(lane, 0.0) for lane in slot.lanes)])
        layer_s = profile.curve(op, setting).layer_s(len(slot.devices), setting.recompute[op])
        op_end[op] = end_s = start_s + slot.num_layers * layer_s
        lane_end.update(dict.fromkeys(slot.lanes, end_s))
        timed.append(Span(slot=number, kind=FOLDED, start_s=start_s, end_s=end_s))
    return tuple(timed)


def pass_spans(
    slots: Sequence[Slot], ops: Sequence[int], order: Sequence[Key], profile: Profile, setting: Setting
) -> tuple[Span, ...]:
    """When each pass runs, if every device runs its passes in this order. Refuses an order that does not respect the
    flows."""
    start_s, end_s = pass_times(slots, ops, order, profile, setting)
    return tuple(
        Span(slot=number, kind=kind, start_s=start, end_s=end)
        for (number, kind), start, end in zip(order, start_s.tolist(), end_s.tolist(), strict=True)
    )


def pass_times(
    slots: Sequence[Slot], ops: Sequence[int], order: Sequence[Key], profile: Profile, setting: Setting
) -> tuple[Seconds, Seconds]:
    """The start and end of each pass of an order. Refuses an order that does not respect the flows."""
    refuse_wrong_slots((number for number, _ in order), len(slots))
    needs = pass_needs(order, slot_needs(ops, profile.graph))
    violation = needs.first_violation
    if violation is not None:
        (number, kind), (source, source_kind) = order[violation[0]], order[violation[1]]
        raise PlanError(f"the {kind} of slot {number} comes before the {source_kind} of slot {source}")
    curves = [profile.curve(op, setting) for op in ops]
    duration_s = [pass_s(slots[number], kind, curves[number], setting.recompute[ops[number]]) for number, kind in order]
    # Slots on the same devices and lane are one group.
    groups: dict[tuple[tuple[int, ...], int], int] = {}
    group_of = [groups.setdefault((slot.devices, slot.lane), len(groups)) for slot in slots]
    lanes_of = [[(device, lane) for device in devices] for devices, lane in groups]
    numbers: dict[DeviceLane, int] = {}
    lanes = [numbers.setdefault(lane, len(numbers)) for of_group in lanes_of for lane in of_group]
    start_s, end_s = np.empty(len(order)), np.empty(len(order))
    run_passes(
        needs.starts,
        needs.needed,
        np.array([group_of[number] for number, _ in order], dtype=np.int64),
        np.cumsum([0, *map(len, lanes_of)]),
        np.array(lanes, dtype=np.int64),
        np.array(duration_s, dtype=np.float64),
        np.zeros(len(numbers)),
        start_s,
        end_s,
    )
    return start_s, end_s


def pass_s(slot: Slot, kind: str, curve: Curve, recompute: bool = False) -> float:
    """Seconds of a pass by its curve; with `recompute`, backward runs all layers forward again."""
    forward_s, backward_s = curve.times_s(len(slot.devices))
    if kind == FORWARD:
        return slot.num_layers * forward_s
    # Input gradients come first in a split backward, so they pay for recomputation.
    recompute_s = forward_s * (slot.num_layers if recompute else slot.recomputed)
    if kind == BACKWARD:
        return slot.num_layers * backward_s + recompute_s
    weight_s = curve.weight_time_s(len(slot.devices))
    if weight_s is None:
        raise ProfileError(f"{slot.op}: the profile does not say which part of its backward computes weight gradients")
    return slot.num_layers * weight_s if kind == WEIGHT else slot.num_layers * (backward_s - weight_s) + recompute_s


def offloaded_bytes(slot: Slot, op: MetaOp, tensor_degree: int) -> int:
    """Bytes of activations that a device of a slot offloads; of the device with the largest share of the batch."""
    rows = -(-(op.batch_size or 1) * tensor_degree * slot.sequence_degree // len(slot.devices))
    return saved_bytes(op, rows, slot.offloaded, tensor_degree, False) // slot.sequence_degree


def slot_links(ops: Sequence[int], graph: MetaGraph) -> list[tuple[int, int]]:
    """Pairs of slots (producer, consumer): successive slots of an op, and the last slot of an op with the first slot of
    each op that it feeds. `ops` is the op of each slot."""
    return _slot_pairs(ops, graph, graph.edges)


def slot_needs(ops: Sequence[int], graph: MetaGraph) -> list[tuple[int, int]]:
    """`slot_links`, and the pairs of ops that only have to run in order (`order_edges`)."""
    return _slot_pairs(ops, graph, graph.all_edges)


def _slot_pairs(ops: Sequence[int], graph: MetaGraph, edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    slots_of: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(ops):
        slots_of[op].append(number)
    for op, metaop in enumerate(graph.metaops):
        if op not in slots_of:
            raise PlanError(f"op {metaop.name!r} has no slots")
    pairs = [pair for numbers in slots_of.values() for pair in pairwise(numbers)]
    pairs += [(slots_of[producer][-1], slots_of[consumer][0]) for producer, consumer in edges]
    return sorted(pairs)


def refuse_wrong_slots(slots: Iterable[int], num_slots: int) -> None:
    """Refuse passes of slots that do not exist, and slots without passes."""
    with_passes = set(slots)
    unknown = sorted(with_passes.difference(range(num_slots)))
    if unknown:
        raise PlanError(f"there is a pass of slot {unknown[0]}; slots are 0 to {num_slots - 1}")
    missing = sorted(set(range(num_slots)) - with_passes)
    if missing:
        raise PlanError(f"slot {missing[0]} has no passes")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassNeeds:
    """The passes whose output each pass of an order needs, by position in the order: pass p needs
    `needed[starts[p] : starts[p + 1]]`, first the pass of its own slot."""

    starts: Column
    needed: Column

    def of(self, place: int) -> list[int]:
        """The positions of the passes that the pass at this position needs."""
        numbers: list[int] = self.needed[self.starts[place] : self.starts[place + 1]].tolist()
        return numbers

    @property
    def first_violation(self) -> tuple[int, int] | None:
        """The first pass that comes before a pass that it needs, and the latter; None if the order is right."""
        passes = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        late = np.flatnonzero(self.needed > passes)
        return (int(passes[late[0]]), int(self.needed[late[0]])) if len(late) else None


def pass_needs(order: Sequence[Key], links: Sequence[tuple[int, int]]) -> PassNeeds:
    """The passes whose output each pass needs. Refuses passes that are missing or listed twice."""
    number_of = {kind: number for number, kind in enumerate(PASS_KINDS)}
    slot = np.array([number for number, _ in order], dtype=np.int64)
    kind = np.array([number_of[kind] for _, kind in order], dtype=np.int64)
    num_slots = 1 + int(slot.max(initial=-1))
    # How often each pass is listed, by kind and slot; it has to be once.
    counts = np.zeros((len(PASS_KINDS), num_slots), dtype=np.int64)
    np.add.at(counts, (kind, slot), 1)
    forward, backward, inputs, weights = counts
    is_listed = counts.sum(axis=0) > 0
    is_whole, is_split = (backward == 1) & (inputs + weights == 0), (backward == 0) & (inputs == 1) & (weights == 1)
    wrong = is_listed & ~((forward == 1) & (is_whole | is_split))
    if wrong.any():
        number = int(slot[np.flatnonzero(wrong[slot])[0]])
        listed = [listed_kind for listed_slot, listed_kind in order if listed_slot == number]
        raise PlanError(
            f"slot {number} has the passes {', '.join(listed)}; expected {FORWARD} and {BACKWARD}, or {FORWARD}, "
            f"{INPUT} and {WEIGHT}"
        )
    for pair in links:
        for number in pair:
            if number >= num_slots or not is_listed[number]:
                raise PlanError(f"slot {number} has no passes")
    place = np.zeros((len(PASS_KINDS), num_slots), dtype=np.int64)
    place[kind, slot] = np.arange(len(order))
    forward_at, backward_at = place[0], np.where(is_split, place[2], place[1])
    # Pairs (pass, pass that it needs). Data goes forward along a link, its gradient backward.
    own, split = np.flatnonzero(is_listed), np.flatnonzero(is_split)
    producer, consumer = np.array(links, dtype=np.int64).reshape(-1, 2).T
    passes = np.concatenate([backward_at[own], place[3, split], forward_at[consumer], backward_at[producer]])
    needed = np.concatenate([forward_at[own], place[2, split], forward_at[producer], backward_at[consumer]])
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(np.bincount(passes, minlength=len(order)), out=starts[1:])
    return PassNeeds(starts=starts, needed=needed[np.argsort(passes, kind="stable")])
