"""Memory of each rank over a step: the bytes that instructions allocate and free, and whether they fit."""

from __future__ import annotations

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.profile import Profile, backward_bytes, bytes_text, saved_bytes, state_bytes
from spindle.program.columns import BACKWARD, EXCHANGE, FORWARD, Jagged, sorted_unique, unique_objects
from spindle.program.copies import copy_columns
from spindle.program.instances import Instances
from spindle.program.instructions import Backward, are_compute
from spindle.program.parameter_uses import gradient_uses, parameter_uses
from spindle.program.program import Column, Program
from spindle.program.row_flows import messages_of


class Memory:
    """Bytes by rank and slot, from which follows how each instruction changes the memory of its ranks."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.graph = program, profile.graph
        self.static_bytes, self.update_bytes, unshared = _held_bytes(program, profile)
        self.passing = {} if profile.gradients_stay else _passing_gradients(program, profile, unshared)
        for (_, rank), passing_bytes in self.passing.items():
            self.static_bytes[rank] -= passing_bytes
        self.static_bytes += program.plan.num_lanes * profile.lane_bytes
        # By slot and rank: activations saved for backward; working space of backward; activations that are recomputed
        # for input gradients and stay until the weight gradients; activations that are offloaded (if `copies` lists
        # them); and outputs.
        self.saved, self.working, self.recomputed, self.offloaded, self.outputs = activation_bytes(program, profile)
        # Activations that cross lanes, and their gradients, are kept to the end of the step (`run/lanes.py`).
        for link in program.links if program.plan.num_lanes > 1 else ():
            producer = program.slots[link.producer]
            cost = self.graph.metaops[producer.op].cost
            if program.plan.slots[link.producer].lane != program.plan.slots[link.consumer].lane and cost is not None:
                held = producer.rows_of_ranks() * cost.cut_bytes_at(producer.tensor_degree)
                self.static_bytes[producer.ranks] += np.ceil(2 * held).astype(np.int64)
        # Bytes of activations that arrive by link and rank, and the sum over the links of each slot.
        messages = messages_of(program.links, backward=False)
        row_bytes = np.array([link.bytes_per_row for link in program.links], dtype=np.float64)[messages.link]
        by_rank = np.bincount(
            messages.link * program.num_ranks + messages.destination,
            weights=(messages.last - messages.first) * row_bytes,
            minlength=len(program.links) * program.num_ranks,
        )
        self.arrived = by_rank.astype(np.int64).reshape(len(program.links), program.num_ranks)
        self.received = np.zeros(self.saved.shape, dtype=np.int64)
        np.add.at(self.received, np.array([link.consumer for link in program.links], dtype=np.int64), self.arrived)

    def changes(self, instances: Instances) -> tuple[Column, Column]:
        """For each instance, bytes that it allocates when it starts, and when it ends (negative if it frees memory)."""
        starts, ends = self.changes_by_rank()
        return starts[instances.instruction, instances.rank], ends[instances.instruction, instances.rank]

    def changes_by_rank(self) -> tuple[Column, Column]:
        """`changes` by instruction and rank."""
        program, columns = self.program, self.program.columns
        starts = np.zeros((len(program.instructions), program.num_ranks), dtype=np.int64)
        ends = np.zeros(starts.shape, dtype=np.int64)
        forward = columns.of_kind(FORWARD)
        starts[forward] = self.saved[columns.index[forward]] + self.offloaded[columns.index[forward]]
        exchange = np.flatnonzero((columns.kind == EXCHANGE) & ~columns.is_backward)
        starts[exchange] = self.arrived[columns.index[exchange]]
        # An input pass keeps the activations for its weight pass: the output gradients that it saves replace those that
        # weight gradients do not need.
        backward = columns.of_kind(BACKWARD)
        slot = columns.index[backward]
        starts[backward], ends[backward] = self.working[slot], -self.working[slot]
        inputs_only = ~columns.makes_weights[backward]
        starts[backward[inputs_only]] += self.recomputed[slot[inputs_only]]
        weights_only = ~columns.makes_inputs[backward]
        # Activations are freed chunk by chunk; rounded so that the chunks add up to all of them.
        begins = np.array([slot.first for slot in program.plan.slots], dtype=np.int64)[slot]
        ends_at = np.array([slot.last for slot in program.plan.slots], dtype=np.int64)[slot]
        before, after = ends_at - columns.last[backward], ends_at - columns.first[backward]
        num_layers = (ends_at - begins)[:, None]
        freed = self.saved[slot] * after[:, None] // num_layers - self.saved[slot] * before[:, None] // num_layers
        is_last = columns.first[backward] == begins
        freed[is_last] += self.received[slot[is_last]]
        has_weight_lane = np.array([slot.has_weight_lane for slot in program.plan.slots], dtype=bool)[slot]
        # With a weight lane, activations that both lanes read are kept to the end of the step.
        held = inputs_only & has_weight_lane
        held_bytes = (columns.last - columns.first)[backward[held], None] * self.working[slot[held]]
        starts[backward[held]] += held_bytes
        ends[-1] -= held_bytes.sum(axis=0) + freed[~inputs_only & has_weight_lane].sum(axis=0)
        frees = ~inputs_only & ~has_weight_lane
        freed[is_last] += self.offloaded[slot[is_last]]
        freed[weights_only] += self.recomputed[slot[weights_only]]
        ends[backward[frees]] -= freed[frees]
        copies, order = copy_columns(program), program.compute_order
        begin, copied = order.starts[copies.rank], self.offloaded[copies.slot, copies.rank]
        ends[order.values[begin + copies.released - 1], copies.rank] -= copied
        starts[order.values[begin + copies.fetched], copies.rank] += copied
        for (number, rank), passing_bytes in self.passing.items():
            starts[number, rank] += passing_bytes
            ends[-1, rank] -= passing_bytes  # the optimizer step is the last instruction
        return starts, ends

    def peaks_in_order(self, instances: Instances) -> Column:
        """The peak memory of each rank if inputs arrived just in time. With one compute lane this is a lower bound for
        any timing; with several, it assumes that all lanes reach their peaks at the same time, an upper bound."""
        peaks, changes = self.static_bytes.copy(), self.changes(instances)
        for lane in np.unique(instances.lane[are_compute(instances.lane)]):
            peaks += self._peaks_of_lane(instances, lane, *changes)
        return peaks

    def _peaks_of_lane(self, instances: Instances, lane: int, at_start: Column, at_end: Column) -> Column:
        """For each rank, the peak of what the instructions of one compute lane allocate."""
        computes = np.flatnonzero(instances.lane == lane)
        rank, instruction = instances.rank[computes], instances.instruction[computes]
        columns = self.program.columns
        slot = np.where(columns.kind == FORWARD, columns.index, -1)[instruction]
        inputs = np.where(slot >= 0, self.received[slot, rank], 0)
        # Two entries for each instruction: what is live while it runs, and after it.
        live = np.cumsum(np.stack([at_start[computes] + inputs, at_end[computes]], axis=1).ravel())
        peaks = np.zeros_like(self.static_bytes)
        # The column has one rank after another: subtract the running sum before each rank's first instruction.
        first = np.searchsorted(rank, np.arange(self.program.num_ranks))
        present = np.flatnonzero(np.bincount(rank, minlength=self.program.num_ranks))
        if len(present):
            before = np.where(first[present] > 0, live[2 * first[present] - 1], 0)
            peaks[present] += np.maximum(0, np.maximum.reduceat(live, 2 * first[present]) - before)
        return peaks


def activation_bytes(program: Program, profile: Profile) -> tuple[Column, Column, Column, Column, Column]:
    """By slot and rank: bytes of saved activations, working space, recomputed activations, offloaded activations, and
    the output."""
    slots, shapes = program.plan.slots, program.slots
    # By slot, for one row on one rank; integers except for outputs.
    of_row, of_output = np.zeros((4, len(slots)), dtype=np.int64), np.zeros(len(slots))
    recompute = frozenset(program.plan.recompute)
    for number, (slot, shape) in enumerate(zip(slots, shapes, strict=True)):
        op, degree, num_layers = profile.graph.metaops[shape.op], shape.tensor_degree, slot.num_layers
        if op.cost is None:
            continue
        num_recomputed = num_layers if op.name in recompute else slot.recomputed
        num_kept = num_layers - num_recomputed - slot.offloaded
        inputs = saved_bytes(op, 1, num_recomputed, degree, True)
        saved = saved_bytes(op, 1, num_kept, degree, False) + inputs
        recomputed = saved_bytes(op, 1, num_recomputed, degree, False) - inputs
        offloaded = saved_bytes(op, 1, slot.offloaded, degree, False)
        of_row[:, number] = saved, backward_bytes(op, 1, degree, num_recomputed > 0), recomputed, offloaded
        of_output[number] = op.cost.cut_bytes_at(degree)
    # Entries for every rank of every slot. Ranks of a sequence group share rows: each has some slices of them.
    ranks = Jagged.concatenate([shape.ranks for shape in shapes])
    slot_of = np.repeat(np.arange(len(shapes)), ranks.sizes)
    bounds, bounds_of = unique_objects(shape.bounds for shape in shapes)
    shares = Jagged.concatenate([np.diff(each) for each in bounds])
    degree_of = np.array([shape.tensor_degree for shape in shapes], dtype=np.int64)
    slices = np.repeat(shares.take(bounds_of), np.repeat(degree_of, shares.sizes[bounds_of]))
    sequence_degree = np.array([shape.sequence_degree for shape in shapes], dtype=np.int64)[slot_of]
    amounts = slices * of_row[:, slot_of]
    shared = sequence_degree > 1
    amounts[:, shared] = slices[shared] / sequence_degree[shared] * of_row[:, slot_of[shared]]
    outputs = (slices / sequence_degree * of_output[slot_of]).astype(np.int64)
    tables = np.zeros((5, len(shapes), program.num_ranks), dtype=np.int64)
    tables[:, slot_of, ranks.values] = np.concatenate([amounts, outputs[None]])
    return tables[0], tables[1], tables[2], tables[3], tables[4]


def counts_bytes(profile: Profile) -> bool:
    """Whether the memory of this workload is known: it is not for abstract graphs."""
    return bool(profile.graph.parameters) or any(op.cost for op in profile.graph.metaops)


def refuse_overfull(peaks: Column, profile: Profile) -> None:
    """Raise a DoesNotFitError if the device with the highest peak has too little memory."""
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
    """(instruction, rank) → bytes of gradients that this backward instruction allocates and the end of the optimizer
    step frees: gradients of parameters that only one rank holds, because all others live in reduction buffers."""
    graph, gradient_bytes = profile.graph, dict[tuple[int, int], int]()
    layers_of_slot = [graph.metaops[shape.op].parameters for shape in program.slots]
    training, users = gradient_uses(program.instructions, layers_of_slot)
    # The position of each instruction in each rank's order.
    never = len(program.instructions)
    place = np.full((len(program.instructions), program.num_ranks), never, dtype=np.int64)
    for rank in range(program.num_ranks):
        numbers = program.compute_of_rank(rank)
        place[numbers, rank] = np.arange(len(numbers))
    numbers_of = np.array([number for number, _ in training], dtype=np.int64)
    first_users: dict[int, list[tuple[int, int]]] = {}  # by id of uses: the first of them on each rank that has any
    for parameter in unshared & users.keys():
        uses = users[parameter]  # parameters with the same uses share this column
        if id(uses) not in first_users:
            candidates = numbers_of[uses]
            ranks = np.flatnonzero(place[candidates].min(axis=0) < never)
            firsts = candidates[place[candidates].argmin(axis=0)[ranks]]
            first_users[id(uses)] = list(zip(firsts.tolist(), ranks.tolist(), strict=True))
        for number, rank in first_users[id(uses)]:
            instruction = program.instructions[number]
            assert isinstance(instruction, Backward)
            elements = graph.parameters[parameter].elements_at(program.slots[instruction.slot].tensor_degree)
            num_bytes = elements * graph.numerics.gradient_bytes
            gradient_bytes[number, rank] = gradient_bytes.get((number, rank), 0) + num_bytes
    return gradient_bytes


def _held_bytes(program: Program, profile: Profile) -> tuple[Column, np.ndarray, set[int]]:
    """For each rank, bytes of weights, gradients and optimizer state, and bytes that its optimizer step reads and
    writes; and the trainable parameters (or shards) that only one rank holds."""
    graph = profile.graph
    static = np.zeros(program.num_ranks, dtype=np.int64)
    update = np.zeros(program.num_ranks, dtype=np.float64)
    users = parameter_uses(
        (graph.metaops[shape.op].parameters, slot.first, slot.last)
        for slot, shape in zip(program.plan.slots, program.slots, strict=True)
    )
    slot_ranks = Jagged.concatenate([shape.ranks for shape in program.slots])
    no_slots = np.zeros(0, dtype=np.int64)
    # First sum over parameters with the same slots (which share a column) and owning ranks: there are far fewer of
    # these keys than parameters.
    totals: dict[tuple[int, tuple[int, ...]], tuple[int, float]] = {}
    ranks_of: dict[tuple[int, tuple[int, ...]], Column] = {}
    unshared: set[int] = set()
    owning_ranks = dict(program.owning_ranks)
    for parameter in users.keys() | owning_ranks.keys():
        used_by, owners_of = users.get(parameter, no_slots), owning_ranks.get(parameter, ())
        key = (id(used_by), owners_of)
        if key not in ranks_of:
            ranks_of[key] = sorted_unique(program.num_ranks, slot_ranks.take(used_by), owners_of)
        state, moved = totals.get(key, (0, 0.0))
        degree = program.slots[int(used_by[-1])].tensor_degree if len(used_by) else 1
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
