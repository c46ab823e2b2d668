"""Costs of a program's rendezvous under a profile: times, resources and bytes.

Resources are shared by what runs at the same time: each device's port out and in; each island's uplink out and in; and
each island's host, if the profile says that busy neighbours slow each other down. A transfer sends its bytes through
every resource on its path; a collective is a ring over its members. If the profile says that compute and collectives
slow each other down, the device itself is a resource, too. Where a plan has several compute lanes, each device has two
more: the pressure and the fill of what runs on it at the same time. Lanes with quotas have SMs of their own, so only
their pressure on memory is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.plan import FORWARD, pass_s, setting_of
from spindle.profile import Contention, Profile, collective_latency_s, ring_bytes
from spindle.program import (
    KINDS,
    Backward,
    Column,
    Exchange,
    Forward,
    GatherParameters,
    Instances,
    Memory,
    OptimizerStep,
    Program,
    SyncGradients,
)
from spindle.simulate.engine import EQUAL_SHARES, FILL, PRESSURE, WEIGHT_ONE, Work

NS = 1e9

_REDUCTION_WEIGHT = 2  # the weight of a gradient reduction in the load of a device; compute has weight 1
_MAX_REDUCTIONS = 64  # more reductions on one device count as this many


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Columns by rendezvous. The entries of a rendezvous (resource, time alone on it, weight) start at `entry_starts`.
    Memory is by instance (`bytes_at_...`) and by rank (`static_bytes`)."""

    delay_ns: Column
    fixed_ns: Column
    entry_starts: Column
    entry_resource: Column
    entry_ns: np.ndarray
    entry_weight: Column
    slowness_of: Column  # by resource: a row of `slowness`, or a kind of resource without a row
    slowness: np.ndarray  # by row and load: how many times longer than alone
    bytes_at_start: Column
    bytes_at_end: Column
    static_bytes: Column

    @property
    def work(self) -> Work:
        """The columns that the compiled loop needs."""
        return Work(
            self.delay_ns,
            self.fixed_ns,
            self.entry_starts,
            self.entry_resource,
            self.entry_ns,
            self.entry_weight,
            self.slowness_of,
            self.slowness,
        )


@dataclass(frozen=True, slots=True)
class _Topology:
    """The numbers of a cluster's resources, and their rates."""

    num_devices: int
    num_islands: int
    island: np.ndarray
    link_bytes_per_s: np.ndarray  # by device
    link_latency_s: np.ndarray
    link_collective_s: np.ndarray  # NaN if it was not measured
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

    def device(self, device: np.ndarray) -> np.ndarray:
        return 2 * self.num_devices + 3 * self.num_islands + device

    def pressure(self, device: np.ndarray) -> np.ndarray:
        return 3 * self.num_devices + 3 * self.num_islands + device

    def fill(self, device: np.ndarray) -> np.ndarray:
        return 4 * self.num_devices + 3 * self.num_islands + device

    @property
    def num_resources(self) -> int:
        return 5 * self.num_devices + 3 * self.num_islands


def _topology(profile: Profile) -> _Topology:
    cluster = profile.cluster
    island = np.asarray(cluster.island_of)
    islands = cluster.islands
    return _Topology(
        cluster.num_devices,
        len(islands),
        island,
        np.array([island.link.bytes_per_s for island in islands])[island],
        np.array([island.link.latency_s for island in islands])[island],
        np.array([np.nan if island.link.collective_s is None else island.link.collective_s for island in islands])[
            island
        ],
        np.array([island.uplink.bytes_per_s for island in islands]),
        np.array([island.uplink.latency_s for island in islands]),
    )


