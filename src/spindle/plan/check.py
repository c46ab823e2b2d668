"""Is this plan legal? Reports the first rule that it breaks, and marks the slot that breaks it.

Legality does not depend on times, so a plan stays legal when curves are measured again.
"""

from __future__ import annotations

from collections import defaultdict

from spindle.errors import ClusterError, PlanError, ProfileError
from spindle.plan.plan import FORWARD, WEIGHT, DeviceLane, Plan, Slot, setting_of
from spindle.plan.text import marked
from spindle.plan.times import offloaded_bytes, pass_needs, refuse_wrong_slots, slot_needs
from spindle.profile import Curve, Profile, bytes_text

MAX_LANES = 8  # compute streams of a device
_TOLERANCE = 1e-9  # versions may add the same times in different orders


def check(plan: Plan, profile: Profile) -> None:
    """Raise a PlanError at the first rule that the plan breaks for this profile's graph and cluster."""
    if plan.fingerprint != profile.graph.fingerprint:
        raise PlanError(f"this plan was made for another workload: {plan.workload!r}, not {profile.graph.name!r}")
    if plan.num_devices > profile.cluster.num_devices:
        raise PlanError(f"this plan needs {plan.num_devices} devices, the cluster has {profile.cluster.num_devices}")
    for rule in (
        _settings,
        _ops_and_layers,
        _allocations,
        _memory,
        _rounds,
        _lanes,
        _quotas,
        _states,
        _order,
        _host,
        _waves,
    ):
        rule(plan, profile)


def _refuse(plan: Plan, slot: Slot, message: str) -> PlanError:
    return PlanError(f"wave {slot.wave}: {message}{marked(plan, slot)}")


def _settings(plan: Plan, profile: Profile) -> None:
    """Degrees and recomputation name things that exist, and modules that share weights are sharded alike."""
    degrees = dict(plan.tensor_degrees)
    for module, degree in degrees.items():
        if module not in profile.graph.modules:
            raise PlanError(f"this plan gives a tensor degree to {module!r}, which is not a module of the workload")
        for sibling in profile.family_of(module) if degree > 1 else ():
            if degrees.get(sibling, 1) != degree:
                raise PlanError(
                    f"{module!r} and {sibling!r} share weights, so their tensor degrees must be equal, "
                    f"got {degree} and {degrees.get(sibling, 1)}"
                )
    names = {op.name for op in profile.graph.metaops}
    for op in plan.recompute:
        if op not in names:
            raise PlanError(f"this plan recomputes {op!r}, which is not an op of the workload")


def _ops_and_layers(plan: Plan, profile: Profile) -> None:
    """Every layer of every op is in exactly one slot, in order, with its op's microbatch."""
    next_layer = {op.name: 0 for op in profile.graph.metaops}
    microbatch_of = {op.name: op.microbatch for op in profile.graph.metaops}
    for slot in plan.slots:
        if slot.op not in next_layer:
            raise _refuse(plan, slot, f"no op is called {slot.op!r}; ops: {', '.join(next_layer)}")
        if slot.last <= slot.first:
            raise _refuse(plan, slot, f"{slot.op} runs layers [{slot.first}, {slot.last}), which is empty")
        if slot.first != next_layer[slot.op]:
            raise _refuse(plan, slot, f"{slot.op} continues at layer {slot.first}, expected {next_layer[slot.op]}")
        if slot.microbatch != microbatch_of[slot.op]:
            expected = microbatch_of[slot.op]
            raise _refuse(plan, slot, f"{slot.op} is of microbatch {expected}, its slot says {slot.microbatch}")
        next_layer[slot.op] = slot.last
    for op in profile.graph.metaops:
        if next_layer[op.name] != op.num_layers:
            raise PlanError(f"op {op.name!r} has {op.num_layers} layers, this plan runs {next_layer[op.name]}")


