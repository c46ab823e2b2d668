"""Copies of offloaded activations, as two more lanes of each rank: to the host, and back to the device.

`program/copies.py` defines when a copy may begin and which pass waits for it. Each direction of the link to the host
carries one copy at a time.
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
    """The instances and costs of a program, with those of copies appended. `offloaded` has the bytes by slot and rank.
    `instances` may contain more than the program's own, which come first."""
    rate, copies = profile.cluster.kind.host_bytes_per_s, copy_columns(program)
    if not rate or not len(copies.slot):  # `check` refuses offloading if the rate is not known
        return instances, costs
    # By rank and place in its compute order: the instance.
    order = program.compute_order
    rank_of = np.repeat(np.arange(program.num_ranks), order.sizes)
    instance_at = np.full((len(program.instructions), program.num_ranks), -1, dtype=np.int64)
    computes = np.flatnonzero(are_compute(instances.lane[: program.num_instructions]))
    instance_at[instances.instruction[computes], instances.rank[computes]] = computes
    instance_of = instance_at[order.values, rank_of]
    # Copies to the host, in the order of forward passes, then those back, in that of backward passes: by rank.
    count, begin = len(copies.slot), order.starts[copies.rank]
    entry = np.append(np.arange(count), np.arange(count))
    is_back = np.repeat([False, True], count)
    order_of_copies = np.lexsort((np.append(copies.forward, copies.backward), is_back, copies.rank[entry]))
    entry, is_back = entry[order_of_copies], is_back[order_of_copies]
    rank, slot = copies.rank[entry], copies.slot[entry]
    owners = instance_of[begin[entry] + np.where(is_back, copies.backward[entry], copies.forward[entry])]
    begins_after = instance_of[begin[entry] + np.where(is_back, copies.fetched[entry] - 1, copies.forward[entry])]
    awaited_by = instance_of[begin[entry] + np.where(is_back, copies.backward[entry], copies.released[entry])]
    # Each copy waits for the one before it in its direction, and for the pass behind which it begins.
    first = instances.num_instances
    copy = first + np.arange(len(entry))
    follows = np.append(False, (rank[1:] == rank[:-1]) & (is_back[1:] == is_back[:-1]))
    sources = np.stack([copy - 1, begins_after, copy], axis=1)
    targets = np.stack([copy, copy, awaited_by], axis=1)
    exists = np.stack([follows, *np.ones((2, len(entry)), dtype=bool)], axis=1)
    sources_before = np.repeat(np.arange(first), np.diff(instances.follower_starts))
    timed = with_instances(
        instances,
        owners,
        np.append(sources_before, sources[exists]),
        np.append(instances.followers, targets[exists]),
    )
    times_ns = np.rint(offloaded[slot, rank] / rate * NS).astype(np.int64)
    return timed, replace(
        costs,
        delay_ns=np.append(costs.delay_ns, np.zeros(len(entry), dtype=np.int64)),
        fixed_ns=np.append(costs.fixed_ns, times_ns),
        entry_starts=np.append(costs.entry_starts, np.full(len(entry), costs.entry_starts[-1])),
    )