class _Entries:
    """Collects entries in blocks, then groups them by rendezvous."""

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def add(
        self, rendezvous: np.ndarray, resource: np.ndarray, time_ns: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        self._blocks.append((rendezvous, resource, time_ns, np.ones_like(rendezvous) if weight is None else weight))

    def grouped(self, num_rendezvous: int) -> tuple[Column, Column, np.ndarray, Column]:
        empty = np.zeros(0, dtype=np.int64)
        blocks = self._blocks or [(empty, empty, np.zeros(0), empty)]
        rendezvous, resource, time_ns, weight = (np.concatenate(part) for part in zip(*blocks, strict=True))
        # Stable, so that results do not depend on the order of equal keys.
        order = np.argsort(rendezvous, kind="stable")
        starts = np.zeros(num_rendezvous + 1, dtype=np.int64)
        np.cumsum(np.bincount(rendezvous, minlength=num_rendezvous), out=starts[1:])
        return starts, resource[order], time_ns[order].astype(np.float64), weight[order].astype(np.int64)


def costs_of(program: Program, instances: Instances, profile: Profile, memory: Memory | None = None) -> Costs:
    """Times and bytes of all instructions of a program. Its memory is computed if it is not given."""
    topology = _topology(profile)
    entries = _Entries()
    delay_ns = np.zeros(instances.num_rendezvous, dtype=np.int64)
    fixed_ns = np.zeros(instances.num_rendezvous, dtype=np.int64)
    memory = Memory(program, profile) if memory is None else memory

    _time_compute(program, profile, topology, instances, fixed_ns, entries)
    if program.plan.num_lanes > 1:
        _time_contention(program, profile, topology, instances, entries)
    _time_flows(program, topology, instances, delay_ns, entries)
    _time_collectives(program, profile, topology, instances, delay_ns, entries)
    _time_updates(program, profile, topology, instances, memory.update_bytes, fixed_ns, entries)
    entry_starts, entry_resource, entry_ns, entry_weight = entries.grouped(instances.num_rendezvous)

    # Ports and uplinks are shared equally. Hosts and devices have measured slowdowns.
    slowness_of = np.full(topology.num_resources, EQUAL_SHARES, dtype=np.int64)
    slowness = np.ones((2, max(2 + _REDUCTION_WEIGHT * _MAX_REDUCTIONS, 1 + len(profile.host_rates))))
    for busy in range(1, slowness.shape[1]) if profile.host_rates else ():
        slowness[0, busy] = 1 / profile.host_rates[min(busy, len(profile.host_rates)) - 1]
    # On a device, compute has weight 1 and a reduction 2, so the load is odd exactly if there is compute. The time of a
    # reduction on the device is its time beside compute, divided by `overlap` (see `_time_rings`).
    slowness[1, 1] = 1 / max((1.0, *profile.host_rates))  # compute only: its speed follows from the island's host
    slowness[1, 2::2] = profile.overlap / profile.exchange_overlap  # reductions only
    slowness[1, 3::2] = profile.overlap  # both
    slowness_of[topology.host(np.arange(topology.num_islands))] = 0
    devices = np.arange(topology.num_devices)
    slowness_of[topology.device(devices)] = 1
    slowness_of[topology.pressure(devices)] = PRESSURE
    slowness_of[topology.fill(devices)] = FILL
    bytes_at_start, bytes_at_end = memory.changes(instances)
    return Costs(
        delay_ns=delay_ns,
        fixed_ns=fixed_ns,
        entry_starts=entry_starts,
        entry_resource=entry_resource,
        entry_ns=entry_ns,
        entry_weight=entry_weight,
        slowness_of=slowness_of,
        slowness=slowness,
        bytes_at_start=bytes_at_start,
        bytes_at_end=bytes_at_end,
        static_bytes=memory.static_bytes,
    )


def _rendezvous_of(program: Program, instances: Instances, *kinds: type) -> np.ndarray:
    """Rendezvous whose instruction is of one of these kinds, in order."""
    is_kind = np.isin(program.columns.kind, [KINDS.index(each) for each in kinds])
    return np.flatnonzero(is_kind[instances.rendezvous_instruction])


def passes_s(program: Program, profile: Profile, *, launches: bool = False) -> np.ndarray:
    """For each instruction, the seconds of a forward or backward pass on its device, or with `launches` on its host;
    zero for other instructions."""
    setting = setting_of(program.plan, profile)
    curves = [profile.curve(shape.op, setting) for shape in program.slots]
    if launches:
        curves = [curve.launches for curve in curves]
    elif program.plan.quotas:
        lanes = [slot.lane for slot in program.plan.slots]
        curves = [curve.on_sms(program.plan.quotas[lane]) for curve, lane in zip(curves, lanes, strict=True)]
    time_s = np.zeros(len(program.instructions))
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward(slot=slot):
                time_s[number] = pass_s(program.plan.slots[slot], FORWARD, curves[slot])
            case Backward(slot=slot, first=first, last=last, part=part):
                whole, recompute = program.plan.slots[slot], setting.recompute[program.slots[slot].op]
                share = (last - first) / whole.num_layers
                time_s[number] = share * pass_s(whole, part, curves[slot], recompute)
            case _:
                pass
    return (
        time_s if launches or profile.gradient_sum_bytes_per_s is None else time_s + _gradient_sums_s(program, profile)
    )


def _gradient_sums_s(program: Program, profile: Profile) -> np.ndarray:
    """For each instruction, the seconds in which a chunk's gradients are added to those of another slot, which trains
    the same layers and ran backward earlier.

    A layer's time includes computing its gradients, but not adding them.
    """
    time_s = np.zeros(len(program.instructions))
    if program.plan.passes:  # microbatches, whose order need not be that of the slots
        return time_s
    assert profile.gradient_sum_bytes_per_s is not None
    graph, slots = profile.graph, program.plan.slots
    summed = [np.zeros(slot.num_layers) for slot in slots]  # bytes by layer
    written: set[tuple[int, tuple[int, ...]]] = set()  # by device
    for number in reversed(range(len(slots))):  # backward mirrors forward
        slot, layers = slots[number], graph.metaops[program.slots[number].op].parameters
        for place in reversed(range(slot.num_layers)):
            parameters = layers[slot.first + place]
            keys = {(device, parameters) for device in slot.devices}
            if not written.isdisjoint(keys):
                trained = (graph.parameters[parameter] for parameter in parameters)
                elements = sum(parameter.num_elements for parameter in trained if parameter.trainable)
                summed[number][place] = elements * graph.numerics.gradient_bytes
            written |= keys
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Backward) and instruction.makes_weights:
            first = slots[instruction.slot].first
            num_bytes = summed[instruction.slot][instruction.first - first : instruction.last - first].sum()
            time_s[number] = num_bytes / profile.gradient_sum_bytes_per_s
    return time_s


