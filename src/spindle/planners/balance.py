"""Who encodes which item, and which replica trains on which sequence? In integers: every rank that is given the same
lengths finds the same answer, without a message.

An item is an image, a clip, a recording. Its cost follows from its length by pieces of a·p² + b·p + k. Items go to
devices longest first, each to the device that would end first with all its work. Under a long tail that is not enough:
one item may take longer than the mean of all devices. So long items go to sequence groups, aligned groups of devices of
one island, as far as that makes the slowest device faster.

Knows nothing of times of day, ranks of a pipeline, or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spindle.errors import DoesNotFitError, InputError
from spindle.jit import njit

Column = NDArray[np.int64]

NOT_ALLOWED = np.int64(2**62)  # the time of an item on a group that its module does not allow
_FRACTION_BITS = 24  # of the coefficients of a cost
_MAX_TIME_NS = 2**38  # 275 s: a·p² with its fraction stays below 2^63
# An item may take at most such a share of the mean load, in percent, before it goes to a larger group.
_SHARES = (10**6, 120, 105, 100, 95, 90, 80, 70, 60, 45, 30, 20)
_NEARLY = 1010  # per mille of the lower bound: nothing more is tried
_MOST_SWAPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCost:
    """Nanoseconds of one item by its length p: from `starts[i]` on, a·p² + b·p + k, with coefficients in 2^-24 ns.

    Below the first measured length the first piece holds, beyond the last one the last piece: attention is quadratic,
    so a longer item is not guessed to be linear.
    """

    starts: tuple[int, ...]
    square: tuple[int, ...]
    linear: tuple[int, ...]
    constant: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.square) == len(self.linear) == len(self.constant) > 0:
            raise InputError("a cost needs a, b and k for each of its pieces, and at least one piece")

    def of(self, lengths: Sequence[int] | Column) -> Column:
        """Nanoseconds of items of these lengths; at least 1."""
        p = np.asarray(lengths, dtype=np.int64)
        if p.size and p.min() < 1:
            position = int(np.argmin(p))
            raise InputError(
                f"item {position} has {int(p[position])} rows; every item needs at least one: leave it out"
            )
        piece = np.maximum(np.searchsorted(np.asarray(self.starts), p, side="right") - 1, 0)
        square, linear, constant = (
            np.asarray(column, dtype=np.int64)[piece] for column in (self.square, self.linear, self.constant)
        )
        largest = np.abs((square.astype(np.float64) * p + linear) * p) + np.abs(linear.astype(np.float64) * p)
        if p.size and largest.max() > 2.0**62:
            raise InputError(f"an item of {int(p.max()):,} rows is far beyond the lengths that were measured; split it")
        return np.asarray(np.maximum(1, ((square * p + linear) * p + constant) >> _FRACTION_BITS), dtype=np.int64)


def cost_through(points: Sequence[tuple[int, int]]) -> LengthCost:
    """The cost through measured points (length, nanoseconds): a piece between each two neighbours.

    A piece bends as the points around it do, never so much that a longer item would take less time. Measured times that
    fall with the length are noise, and are raised to the time before. One point gives a cost in proportion to lengths.
    """
    rising: list[tuple[int, int]] = []
    for length, time_ns in sorted(dict(points).items()):
        if length < 1 or not 0 <= time_ns < _MAX_TIME_NS:
            raise InputError(
                f"a measured point is a length of at least 1 and a time of up to {_MAX_TIME_NS // 10**9} s, got "
                f"{length} and {time_ns} ns"
            )
        rising.append((length, max(time_ns, rising[-1][1] if rising else 0)))
    if not rising:
        raise InputError("a cost needs at least one measured length")
    one = 1 << _FRACTION_BITS
    if len(rising) == 1:
        length, time_ns = rising[0]
        return LengthCost(starts=(length,), square=(0,), linear=(time_ns * one // length,), constant=(0,))
    slopes = [(t1 - t0) * one // (p1 - p0) for (p0, t0), (p1, t1) in pairwise(rising)]
    pieces = []
    for number, ((p0, t0), (p1, _)) in enumerate(pairwise(rising)):
        slope = slopes[number]
        # Second differences with the neighbours of the piece; where there are two, the smaller bend.
        bends = []
        if number:
            bends.append((slope - slopes[number - 1]) // (p1 - rising[number - 1][0]))
        if number + 1 < len(slopes):
            bends.append((slopes[number + 1] - slope) // (rising[number + 2][0] - p0))
        # It rises from its beginning on; the first piece from 0 on.
        steepest = slope // (p1 - p0 if number else p1 + p0)
        square = max(0, min(*bends, steepest)) if bends else 0
        linear = slope - square * (p0 + p1)
        pieces.append((p0, square, linear, t0 * one - (square * p0 + linear) * p0))
    if max(abs(number) for piece in pieces for number in piece) >= 2**62:
        raise InputError("measured times rise too steeply between neighbouring lengths; measure them again")
    starts, square_of, linear_of, constant_of = zip(*pieces, strict=True)
    return LengthCost(starts=starts, square=square_of, linear=linear_of, constant=constant_of)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """By item: the first of its devices and how many there are, which lie next to each other in one island; by device:
    the nanoseconds of all its work."""

    first_device: Column
    degree: Column
    load_ns: Column

    @property
    def imbalance(self) -> float:
        """The slowest device over the mean."""
        return float(self.load_ns.max() / max(1e-9, self.load_ns.mean()))

    def devices_of(self, item: int) -> tuple[int, ...]:
        first = int(self.first_device[item])
        return tuple(range(first, first + int(self.degree[item])))


def assign_items(
    times_ns: Column | Sequence[Sequence[int]],
    degrees: Sequence[int],
    island_sizes: Sequence[int],
    load_ns: Column | Sequence[int] | None = None,
) -> Assignment:
    """Assign items to devices so that the slowest device ends as early as can be found.

    `times_ns` [degrees, items] is how long each item keeps every device of a group of so many busy (`NOT_ALLOWED` where
    it cannot be split so); `degrees` rise from the smallest group that the module may have: 1, or its tensor degree.
    `island_sizes` are the devices of each island, `load_ns` what devices do besides. Groups lie inside islands, at
    multiples of their size.
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
    # In units of the smallest group; devices that are in none take no items.
    starts = np.cumsum([0, *island_sizes]).tolist()
    unit_first = np.array(
        [first for low, high in pairwise(starts) for first in range(low, high - unit + 1, unit)], dtype=np.int64
    )
    units_of_islands = [size // unit for size in island_sizes]
    if not len(unit_first):
        raise InputError(f"a group of {unit} devices fits into no island; islands have {list(island_sizes)}")
    unit_starts = np.cumsum([0, *units_of_islands]).tolist()
    groups = [
        [first for low, high in pairwise(unit_starts) for first in range(low, high - size + 1, size)]
        for size in (sizes // unit).tolist()
    ]
    usable = sum(1 for of_degree in groups if of_degree)
    if times.shape[1] and times[:usable].min(axis=0).max() >= NOT_ALLOWED:
        item = int(times[:usable].min(axis=0).argmax())
        raise InputError(f"item {item} is allowed on no group of devices; at least one degree has to be")
    first, degree, unit_loads = _assign(
        times[:usable].copy(),
        sizes[:usable] // unit,
        np.array([first for of_degree in groups[:usable] for first in of_degree], dtype=np.int64),
        np.cumsum([0, *map(len, groups[:usable])]).astype(np.int64),
        np.maximum.reduce([loads[unit_first + member] for member in range(unit)]),
        np.array(_SHARES, dtype=np.int64),
    )
    result = loads.copy()
    for member in range(unit):
        result[unit_first + member] = unit_loads
    return Assignment(first_device=unit_first[first], degree=degree * unit, load_ns=result)


@njit(cache=True, nogil=True)
def _assign(times, sizes, group_first, group_starts, initial, shares):
    """Tries, for each share, how the items lie if none takes longer than that share of the mean; keeps the best."""
    num_degrees, num_items = times.shape
    num_devices = len(initial)
    best_first = np.zeros(num_items, np.int64)
    best_degree = np.full(num_items, sizes[0], np.int64)
    best_loads = initial.copy()
    if num_items == 0:
        return best_first, best_degree, best_loads
    # No assignment is better than all work at its cheapest, spread evenly, nor than what is there already.
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
    orders = np.empty((num_degrees, num_items), np.int64)  # by degree: longest first
    for number in range(num_degrees):
        orders[number] = np.argsort(-times[number], kind="mergesort")
    chosen = np.empty(num_items, np.int64)
    first = np.empty(num_items, np.int64)
    before = np.full(num_items, -1, np.int64)
    for share in shares:
        most = mean * share // 100
        is_new = False
        for item in range(num_items):
            # The smallest group on which the item takes no longer; if there is none, the one on which it is fastest.
            taken = -1
            fastest = 0
            for number in range(num_degrees):
                if times[number, item] < times[fastest, item]:
                    fastest = number
                if times[number, item] <= most:
                    taken = number
                    break
            chosen[item] = taken if taken >= 0 else fastest
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
    """Places the largest groups first, and of one size the longest items first, each on the group that ends first."""
    num_degrees = len(times)
    for number in range(num_degrees - 1, -1, -1):
        size = sizes[number]
        # A heap of groups by (load, place).
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
            # Members wait for each other, so all are busy until then.
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
    """Moves an item of the slowest device elsewhere, or swaps it for a shorter one there, as long as that makes the
    slower of the two devices faster. Only items on one device each."""
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
        # The swap that comes closest to sharing the gap.
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
    """By sequence: its replica; by replica: the nanoseconds and the bytes of all its sequences."""

    replica: Column
    time_ns: Column
    memory_bytes: Column

    @property
    def imbalance(self) -> float:
        """The slowest replica over the mean."""
        return float(self.time_ns.max() / max(1e-9, self.time_ns.mean()))


def assign_sequences(
    times_ns: Column | Sequence[int],
    num_replicas: int,
    memory_bytes: Column | Sequence[int] | None = None,
    most_bytes: int | None = None,
) -> SequenceAssignment:
    """Assign the sequences of a step to replicas: longest first to the replica with least work that has memory for it,
    then swapped between the slowest replica and others as long as that makes the slower of the two faster.

    `times_ns` is all work of a sequence, encoders included. `memory_bytes` and `most_bytes` bound what the sequences of
    one replica keep together. Every replica gets a sequence.
    """
    times = np.asarray(times_ns, dtype=np.int64)
    sizes = np.zeros_like(times) if memory_bytes is None else np.asarray(memory_bytes, dtype=np.int64)
    if num_replicas < 1 or len(times) < num_replicas:
        raise InputError(
            f"a step needs a sequence for each replica, got {len(times)} sequences for {num_replicas} replicas; "
            "give more microbatches, or use fewer devices"
        )
    if len(sizes) != len(times):
        raise InputError(f"there are {len(times)} sequences, and {len(sizes)} sizes were given")
    limit = int(NOT_ALLOWED) if most_bytes is None else most_bytes
    replica, time_ns, used = _assign_sequences(times.copy(), sizes.copy(), num_replicas, limit)
    if used.max() > limit:
        raise DoesNotFitError(
            f"the sequences of replica {int(used.argmax())} would keep {int(used.max()):,} bytes and may keep "
            f"{limit:,}; give shorter sequences, or more devices",
            int(used.max()),
        )
    return SequenceAssignment(replica=replica, time_ns=time_ns, memory_bytes=used)


@njit(cache=True, nogil=True)
def _assign_sequences(times, sizes, num_replicas, limit):
    num_sequences = len(times)
    replica = np.zeros(num_sequences, np.int64)
    load = np.zeros(num_replicas, np.int64)
    used = np.zeros(num_replicas, np.int64)
    count = np.zeros(num_replicas, np.int64)
    order = np.argsort(-times, kind="mergesort")
    for place in range(num_sequences):
        sequence = order[place]
        # Replicas without a sequence come first once there are only enough left for them.
        num_empty = np.int64(0)
        for number in range(num_replicas):
            num_empty += count[number] == 0
        must_fill = num_sequences - place <= num_empty
        best = -1
        roomiest = 0
        for number in range(num_replicas):
            if must_fill and count[number]:
                continue
            if used[number] < used[roomiest] or (must_fill and count[roomiest]):
                roomiest = number
            if used[number] + sizes[sequence] <= limit and (best < 0 or load[number] < load[best]):
                best = number
        best = best if best >= 0 else roomiest
        replica[sequence] = best
        load[best] += times[sequence]
        used[best] += sizes[sequence]
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
                # A negative number stands for no sequence of that replica: the item moves.
                other = -1 - take if take < 0 else replica[take]
                if other == slow or (take < 0 and count[slow] == 1):
                    continue
                time = np.int64(0) if take < 0 else times[take]
                size = np.int64(0) if take < 0 else sizes[take]
                moved, bytes_moved = times[give] - time, sizes[give] - size
                gain = min(moved, load[slow] - load[other] - moved)
                if gain > best_gain and used[other] + bytes_moved <= limit and used[slow] - bytes_moved <= limit:
                    best_gain, best_give, best_take, best_other = gain, give, take, other
        if best_give < 0:
            break
        time = np.int64(0) if best_take < 0 else times[best_take]
        size = np.int64(0) if best_take < 0 else sizes[best_take]
        load[slow] -= times[best_give] - time
        load[best_other] += times[best_give] - time
        used[slow] -= sizes[best_give] - size
        used[best_other] += sizes[best_give] - size
        replica[best_give] = best_other
        if best_take >= 0:
            replica[best_take] = slow
        else:
            count[slow] -= 1
            count[best_other] += 1
    return replica, load, used


def group_sequences(work: Sequence[int], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Sequences in groups of equal size and level work: longest first to the group with least work that is not full.
    Numbers inside a group rise, and groups are in the order of their first sequences."""
    if num_groups < 1 or len(work) % num_groups:
        raise InputError(f"{len(work)} sequences cannot be divided into {num_groups} groups of equal size")
    size = len(work) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    total = [0] * num_groups
    for sequence in sorted(range(len(work)), key=lambda sequence: (-work[sequence], sequence)):
        open_groups = (group for group in range(num_groups) if len(groups[group]) < size)
        group = min(open_groups, key=lambda group: (total[group], group))
        groups[group].append(sequence)
        total[group] += work[sequence]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
