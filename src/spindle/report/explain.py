"""Why an op got its devices: its curve, the bound, what ran at the same time, and where its data was."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.display import count_of, listed, num_bytes, percent, seconds
from spindle.errors import InputError
from spindle.plan import Plan, Slot, Span, format_devices, forward_spans, setting_of, spans
from spindle.planners import lp_bound, problem_of
from spindle.profile import Profile
from spindle.program import Backward, Forward, Link, Program, lower
from spindle.simulate import simulate

_SAME_TIME = 1e-9  # of the step: planners add the same times in different orders


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A layer on a number of devices. Efficiency is the speedup over the smallest allowed number, per device."""

    num_devices: int
    layer_s: float
    efficiency: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotExplanation:
    """One slot: its devices, what it waited for, and what ran at the same time (op, devices)."""

    first: int
    last: int
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    wave: int
    waited_for: str
    beside: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflow:
    """Data that a slot takes from another: bytes that move between devices, and bytes that are already in place."""

    producer: str
    into_layer: int
    moved_bytes: float
    kept_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Weights this op uses together with others, or on several devices; `num_devices` synchronise their gradients."""

    with_ops: tuple[str, ...]
    num_bytes: int
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """One of several lanes, on which slots of an op run: the factor by which modules on other lanes slow them down, and
    which modules these are; and the lane's SMs, if it has a quota, which slows them down as well."""

    lane: int
    num_lanes: int
    slowdown: float
    slowed_by: tuple[str, ...]
    weight_lane: int | None = None  # of its weight gradients, where they run on another
    num_sms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpExplanation:
    """`bound_mix` is the LP bound's allocation: (devices, layers), layers fractional."""

    op: str
    task: str
    num_layers: int
    batch_size: int | None
    tensor_degree: int
    recompute: bool
    slots: tuple[SlotExplanation, ...]
    curve: tuple[CurvePoint, ...]
    bound_mix: tuple[tuple[int, float], ...]
    inflows: tuple[Inflow, ...]
    shared_weights: tuple[SharedWeights, ...]
    lanes: tuple[LaneShare, ...] = ()


def explain(plan: Plan, profile: Profile, wanted: str | None = None) -> tuple[OpExplanation, ...]:
    """The explanation of every op, or of the op (or the ops of the module) of that name."""
    graph = profile.graph
    setting = setting_of(plan, profile)
    mixes = lp_bound(problem_of(profile, setting)).mixes
    program = lower(plan, profile)
    timed = list(zip(plan.slots, forward_spans(plan, profile), strict=True))
    lanes = _lane_shares(program, profile) if plan.num_lanes > 1 else {}
    explanations = []
    for position, op in enumerate(graph.metaops):
        if wanted not in (None, op.name, op.module):
            continue
        explanations.append(
            OpExplanation(
                op=op.name,
                task=op.task,
                num_layers=op.num_layers,
                batch_size=op.batch_size,
                tensor_degree=setting.tensor_degrees[position],
                recompute=setting.recompute[position],
                slots=tuple(_explain_slot(plan, profile, timed, *entry) for entry in timed if entry[0].op == op.name),
                curve=_points(plan, profile, position),
                bound_mix=mixes[position],
                inflows=tuple(
                    _inflow(program, profile, link)
                    for link in program.links
                    if program.slots[link.consumer].op == position
                ),
                shared_weights=_shared_weights(program, profile, position),
                lanes=lanes.get(op.name, ()),
            )
        )
    if not explanations:
        names = ", ".join(op.name for op in graph.metaops)
        raise InputError(f"no op or module is called {wanted!r}; ops: {names}")
    return tuple(explanations)