def _time_compute(
    program: Program,
    profile: Profile,
    topology: _Topology,
    instances: Instances,
    fixed_ns: np.ndarray,
    entries: _Entries,
) -> None:
    """Forward and backward passes: a fixed time, or work at a speed that depends on how many devices of the island are
    busy."""
    time_ns = passes_s(program, profile) * NS
    rendezvous_ids = _rendezvous_of(program, instances, Forward, Backward)
    # launches do not become faster when neighbours are idle
    fixed = passes_s(program, profile, launches=True) * NS if profile.host_rates else time_ns
    fixed_ns[:] = np.round(fixed[instances.rendezvous_instruction])
    shares_device = _reductions_slow_compute(profile)
    for rendezvous in rendezvous_ids.tolist() if profile.host_rates or shares_device else ():
        members = instances.members[instances.member_starts[rendezvous] : instances.member_starts[rendezvous + 1]]
        ranks, work_ns = instances.rank[members], time_ns[instances.rendezvous_instruction[rendezvous]]
        if profile.host_rates:
            hosts, counts = np.unique(topology.island[ranks], return_counts=True)
            entries.add(np.full(len(hosts), rendezvous), topology.host(hosts), np.full(len(hosts), work_ns), counts)
        if shares_device:
            entries.add(np.full(len(ranks), rendezvous), topology.device(ranks), np.full(len(ranks), work_ns))


