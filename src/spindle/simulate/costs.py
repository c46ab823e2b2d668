"""What every meeting of a program costs under a profile: times, resources and bytes.

Resources are, for each device, its port out and in; for each island, its uplink out and in, and its host (for profiles
that say how busy neighbours slow each other). A transfer takes its bytes at the rate of each resource it crosses; a
collective is a ring over its members. Left out: what communication takes from compute on the same device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.plan import setting_of
from spindle.profile import Profile, backward_bytes, collective_latency_s, ring_bytes, saved_bytes, state_bytes
from spindle.program import Backward, Exchange, Forward, Instances, OptimizerStep, Program, SyncGradients
from spindle.program.program import Column

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Columns by meeting (entries cut at `entry_starts`), and by instance and rank for memory."""

    delay_ns: Column
    fixed_ns: Column
    entry_starts: Column
    entry_resource: Column
    entry_ns: np.ndarray
    entry_weight: Column
    slowness_of: Column  # by resource: -1 shares equally, else a row of `slowness`
    slowness: np.ndarray
    bytes_at_start: Column
    bytes_at_end: Column
    static_bytes: Column


@dataclass(frozen=True, slots=True)
class _Topology:
    """Resource numbers and rates of a cluster."""

    num_devices: int
    num_islands: int
    island: np.ndarray
    link_bytes_per_s: np.ndarray  # by device
    link_latency_s: np.ndarray
    uplink_bytes_per_s: np.ndarray  # by island
    uplink_latency_s: np.ndarray

    def port_out(self, device: np.ndarray) -> np.ndarray:
        return device

    def port_in(self, device: np.ndarray) -> np.ndarray:
        return self.num_devices + device

    def uplink_out(self, island: np.ndarray) -> np.ndarray:
        return 2 * self.num_devices + island

    def uplink_in(self, island: np.ndarray) -> np.ndarray:
        return 2 * self.num_devices + self.num_islands + island

    def host(self, island: np.ndarray) -> np.ndarray:
        return 2 * self.num_devices + 2 * self.num_islands + island

    @property
    def num_resources(self) -> int:
        return 2 * self.num_devices + 3 * self.num_islands


def _topology(profile: Profile) -> _Topology:
    cluster = profile.cluster
    island = np.asarray(cluster.island_of)
    islands = cluster.islands
    return _Topology(
        cluster.num_devices,
        len(islands),
        island,
        np.array([one.link.bytes_per_s for one in islands])[island],
        np.array([one.link.latency_s for one in islands])[island],
        np.array([one.uplink.bytes_per_s for one in islands]),
        np.array([one.uplink.latency_s for one in islands]),
    )


class _Columns:
    """Collects meetings' entries in blocks, then joins them."""

    def __init__(self, num_meetings: int) -> None:
        self.delay_ns = np.zeros(num_meetings, dtype=np.int64)
        self.fixed_ns = np.zeros(num_meetings, dtype=np.int64)
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def enter(
        self, meeting: np.ndarray, resource: np.ndarray, time_ns: np.ndarray, weight: np.ndarray | int = 1
    ) -> None:
        self._blocks.append((meeting, resource, time_ns, np.broadcast_to(weight, meeting.shape)))

    def entries(self) -> tuple[Column, Column, np.ndarray, Column]:
        empty = np.zeros(0, dtype=np.int64)
        blocks = self._blocks or [(empty, empty, np.zeros(0), empty)]
        meeting, resource, time_ns, weight = (np.concatenate(part) for part in zip(*blocks, strict=True))
        order = np.argsort(meeting, kind="stable")
        starts = np.zeros(len(self.fixed_ns) + 1, dtype=np.int64)
        np.cumsum(np.bincount(meeting, minlength=len(self.fixed_ns)), out=starts[1:])
        return starts, resource[order], time_ns[order].astype(np.float64), weight[order].astype(np.int64)


