"""Random legal plans, as text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spindle.plan import Piece, Plan, assemble, parse_plan, setting_of
from spindle.profile import Contention, Profile

MAX_RANDOM_LANES = 4


def random_plan_text(
    profile: Profile,
    seed: int,
    *,
    degrees: Mapping[str, int] | None = None,
    has_rounds: bool | None = None,
    recomputed_share: float | None = None,
) -> str:
    """A legal plan: ops cut anywhere, on any tensor groups of these degrees, in any order that the flows allow. Rounds
    and the share of ops that are recomputed are drawn unless given.

    Starts are far apart, so that the plan is legal under any profile of the workload.
    """
    choose = random.Random(seed)
    profile = profile.with_degrees(degrees) if degrees else profile
    graph, num_devices = profile.graph, profile.cluster.num_devices
    groups = list(dict.fromkeys(graph.task_groups.values()))
    tasks = choose.sample(groups, len(groups))
    num_rounds = choose.choice((1, 1, min(2, len(tasks)), len(tasks)))
    if has_rounds is not None:
        num_rounds = len(tasks) if has_rounds else 1
    round_of_group = {name: number * num_rounds // len(tasks) for number, name in enumerate(tasks)}
    round_of = {name: round_of_group[group] for name, group in graph.task_groups.items()}
    state_devices: dict[str, list[int]] = {}
    drawn_share = choose.choice((0.0, 0.0, 0.7))
    share = drawn_share if recomputed_share is None else recomputed_share
    lines = [f"# tensor {name} {degree}" for name, degree in (degrees or {}).items() if degree > 1]
    lines += [f"# recompute {op.name}" for op in graph.metaops if choose.random() < share]
    wave = 0
    for round_number in range(num_rounds):
        layers_left = {
            position: op.num_layers for position, op in enumerate(graph.metaops) if round_of[op.task] == round_number
        }
        while layers_left:
            ready = [
                position
                for position in layers_left
                if not any(source in layers_left for source in graph.predecessors[position])
            ]
            free = choose.sample(range(num_devices), num_devices)
            slots = []
            for position in choose.sample(ready, choose.randint(1, len(ready))):
                curve = profile.curves[position][0]
                degree = curve.tensor_degree
                cost = graph.metaops[position].cost
                state = "" if cost is None else cost.state
                known = state_devices.get(state, free)
                if not set(known) <= set(free):
                    continue
                groups, rest = tensor_groups(known, degree, profile.cluster.place_in_island)
                rest += [device for device in free if device not in known]
                counts = [count for count in curve.num_devices if count <= len(groups) * degree]
                if not counts:
                    continue
                count, layers = choose.choice(counts), choose.randint(1, layers_left[position])
                taken = [device for group in groups[: count // degree] for device in group]
                devices = ",".join(map(str, taken))
                if state:
                    state_devices[state] = taken
                free = rest + [device for group in groups[count // degree :] for device in group]
                slots.append(f"{graph.metaops[position].name}*{layers}@{devices}~{round_number}^{wave}000")
                layers_left[position] -= layers
                if not layers_left[position]:
                    del layers_left[position]
            if slots:
                lines.append(" ".join(slots))
                wave += 1
    return "\n".join(lines)


def tensor_groups(free: list[int], degree: int, places: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Devices in tensor groups, one of each place in an island modulo the degree; and those that are left over."""
    by_shard = [[device for device in free if places[device] % degree == shard] for shard in range(degree)]
    count = min(map(len, by_shard))
    groups = [[devices[number] for devices in by_shard] for number in range(count)]
    return groups, [device for devices in by_shard for device in devices[count:]]


def plan_text_named(profile: Profile, name: str, degrees: Mapping[str, int] | None = None) -> str:
    """The random plan `plan SEED`, with everything recomputed (`plan 3 recomputed`) or the optimizer sharded."""
    _, seed, *options = name.split()
    recomputed_share = 1.0 if "recomputed" in options else None
    text = random_plan_text(profile, int(seed), degrees=degrees, recomputed_share=recomputed_share)
    return "# optimizer sharded\n" * ("sharded" in options) + text


def contended(profile: Profile, by_module: Mapping[str, tuple[float, float]] | None = None) -> Profile:
    """The profile with pressure and fill of each module, or of an op without one; without them, lanes hardly disturb
    each other. Weight gradients take half of backward."""
    curves = []
    for op, choices in zip(profile.graph.metaops, profile.curves, strict=True):
        shares = (by_module or {}).get(op.module or op.name, (0.0, 0.01))
        contention = Contention(forward=shares, backward=shares)
        curves.append(
            tuple(
                replace(
                    curve,
                    contention=(contention,) * len(curve.num_devices),
                    weight_s=tuple(time_s / 2 for time_s in curve.backward_s),
                )
                for curve in choices
            )
        )
    return replace(profile, curves=tuple(curves))


def random_lane_plan(profile: Profile, name: str) -> Plan:
    """The random plan `plan SEED lanes`, each slot as early as its lanes and data allow; modules that share weights
    share a lane. In `plan SEED weight lanes`, weight gradients of some modules run on another lane."""
    _, seed, *options = name.split()
    choose = random.Random(int(seed))
    plan = parse_plan(random_plan_text(profile, int(seed), has_rounds=False), profile)
    module_of = {op.name: op.module for op in profile.graph.metaops}

    def family_of(op: str) -> object:
        module = module_of[op]
        return profile.family_of(module) if module else op

    families = list(dict.fromkeys(family_of(slot.op) for slot in plan.slots))
    whole = {family_of(op) for op in plan.recompute}  # whose backward is not split
    lane_of = {family: choose.randrange(MAX_RANDOM_LANES) for family in families}
    weight_lane_of = {
        family: choose.randrange(MAX_RANDOM_LANES)
        for family in families
        if "weight" in options and family not in whole and choose.random() < 0.7
    }
    used = sorted({*lane_of.values(), *weight_lane_of.values()})
    position = {op.name: number for number, op in enumerate(profile.graph.metaops)}
    pieces = []
    for slot in plan.slots:
        weight_lane = weight_lane_of.get(family_of(slot.op))
        pieces.append(
            Piece(
                op=position[slot.op],
                num_layers=slot.num_layers,
                devices=slot.devices,
                lane=used.index(lane_of[family_of(slot.op)]),
                weight_lane=None if weight_lane is None else used.index(weight_lane),
            )
        )
    return assemble(profile, setting_of(plan, profile), "random", pieces)
