"""Which device encodes which item, and which replica trains on which sequence? In integers, so all ranks that have the
same lengths compute the same assignment, without communication.

An item is an image, a clip, a recording. Items are assigned longest first, each to the device that would finish
earliest. With a long tail that is not enough: one item may take longer than the mean load. Long items therefore go to
sequence groups (aligned groups of devices of one island), as long as that makes the slowest device faster.

Knows nothing of clocks, pipeline ranks, or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spindle.errors import InputError
from spindle.jit import njit

Column = NDArray[np.int64]

NOT_ALLOWED = np.int64(2**62)  # the time of an item on a group that its module does not allow
# Percentages of the mean load that a single item may take before it goes to a larger group.
_SHARES = (10**6, 120, 105, 100, 95, 90, 80, 70, 60, 45, 30, 20)
_NEARLY = 1010  # per mille above the lower bound at which the search stops
_MOST_SWAPS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """For each item, its first device and its number of devices (`degree`), which are neighbours in one island. For
    each device, the nanoseconds of all its work."""

    first_device: Column
    degree: Column
    load_ns: Column

    @property
    def imbalance(self) -> float:
        """The load of the slowest device divided by the mean."""
        return float(self.load_ns.max() / max(1e-9, self.load_ns.mean()))

    def devices_of(self, item: int) -> tuple[int, ...]:
        first = int(self.first_device[item])
        return tuple(range(first, first + int(self.degree[item])))


def assign_items(
    times_ns: Column | Sequence[Sequence[int]],
    degrees: Sequence[int],
    island_sizes: Sequence[int],
    load_ns: Column | Sequence[int] | None = None,
    most_ns: int = int(NOT_ALLOWED),
) -> Assignment:
    """Assign items to devices so that the slowest device finishes as early as possible.

    `times_ns` [degrees, items] is how long each item keeps every device of a group of that size busy (`NOT_ALLOWED` if
    it cannot be split that way). `degrees` increase from the smallest group that the module may have: 1, or its tensor
    degree. `island_sizes` are the numbers of devices of the islands, `load_ns` is the other work of each device. Groups
    lie inside islands, at multiples of their size. Items that take longer than `most_ns` go to larger groups even if
    the load would be balanced without, because others wait for them.
    """
    times = np.ascontiguousarray(np.asarray(times_ns, dtype=np.int64))
    sizes = np.asarray(degrees, dtype=np.int64)
    num_devices = int(sum(island_sizes))
    loads = np.zeros(num_devices, np.int64) if load_ns is None else np.asarray(load_ns, dtype=np.int64)
    if times.ndim != 2 or len(times) != len(sizes) or len(sizes) < 1:
        raise InputError(f"times of items are one row for each degree, got {times.shape} for {len(sizes)} degrees")
    if len(loads) != num_devices:
        raise InputError(f"there are {num_devices} devices, and {len(loads)} loads were given")
    unit = int(sizes[0])
    if unit < 1 or (np.diff(sizes) <= 0).any() or (sizes % unit).any():
        raise InputError(f"degrees are multiples of the smallest group, rising from it, got {sizes.tolist()}")
    if times.size and times.min() < 0:
        raise InputError("times of items cannot be negative")
    # In units of the smallest group. Devices that belong to no such group take no items.
    starts = np.cumsum([0, *island_sizes]).tolist()
    unit_first = np.array(
        [first for low, high in pairwise(starts) for first in range(low, high - unit + 1, unit)], dtype=np.int64
    )
    units_of_islands = [size // unit for size in island_sizes]
    if not len(unit_first):
        raise InputError(
            f"a group of {unit} devices fits into no island; islands have {list(island_sizes)}: give the module a "
            "smaller tensor degree"
        )
    unit_starts = np.cumsum([0, *units_of_islands]).tolist()
    groups = [
        [first for low, high in pairwise(unit_starts) for first in range(low, high - size + 1, size)]
        for size in (sizes // unit).tolist()
    ]
    usable = sum(1 for of_degree in groups if of_degree)
    if times.shape[1] and times[:usable].min(axis=0).max() >= NOT_ALLOWED:
        item = int(times[:usable].min(axis=0).argmax())
        raise InputError(f"item {item} is allowed on no group of devices; at least one degree has to be")
    # The load of a group of the smallest size is the load of its busiest device.
    first, degree, unit_loads = _assign(
        times[:usable].copy(),
        sizes[:usable] // unit,
        np.array([first for of_degree in groups[:usable] for first in of_degree], dtype=np.int64),
        np.cumsum([0, *map(len, groups[:usable])]).astype(np.int64),
        np.maximum.reduce([loads[unit_first + member] for member in range(unit)]),
        np.array(_SHARES, dtype=np.int64),
        most_ns,
    )
    result = loads.copy()
    for member in range(unit):
        result[unit_first + member] = unit_loads
    return Assignment(first_device=unit_first[first], degree=degree * unit, load_ns=result)


@njit(cache=True, nogil=True)
def _assign(times, sizes, group_first, group_starts, initial, shares, most_ns):
    """For each share, assign items so that none takes longer than that share of the mean load. Keeps the best
    assignment."""
    num_degrees, num_items = times.shape
    num_devices = len(initial)
    best_first = np.zeros(num_items, np.int64)
    best_degree = np.full(num_items, sizes[0], np.int64)
    best_loads = initial.copy()
    if num_items == 0:
        return best_first, best_degree, best_loads
    # No assignment is better than all work at its cheapest, spread evenly, or than the load that is there already.
    total = np.int64(0)
    for device in range(num_devices):
        total += initial[device]
    for item in range(num_items):
        least = np.int64(2**62)
        for number in range(num_degrees):
            if times[number, item] < 2**62:
                least = min(least, times[number, item] * sizes[number])
        total += least
    mean = max(np.int64(1), total // num_devices)
    bound = max(mean, initial.max())
    best = np.int64(2**62)
    orders = np.empty((num_degrees, num_items), np.int64)  # by degree, longest item first
    for number in range(num_degrees):
        orders[number] = np.argsort(-times[number], kind="mergesort")
    chosen = np.empty(num_items, np.int64)
    first = np.empty(num_items, np.int64)
    before = np.full(num_items, -1, np.int64)
    for share in shares:
        most = min(mean * share // 100, most_ns)
        is_new = False
        for item in range(num_items):
            # The smallest group on which the item takes no longer than that; if there is none, the fastest group.
            unit = -1
            fastest = 0
            for number in range(num_degrees):
                if times[number, item] < times[fastest, item]:
                    fastest = number
                if times[number, item] <= most:
                    unit = number
                    break
            chosen[item] = unit if unit >= 0 else fastest
            is_new = is_new or chosen[item] != before[item]
        if not is_new:
            continue
        before[:] = chosen
        loads = initial.copy()
        _place_longest_first(times, sizes, group_first, group_starts, orders, chosen, loads, first)
        _swap(times, chosen, first, loads, bound)
        slowest = loads.max()
        if slowest < best:
            best = slowest
            best_first[:] = first
            best_loads[:] = loads
            for item in range(num_items):
                best_degree[item] = sizes[chosen[item]]
        if best * 1000 <= bound * _NEARLY:
            break
    return best_first, best_degree, best_loads


@njit(cache=True, nogil=True)
def _place_longest_first(times, sizes, group_first, group_starts, orders, chosen, loads, first):
    """Place the largest groups first, and among groups of one size the longest items first, each on the group that
    finishes first."""
    num_degrees = len(times)
    for number in range(num_degrees - 1, -1, -1):
        size = sizes[number]
        # a heap of groups by (load, position)
        groups = group_first[group_starts[number] : group_starts[number + 1]]
        length = len(groups)
        heap_load = np.empty(length, np.int64)
        heap_place = np.empty(length, np.int64)
        for place in range(length):
            load = np.int64(0)
            for device in range(groups[place], groups[place] + size):
                load = max(load, loads[device])
            heap_load[place] = load
            heap_place[place] = place
        for place in range(length // 2 - 1, -1, -1):
            _sift_down(heap_load, heap_place, place)
        for item in orders[number]:
            if chosen[item] != number:
                continue
            load = heap_load[0] + times[number, item]
            start = groups[heap_place[0]]
            first[item] = start
            # the members of a group wait for each other, so all of them are busy until then
            for device in range(start, start + size):
                loads[device] = load
            heap_load[0] = load
            _sift_down(heap_load, heap_place, 0)


@njit(cache=True, nogil=True)
def _sift_down(load, place, position):
    length = len(load)
    while True:
        child = 2 * position + 1
        if child >= length:
            return
        right = child + 1
        if right < length and (
            load[right] < load[child] or (load[right] == load[child] and place[right] < place[child])
        ):
            child = right
        if load[child] > load[position] or (load[child] == load[position] and place[child] > place[position]):
            return
        load[child], load[position] = load[position], load[child]
        place[child], place[position] = place[position], place[child]
        position = child


@njit(cache=True, nogil=True)
def _swap(times, chosen, first, loads, bound):
    """Move an item of the slowest device to another device, or swap it for a shorter one, as long as that makes the
    slower of the two faster. Only items on a single device."""
    num_devices, num_items = len(loads), times.shape[1]
    starts = np.zeros(num_devices + 1, np.int64)
    for item in range(num_items):
        if chosen[item] == 0:
            starts[first[item] + 1] += 1
    for device in range(num_devices):
        starts[device + 1] += starts[device]
    of_device = np.empty(starts[num_devices], np.int64)
    filled = starts[:-1].copy()
    for item in range(num_items):
        if chosen[item] == 0:
            of_device[filled[first[item]]] = item
            filled[first[item]] += 1
    for _ in range(_MOST_SWAPS):
        slow = np.argmax(loads)
        if loads[slow] * 1000 <= bound * _NEARLY:
            return
        fast = np.argmin(loads)
        gap = loads[slow] - loads[fast]
        # the swap that comes closest to halving the gap
        best_gain = np.int64(0)
        best_give = best_take = -1
        for give in range(starts[slow], starts[slow + 1]):
            for take in range(starts[fast], starts[fast + 1]):
                moved = times[0, of_device[give]] - times[0, of_device[take]]
                gain = min(moved, gap - moved)
                if gain > best_gain:
                    best_gain, best_give, best_take = gain, give, take
        if best_give < 0:
            return
        give, take = of_device[best_give], of_device[best_take]
        moved = times[0, give] - times[0, take]
        loads[slow] -= moved
        loads[fast] += moved
        first[give], first[take] = fast, slow
        of_device[best_give], of_device[best_take] = take, give


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceAssignment:
    """For each sequence, its replica; for each replica, the nanoseconds of all its sequences."""

    replica: Column
    time_ns: Column

    @property
    def imbalance(self) -> float:
        """The load of the slowest replica divided by the mean."""
        return float(self.time_ns.max() / max(1e-9, self.time_ns.mean()))


def assign_sequences(times_ns: Column | Sequence[int], num_replicas: int) -> SequenceAssignment:
    """Assign the sequences of a step to replicas: longest first to the replica with the least work, then by swaps
    between the slowest replica and others, as long as a swap makes the slower of the two faster.

    `times_ns` is all work of a sequence, including encoders. Every replica gets at least one sequence.
    """
    times = np.asarray(times_ns, dtype=np.int64)
    if num_replicas < 1 or len(times) < num_replicas:
        raise InputError(
            f"a step needs a sequence for each replica, got {len(times)} sequences for {num_replicas} replicas; "
            "give more microbatches, or use fewer devices"
        )
    replica, time_ns = _assign_sequences(times.copy(), num_replicas)
    return SequenceAssignment(replica=replica, time_ns=time_ns)


@njit(cache=True, nogil=True)
def _assign_sequences(times, num_replicas):
    num_sequences = len(times)
    replica = np.zeros(num_sequences, np.int64)
    load = np.zeros(num_replicas, np.int64)
    count = np.zeros(num_replicas, np.int64)
    order = np.argsort(-times, kind="mergesort")
    for place in range(num_sequences):
        sequence = order[place]
        # replicas without a sequence come first once there are only just enough sequences left for them
        num_empty = np.int64(0)
        for number in range(num_replicas):
            num_empty += count[number] == 0
        must_fill = num_sequences - place <= num_empty
        best = -1
        for number in range(num_replicas):
            if must_fill and count[number]:
                continue
            if best < 0 or load[number] < load[best]:
                best = number
        replica[sequence] = best
        load[best] += times[sequence]
        count[best] += 1
    mean = load.sum() // num_replicas
    for _ in range(_MOST_SWAPS * num_replicas):
        slow = np.argmax(load)
        if load[slow] * 1000 <= mean * _NEARLY:
            break
        best_gain = np.int64(0)
        best_give = best_take = best_other = -1
        for give in range(num_sequences):
            if replica[give] != slow:
                continue
            for take in range(-num_replicas, num_sequences):
                # a negative number means that nothing comes back from that replica: the sequence moves
                other = -1 - take if take < 0 else replica[take]
                if other == slow or (take < 0 and count[slow] == 1):
                    continue
                moved = times[give] - (np.int64(0) if take < 0 else times[take])
                gain = min(moved, load[slow] - load[other] - moved)
                if gain > best_gain:
                    best_gain, best_give, best_take, best_other = gain, give, take, other
        if best_give < 0:
            break
        moved = times[best_give] - (np.int64(0) if best_take < 0 else times[best_take])
        load[slow] -= moved
        load[best_other] += moved
        replica[best_give] = best_other
        if best_take >= 0:
            replica[best_take] = slow
        else:
            count[slow] -= 1
            count[best_other] += 1
    return replica, load


def group_sequences(work: Sequence[int], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Group sequences into groups of equal size with equal work: longest first, to the group with the least work that
    is not full.

    Numbers within a group increase, and groups are in the order of their first sequence.
    """
    if num_groups < 1 or len(work) % num_groups:
        raise InputError(
            f"{len(work)} sequences cannot be divided into {num_groups} groups of equal size; give a multiple of "
            f"{num_groups}"
        )
    size = len(work) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    total = [0] * num_groups
    for sequence in sorted(range(len(work)), key=lambda sequence: (-work[sequence], sequence)):
        open_groups = (group for group in range(num_groups) if len(groups[group]) < size)
        group = min(open_groups, key=lambda group: (total[group], group))
        groups[group].append(sequence)
        total[group] += work[sequence]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
