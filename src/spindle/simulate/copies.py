"""Copies of offloaded activations, as two more lanes of each rank: to the host, and back to the device.

When a copy may begin and which pass waits for it is said in `program/copies.py`. Each direction of the link to the host
carries one copy after another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spindle.profile import Profile
from spindle.program import Column, Instances, Program, are_compute, copy_columns
from spindle.simulate.costs import NS, Costs
from spindle.simulate.host import with_instances


def with_copies(
    program: Program, instances: Instances, costs: Costs, profile: Profile, offloaded: Column
) -> tuple[Instances, Costs]:
    """The instances and costs of a program, with those of copies appended; `offloaded` has the bytes by slot and rank.
    `instances` may have others behind those of the program."""
    rate, copies = profile.cluster.kind.host_bytes_per_s, copy_columns(program)
    if not rate or not len(copies.slot):  # `check` refuses to offload at no rate
        return instances, costs
    # By rank and place in its compute order: the instance.
    order = program.compute_order
    rank_of = np.repeat(np.arange(program.num_ranks), order.sizes)
    where = np.full((len(program.instructions), program.num_ranks), -1, dtype=np.int64)
    own = np.flatnonzero(are_compute(instances.lane[: program.num_instructions]))
    where[instances.instruction[own], instances.rank[own]] = own
    instance_of = where[order.values, rank_of]
    # Copies to the host, in the order of forward passes, then those back, in that of backward passes: by rank.
    count, begin = len(copies.slot), order.starts[copies.rank]
    both = np.append(np.arange(count), np.arange(count))
    is_back = np.repeat([False, True], count)
    in_turn = np.lexsort((np.append(copies.forward, copies.backward), is_back, copies.rank[both]))
    both, is_back = both[in_turn], is_back[in_turn]
    rank, slot = copies.rank[both], copies.slot[both]
    owners = instance_of[begin[both] + np.where(is_back, copies.backward[both], copies.forward[both])]
    begins_behind = instance_of[begin[both] + np.where(is_back, copies.fetched[both] - 1, copies.forward[both])]
    waited_for_by = instance_of[begin[both] + np.where(is_back, copies.backward[both], copies.released[both])]
    # Each copy waits for the one before it in its direction, and for the pass behind which it begins.
    first = instances.num_instances
    copy = first + np.arange(len(both))
    follows = np.append(False, (rank[1:] == rank[:-1]) & (is_back[1:] == is_back[:-1]))
    sources = np.stack([copy - 1, begins_behind, copy], axis=1)
    targets = np.stack([copy, copy, waited_for_by], axis=1)
    exists = np.stack([follows, *np.ones((2, len(both)), dtype=bool)], axis=1)
    known = np.repeat(np.arange(first), np.diff(instances.follower_starts))
    timed = with_instances(
        instances,
        owners,
        np.append(known, sources[exists]),
        np.append(instances.followers, targets[exists]),
    )
    times_ns = np.rint(offloaded[slot, rank] / rate * NS).astype(np.int64)
    return timed, replace(
        costs,
        delay_ns=np.append(costs.delay_ns, np.zeros(len(both), dtype=np.int64)),
        fixed_ns=np.append(costs.fixed_ns, times_ns),
        entry_starts=np.append(costs.entry_starts, np.full(len(both), costs.entry_starts[-1])),
    )