def _lane_shares(program: Program, profile: Profile) -> dict[str, tuple[LaneShare, ...]]:
    """Op → the lanes of its slots, as simulated."""
    plan, timeline = program.plan, simulate(program, profile)
    alone_ns = [1e9 * (span.end_s - span.start_s) for span in spans(plan, profile)]
    passes: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of one rank, by slot
    for rank, number, start, end in zip(
        timeline.rank.tolist(),
        timeline.instruction.tolist(),
        timeline.start.tolist(),
        timeline.end.tolist(),
        strict=True,
    ):
        instruction = program.instructions[number]
        if isinstance(instruction, Forward | Backward) and rank == plan.slots[instruction.slot].devices[0]:
            passes[instruction.slot].append((start, end))
    shares: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for number, slot in enumerate(plan.slots):
        shares[slot.op, slot.lane, slot.lane_of_weights].append(number)
    module_of = {op.name: op.module or op.name for op in profile.graph.metaops}
    explained: dict[str, list[LaneShare]] = defaultdict(list)
    for (op, lane, weight_lane), numbers in shares.items():
        taken_ns = sum(end - start for number in numbers for start, end in passes[number])
        neighbours = [
            module_of[slot.op]
            for number, slot in enumerate(plan.slots)
            if slot.lane != lane
            and any(set(slot.devices) & set(plan.slots[own].devices) for own in numbers)
            and any(_overlap(passes[number], passes[own]) for own in numbers)
        ]
        explained[op].append(
            LaneShare(
                lane=lane,
                num_lanes=plan.num_lanes,
                slowdown=taken_ns / max(1.0, sum(alone_ns[number] for number in numbers)),
                slowed_by=tuple(dict.fromkeys(neighbours)),
                weight_lane=None if weight_lane == lane else weight_lane,
                num_sms=plan.quotas[lane] if plan.quotas else None,
            )
        )
    return {op: tuple(of_op) for op, of_op in explained.items()}


def _overlap(passes: Sequence[tuple[int, int]], other_passes: Sequence[tuple[int, int]]) -> bool:
    return any(start < last and first < end for start, end in passes for first, last in other_passes)


def _points(plan: Plan, profile: Profile, op: int) -> tuple[CurvePoint, ...]:
    """The curve at the smallest and the largest number of devices, at the chosen numbers, and at their neighbours."""
    setting = setting_of(plan, profile)
    curve = profile.curve(op, setting)
    counts, times = curve.num_devices, curve.folded_s(setting.recompute[op])
    chosen = {len(slot.devices) for slot in plan.slots if slot.op == profile.graph.metaops[op].name}
    shown = {0, len(counts) - 1}
    for count in chosen:
        place = counts.index(count)
        shown |= {max(0, place - 1), place, min(len(counts) - 1, place + 1)}
    least_area = counts[0] * float(times[0])
    return tuple(
        CurvePoint(
            num_devices=counts[place],
            layer_s=float(times[place]),
            efficiency=least_area / (counts[place] * float(times[place])),
            chosen=counts[place] in chosen,
        )
        for place in sorted(shown)
    )


def _explain_slot(
    plan: Plan, profile: Profile, timed: Sequence[tuple[Slot, Span]], slot: Slot, span: Span
) -> SlotExplanation:
    concurrent: dict[str, int] = {}
    slack = _SAME_TIME * plan.folded_s
    for neighbour, when in timed:
        overlaps = when.start_s < span.end_s - slack and when.end_s > span.start_s + slack
        if neighbour.op != slot.op and overlaps:
            concurrent[neighbour.op] = max(concurrent.get(neighbour.op, 0), len(neighbour.devices))
    return SlotExplanation(
        first=slot.first,
        last=slot.last,
        devices=slot.devices,
        start_s=span.start_s,
        end_s=span.end_s,
        wave=slot.wave,
        waited_for=_waited_for(plan, profile, timed, slot, span),
        beside=tuple(concurrent.items()),
    )


def _waited_for(plan: Plan, profile: Profile, timed: Sequence[tuple[Slot, Span]], slot: Slot, span: Span) -> str:
    """What ended when this slot started: the producer of its data, else the previous slot on its devices."""
    graph = profile.graph
    slack = _SAME_TIME * plan.folded_s
    if span.start_s <= slack:
        return "the start of the step"
    ended = [before for before, when in timed if abs(when.end_s - span.start_s) <= slack]
    position = next(number for number, op in enumerate(graph.metaops) if op.name == slot.op)
    producers = {graph.metaops[producer].name for producer in graph.predecessors[position]}
    for before in ended:
        if (slot.first == 0 and before.op in producers) or (before.op == slot.op and before.last == slot.first):
            if before.op == slot.op:
                return "its own earlier layers"
            same = set(before.devices) == set(slot.devices)
            where = "the same devices" if same else format_devices(sorted(before.devices))
            return f"its input from {before.op} on {where}"
    for before in ended:
        common = sorted(set(before.devices) & set(slot.devices))
        if common:
            return f"{before.op} to leave {'device' if len(common) == 1 else 'devices'} {format_devices(common)}"
    return "the start of its wave, though its data and devices were there before"


