"""Which passes a pass depends on, and when it runs by the curves. Transfers, and copies of offloaded activations, come
in with the program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spindle.errors import PlanError, ProfileError
from spindle.graph import MetaGraph, MetaOp
from spindle.plan.plan import BACKWARD, FORWARD, INPUT, WEIGHT, DeviceLane, Plan, Slot, setting_of
from spindle.profile import Curve, Profile, Setting, saved_bytes

Key = tuple[int, str]  # a slot and a kind of pass
FOLDED = "folded"  # forward and backward of a slot together


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a pass runs; or, of kind `folded`, both passes of a slot whose backward mirrors its forward."""

    slot: int
    kind: str
    start_s: float
    end_s: float


def spans(plan: Plan, profile: Profile) -> tuple[Span, ...]:
    """Every pass of a plan in its order, each as early as its data and the lanes of its devices allow.

    Mirrored plans are in folded time, which counts forward and backward together: a span for each slot.
    """
    setting = setting_of(plan, profile)
    position = {op.name: index for index, op in enumerate(profile.graph.metaops)}
    ops = [position[slot.op] for slot in plan.slots]
    if plan.passes:
        return pass_spans(plan.slots, ops, [(pass_.slot, pass_.kind) for pass_ in plan.passes], profile, setting)
    return _folded_spans(plan.slots, ops, profile, setting)


def forward_spans(plan: Plan, profile: Profile) -> tuple[Span, ...]:
    """By slot: its span in folded time, or that of its forward pass."""
    starting = [span for span in spans(plan, profile) if span.kind in (FORWARD, FOLDED)]
    return tuple(sorted(starting, key=lambda span: span.slot))


def _folded_spans(slots: Sequence[Slot], ops: Sequence[int], profile: Profile, setting: Setting) -> tuple[Span, ...]:
    op_end: dict[int, float] = {}
    lane_end: dict[DeviceLane, float] = {}
    timed: list[Span] = []
    for number, (slot, op) in enumerate(zip(slots, ops, strict=True)):
        # A slot with earlier layers of its op waits only for these, which have already waited for the op's producers.
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
    """Times of passes that run in the given order on each device; refuses an order that does not respect the flows."""
    refuse_other_slots((number for number, _ in order), len(slots))
    needs = pass_needs(order, slot_links(ops, profile.graph))
    ends: dict[Key, float] = {}
    lane_end: dict[DeviceLane, float] = defaultdict(float)
    timed: list[Span] = []
    for key in order:
        number, kind = key
        late = [need for need in needs[key] if need not in ends]
        if late:
            raise PlanError(f"the {kind} of slot {number} comes before the {late[0][1]} of slot {late[0][0]}")
        slot, op = slots[number], ops[number]
        start_s = max([*(ends[need] for need in needs[key]), *(lane_end[lane] for lane in slot.lanes)], default=0.0)
        end_s = start_s + pass_s(slot, kind, profile.curve(op, setting), setting.recompute[op])
        ends[key] = end_s
        lane_end.update(dict.fromkeys(slot.lanes, end_s))
        timed.append(Span(slot=number, kind=kind, start_s=start_s, end_s=end_s))
    return tuple(timed)


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
        raise ProfileError(f"{slot.op}: nothing is known of which part of its backward pass makes weights' gradients")
    return slot.num_layers * weight_s if kind == WEIGHT else slot.num_layers * (backward_s - weight_s) + recompute_s


def offloaded_bytes(slot: Slot, op: MetaOp, tensor_degree: int) -> int:
    """Bytes of activations that a device of a slot offloads, for the largest share of the batch."""
    rows = -(-(op.batch_size or 1) * tensor_degree * slot.sequence_degree // len(slot.devices))
    return saved_bytes(op, rows, slot.offloaded, tensor_degree, False) // slot.sequence_degree


def slot_links(ops: Sequence[int], graph: MetaGraph) -> list[tuple[int, int]]:
    """Pairs of slots (producer, consumer): from slot to slot of an op, and from the last slot of an op to the first of
    each op that it feeds. `ops` has the op of each slot."""
    slots_of: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(ops):
        slots_of[op].append(number)
    for op, metaop in enumerate(graph.metaops):
        if op not in slots_of:
            raise PlanError(f"op {metaop.name!r} has no slots")
    pairs = [pair for numbers in slots_of.values() for pair in pairwise(numbers)]
    pairs += [(slots_of[producer][-1], slots_of[consumer][0]) for producer, consumer in graph.edges]
    return sorted(pairs)


def refuse_other_slots(slots: Iterable[int], num_slots: int) -> None:
    """Refuse passes of slots that do not exist, and slots without passes."""
    with_passes = set(slots)
    unknown = sorted(with_passes.difference(range(num_slots)))
    if unknown:
        raise PlanError(f"there is a pass of slot {unknown[0]}; slots are 0 to {num_slots - 1}")
    missing = sorted(set(range(num_slots)) - with_passes)
    if missing:
        raise PlanError(f"slot {missing[0]} has no passes")


def pass_needs(order: Iterable[Key], links: Sequence[tuple[int, int]]) -> dict[Key, list[Key]]:
    """The passes whose output each pass needs. Refuses passes that are missing or listed twice."""
    kinds: dict[int, list[str]] = defaultdict(list)
    for slot, kind in order:
        kinds[slot].append(kind)
    for slot, listed in kinds.items():
        if sorted(listed) not in ([BACKWARD, FORWARD], [FORWARD, INPUT, WEIGHT]):
            raise PlanError(
                f"slot {slot} has the passes {', '.join(listed)}; expected {FORWARD} and {BACKWARD}, or {FORWARD}, "
                f"{INPUT} and {WEIGHT}"
            )
    back = {slot: INPUT if INPUT in listed else BACKWARD for slot, listed in kinds.items()}
    needs: dict[Key, list[Key]] = {}
    for slot in kinds:
        needs[slot, FORWARD] = []
        needs[slot, back[slot]] = [(slot, FORWARD)]
        if back[slot] == INPUT:
            needs[slot, WEIGHT] = [(slot, INPUT)]
    for producer, consumer in links:
        for slot in (producer, consumer):
            if slot not in kinds:
                raise PlanError(f"slot {slot} has no passes")
        # Data goes forward along a link, its gradient backward.
        needs[consumer, FORWARD].append((producer, FORWARD))
        needs[producer, back[producer]].append((consumer, back[consumer]))
    return needs
