"""The loop of the simulator, compiled. It knows instances, rendezvous and resources, not what they stand for.

A rendezvous has a fixed time and entries (resource, time alone on it, weight). While it runs, each of its resources is
shared by all rendezvous on it: with a total weight w there, the rendezvous would take its time alone times
slowness[w]; the slowest of its resources decides. When a rendezvous starts or ends, those it shared with are timed
again. Time is in integer nanoseconds; what is left of a rendezvous is a fraction.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_NEVER = np.int64(-1)


@njit(cache=True)
def _push(heap_time, heap_item, size, time, item):
    position = size
    while position > 0:
        parent = (position - 1) >> 1
        if heap_time[parent] < time or (heap_time[parent] == time and heap_item[parent] <= item):
            break
        heap_time[position] = heap_time[parent]
        heap_item[position] = heap_item[parent]
        position = parent
    heap_time[position] = time
    heap_item[position] = item
    return size + 1


@njit(cache=True)
def _pop(heap_time, heap_item, size):
    """Takes the first entry off; the caller has read it."""
    size -= 1
    time = heap_time[size]
    item = heap_item[size]
    position = 0
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap_time[right] < heap_time[child]
            or (heap_time[right] == heap_time[child] and heap_item[right] < heap_item[child])
        ):
            child = right
        if time < heap_time[child] or (time == heap_time[child] and item <= heap_item[child]):
            break
        heap_time[position] = heap_time[child]
        heap_item[position] = heap_item[child]
        position = child
    heap_time[position] = time
    heap_item[position] = item
    return size


@njit(cache=True)
def _grown(column):
    larger = np.empty(2 * len(column), column.dtype)
    larger[: len(column)] = column
    return larger


@njit(cache=True)
def _slowness(resource, load, slowness_of, slowness):
    """How many times longer than alone a rendezvous takes on a resource under a load."""
    row = slowness_of[resource]
    return np.float64(load) if row < 0 else slowness[row, min(load, slowness.shape[1] - 1)]


@njit(cache=True)
def _span(rendezvous, fixed_ns, entry_starts, entry_resource, entry_ns, weight_on, slowness_of, slowness):
    """How long the whole rendezvous would take at the present load."""
    span = np.float64(fixed_ns[rendezvous])
    for entry in range(entry_starts[rendezvous], entry_starts[rendezvous + 1]):
        resource = entry_resource[entry]
        time = entry_ns[entry] * _slowness(resource, weight_on[resource], slowness_of, slowness)
        if time > span:
            span = time
    return span


@njit(cache=True)
def run(
    num_needs,
    follower_starts,
    followers,
    rendezvous_starts,
    rendezvous_ids,
    member_starts,
    members,
    delay_ns,
    fixed_ns,
    entry_starts,
    entry_resource,
    entry_ns,
    entry_weight,
    slowness_of,
    slowness,
):
    """Runs everything; returns when each instance was posted, began and ended (-1: it never did)."""
    num_instances = len(num_needs)
    num_rendezvous = len(fixed_ns)
    posted = np.full(num_instances, _NEVER)
    began = np.full(num_instances, _NEVER)
    ended = np.full(num_instances, _NEVER)
    needs = num_needs.copy()
    unfinished = rendezvous_starts[1:] - rendezvous_starts[:-1]
    absent = member_starts[1:] - member_starts[:-1]

    # A running rendezvous: what is left of it, its span at the present load, since when, and when it will end.
    left = np.ones(num_rendezvous)
    span = np.zeros(num_rendezvous)
    since = np.zeros(num_rendezvous, np.int64)
    finish = np.full(num_rendezvous, _NEVER)
    waits = np.zeros(num_rendezvous, np.bool_)  # in its delay, not on its resources yet

    # Rendezvous on each resource, as linked lists of entries.
    num_resources = len(slowness_of)
    head = np.full(num_resources, -1, np.int64)
    following = np.full(len(entry_resource), -1, np.int64)
    preceding = np.full(len(entry_resource), -1, np.int64)
    entry_rendezvous = np.zeros(len(entry_resource), np.int64)
    weight_on = np.zeros(num_resources, np.int64)
    for rendezvous in range(num_rendezvous):
        for entry in range(entry_starts[rendezvous], entry_starts[rendezvous + 1]):
            entry_rendezvous[entry] = rendezvous

    heap_time = np.zeros(max(16, num_rendezvous), np.int64)
    heap_item = np.zeros(max(16, num_rendezvous), np.int64)
    heap_size = 0
    ready = np.empty(num_instances, np.int64)
    num_ready = 0
    for instance in range(num_instances):
        if needs[instance] == 0:
            ready[num_ready] = instance
            num_ready += 1
    now = np.int64(0)

    while True:
        # Start what is ready; an instance without rendezvous is done at once.
        while num_ready > 0:
            num_ready -= 1
            instance = ready[num_ready]
            posted[instance] = now
            if unfinished[instance] == 0:
                began[instance] = now
                ended[instance] = now
                for place in range(follower_starts[instance], follower_starts[instance + 1]):
                    follower = followers[place]
                    needs[follower] -= 1
                    if needs[follower] == 0:
                        ready[num_ready] = follower
                        num_ready += 1
                continue
            for place in range(rendezvous_starts[instance], rendezvous_starts[instance + 1]):
                rendezvous = rendezvous_ids[place]
                absent[rendezvous] -= 1
                if absent[rendezvous] == 0:
                    for other in range(member_starts[rendezvous], member_starts[rendezvous + 1]):
                        if began[members[other]] < 0:
                            began[members[other]] = now
                    waits[rendezvous] = True
                    finish[rendezvous] = now + delay_ns[rendezvous]
                    if heap_size + 1 >= len(heap_time):
                        heap_time = _grown(heap_time)
                        heap_item = _grown(heap_item)
                    heap_size = _push(heap_time, heap_item, heap_size, finish[rendezvous], rendezvous)
        if heap_size == 0:
            break
        time = heap_time[0]
        rendezvous = heap_item[0]
        heap_size = _pop(heap_time, heap_item, heap_size)
        if finish[rendezvous] != time:
            continue  # it was timed again since
        now = time

        starts = waits[rendezvous]
        if starts:
            waits[rendezvous] = False
            since[rendezvous] = now
        else:
            finish[rendezvous] = _NEVER
        # Come onto the resources, or leave them.
        for entry in range(entry_starts[rendezvous], entry_starts[rendezvous + 1]):
            resource = entry_resource[entry]
            if starts:
                weight_on[resource] += entry_weight[entry]
                following[entry] = head[resource]
                preceding[entry] = -1
                if head[resource] >= 0:
                    preceding[head[resource]] = entry
                head[resource] = entry
            else:
                weight_on[resource] -= entry_weight[entry]
                if preceding[entry] >= 0:
                    following[preceding[entry]] = following[entry]
                else:
                    head[resource] = following[entry]
                if following[entry] >= 0:
                    preceding[following[entry]] = preceding[entry]
        if starts:
            span[rendezvous] = _span(
                rendezvous, fixed_ns, entry_starts, entry_resource, entry_ns, weight_on, slowness_of, slowness
            )
            finish[rendezvous] = now + np.int64(np.ceil(span[rendezvous] - 1e-6))
            if heap_size + 1 >= len(heap_time):
                heap_time = _grown(heap_time)
                heap_item = _grown(heap_item)
            heap_size = _push(heap_time, heap_item, heap_size, finish[rendezvous], rendezvous)
        # Time again those that share a resource with it: only what this resource says of them has changed, so all of
        # a rendezvous's entries are looked at again only when the one that held it back lets go.
        for entry in range(entry_starts[rendezvous], entry_starts[rendezvous + 1]):
            resource = entry_resource[entry]
            load = weight_on[resource]
            before = load - entry_weight[entry] if starts else load + entry_weight[entry]
            slow_before = _slowness(resource, before, slowness_of, slowness)
            slow_now = _slowness(resource, load, slowness_of, slowness)
            other_entry = head[resource]
            while other_entry >= 0:
                other = entry_rendezvous[other_entry]
                time_before = entry_ns[other_entry] * slow_before
                time_now = entry_ns[other_entry] * slow_now
                other_entry = following[other_entry]
                if other == rendezvous:
                    continue
                new_span = span[other]
                if time_now >= span[other]:
                    new_span = time_now
                elif time_before >= span[other] * (1 - 1e-12):
                    new_span = _span(
                        other, fixed_ns, entry_starts, entry_resource, entry_ns, weight_on, slowness_of, slowness
                    )
                if new_span == span[other]:
                    continue
                if span[other] > 0:
                    left[other] = max(0.0, left[other] - (now - since[other]) / span[other])
                since[other] = now
                span[other] = new_span
                new_finish = now + np.int64(np.ceil(left[other] * new_span - 1e-6))
                if new_finish != finish[other]:
                    finish[other] = new_finish
                    if heap_size + 1 >= len(heap_time):
                        heap_time = _grown(heap_time)
                        heap_item = _grown(heap_item)
                    heap_size = _push(heap_time, heap_item, heap_size, new_finish, other)
        if starts:
            continue
        # It ended: so do the members that had nothing else to do.
        for place in range(member_starts[rendezvous], member_starts[rendezvous + 1]):
            instance = members[place]
            unfinished[instance] -= 1
            if unfinished[instance] == 0:
                ended[instance] = now
                for other in range(follower_starts[instance], follower_starts[instance + 1]):
                    follower = followers[other]
                    needs[follower] -= 1
                    if needs[follower] == 0:
                        ready[num_ready] = follower
                        num_ready += 1
    return posted, began, ended
