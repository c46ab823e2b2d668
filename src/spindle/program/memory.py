"""How many bytes each rank holds when: what instructions add and free, and whether that fits."""

from __future__ import annotations

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.profile import Profile, backward_bytes, bytes_text, saved_bytes, state_bytes
from spindle.program.instances import Instances
from spindle.program.instructions import COMPUTE, Backward, Exchange, Forward
from spindle.program.program import Column, Program


class Memory:
    """Bytes by rank and slot, from which every instruction's change follows."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.graph = program, profile.graph
        self.static_bytes, self.update_bytes, alone = _held_bytes(program, profile)
        self.passing = {} if profile.gradients_stay else _passing_gradients(program, profile, alone)
        for (_, rank), passing_bytes in self.passing.items():
            self.static_bytes[rank] -= passing_bytes
        num_slots = len(program.slots)
        # What each rank of a slot keeps for backward, works with in backward, and received from others.
        self.saved = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        self.working = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        self.received = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        # What runs again, or comes back from the host, for the gradients of inputs stays for those of weights.
        self.returned = np.zeros((num_slots, program.num_ranks), dtype=np.int64)
        for number, (slot, shape) in enumerate(zip(program.plan.slots, program.slots, strict=True)):
            op, degree = self.graph.metaops[shape.op], shape.tensor_degree
            if op.cost is not None:
                rows = shape.rows_of_ranks()
                again = slot.num_layers if op.name in program.plan.recompute else slot.recomputed
                kept = slot.num_layers - again - slot.offloaded
                self.saved[number, shape.ranks] = rows * (
                    saved_bytes(op, 1, kept, degree, False) + saved_bytes(op, 1, again, degree, True)
                )
                self.working[number, shape.ranks] = rows * backward_bytes(op, 1, degree, again > 0)
                whole = rows * saved_bytes(op, 1, slot.num_layers, degree, False)
                self.returned[number, shape.ranks] = whole - self.saved[number, shape.ranks]
        self.arrived = np.zeros((len(program.links), program.num_ranks), dtype=np.int64)
        for number, link in enumerate(program.links):
            if link.bytes_per_row:
                num_bytes = (link.forward.last - link.forward.first) * link.bytes_per_row
                by_rank = np.bincount(link.forward.destination, weights=num_bytes, minlength=program.num_ranks)
                self.arrived[number] = by_rank.astype(np.int64)
                self.received[link.consumer] += self.arrived[number]

    def changes(self, instances: Instances) -> tuple[Column, Column]:
        """What each instance adds when it starts, and adds or frees when it ends."""
        starts = np.zeros((len(self.program.instructions), self.program.num_ranks), dtype=np.int64)
        ends = np.zeros_like(starts)
        for number, instruction in enumerate(self.program.instructions):
            match instruction:
                case Forward(slot=slot):
                    starts[number] = self.saved[slot]
                case Backward(slot=slot, first=first, last=last):
                    whole = self.program.plan.slots[slot]
                    if not instruction.makes_weights:
                        # The gradients of outputs take the place of what the weights' part does not need.
                        starts[number] = self.working[slot] + self.returned[slot]
                        ends[number] = -self.working[slot]
                        continue
                    # A slot's activations are freed chunk by chunk, in whole numbers that add up.
                    before, after = whole.last - last, whole.last - first
                    freed = self.saved[slot] * after // whole.num_layers - self.saved[slot] * before // whole.num_layers
                    starts[number] = self.working[slot]
                    ends[number] = -self.working[slot] - freed
                    if first == whole.first:
                        ends[number] -= self.received[slot]
                    if not instruction.makes_inputs:
                        ends[number] -= self.returned[slot]
                case Exchange(link=link, backward=False):
                    starts[number] = self.arrived[link]
                case _:
                    pass
        for (number, rank), passing_bytes in self.passing.items():
            starts[number, rank] += passing_bytes
            ends[-1, rank] -= passing_bytes  # the optimizer's step is the last of all
        return starts[instances.instruction, instances.rank], ends[instances.instruction, instances.rank]

    def peaks_in_order(self, instances: Instances) -> Column:
        """The largest live memory of each rank if data arrived just when it is needed: what no timing can undercut."""
        at_start, at_end = self.changes(instances)
        mine = np.flatnonzero(instances.lane == COMPUTE)
        rank, instruction = instances.rank[mine], instances.instruction[mine]
        slot_of = np.array(
            [instruction.slot if isinstance(instruction, Forward) else -1 for instruction in self.program.instructions]
        )
        slot = slot_of[instruction]
        arrives = np.where(slot >= 0, self.received[slot, rank], 0)
        live = np.cumsum(np.stack([at_start[mine] + arrives, at_end[mine]], axis=1).ravel())
        peaks = self.static_bytes.copy()
        # The compute lane lists rank after rank, and every rank ends where it began.
        first = np.searchsorted(rank, np.arange(self.program.num_ranks))
        present = np.flatnonzero(np.bincount(rank, minlength=self.program.num_ranks))
        if len(present):
            before = np.where(first[present] > 0, live[2 * first[present] - 1], 0)
            peaks[present] += np.maximum(0, np.maximum.reduceat(live, 2 * first[present]) - before)
        return peaks


def counts_bytes(profile: Profile) -> bool:
    """Whether anything is known of this workload's memory."""
    return bool(profile.graph.parameters) or any(op.cost for op in profile.graph.metaops)


