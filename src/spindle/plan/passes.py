"""Plans whose passes have an order of their own: what each pass waits for, and from an order to times.

A backward pass mirrors its forward pass unless a plan says otherwise; these plans do. On each device passes run in the
order in which the plan has them. Times are those of the curves; transfers come in with the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from spindle.errors import PlanError
from spindle.graph import MetaGraph
from spindle.plan.assemble import Piece, label_waves, plan_of
from spindle.plan.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Pass, Plan, Slot, pass_s
from spindle.profile import Profile, Setting

Key = tuple[int, str]  # a slot and a kind of pass


def slot_links(ops: Sequence[int], graph: MetaGraph) -> list[tuple[int, int]]:
    """Pairs of slots (numbered as `ops`, which has the op of each) of which the first hands data to the second: from
    slot to slot of an op, and from the last of a producer to the first of its consumer."""
    slots_of: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(ops):
        slots_of[op].append(number)
    pairs = [pair for numbers in slots_of.values() for pair in pairwise(numbers)]
    pairs += [(slots_of[producer][-1], slots_of[consumer][0]) for producer, consumer in graph.edges]
    return sorted(pairs)


def refuse_other_slots(slots: Iterable[int], num_slots: int) -> None:
    """The slots of passes are those of the plan: all of them, and no others."""
    found = set(slots)
    unknown = sorted(found.difference(range(num_slots)))
    if unknown:
        raise PlanError(f"there is a pass of slot {unknown[0]}; slots are 0 to {num_slots - 1}")
    missing = sorted(set(range(num_slots)) - found)
    if missing:
        raise PlanError(f"slot {missing[0]} has no passes")


def pass_needs(order: Iterable[Key], links: Sequence[tuple[int, int]]) -> dict[Key, list[Key]]:
    """What each pass waits for by its data. Refuses passes that are missing, or there twice."""
    kinds: dict[int, list[str]] = defaultdict(list)
    for slot, kind in order:
        kinds[slot].append(kind)
    for slot, found in kinds.items():
        if sorted(found) not in ([BACKWARD, FORWARD], [FORWARD, INPUT, WEIGHT]):
            raise PlanError(
                f"slot {slot} has the passes {', '.join(found)}; expected {FORWARD} and {BACKWARD}, or {FORWARD}, "
                f"{INPUT} and {WEIGHT}"
            )
    back = {slot: INPUT if INPUT in found else BACKWARD for slot, found in kinds.items()}
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
        needs[consumer, FORWARD].append((producer, FORWARD))
        needs[producer, back[producer]].append((consumer, back[consumer]))
    return needs


def assemble_passes(
    profile: Profile,
    setting: Setting,
    planner: str,
    pieces: Sequence[Piece],
    order: Sequence[Key],
    seed: int = 0,
) -> Plan:
    """A plan from pieces, each a slot of its own, and the order of their passes (numbered as the pieces are), which
    must respect the flows. Each pass starts as soon as its data and its devices are there."""
    graph = profile.graph
    next_layer = [0] * len(graph.metaops)
    slots: list[Slot] = []
    for piece in pieces:
        first = next_layer[piece.op]
        next_layer[piece.op] = first + piece.num_layers
        slots.append(
            Slot(
                op=graph.metaops[piece.op].name,
                first=first,
                last=first + piece.num_layers,
                devices=piece.devices,
                start_s=0.0,
                end_s=0.0,
                wave=-1,
                recomputed=piece.recomputed,
                offloaded=piece.offloaded,
            )
        )
    ops = [piece.op for piece in pieces]
    refuse_other_slots((number for number, _ in order), len(slots))
    needs = pass_needs(order, slot_links(ops, graph))
    ends: dict[Key, float] = {}
    device_end: dict[int, float] = defaultdict(float)
    timed: list[Pass] = []
    for key in order:
        number, kind = key
        late = [need for need in needs[key] if need not in ends]
        if late:
            raise PlanError(f"the {kind} of slot {number} stands before the {late[0][1]} of slot {late[0][0]}")
        slot, op = slots[number], ops[number]
        start_s = max(
            [*(ends[need] for need in needs[key]), *(device_end[device] for device in slot.devices)], default=0.0
        )
        end_s = start_s + pass_s(slot, kind, profile.curve(op, setting), setting.recompute[op])
        ends[key] = end_s
        for device in slot.devices:
            device_end[device] = end_s
        timed.append(Pass(slot=number, kind=kind, start_s=start_s, end_s=end_s))
        if kind == FORWARD:
            slots[number] = replace(slot, start_s=start_s, end_s=end_s)
    rising = sorted(range(len(slots)), key=lambda number: (slots[number].start_s, number))
    place = {number: index for index, number in enumerate(rising)}
    ordered = label_waves(profile, [slots[number] for number in rising])
    timed.sort(key=lambda one: one.start_s)
    plan = plan_of(profile, setting, planner, ordered, seed)
    passes = tuple(replace(one, slot=place[one.slot]) for one in timed)
    return replace(plan, passes=passes, folded_s=max(pass_.end_s for pass_ in passes))
