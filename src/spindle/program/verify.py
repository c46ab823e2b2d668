"""Is this program safe to run? Every rank has what it needs, nothing runs twice, nothing waits in a circle, it fits.

`verify` executes the program without time: it starts everything that can start until nothing can. What is left over is
the deadlock that would have happened.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import ProgramError
from spindle.profile import Profile
from spindle.program.instances import Instances, instances_of
from spindle.program.instructions import Backward, Forward, code
from spindle.program.memory import Memory, refuse_overfull
from spindle.program.program import Column, Flows, Program, SlotShape
from spindle.program.reshard import common_scale
from spindle.program.untimed import run_untimed


def verify(program: Program, profile: Profile) -> None:
    """Raises a ProgramError for the first thing that is wrong, a DoesNotFitError when memory is short."""
    _every_slot_runs(program)
    _every_row_arrives(program)
    instances = instances_of(program, profile.gangs)
    stuck = np.flatnonzero(~run_untimed(*instances.arrays))
    if len(stuck):
        raise ProgramError(describe_deadlock(program, instances, stuck))
    refuse_overfull(Memory(program, profile).peaks_in_order(instances), profile)


def _every_slot_runs(program: Program) -> None:
    """Every slot has a forward, and a backward over each of its layers; `instances_of` sees who runs them."""
    chunks: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(program.plan.slots))}
    forwards = set()
    for instruction in program.instructions:
        if isinstance(instruction, Backward):
            chunks[instruction.slot].append((instruction.first, instruction.last))
        elif isinstance(instruction, Forward):
            forwards.add(instruction.slot)
    for number, slot in enumerate(program.plan.slots):
        covered = sorted(chunks[number])
        ends = [slot.first, *(last for _, last in covered)]
        if [first for first, _ in covered] != ends[:-1] or ends[-1] != slot.last:
            text = ", ".join(f"[{first}, {last})" for first, last in covered) or "none"
            raise ProgramError(
                f"the backward of slot {number} ({slot.op}) covers layers {text}, expected [{slot.first}, {slot.last})"
            )
        if number not in forwards:
            raise ProgramError(f"slot {number} ({slot.op}) has no forward")


def _every_row_arrives(program: Program) -> None:
    """Each rank of a consumer holds or receives each of its rows exactly once, and likewise each gradient row back."""
    for number, link in enumerate(program.links):
        for giver, taker, flows, what in (
            (link.producer, link.consumer, link.forward, "activation"),
            (link.consumer, link.producer, link.backward, "gradient"),
        ):
            given, taken = program.slots[giver], program.slots[taker]
            missing = _rows_missing(given, taken, flows, program.num_ranks)
            if missing.any():
                place = int(np.flatnonzero(missing)[0])
                raise ProgramError(
                    f"link {number}: rank {taken.ranks[place]} needs {'more' if missing[place] > 0 else 'fewer'} "
                    f"{what} rows of slot {taker} ({abs(int(missing[place]))}) than it holds and receives"
                )


def _rows_missing(giver: SlotShape, taker: SlotShape, flows: Flows, num_ranks: int) -> Column:
    scale = common_scale(giver, taker)
    given = giver.bounds * (scale // giver.num_rows)
    taken = taker.bounds * (scale // taker.num_rows)
    low, high = np.full(num_ranks, 0), np.full(num_ranks, 0)
    low[giver.ranks] = np.repeat(given[:-1], giver.tensor_degree)
    high[giver.ranks] = np.repeat(given[1:], giver.tensor_degree)
    first = np.repeat(taken[:-1], taker.tensor_degree)
    last = np.repeat(taken[1:], taker.tensor_degree)
    local = np.maximum(0, np.minimum(high[taker.ranks], last) - np.maximum(low[taker.ranks], first))
    received = np.bincount(flows.destination, weights=flows.last - flows.first, minlength=num_ranks)
    missing: Column = (last - first) - local - received[taker.ranks].astype(np.int64)
    return missing


def describe_deadlock(program: Program, instances: Instances, stuck: Column) -> str:
    """Who waits for whom, from one stuck instance around the circle."""
    is_stuck = np.zeros(instances.num_instances, dtype=bool)
    is_stuck[stuck] = True
    waits_for: dict[int, list[int]] = {int(instance): [] for instance in stuck}
    for instance in stuck:
        for follower in instances.followers[
            instances.follower_starts[instance] : instances.follower_starts[instance + 1]
        ]:
            if is_stuck[follower]:
                waits_for[int(follower)].append(int(instance))
    blocked_by_needs = {instance for instance, sources in waits_for.items() if sources}
    for instance in stuck:
        if int(instance) in blocked_by_needs:
            continue
        for meeting in instances.meetings[instances.meeting_starts[instance] : instances.meeting_starts[instance + 1]]:
            members = instances.members[instances.member_starts[meeting] : instances.member_starts[meeting + 1]]
            waits_for[int(instance)] += [int(member) for member in members if int(member) in blocked_by_needs]
    path: list[int] = []
    instance = int(stuck[0])
    while instance not in path and waits_for[instance]:
        path.append(instance)
        instance = waits_for[instance][0]
    circle = path[path.index(instance) :] if instance in path else path
    lines = [
        f"    rank {instances.rank[one]} {code(program.instructions[instances.instruction[one]])}" for one in circle
    ]
    return (
        f"deadlock: {len(stuck)} instructions cannot run; each of these waits for the next, the last for the first:\n"
        + "\n".join(lines)
    )
