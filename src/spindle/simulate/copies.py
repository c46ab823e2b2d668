"""Copies of offloaded activations, as two more lanes of each rank: to the host, and back to the device.

When a copy may begin and which pass waits for it is said in `program/copies.py`. Each direction of the link to the host
carries one copy after another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spindle.profile import Profile
from spindle.program import Instances, Memory, Program, are_compute, offload_copies
from spindle.simulate.costs import NS, Costs
from spindle.simulate.host import with_instances


def with_copies(program: Program, instances: Instances, costs: Costs, profile: Profile) -> tuple[Instances, Costs]:
    """The instances and costs of a program, with those of copies appended. `instances` may have others behind those of
    the program."""
    rate = profile.cluster.kind.host_bytes_per_s
    if not rate or not any(slot.offloaded for slot in program.plan.slots):  # `check` refuses to offload at no rate
        return instances, costs
    num_bytes = Memory(program, profile).offloaded
    first = instances.num_instances
    owners: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    times_ns: list[int] = []
    for rank in range(program.num_ranks):
        places = _compute_instances(program, instances, rank)
        copies = offload_copies(program, rank)
        to_host = [(entry.forward, entry.forward, entry.released, entry.slot) for entry in copies]
        back = [(entry.backward, entry.fetched - 1, entry.backward, entry.slot) for entry in copies]
        for direction in (to_host, back):
            for number, (_, begins_behind, waited_for_by, slot) in enumerate(sorted(direction)):
                copy = first + len(owners)
                if number:
                    sources.append(copy - 1)
                    targets.append(copy)
                sources += [places[begins_behind], copy]
                targets += [copy, places[waited_for_by]]
                owners.append(places[begins_behind])
                times_ns.append(round(num_bytes[slot, rank] / rate * NS))
    known = np.repeat(np.arange(first), np.diff(instances.follower_starts))
    timed = with_instances(
        instances,
        np.array(owners, dtype=np.int64),
        np.concatenate([known, np.array(sources, dtype=np.int64)]),
        np.concatenate([instances.followers, np.array(targets, dtype=np.int64)]),
    )
    count = len(owners)
    return timed, replace(
        costs,
        delay_ns=np.concatenate([costs.delay_ns, np.zeros(count, dtype=np.int64)]),
        fixed_ns=np.concatenate([costs.fixed_ns, np.array(times_ns, dtype=np.int64)]),
        entry_starts=np.concatenate([costs.entry_starts, np.full(count, costs.entry_starts[-1])]),
    )


def _compute_instances(program: Program, instances: Instances, rank: int) -> list[int]:
    """The instances of a rank's compute order."""
    own = slice(program.num_instructions)
    computes = np.flatnonzero(are_compute(instances.lane[own]) & (instances.rank[own] == rank))
    instance_of = dict(zip(instances.instruction[computes].tolist(), computes.tolist(), strict=True))
    return [instance_of[number] for number in program.compute_of_rank(rank)]