def refuse_overfull(peaks: Column, profile: Profile) -> None:
    """Raises a DoesNotFitError that names the fullest device when it would hold more than it can."""
    if not counts_bytes(profile):
        return
    device = int(np.argmax(peaks))
    needed, limit = int(peaks[device]), profile.cluster.kind.memory_bytes
    if needed > limit:
        raise DoesNotFitError(
            f"{profile.graph.name} does not fit: device {device} would need {bytes_text(needed)} "
            f"of the {bytes_text(limit)} there ({needed - limit:,} bytes too many)",
            needed,
        )


def _passing_gradients(program: Program, profile: Profile, alone: set[int]) -> dict[tuple[int, int], int]:
    """Bytes of the gradients that are there from a backward instruction on, by that and the rank, until the optimizer's
    step: those of parameters that no other rank has the same of, so that nothing keeps a place for their sum."""
    graph, found = profile.graph, dict[tuple[int, int], int]()
    compute = program.lanes[COMPUTE]
    for rank in range(program.num_ranks):
        seen: set[int] = set()
        for number in compute.of_rank(rank).tolist():
            instruction = program.instructions[number]
            if not isinstance(instruction, Backward):
                continue
            shape = program.slots[instruction.slot]
            for layer in graph.metaops[shape.op].parameters[instruction.first : instruction.last]:
                for parameter in alone.intersection(layer) - seen:
                    seen.add(parameter)
                    elements = graph.parameters[parameter].elements_at(shape.tensor_degree)
                    num_bytes = elements * graph.numerics.gradient_bytes
                    found[number, rank] = found.get((number, rank), 0) + num_bytes
    return found


def _held_bytes(program: Program, profile: Profile) -> tuple[Column, np.ndarray, set[int]]:
    """Bytes of state each rank holds, bytes its optimizer step moves, and the parameters that are trained by one rank
    alone, or one of each shard."""
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
    Key = tuple[tuple[int, ...], tuple[int, ...]]  # slots that use a parameter, and ranks that keep it all the same
    together: dict[Key, tuple[int, float]] = {}
    ranks_of: dict[Key, Column] = {}
    alone: set[int] = set()
    owning_ranks = dict(program.owning_ranks)
    for parameter in users.keys() | owning_ranks.keys():
        key = (tuple(dict.fromkeys(users.get(parameter, ()))), owning_ranks.get(parameter, ()))
        if key not in ranks_of:
            uses = np.zeros(program.num_ranks, dtype=bool)
            for number in key[0]:
                uses[program.slots[number].ranks] = True
            uses[list(key[1])] = True
            ranks_of[key] = np.flatnonzero(uses)
        state, moved = together.get(key, (0, 0.0))
        degree = degree_of.get(parameter, 1)
        owners = len(ranks_of[key]) // degree if program.plan.shard_optimizer else 1
        state += state_bytes(graph, parameter, degree, owners)
        if graph.parameters[parameter].trainable:
            alone.update([parameter] if len(ranks_of[key]) == degree else [])
            moved += graph.parameters[parameter].elements_at(degree) / owners * graph.numerics.update_bytes
        together[key] = (state, moved)
    for key, (state, moved) in together.items():
        static[ranks_of[key]] += state
        update[ranks_of[key]] += moved
    return static, update, alone