def costs_of(program: Program, instances: Instances, profile: Profile) -> Costs:
    """Times and bytes of every instruction of a program."""
    topology = _topology(profile)
    columns = _Columns(instances.num_meetings)
    meetings_of = _ranges(instances.meeting_instruction, len(program.instructions))
    at_start = np.zeros(instances.num_instances, dtype=np.int64)
    at_end = np.zeros(instances.num_instances, dtype=np.int64)
    held = _held_bytes(program, profile)
    instances_by = np.argsort(instances.instruction, kind="stable")
    instance_bounds = np.searchsorted(instances.instruction[instances_by], np.arange(len(program.instructions) + 1))

    for number, instruction in enumerate(program.instructions):
        meetings = np.arange(*meetings_of[number])
        mine = instances_by[instance_bounds[number] : instance_bounds[number + 1]]
        match instruction:
            case Forward(slot=slot):
                _compute(program, profile, topology, columns, instances, meetings, slot, None)
                at_start[mine] = _saved(program, profile, slot, instances.rank[mine])
            case Backward(slot=slot, first=first, last=last):
                _compute(program, profile, topology, columns, instances, meetings, slot, last - first)
                working = _working(program, profile, slot, instances.rank[mine])
                at_start[mine] = working
                layers = program.plan.slots[slot].num_layers
                freed = _saved(program, profile, slot, instances.rank[mine])
                # The slot's activations are freed chunk by chunk, in whole numbers that add up.
                done = program.plan.slots[slot].last - last
                share = freed * (done + last - first) // layers - freed * done // layers
                at_end[mine] = -working - share
                if first == program.plan.slots[slot].first:
                    at_end[mine] -= _received(program, slot, instances.rank[mine])
            case Exchange(link=link, backward=is_backward):
                one = program.links[link]
                flows = one.backward if is_backward else one.forward
                _flows(
                    topology,
                    columns,
                    meetings,
                    flows.source,
                    flows.destination,
                    (flows.last - flows.first) * one.bytes_per_row,
                )
                if not is_backward:
                    arrived = np.zeros(program.num_ranks)
                    np.add.at(arrived, flows.destination, (flows.last - flows.first) * one.bytes_per_row)
                    at_start[mine] = arrived.astype(np.int64)[instances.rank[mine]]
            case SyncGradients(bucket=bucket):
                _all_reduce(
                    topology,
                    columns,
                    int(meetings[0]),
                    program.buckets[bucket].ranks,
                    program.buckets[bucket].num_bytes,
                )
            case OptimizerStep():
                bytes_per_s = profile.cluster.kind.memory_bytes_per_s
                ranks = instances.rank[instances.members[instances.member_starts[meetings]]] if len(meetings) else mine
                columns.fixed_ns[meetings] = np.ceil(held.update[ranks] / bytes_per_s * NS)
    entry_starts, entry_resource, entry_ns, entry_weight = columns.entries()
    slowness_of = np.full(topology.num_resources, -1, dtype=np.int64)
    slowness = np.ones((1, 2))
    if profile.host_rates:
        slowness_of[topology.host(np.arange(topology.num_islands))] = 0
        slowness = 1 / np.array([[1.0, *profile.host_rates]])
    return Costs(
        delay_ns=columns.delay_ns,
        fixed_ns=columns.fixed_ns,
        entry_starts=entry_starts,
        entry_resource=entry_resource,
        entry_ns=entry_ns,
        entry_weight=entry_weight,
        slowness_of=slowness_of,
        slowness=slowness,
        bytes_at_start=at_start,
        bytes_at_end=at_end,
        static_bytes=held.static,
    )


def _ranges(sorted_keys: Column, num_keys: int) -> list[tuple[int, int]]:
    bounds = np.searchsorted(sorted_keys, np.arange(num_keys + 1)).tolist()
    return list(zip(bounds, bounds[1:], strict=False))


def _compute(
    program: Program,
    profile: Profile,
    topology: _Topology,
    columns: _Columns,
    instances: Instances,
    meetings: np.ndarray,
    slot: int,
    backward_layers: int | None,
) -> None:
    """A slot's forward (`backward_layers` is None) or one chunk of its backward."""
    shape = program.slots[slot]
    setting = setting_of(program.plan, profile)
    forward_s, backward_s = profile.curve(shape.op, setting).times_s(len(shape.ranks))
    if backward_layers is None:
        time_ns = program.plan.slots[slot].num_layers * forward_s * NS
    else:
        time_ns = backward_layers * (backward_s + (forward_s if setting.recompute[shape.op] else 0.0)) * NS
    if not profile.host_rates:
        columns.fixed_ns[meetings] = round(time_ns)
        return
    size = len(shape.ranks) // max(1, len(meetings))
    islands = topology.island[shape.ranks].reshape(-1, size)
    for meeting, members in zip(meetings, islands, strict=True):
        hosts, counts = np.unique(members, return_counts=True)
        columns.enter(np.full(len(hosts), meeting), topology.host(hosts), np.full(len(hosts), time_ns), counts)