def _inflow(program: Program, profile: Profile, link: Link) -> Inflow:
    """The data that a slot takes from another one. A program lists only what moves; everything else that the consumer
    needs is already in place."""
    producer, consumer = program.slots[link.producer], program.slots[link.consumer]
    cost = profile.graph.metaops[producer.op].cost
    needed = 0.0 if cost is None else cost.output_bytes * producer.num_rows * consumer.tensor_degree
    moved = float((link.forward.last - link.forward.first).sum() * link.bytes_per_row)
    return Inflow(
        producer=program.plan.slots[link.producer].op,
        into_layer=program.plan.slots[link.consumer].first,
        moved_bytes=moved,
        kept_bytes=max(0.0, needed - moved),
    )


def _shared_weights(program: Program, profile: Profile, op: int) -> tuple[SharedWeights, ...]:
    """The weights of an op, grouped by the other ops that use them and the number of devices that hold them."""
    graph = profile.graph
    parameters = {parameter for layer in graph.metaops[op].parameters for parameter in layer}
    users: dict[int, list[str]] = defaultdict(list)
    for number, sharing_op in enumerate(graph.metaops):
        for parameter in sorted({parameter for layer in sharing_op.parameters for parameter in layer} & parameters):
            if number != op:
                users[parameter].append(sharing_op.name)
    groups: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    num_devices_of: dict[int, int] = defaultdict(int)
    for bucket in program.buckets:
        for parameter in parameters & set(bucket.parameters):
            num_devices_of[parameter] = max(num_devices_of[parameter], len(np.unique(bucket.ranks)))
    for parameter in sorted(parameters):
        size = graph.parameters[parameter].num_elements * graph.numerics.parameter_bytes
        groups[tuple(users[parameter]), num_devices_of[parameter]] += size
    return tuple(
        SharedWeights(with_ops=ops, num_bytes=size, num_devices=holder) for (ops, holder), size in groups.items()
    )


def sentences(explanation: OpExplanation) -> list[str]:
    """The explanation as sentences."""
    return [
        *_about_slots(explanation),
        *_about_lanes(explanation),
        _about_curve(explanation),
        _about_bound(explanation),
        *_about_neighbours(explanation),
        *_about_data(explanation),
        *_about_weights(explanation),
    ]


def _about_slots(explanation: OpExplanation) -> list[str]:
    lines = []
    for slot in explanation.slots:
        several = slot.last - slot.first > 1
        layers = f"Layers {slot.first} to {slot.last - 1} run" if several else f"Layer {slot.first} runs"
        layers += f" on {count_of(len(slot.devices), 'device')} ({format_devices(sorted(slot.devices))})"
        place = f"in wave {slot.wave}, after {slot.waited_for}"
        if explanation.lanes:  # the step has no folded times: lanes slow each other down
            alone_s = slot.end_s - slot.start_s
            lines.append(f"{layers} {place}; alone that takes {seconds(alone_s)}, forward and backward together.")
        else:
            lines.append(f"{layers} from {seconds(slot.start_s)} to {seconds(slot.end_s)} {place}.")
    if explanation.tensor_degree > 1:
        lines.append(f"Every {explanation.tensor_degree} devices hold one copy of its weights (its tensor degree).")
    if explanation.recompute:
        lines.append("Its activations are recomputed in the backward pass, because memory is short.")
    return lines