def _time_contention(
    program: Program, profile: Profile, topology: _Topology, instances: Instances, entries: _Entries
) -> None:
    """Passes that run at the same time on lanes of one device slow each other down: by pressure and by fill, or with
    quotas by pressure on memory."""
    setting = setting_of(program.plan, profile)
    time_ns = passes_s(program, profile) * NS
    weights = np.zeros((len(program.instructions), 2))  # pressure and fill
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Forward | Backward):
            curve = profile.curve(program.slots[instruction.slot].op, setting)
            if program.plan.quotas:
                assert curve.sm_times is not None
                weights[number, 0] = curve.sm_times.pressure[isinstance(instruction, Backward)]
            else:
                num_devices = len(program.plan.slots[instruction.slot].devices)
                weights[number] = _contention_of(instruction, curve.contention_on(num_devices))
    rendezvous = _rendezvous_of(program, instances, Forward, Backward)
    starts = instances.member_starts
    members = np.concatenate(
        [np.arange(first, end) for first, end in zip(starts[rendezvous], starts[rendezvous + 1], strict=True)]
    )
    ranks = instances.rank[instances.members[members]]
    owners = np.repeat(rendezvous, starts[rendezvous + 1] - starts[rendezvous])
    number = instances.rendezvous_instruction[owners]
    for column, resource in enumerate((topology.pressure, topology.fill)[: 1 if program.plan.quotas else 2]):
        weight = np.round(weights[number, column] * WEIGHT_ONE).astype(np.int64)
        entries.add(owners, resource(ranks), time_ns[number], weight)


def _contention_of(instruction: Forward | Backward, contention: Contention) -> tuple[float, float]:
    match instruction:
        case Forward():
            return contention.forward
        case Backward(makes_weights=False):
            return contention.of_inputs
        case Backward(makes_inputs=False):
            return contention.of_weights
        case Backward():
            return contention.backward


def _time_flows(
    program: Program, topology: _Topology, instances: Instances, delay_ns: np.ndarray, entries: _Entries
) -> None:
    """Transfers: a latency, then their bytes through both ports, and through both uplinks between islands."""
    rendezvous_ids = _rendezvous_of(program, instances, Exchange)
    if not len(rendezvous_ids):
        return
    exchanges = np.flatnonzero(program.columns.kind == KINDS.index(Exchange))
    number, is_backward = program.columns.index[exchanges].tolist(), program.columns.is_backward[exchanges].tolist()
    links = [program.links[link] for link in number]
    flows = [link.backward if backward else link.forward for link, backward in zip(links, is_backward, strict=True)]
    source = np.concatenate([flow.source for flow in flows])
    destination = np.concatenate([flow.destination for flow in flows])
    num_rows = np.concatenate([flow.last for flow in flows]) - np.concatenate([flow.first for flow in flows])
    num_bytes = num_rows * np.repeat([link.bytes_per_row for link in links], [len(flow.source) for flow in flows])
    sent = num_bytes > 0
    rendezvous_ids, source, destination, num_bytes = (
        rendezvous_ids[sent],
        source[sent],
        destination[sent],
        num_bytes[sent],
    )
    inside = topology.island[source] == topology.island[destination]
    latency = np.where(inside, topology.link_latency_s[source], topology.uplink_latency_s[topology.island[source]])
    delay_ns[rendezvous_ids] = np.round(latency * NS)
    # Both ports carry all bytes; the uplinks only what leaves an island.
    entries.add(rendezvous_ids, topology.port_out(source), num_bytes / topology.link_bytes_per_s[source] * NS)
    entries.add(rendezvous_ids, topology.port_in(destination), num_bytes / topology.link_bytes_per_s[destination] * NS)
    rendezvous_ids, num_bytes = rendezvous_ids[~inside], num_bytes[~inside]
    for ends, uplink in ((source, topology.uplink_out), (destination, topology.uplink_in)):
        islands = topology.island[ends[~inside]]
        entries.add(rendezvous_ids, uplink(islands), num_bytes / topology.uplink_bytes_per_s[islands] * NS)


def _reductions_slow_compute(profile: Profile) -> bool:
    """Whether compute and gradient reductions slow each other down on a device."""
    return max(profile.overlap, profile.exchange_overlap) > 1


