"""Memory of each rank over a step: the bytes that instructions allocate and free, and whether they fit."""

from __future__ import annotations

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.profile import Profile, backward_bytes, bytes_text, saved_bytes, state_bytes
from spindle.program.copies import offload_copies
from spindle.program.instances import Instances
from spindle.program.instructions import Backward, Exchange, Forward, are_compute
from spindle.program.program import Column, Program


class Memory:
    """Bytes by rank and slot, from which the change of each instruction follows."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.graph = program, profile.graph
        self.static_bytes, self.update_bytes, unshared = _held_bytes(program, profile)
        self.passing = {} if profile.gradients_stay else _passing_gradients(program, profile, unshared)
        for (_, rank), passing_bytes in self.passing.items():
            self.static_bytes[rank] -= passing_bytes
        self.static_bytes += program.plan.num_lanes * profile.lane_bytes
        num_slots = len(program.slots)
        # By slot and rank: activations saved for backward, working space of backward, and inputs received from others.
        self.saved = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        self.working = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        self.received = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        # Activations that are recomputed for input gradients, and stay until the weight gradients.
        self.recomputed = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        # Activations that are on the host between forward and backward, as far as `copies` says so.
        self.offloaded = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        for number, (slot, shape) in enumerate(zip(program.plan.slots, program.slots, strict=True)):
            op, degree = self.graph.metaops[shape.op], shape.tensor_degree
            if op.cost is not None:
                rows = shape.rows_of_ranks()
                num_recomputed = slot.num_layers if op.name in program.plan.recompute else slot.recomputed
                num_kept = slot.num_layers - num_recomputed - slot.offloaded
                self.saved[number, shape.ranks] = rows * (
                    saved_bytes(op, 1, num_kept, degree, False) + saved_bytes(op, 1, num_recomputed, degree, True)
                )
                self.working[number, shape.ranks] = rows * backward_bytes(op, 1, degree, num_recomputed > 0)
                self.recomputed[number, shape.ranks] = rows * (
                    saved_bytes(op, 1, num_recomputed, degree, False) - saved_bytes(op, 1, num_recomputed, degree, True)
                )
                self.offloaded[number, shape.ranks] = rows * saved_bytes(op, 1, slot.offloaded, degree, False)
        # What crosses lanes, and its gradient, is held to the end of the step (`run/lanes.py`).
        for link in program.links:
            producer = program.slots[link.producer]
            cost = self.graph.metaops[producer.op].cost
            if program.plan.slots[link.producer].lane != program.plan.slots[link.consumer].lane and cost is not None:
                held = producer.rows_of_ranks() * cost.cut_bytes_at(producer.tensor_degree)
                self.static_bytes[producer.ranks] += np.ceil(2 * held).astype(np.int64)
        # By link and rank: bytes of activations that arrive.
        self.arrived = np.zeros((len(program.links), program.num_ranks), dtype=np.int64)
        for number, link in enumerate(program.links):
            if link.bytes_per_row:
                num_bytes = (link.forward.last - link.forward.first) * link.bytes_per_row
                by_rank = np.bincount(link.forward.destination, weights=num_bytes, minlength=program.num_ranks)
                self.arrived[number] = by_rank.astype(np.int64)
                self.received[link.consumer] += self.arrived[number]

    def changes(self, instances: Instances) -> tuple[Column, Column]:
        """Bytes that each instance allocates when it starts, and allocates (or frees, negative) when it ends."""
        starts = np.zeros((len(self.program.instructions), self.program.num_ranks), dtype=np.int64)
        ends = np.zeros_like(starts)
        for number, instruction in enumerate(self.program.instructions):
            match instruction:
                case Forward(slot=slot):
                    starts[number] = self.saved[slot] + self.offloaded[slot]
                case Backward(slot=slot, first=first, last=last):
                    whole = self.program.plan.slots[slot]
                    if not instruction.makes_weights:
                        # Output gradients are saved for the weight gradients, in place of activations not needed there.
                        starts[number] = self.working[slot] + self.recomputed[slot]
                        ends[number] = -self.working[slot]
                        if whole.has_weight_lane:  # both are held, where another lane reads them
                            held = (last - first) * self.working[slot]
                            starts[number] += held
                            ends[-1] -= held
                        continue
                    # Activations are freed chunk by chunk, in integers that add up to all of them.
                    before, after = whole.last - last, whole.last - first
                    freed = self.saved[slot] * after // whole.num_layers - self.saved[slot] * before // whole.num_layers
                    starts[number] = self.working[slot]
                    ends[number] = -self.working[slot]
                    if whole.has_weight_lane:  # what two lanes read is held to the end of the step
                        ends[-1] -= freed + (self.received[slot] if first == whole.first else 0)
                        continue
                    ends[number] -= freed
                    if first == whole.first:
                        ends[number] -= self.received[slot] + self.offloaded[slot]
                    if not instruction.makes_inputs:
                        ends[number] -= self.recomputed[slot]
                case Exchange(link=link, backward=False):
                    starts[number] = self.arrived[link]
                case _:
                    pass
        for rank in range(self.program.num_ranks) if self.offloaded.any() else ():
            order = self.program.compute_of_rank(rank)
            for copies in offload_copies(self.program, rank):
                ends[order[copies.released - 1], rank] -= self.offloaded[copies.slot, rank]
                starts[order[copies.fetched], rank] += self.offloaded[copies.slot, rank]
        for (number, rank), passing_bytes in self.passing.items():
            starts[number, rank] += passing_bytes
            ends[-1, rank] -= passing_bytes  # the optimizer step is the last instruction
        return starts[instances.instruction, instances.rank], ends[instances.instruction, instances.rank]

    def peaks_in_order(self, instances: Instances) -> Column:
        """The peak memory of each rank if inputs arrived just in time: with one compute lane a lower bound for any
        timing. With several, each lane is at its peak at the same time: no timing of these lanes needs more."""
        peaks = self.static_bytes.copy()
        for lane in np.unique(instances.lane[are_compute(instances.lane)]):
            peaks += self._peaks_of_lane(instances, lane)
        return peaks

    def _peaks_of_lane(self, instances: Instances, lane: int) -> Column:
        """By rank: the peak of what the instructions of one compute lane allocate."""
        at_start, at_end = self.changes(instances)
        computes = np.flatnonzero(instances.lane == lane)
        rank, instruction = instances.rank[computes], instances.instruction[computes]
        slot_of = np.array(
            [instruction.slot if isinstance(instruction, Forward) else -1 for instruction in self.program.instructions]
        )
        slot = slot_of[instruction]
        inputs = np.where(slot >= 0, self.received[slot, rank], 0)
        # Two entries for each instruction: what is live while it runs, and after it.
        live = np.cumsum(np.stack([at_start[computes] + inputs, at_end[computes]], axis=1).ravel())
        peaks = np.zeros_like(self.static_bytes)
        # A lane is one rank after another, so the running sum has to be cut by rank.
        first = np.searchsorted(rank, np.arange(self.program.num_ranks))
        present = np.flatnonzero(np.bincount(rank, minlength=self.program.num_ranks))
        if len(present):
            before = np.where(first[present] > 0, live[2 * first[present] - 1], 0)
            peaks[present] += np.maximum(0, np.maximum.reduceat(live, 2 * first[present]) - before)
        return peaks


def counts_bytes(profile: Profile) -> bool:
    """Whether anything is known about this workload's memory."""
    return bool(profile.graph.parameters) or any(op.cost for op in profile.graph.metaops)