def _about_lanes(explanation: OpExplanation) -> list[str]:
    lines = []
    for share in explanation.lanes:
        place = f"It runs on lane {share.lane} of {share.num_lanes}"
        if share.weight_lane is not None:
            place += f", its weight gradients on lane {share.weight_lane}"
        causes = share.slowed_by
        if share.num_sms is not None:
            place += f", on {share.num_sms} SMs of its own"
            causes = ("fewer SMs", *causes)
        if share.slowdown < 1.005 or not causes:
            lines.append(f"{place}, as fast as alone.")
        else:
            lines.append(f"{place}, slowed {share.slowdown:.2g}× by {listed(causes)}.")
    return lines


def _about_curve(explanation: OpExplanation) -> str:
    parts = []
    for number, point in enumerate(explanation.curve):
        unit = (" device" if point.num_devices == 1 else " devices") if number == 0 else ""
        notes = f"{100 * point.efficiency:.0f} % efficient" if number == 0 else f"{100 * point.efficiency:.0f} %"
        notes += ", chosen" if point.chosen else ""
        parts.append(f"{seconds(point.layer_s)} on {point.num_devices}{unit} ({notes})")
    return f"A layer takes {listed(parts, at_most=16)}."


def _about_bound(explanation: OpExplanation) -> str:
    parts = [
        f"{layers:.3g} {'layer' if layers == 1 else 'layers'} on {count}" for count, layers in explanation.bound_mix
    ]
    pieces = [(slot.last - slot.first, len(slot.devices)) for slot in explanation.slots]
    chosen = []
    for (layers, devices), equal in itertools.groupby(pieces):
        repeats = len(list(equal))
        times = f"{repeats} × " if repeats > 1 else ""
        chosen.append(f"{times}{count_of(layers, 'layer')} on {count_of(devices, 'device')}")
    return f"The LP bound would run {listed(parts)}; this plan runs {listed(chosen)}."


def _about_neighbours(explanation: OpExplanation) -> list[str]:
    concurrent: dict[str, int] = {}
    for slot in explanation.slots:
        for op, count in slot.beside:
            concurrent[op] = max(count, concurrent.get(op, 0))
    if not concurrent:
        return ["Nothing ran beside it."]
    return [f"Beside it ran {listed([f'{op} (on {count})' for op, count in concurrent.items()])}."]


def _about_data(explanation: OpExplanation) -> list[str]:
    """Where its data came from; producers with equal sizes share a sentence."""
    lines = []
    if not any(inflow.into_layer == 0 for inflow in explanation.inflows):
        lines.append("It takes its input from the batch, from no other op.")
    producers: dict[tuple[int, float, float], list[str]] = {}
    for inflow in explanation.inflows:
        own = inflow.producer == explanation.op
        total = inflow.moved_bytes + inflow.kept_bytes
        if own and total == 0:
            continue
        alike = producers.setdefault((inflow.into_layer, inflow.moved_bytes, total), [])
        alike.append(f"layer {inflow.into_layer - 1}" if own else inflow.producer)
    for (layer, moved, total), names in producers.items():
        sources, each = listed(names), " each" if len(names) > 1 else ""
        if total == 0:
            lines.append(f"Layer {layer} takes its input from {sources}; its bytes are not known.")
        elif moved == 0:
            lines.append(f"Layer {layer} finds its input from {sources} in place ({num_bytes(total)}{each}).")
        else:
            lines.append(
                f"Layer {layer} takes {num_bytes(total)}{each} from {sources}; {num_bytes(moved)} "
                f"({percent(moved / total)}){' of each' if each else ''} moves between devices."
            )
    return lines


def _about_weights(explanation: OpExplanation) -> list[str]:
    lines = []
    for shared in explanation.shared_weights:
        with_whom = f"It shares {num_bytes(shared.num_bytes)} of weights with {listed(shared.with_ops)}"
        if not shared.with_ops:
            with_whom = f"{num_bytes(shared.num_bytes)} of its weights are its own"
        how = f"their gradients are synchronised over {shared.num_devices} devices"
        if shared.num_devices < 2:
            how = "nothing is synchronised for them"
        lines.append(f"{with_whom}; {how}.")
    return lines


def headline(explanation: OpExplanation) -> str:
    """A line that says what the op is."""
    batch = "" if explanation.batch_size is None else f", batch {explanation.batch_size}"
    return f"{explanation.op}: {count_of(explanation.num_layers, 'layer')}{batch}"