def _time_collectives(
    program: Program,
    profile: Profile,
    topology: _Topology,
    instances: Instances,
    delay_ns: np.ndarray,
    entries: _Entries,
) -> None:
    """Collectives: rings through the ports of all members, and through the uplinks if the group spans islands.

    A reduce-scatter or an all-gather has half the bytes of an all-reduce, and the same latency.
    """
    if not program.buckets:
        return
    gradient_bytes = [float(bucket.num_bytes) for bucket in program.buckets]
    if not program.plan.shard_optimizer:
        _time_rings(
            program,
            profile,
            topology,
            _rendezvous_of(program, instances, SyncGradients),
            gradient_bytes,
            delay_ns,
            entries,
        )
        return
    numerics = profile.graph.numerics
    parameter_bytes = [size * numerics.parameter_bytes / numerics.gradient_bytes for size in gradient_bytes]
    for kind, num_bytes in ((SyncGradients, gradient_bytes), (GatherParameters, parameter_bytes)):
        halves = [size / 2 for size in num_bytes]
        _time_rings(program, profile, topology, _rendezvous_of(program, instances, kind), halves, delay_ns, entries)


def _time_rings(
    program: Program,
    profile: Profile,
    topology: _Topology,
    rendezvous_of_bucket: np.ndarray,
    num_bytes: list[float],
    delay_ns: np.ndarray,
    entries: _Entries,
) -> None:
    """Ring all-reduces, one per bucket, whose rendezvous are `rendezvous_of_bucket`."""
    sizes = np.array([len(bucket.ranks) for bucket in program.buckets])
    # times NS, so that dividing by bytes per second gives nanoseconds
    scaled_bytes = np.array([ring_bytes(*ring) * NS for ring in zip(num_bytes, sizes.tolist(), strict=True)])
    bucket = np.repeat(np.arange(len(sizes)), sizes)
    ranks = np.concatenate([bucket.ranks for bucket in program.buckets])
    alone_ns = scaled_bytes[bucket] / topology.link_bytes_per_s[ranks]
    for port in (topology.port_out, topology.port_in):
        entries.add(rendezvous_of_bucket[bucket], port(ranks), alone_ns)
    if _reductions_slow_compute(profile):
        device_ns = alone_ns * profile.exchange_overlap / profile.overlap
        entries.add(
            rendezvous_of_bucket[bucket], topology.device(ranks), device_ns, np.full(len(ranks), _REDUCTION_WEIGHT)
        )
    # a collective is as slow as the slowest link of its members
    latency = np.zeros(len(sizes))
    np.maximum.at(latency, bucket, topology.link_latency_s[ranks])

    # each pair (bucket, island) once, for buckets that span several islands
    bucket, island = np.divmod(np.unique(bucket * topology.num_islands + topology.island[ranks]), topology.num_islands)
    spans = np.bincount(bucket, minlength=len(sizes))[bucket] > 1
    bucket, island = bucket[spans], island[spans]
    for uplink in (topology.uplink_out, topology.uplink_in):
        entries.add(
            rendezvous_of_bucket[bucket], uplink(island), scaled_bytes[bucket] / topology.uplink_bytes_per_s[island]
        )
    np.maximum.at(latency, bucket, topology.uplink_latency_s[island])
    delay_s = np.array([collective_latency_s(*ring) for ring in zip(sizes.tolist(), latency.tolist(), strict=True)])
    # The overhead was measured inside one host. Between islands, only the latency of a tree is known.
    measured_s = np.array([topology.link_collective_s[bucket.ranks].max() for bucket in program.buckets])
    measured_s[bucket] = np.nan
    delay_ns[rendezvous_of_bucket] = np.round(np.where(np.isnan(measured_s), delay_s, measured_s) * NS)


def _time_updates(
    program: Program,
    profile: Profile,
    topology: _Topology,
    instances: Instances,
    update_bytes: np.ndarray,
    fixed_ns: np.ndarray,
    entries: _Entries,
) -> None:
    """Optimizer steps: limited by memory bandwidth, which busy neighbours may share."""
    rendezvous_ids = _rendezvous_of(program, instances, OptimizerStep)
    ranks = instances.rank[instances.members[instances.member_starts[rendezvous_ids]]]
    time_ns = np.ceil(update_bytes[ranks] / profile.cluster.kind.memory_bytes_per_s * NS)
    if profile.host_rates:
        entries.add(rendezvous_ids, topology.host(topology.island[ranks]), time_ns)
    else:
        fixed_ns[rendezvous_ids] = time_ns