def _allocations(plan: Plan, profile: Profile) -> None:
    """A slot names existing devices, each once, as many as its curve allows, in whole groups inside an island."""
    setting = setting_of(plan, profile)
    island_of, shard_of = profile.cluster.island_of, profile.cluster.place_in_island
    for slot in plan.slots:
        op = profile.graph.positions[slot.op]
        curve = profile.curve(op, setting)
        if len(set(slot.devices)) < len(slot.devices):
            raise _refuse(plan, slot, f"{slot.op} names a device twice: {list(slot.devices)}")
        for device in slot.devices:
            if not 0 <= device < len(island_of):
                raise _refuse(plan, slot, f"there is no device {device}, only 0 to {len(island_of) - 1}")
        if not curve.allows(len(slot.devices)):
            allowed = ", ".join(map(str, curve.num_devices[:8])) + (", ..." if len(curve.num_devices) > 8 else "")
            why = ": a sequence group has to divide its heads" if profile.graph.metaops[op].items else ""
            raise _refuse(
                plan, slot, f"{slot.op} is not allowed on {len(slot.devices)} devices, only on {allowed}{why}"
            )
        degree = curve.tensor_degree
        for start in range(0, len(slot.devices) if degree > 1 else 0, degree):
            group = slot.devices[start : start + degree]
            if len({island_of[device] for device in group}) > 1:
                raise _refuse(plan, slot, f"the tensor group {list(group)} of {slot.op} spans two islands")
            if any(shard_of[device] % degree != place for place, device in enumerate(group)):
                # A device always holds the same shard of a module.
                raise _refuse(plan, slot, f"the tensor group {list(group)} of {slot.op} is not aligned")
        size = degree * slot.sequence_degree
        if slot.sequence_degree < 1 or len(slot.devices) % size:
            raise _refuse(
                plan,
                slot,
                f"{slot.op} is on {len(slot.devices)} devices, expected whole sequence groups of {size}",
            )
        for start in range(0, len(slot.devices) if slot.sequence_degree > 1 else 0, size):
            group = slot.devices[start : start + size]
            if len({island_of[device] for device in group}) > 1:
                raise _refuse(plan, slot, f"the sequence group {list(group)} of {slot.op} spans two islands")


def _memory(plan: Plan, profile: Profile) -> None:
    """A slot recomputes or offloads each of its layers at most once, and only in plans that list passes."""
    num_lanes = plan.num_lanes
    for slot in plan.slots:
        if min(slot.recomputed, slot.offloaded) < 0 or slot.recomputed + slot.offloaded > slot.num_layers:
            raise _refuse(
                plan,
                slot,
                f"{slot.op} recomputes {slot.recomputed} and offloads {slot.offloaded} of {slot.num_layers} layers",
            )
        if (slot.recomputed or slot.offloaded) and not plan.passes:
            raise _refuse(
                plan,
                slot,
                f"{slot.op} recomputes {slot.recomputed} and offloads {slot.offloaded} of its layers, which only plans "
                "with passes can; without them an op is recomputed as a whole",
            )
        if (slot.recomputed or slot.offloaded) and slot.op in plan.recompute:
            raise _refuse(
                plan,
                slot,
                f"{slot.op} is recomputed as a whole, so its slots recompute and offload no layers of their own, got "
                f"{slot.recomputed} and {slot.offloaded}",
            )
        if slot.offloaded and not profile.cluster.kind.host_bytes_per_s:
            raise _refuse(plan, slot, f"{slot.op} offloads, and the bandwidth to host memory is not known")
        if slot.offloaded and num_lanes > 1:  # copies are ordered by passes of one lane
            raise _refuse(plan, slot, f"{slot.op} offloads in a plan of {num_lanes} lanes; expected one lane")


def _host(plan: Plan, profile: Profile) -> None:
    """Offloaded activations fit into host memory at any time."""
    if not any(slot.offloaded for slot in plan.slots):
        return
    kind, graph, setting = profile.cluster.kind, profile.graph, setting_of(plan, profile)
    held_bytes: dict[int, int] = defaultdict(int)
    for pass_ in plan.passes:
        slot = plan.slots[pass_.slot]
        if not slot.offloaded or pass_.kind == WEIGHT:  # activations were copied back for the input gradients
            continue
        op = graph.positions[slot.op]
        num_bytes = offloaded_bytes(slot, graph.metaops[op], profile.curve(op, setting).tensor_degree)
        for device in slot.devices:
            held_bytes[device] += num_bytes if pass_.kind == FORWARD else -num_bytes
            if held_bytes[device] > kind.host_memory_bytes:
                raise _refuse(
                    plan,
                    slot,
                    f"device {device} offloads more than the {bytes_text(kind.host_memory_bytes)} that the host has "
                    "for it, counting what has not been copied back yet",
                )