def _flows(
    topology: _Topology,
    columns: _Columns,
    meetings: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    num_bytes: np.ndarray,
) -> None:
    moving = num_bytes > 0
    meetings, source, destination, num_bytes = meetings[moving], source[moving], destination[moving], num_bytes[moving]
    inside = topology.island[source] == topology.island[destination]
    latency = np.where(inside, topology.link_latency_s[source], topology.uplink_latency_s[topology.island[source]])
    columns.delay_ns[meetings] = np.round(latency * NS)
    columns.enter(meetings, topology.port_out(source), num_bytes / topology.link_bytes_per_s[source] * NS)
    columns.enter(meetings, topology.port_in(destination), num_bytes / topology.link_bytes_per_s[destination] * NS)
    crossing = ~inside
    meetings, num_bytes = meetings[crossing], num_bytes[crossing]
    for islands, resource in (
        (topology.island[source[crossing]], topology.uplink_out),
        (topology.island[destination[crossing]], topology.uplink_in),
    ):
        columns.enter(meetings, resource(islands), num_bytes / topology.uplink_bytes_per_s[islands] * NS)


def _all_reduce(topology: _Topology, columns: _Columns, meeting: int, ranks: np.ndarray, num_bytes: int) -> None:
    """A ring over all members: every port carries it, and every uplink of a group that spans islands."""
    carried = ring_bytes(num_bytes, len(ranks))
    islands = np.unique(topology.island[ranks])
    latency = topology.link_latency_s[ranks].max()
    if len(islands) > 1:
        latency = max(latency, topology.uplink_latency_s[islands].max())
        for resource in (topology.uplink_out, topology.uplink_in):
            columns.enter(
                np.full(len(islands), meeting), resource(islands), carried / topology.uplink_bytes_per_s[islands] * NS
            )
    for port in (topology.port_out, topology.port_in):
        columns.enter(np.full(len(ranks), meeting), port(ranks), carried / topology.link_bytes_per_s[ranks] * NS)
    columns.delay_ns[meeting] = round(collective_latency_s(len(ranks), latency) * NS)


@dataclass(frozen=True, slots=True)
class _Held:
    static: np.ndarray
    update: np.ndarray


def _held_bytes(program: Program, profile: Profile) -> _Held:
    """Bytes of state each rank holds, and bytes its optimizer step moves."""
    graph = profile.graph
    static = np.zeros(program.num_ranks, dtype=np.int64)
    update = np.zeros(program.num_ranks, dtype=np.float64)
    users: dict[int, set[int]] = {}
    degree_of: dict[int, int] = {}
    for number, (slot, shape) in enumerate(zip(program.plan.slots, program.slots, strict=True)):
        op = graph.metaops[shape.op]
        for layer in range(slot.first, slot.last) if op.parameters else ():
            for parameter in op.parameters[layer]:
                users.setdefault(parameter, set()).add(number)
                degree_of[parameter] = shape.tensor_degree
    together: dict[frozenset[int], tuple[int, float]] = {}
    for parameter, using in users.items():
        slots = frozenset(using)
        state, moved = together.get(slots, (0, 0.0))
        degree = degree_of[parameter]
        state += state_bytes(graph, parameter, degree)
        if graph.parameters[parameter].trainable:
            moved += graph.parameters[parameter].num_elements / degree * graph.numerics.update_bytes
        together[slots] = (state, moved)
    for slots, (state, moved) in together.items():
        ranks = np.unique(np.concatenate([program.slots[slot].ranks for slot in slots]))
        static[ranks] += state
        update[ranks] += moved
    return _Held(static, update)


def _rows(program: Program, slot: int, ranks: np.ndarray) -> np.ndarray:
    shape = program.slots[slot]
    by_rank = np.zeros(program.num_ranks, dtype=np.int64)
    by_rank[shape.ranks] = shape.rows_of_ranks()
    rows: np.ndarray = by_rank[ranks]
    return rows


def _saved(program: Program, profile: Profile, slot: int, ranks: np.ndarray) -> np.ndarray:
    shape = program.slots[slot]
    op = profile.graph.metaops[shape.op]
    recompute = op.name in program.plan.recompute
    layers = program.plan.slots[slot].num_layers
    one_row = saved_bytes(op, 1, layers, shape.tensor_degree, recompute)
    return _rows(program, slot, ranks) * one_row


def _working(program: Program, profile: Profile, slot: int, ranks: np.ndarray) -> np.ndarray:
    shape = program.slots[slot]
    return _rows(program, slot, ranks) * backward_bytes(profile.graph.metaops[shape.op], 1, shape.tensor_degree)


def _received(program: Program, slot: int, ranks: np.ndarray) -> np.ndarray:
    """Bytes that arrived for a slot from other ranks and live until its backward is over."""
    arrived = np.zeros(program.num_ranks, dtype=np.int64)
    for link in program.links:
        if link.consumer == slot:
            part = np.zeros(program.num_ranks)
            np.add.at(part, link.forward.destination, (link.forward.last - link.forward.first) * link.bytes_per_row)
            arrived += part.astype(np.int64)
    mine: np.ndarray = arrived[ranks]
    return mine
