"""The compiled loop of `verify`: run a program without times, starting everything that can start."""

from __future__ import annotations

import numpy as np

from spindle.jit import njit


@njit(cache=True)
def run_untimed(num_needs, follower_starts, followers, rendezvous_starts, rendezvous_ids, member_starts, members):
    """Whether each instance finishes. The arguments are `Instances.arrays`."""
    num_instances = len(num_needs)
    needs = num_needs.copy()
    done = np.zeros(num_instances, np.bool_)
    absent = member_starts[1:] - member_starts[:-1]
    unfinished = rendezvous_starts[1:] - rendezvous_starts[:-1]
    # Instances that can start and have not started.
    stack = np.empty(num_instances + 1, np.int64)
    size = 0
    for instance in range(num_instances):
        if needs[instance] == 0:
            stack[size] = instance
            size += 1
    finished = np.empty(num_instances + 1, np.int64)
    while size > 0:
        size -= 1
        instance = stack[size]
        # Start it. This may complete rendezvous, and with them instances that started earlier.
        num_finished = 0
        if unfinished[instance] == 0:
            finished[0] = instance
            num_finished = 1
        for place in range(rendezvous_starts[instance], rendezvous_starts[instance + 1]):
            rendezvous = rendezvous_ids[place]
            absent[rendezvous] -= 1
            if absent[rendezvous] == 0:
                for member_place in range(member_starts[rendezvous], member_starts[rendezvous + 1]):
                    member = members[member_place]
                    unfinished[member] -= 1
                    if unfinished[member] == 0:
                        finished[num_finished] = member
                        num_finished += 1
        # Instances that waited for these may be able to start now.
        for number in range(num_finished):
            member = finished[number]
            done[member] = True
            for place in range(follower_starts[member], follower_starts[member + 1]):
                follower = followers[place]
                needs[follower] -= 1
                if needs[follower] == 0:
                    stack[size] = follower
                    size += 1
    return done