def _rounds(plan: Plan, profile: Profile) -> None:
    """Data never flows between rounds, and a device finishes one round before the next."""
    round_of: dict[str, int] = {}
    groups = profile.graph.task_groups
    task_of = {op.name: groups[op.task] for op in profile.graph.metaops}
    last: dict[int, int] = {}
    for slot in plan.slots:
        if not 0 <= slot.round < len(plan.slots):
            raise _refuse(
                plan, slot, f"{slot.op} is in round {slot.round}; rounds are 0 to {len(plan.slots) - 1} at most"
            )
        if round_of.setdefault(task_of[slot.op], slot.round) != slot.round:
            raise _refuse(
                plan,
                slot,
                f"task {task_of[slot.op]!r} runs in rounds {round_of[task_of[slot.op]]} and {slot.round}",
            )
        for device in slot.devices:
            if last.get(device, 0) > slot.round:
                raise _refuse(plan, slot, f"device {device} is already in round {last[device]}")
            last[device] = slot.round
    op_round = {slot.op: slot.round for slot in plan.slots}
    for producer, consumer in profile.graph.edges:
        first, second = profile.graph.metaops[producer].name, profile.graph.metaops[consumer].name
        if op_round[first] != op_round[second]:
            raise PlanError(f"{first} in round {op_round[first]} feeds {second} in round {op_round[second]}")


def _lanes(plan: Plan, profile: Profile) -> None:
    """Lanes are numbered without gaps, slots that train the same parameter on a device use the same lanes, and the
    profile says how much concurrent lanes slow each other down."""
    if all(slot.lane == 0 and slot.weight_lane is None for slot in plan.slots):
        return
    for slot in plan.slots:
        for lane, what in ((slot.lane, "is on"), (slot.lane_of_weights, "has its weight gradients on")):
            if not 0 <= lane < MAX_LANES:
                raise _refuse(plan, slot, f"{slot.op} {what} lane {lane}; a device has lanes 0 to {MAX_LANES - 1}")
    if plan.passes:
        raise PlanError("this plan lists its passes and has several lanes; pipelines have one lane on each device")
    graph = profile.graph
    first_slot_with: dict[tuple[int, int], Slot] = {}  # by device and parameter
    for slot in plan.slots:
        op = graph.positions[slot.op]
        curve = profile.curve(op, setting_of(plan, profile))
        if slot.has_weight_lane:
            _weight_lane(plan, slot, curve)
        if not curve.contention:
            raise _refuse(
                plan,
                slot,
                f"{slot.op} shares a device with other lanes, and the profile does not say how much they slow each "
                "other down; measure it on this machine, or plan with lanes=1",
            )
        trained = {
            parameter
            for layer in graph.metaops[op].parameters[slot.first : slot.last]
            for parameter in layer
            if graph.parameters[parameter].trainable
        }
        for device in slot.devices:
            for parameter in trained:
                sibling = first_slot_with.setdefault((device, parameter), slot)
                name = graph.parameters[parameter].name
                if sibling.lane != slot.lane:
                    raise _refuse(
                        plan,
                        slot,
                        f"{slot.op} is on lane {slot.lane} and {sibling.op} on lane {sibling.lane} of device {device}; "
                        f"both train {name}, so they need one lane",
                    )
                if sibling.lane_of_weights != slot.lane_of_weights:
                    raise _refuse(
                        plan,
                        slot,
                        f"{slot.op} has its weight gradients on lane {slot.lane_of_weights} and {sibling.op} on lane "
                        f"{sibling.lane_of_weights} of device {device}; both train {name}, so they need one lane",
                    )
    lanes = {lane for slot in plan.slots for lane in (slot.lane, slot.lane_of_weights)}
    missing = min(set(range(MAX_LANES)) - lanes, default=MAX_LANES)
    for slot in plan.slots:
        if max(slot.lane, slot.lane_of_weights) > missing:
            raise _refuse(
                plan,
                slot,
                f"{slot.op} is on lane {max(slot.lane, slot.lane_of_weights)}, and nothing is on lane {missing}; "
                f"number lanes from 0 without gaps (here 0 to {len(lanes) - 1})",
            )


def _weight_lane(plan: Plan, slot: Slot, curve: Curve) -> None:
    """Weight gradients on another lane need a known time, and a backward pass that can be split in two."""
    if not curve.weight_s:
        raise _refuse(
            plan,
            slot,
            f"{slot.op} has its weight gradients on lane {slot.weight_lane}, and the profile does not say how long "
            "they take; leave the lane out, or give weight_s in the profile",
        )
    if curve.tensor_degree > 1 or slot.op in plan.recompute:
        what = "is recomputed" if slot.op in plan.recompute else f"has tensor degree {curve.tensor_degree}"
        raise _refuse(plan, slot, f"{slot.op} {what}, so its weight gradients stay on its lane, {slot.lane}")