def refuse_overfull(peaks: Column, profile: Profile) -> None:
    """Raise a DoesNotFitError that names the fullest device, if it has too little memory."""
    if not counts_bytes(profile):
        return
    device = int(np.argmax(peaks))
    needed, limit = int(peaks[device]), profile.cluster.kind.memory_bytes
    if needed > limit:
        raise DoesNotFitError(
            f"{profile.graph.name} does not fit: device {device} would need {bytes_text(needed)} "
            f"but has {bytes_text(limit)} ({needed - limit:,} bytes too many)",
            needed,
        )


def _passing_gradients(program: Program, profile: Profile, unshared: set[int]) -> dict[tuple[int, int], int]:
    """Bytes of gradients that are allocated by a backward instruction and freed after the optimizer step, by
    instruction and rank: gradients of parameters that no other rank holds, which have no place in a reduction
    buffer."""
    graph, gradient_bytes = profile.graph, dict[tuple[int, int], int]()
    for rank in range(program.num_ranks):
        seen: set[int] = set()
        for number in program.compute_of_rank(rank):
            instruction = program.instructions[number]
            if not isinstance(instruction, Backward) or not instruction.makes_weights:
                continue
            shape = program.slots[instruction.slot]
            for layer in graph.metaops[shape.op].parameters[instruction.first : instruction.last]:
                for parameter in unshared.intersection(layer) - seen:
                    seen.add(parameter)
                    elements = graph.parameters[parameter].elements_at(shape.tensor_degree)
                    num_bytes = elements * graph.numerics.gradient_bytes
                    gradient_bytes[number, rank] = gradient_bytes.get((number, rank), 0) + num_bytes
    return gradient_bytes


def _held_bytes(program: Program, profile: Profile) -> tuple[Column, np.ndarray, set[int]]:
    """By rank: bytes of weights, gradients and optimizer state, and bytes that its optimizer step reads and writes; and
    the trainable parameters (or shards) that only one rank holds."""
    graph = profile.graph
    static = np.zeros(program.num_ranks, dtype=np.int64)
    update = np.zeros(program.num_ranks, dtype=np.float64)
    users: dict[int, list[int]] = {}
    degree_of: dict[int, int] = {}
    for number, (slot, shape) in enumerate(zip(program.plan.slots, program.slots, strict=True)):
        op = graph.metaops[shape.op]
        for layer in range(slot.first, slot.last) if op.parameters else ():
            for parameter in op.parameters[layer]:
                users.setdefault(parameter, []).append(number)
                degree_of[parameter] = shape.tensor_degree
    Key = tuple[tuple[int, ...], tuple[int, ...]]  # slots that use a parameter, and ranks that hold it without use
    totals: dict[Key, tuple[int, float]] = {}  # summed first over parameters with the same key: there are far fewer
    ranks_of: dict[Key, Column] = {}
    unshared: set[int] = set()
    owning_ranks = dict(program.owning_ranks)
    for parameter in users.keys() | owning_ranks.keys():
        key = (tuple(dict.fromkeys(users.get(parameter, ()))), owning_ranks.get(parameter, ()))
        if key not in ranks_of:
            uses = np.zeros(program.num_ranks, dtype=bool)
            for number in key[0]:
                uses[program.slots[number].ranks] = True
            uses[list(key[1])] = True
            ranks_of[key] = np.flatnonzero(uses)
        state, moved = totals.get(key, (0, 0.0))
        degree = degree_of.get(parameter, 1)
        owners = len(ranks_of[key]) // degree if program.plan.shard_optimizer else 1
        state += state_bytes(graph, parameter, degree, owners)
        if graph.parameters[parameter].trainable:
            unshared.update([parameter] if len(ranks_of[key]) == degree else [])
            moved += graph.parameters[parameter].elements_at(degree) / owners * graph.numerics.update_bytes
        totals[key] = (state, moved)
    for key, (state, moved) in totals.items():
        static[ranks_of[key]] += state
        update[ranks_of[key]] += moved
    return static, update, unshared
