"""The compiled event loop of the simulator. It knows instances, rendezvous and resources, but not what they represent.

A rendezvous waits for all its members, then for a fixed delay (latency), then runs. It has a fixed time and entries
(resource, time alone on it, weight). While it runs, each of its resources is shared by all rendezvous on it: at a total
weight w it takes `slowness[w]` times its time alone, and its slowest resource decides. Two kinds of resources have
weights in millionths instead of a table: on `FILL` the slowdown is the total weight, at least 1; on `PRESSURE` it is 1
plus the weight of the others. When a rendezvous starts or ends, the rendezvous that share a resource with it are
re-timed: the fraction that is left stays, the rate changes.

Events are (time, rendezvous) in a binary heap. Re-timing pushes a new event instead of moving the old one; an event
whose time is not the present `finish` of its rendezvous is stale and skipped. Time is in integer nanoseconds.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from spindle.jit import njit

_NEVER = np.int64(-1)

# kinds of resources that have no row in the table of slowdowns
EQUAL_SHARES, PRESSURE, FILL = -1, -2, -3
WEIGHT_ONE = 1_000_000  # the unit of pressure and fill: a weight of 1

Work = namedtuple(
    "Work",
    [
        "delay_ns",  # by rendezvous: from the arrival of its last member to its start
        "fixed_ns",  # by rendezvous: its duration, unless its resources make it longer
        "entry_starts",  # by rendezvous: its entries are [entry_starts[r], entry_starts[r + 1])
        "entry_resource",
        "entry_ns",  # alone on the resource
        "entry_weight",
        "slowness_of",  # by resource: a row of `slowness`, or a kind of resource
        "slowness",  # by row and load: how many times longer than alone
    ],
)


@njit(cache=True)
def _grown(column):
    larger = np.empty(2 * len(column), column.dtype)
    larger[: len(column)] = column
    return larger


@njit(cache=True)
def _push(heap_time, heap_item, size, time, item):
    """Insert an event, growing the columns if they are full. Returns the columns and their new number of events."""
    if size + 1 >= len(heap_time):
        heap_time = _grown(heap_time)
        heap_item = _grown(heap_item)
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
    return heap_time, heap_item, size + 1


@njit(cache=True)
def _pop(heap_time, heap_item, size):
    """Remove the first event. The caller has read it."""
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
def _entry_time(entry, load, work):
    """How long an entry takes on its resource at this load (total weight)."""
    row = work.slowness_of[work.entry_resource[entry]]
    if row >= 0:
        slowness = work.slowness[row, min(load, work.slowness.shape[1] - 1)]
    elif row == PRESSURE:
        slowness = 1.0 + (load - work.entry_weight[entry]) / WEIGHT_ONE
    elif row == FILL:
        slowness = max(1.0, load / WEIGHT_ONE)
    else:
        slowness = np.float64(load)
    return work.entry_ns[entry] * slowness


@njit(cache=True)
def _span(rendezvous, work, weight_on):
    """The duration of a whole rendezvous at the current load: that of its slowest resource."""
    span = np.float64(work.fixed_ns[rendezvous])
    for entry in range(work.entry_starts[rendezvous], work.entry_starts[rendezvous + 1]):
        time = _entry_time(entry, weight_on[work.entry_resource[entry]], work)
        if time > span:
            span = time
    return span


@njit(cache=True)
def _link(entry, resource, head, following, preceding):
    """Insert an entry into the list of its resource."""
    following[entry] = head[resource]
    preceding[entry] = -1
    if head[resource] >= 0:
        preceding[head[resource]] = entry
    head[resource] = entry


@njit(cache=True)
def _unlink(entry, resource, head, following, preceding):
    """Remove an entry from the list of its resource."""
    if preceding[entry] >= 0:
        following[preceding[entry]] = following[entry]
    else:
        head[resource] = following[entry]
    if following[entry] >= 0:
        preceding[following[entry]] = preceding[entry]


@njit(cache=True)
def _release_followers(instance, follower_starts, followers, num_waiting_for, ready, num_ready):
    """An instance is done: append the instances that waited only for it to `ready`. Returns their new number."""
    for place in range(follower_starts[instance], follower_starts[instance + 1]):
        follower = followers[place]
        num_waiting_for[follower] -= 1
        if num_waiting_for[follower] == 0:
            ready[num_ready] = follower
            num_ready += 1
    return num_ready


@njit(cache=True)
def run(
    num_needs,
    follower_starts,
    followers,
    rendezvous_starts,
    rendezvous_ids,
    member_starts,
    members,
    work,
):
    """Run everything. Returns when each instance was posted, began and ended; -1 if it never did (a deadlock).

    The arguments are `Instances.arrays` and `Costs.work`. Four phases for each event, in one function: one for each
    would have the references to all their arrays counted at every event.
    """
    entry_starts, entry_resource, entry_weight = work.entry_starts, work.entry_resource, work.entry_weight
    num_instances = len(num_needs)
    num_rendezvous = len(work.fixed_ns)
    posted = np.full(num_instances, _NEVER)
    began = np.full(num_instances, _NEVER)
    ended = np.full(num_instances, _NEVER)
    num_waiting_for = num_needs.copy()
    num_unfinished = rendezvous_starts[1:] - rendezvous_starts[:-1]
    num_absent = member_starts[1:] - member_starts[:-1]

    # Running rendezvous: the fraction that is left, the duration of the whole at the current load, the time since which
    # this holds, and the time at which it ends.
    fraction_left = np.ones(num_rendezvous)
    span = np.zeros(num_rendezvous)
    since = np.zeros(num_rendezvous, np.int64)
    finish = np.full(num_rendezvous, _NEVER)
    in_delay = np.zeros(num_rendezvous, np.bool_)  # not on its resources yet

    # The entries on each resource, as doubly linked lists.
    num_resources = len(work.slowness_of)
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
        if num_waiting_for[instance] == 0:
            ready[num_ready] = instance
            num_ready += 1
    now = np.int64(0)

    while True:
        # Phase 1: start what is ready. A rendezvous whose last member arrives enters its delay. An instance without
        # rendezvous is done at once.
        while num_ready > 0:
            num_ready -= 1
            instance = ready[num_ready]
            posted[instance] = now
            if num_unfinished[instance] == 0:
                began[instance] = now
                ended[instance] = now
                num_ready = _release_followers(instance, follower_starts, followers, num_waiting_for, ready, num_ready)
                continue
            for place in range(rendezvous_starts[instance], rendezvous_starts[instance + 1]):
                rendezvous = rendezvous_ids[place]
                num_absent[rendezvous] -= 1
                if num_absent[rendezvous] == 0:
                    for member_place in range(member_starts[rendezvous], member_starts[rendezvous + 1]):
                        if began[members[member_place]] < 0:
                            began[members[member_place]] = now
                    in_delay[rendezvous] = True
                    finish[rendezvous] = now + work.delay_ns[rendezvous]
                    heap_time, heap_item, heap_size = _push(
                        heap_time, heap_item, heap_size, finish[rendezvous], rendezvous
                    )
        if heap_size == 0:
            break

        # Phase 2: take the next event. Either a delay is over and the rendezvous starts, or the rendezvous ends.
        time = heap_time[0]
        rendezvous = heap_item[0]
        heap_size = _pop(heap_time, heap_item, heap_size)
        if finish[rendezvous] != time:
            continue  # stale: the rendezvous was re-timed since
        now = time

        starts = in_delay[rendezvous]
        if starts:
            in_delay[rendezvous] = False
            since[rendezvous] = now
        else:
            finish[rendezvous] = _NEVER
        # add its load to its resources, or remove it
        for entry in range(entry_starts[rendezvous], entry_starts[rendezvous + 1]):
            resource = entry_resource[entry]
            if starts:
                weight_on[resource] += entry_weight[entry]
                _link(entry, resource, head, following, preceding)
            else:
                weight_on[resource] -= entry_weight[entry]
                _unlink(entry, resource, head, following, preceding)
        if starts:
            span[rendezvous] = _span(rendezvous, work, weight_on)
            # subtract a float rounding error, so that a whole number of nanoseconds stays whole
            finish[rendezvous] = now + np.int64(np.ceil(span[rendezvous] - 1e-6))
            heap_time, heap_item, heap_size = _push(heap_time, heap_item, heap_size, finish[rendezvous], rendezvous)

        # Phase 3: re-time the rendezvous that share a resource with it. Only this resource's load has changed. So
        # unless this resource was a neighbour's slowest one and became faster, the neighbour's new span follows from
        # the old one and this entry, without a look at its other entries.
        for entry in range(entry_starts[rendezvous], entry_starts[rendezvous + 1]):
            resource = entry_resource[entry]
            load = weight_on[resource]
            load_before = load - entry_weight[entry] if starts else load + entry_weight[entry]
            neighbour_entry = head[resource]
            while neighbour_entry >= 0:
                neighbour = entry_rendezvous[neighbour_entry]
                time_before = _entry_time(neighbour_entry, load_before, work)
                time_now = _entry_time(neighbour_entry, load, work)
                neighbour_entry = following[neighbour_entry]
                if neighbour == rendezvous:
                    continue
                new_span = span[neighbour]
                if time_now >= span[neighbour]:
                    new_span = time_now
                elif time_before >= span[neighbour] * (1 - 1e-12):
                    new_span = _span(neighbour, work, weight_on)
                if new_span == span[neighbour]:
                    continue
                # the share that is done so far, at the old rate; the rest continues at the new one
                if span[neighbour] > 0:
                    fraction_left[neighbour] = max(
                        0.0, fraction_left[neighbour] - (now - since[neighbour]) / span[neighbour]
                    )
                since[neighbour] = now
                span[neighbour] = new_span
                new_finish = now + np.int64(np.ceil(fraction_left[neighbour] * new_span - 1e-6))
                if new_finish != finish[neighbour]:
                    finish[neighbour] = new_finish  # from now on, the event of the old entry is stale
                    heap_time, heap_item, heap_size = _push(heap_time, heap_item, heap_size, new_finish, neighbour)
        if starts:
            continue

        # Phase 4: the rendezvous ended, and with it the members that have no other rendezvous left.
        for place in range(member_starts[rendezvous], member_starts[rendezvous + 1]):
            instance = members[place]
            num_unfinished[instance] -= 1
            if num_unfinished[instance] == 0:
                ended[instance] = now
                num_ready = _release_followers(instance, follower_starts, followers, num_waiting_for, ready, num_ready)
    return posted, began, ended