def _quotas(plan: Plan, profile: Profile) -> None:
    """Each of several lanes has a quota of SMs that the driver can grant, with known times of its layers on them."""
    if not plan.quotas:
        return
    listed = ", ".join(map(str, plan.quotas))
    if plan.num_lanes == 1:
        raise PlanError(
            f"this plan has quotas of {listed} SMs and one lane, which has the whole device; leave them out"
        )
    if len(plan.quotas) != plan.num_lanes:
        raise PlanError(f"this plan has {plan.num_lanes} lanes, expected a quota of SMs for each of them, got {listed}")
    kind = profile.cluster.kind
    if kind.sm_groups is None:
        raise PlanError(
            f"this plan has quotas of {listed} SMs, and the profile does not say how the SMs of {kind.name!r} can be "
            "split; measure with Planning(quotas=True) on a GPU whose driver has green contexts, or leave them out"
        )
    try:
        kind.sm_groups.parts(plan.quotas)
    except ClusterError as error:
        raise PlanError(f"{kind.name!r}: {error}") from error
    setting = setting_of(plan, profile)
    for slot in plan.slots:
        if slot.has_weight_lane:  # autograd launches weight gradients on the stream, so on the SMs, of the forward
            raise _refuse(
                plan,
                slot,
                f"{slot.op} has its weight gradients on lane {slot.weight_lane}, in a plan with quotas, under which "
                "they run on the SMs of their slot; leave that lane or the quotas out",
            )
        try:
            profile.curve(profile.graph.positions[slot.op], setting).on_sms(plan.quotas[slot.lane])
        except ProfileError as error:
            raise _refuse(plan, slot, f"{slot.op}: {error}") from error


def _states(plan: Plan, profile: Profile) -> None:
    """Slots that change the same state of a module (running statistics) are on the same lane of the same device."""
    state_of = {op.name: op.cost.state for op in profile.graph.metaops if op.cost is not None and op.cost.state}
    first_slot_with: dict[str, Slot] = {}
    for slot in plan.slots:
        if slot.op in state_of:
            first = first_slot_with.setdefault(state_of[slot.op], slot)
            if first.lanes != slot.lanes:
                where = ("device " + ",".join(map(str, of.devices)) + f" lane {of.lane}" for of in (first, slot))
                raise _refuse(
                    plan,
                    slot,
                    f"{first.op} and {slot.op} change the same state of {state_of[slot.op]!r} in every call, so they "
                    f"need one device and lane; got {' and '.join(where)}",
                )


def _order(plan: Plan, profile: Profile) -> None:
    """Every pass comes after the passes it depends on."""
    position = profile.graph.positions
    if plan.passes and plan.num_rounds > 1:
        raise PlanError("a plan with passes has no rounds: its passes already give the order")
    order = [(pass_.slot, pass_.kind) for pass_ in plan.order]
    refuse_wrong_slots((slot for slot, _ in order), len(plan.slots))
    needs = pass_needs(order, slot_needs([position[slot.op] for slot in plan.slots], profile.graph))
    if needs.first_violation is None:
        return
    (number, kind), (need, need_kind) = (order[place] for place in needs.first_violation)
    slot, source = plan.slots[number], plan.slots[need].op
    if kind == FORWARD:
        is_order = (position[source], position[slot.op]) in profile.graph.order_edges
        why = "changes its state first" if is_order else "feeds it"
        raise _refuse(plan, slot, f"{slot.op} runs before {source}, which {why}")
    raise _refuse(plan, slot, f"the {kind} of {slot.op} runs before the {need_kind} of {source}, its input")


def _waves(plan: Plan, profile: Profile) -> None:
    """A lane of a device appears at most once in a wave, waves follow start order, and data flows to later waves."""
    graph = profile.graph
    wave_of_op: dict[int, int] = {}
    used: dict[DeviceLane, int] = {}
    wave = 0
    for slot in plan.slots:
        for device, lane in slot.lanes:
            if used.get((device, lane)) == slot.wave:
                where = f"lane {lane} of device {device}" if lane else f"device {device}"
                raise _refuse(plan, slot, f"{where} is used twice")
            used[device, lane] = slot.wave
    for slot in plan.slots:
        if slot.wave < wave:
            raise _refuse(plan, slot, f"wave numbers must not decrease; wave {wave} came before")
        wave = slot.wave
        op = graph.positions[slot.op]
        sources = [op] if slot.first else list(graph.predecessors[op])
        for source in sources:
            if wave_of_op.get(source, -1) >= slot.wave:
                raise _refuse(plan, slot, f"{slot.op} takes data from its own wave ({graph.metaops[source].name})")
        wave_of_op[op] = slot.wave
