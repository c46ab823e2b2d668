"""In which order does every device run its passes? A list scheduler over devices, compiled.

Passes have devices, a duration, passes they wait for, and a key: when they would run if encoders took no time. An idle
device takes, by rising key, the first of its passes that can start. While a pass with a smaller key is about to be
ready, or waits for another device of its group, a later one may run only if it ends by then (or little after it). So
encoders run just in time where all devices are busy, and earlier where one would be idle.

The order on every device is that of one run, so no plan made of it can deadlock. Forwards of parts are gated by memory:
the language model's own order never waits for them, and parts of a device start in the order of their keys. Where the
memory holds too few parts for the language model to go on, the run ends early, and there is no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.jit import njit

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Work on devices: entity e has the passes 2e (forward) and 2e + 1 (backward), on devices `[first, first + count)`.

    `needs` [edges, 3] are (pass, pass it waits for, nanoseconds between them). Memory choices are columns of the tables
    [entities, choices], `choice_count` of them, rising in memory; `is_part` tells encoders' parts from stages. `key` is
    by pass.
    """

    first: Column
    count: Column
    is_part: NDArray[np.bool_]
    needs: Column
    key: Column
    choice_forward_ns: Column
    choice_backward_ns: Column
    choice_memory: Column
    choice_count: Column
    num_devices: int

    @property
    def num_passes(self) -> int:
        return 2 * len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """Passes in the order in which they start, when, the memory choice of each entity, and the peak of each device."""

    passes: Column
    start_ns: Column  # by pass
    choice: Column  # by entity
    peak: Column  # by device
    makespan_ns: int


def _edges(needs: Column, num_passes: int, by: int) -> tuple[Column, Column, Column]:
    """Needs grouped by one of their passes: starts, the other pass, nanoseconds."""
    order = np.argsort(needs[:, by], kind="stable")
    starts = np.zeros(num_passes + 1, dtype=np.int64)
    np.cumsum(np.bincount(needs[:, by], minlength=num_passes), out=starts[1:])
    return starts, needs[order, 1 - by].copy(), needs[order, 2].copy()


def ordered(passes: Passes, caps: Column, level: int, num_levels: int) -> Order | None:
    """The order of passes whose entities begin with the memory choices of a level (0: the leanest), then keep more
    where the order leaves memory; None where memory allows no order."""
    rows = np.arange(len(passes.first))
    choice = (passes.choice_count - 1) * level // num_levels
    duration = np.empty(passes.num_passes, dtype=np.int64)
    duration[0::2] = passes.choice_forward_ns[rows, choice]
    duration[1::2] = passes.choice_backward_ns[rows, choice]
    memory = passes.choice_memory[rows, choice]
    need_starts, need_of, need_ns = _edges(passes.needs, passes.num_passes, 0)
    follow_starts, follow_of, follow_ns = _edges(passes.needs, passes.num_passes, 1)
    # Passes of each device by key.
    by_key = np.argsort(passes.key, kind="stable")
    per_device: list[list[int]] = [[] for _ in range(passes.num_devices)]
    for number in by_key.tolist():
        entity = number // 2
        for device in range(passes.first[entity], passes.first[entity] + passes.count[entity]):
            per_device[device].append(number)
    queue_starts = np.cumsum([0, *map(len, per_device)]).astype(np.int64)
    queue = np.array([number for of_device in per_device for number in of_device], dtype=np.int64)
    start = np.full(passes.num_passes, -1, dtype=np.int64)
    sequence = np.empty(passes.num_passes, dtype=np.int64)
    stage_peak = _stage_peaks(passes, memory, queue, queue_starts)
    if (stage_peak > caps).any():
        return None
    count = _walk(
        passes.first,
        passes.count,
        passes.is_part,
        passes.key,
        duration,
        memory,
        need_starts,
        follow_starts,
        follow_of,
        follow_ns,
        queue_starts,
        queue,
        caps - stage_peak,
        start,
        sequence,
    )
    if count < passes.num_passes:
        return None
    peak = np.zeros(passes.num_devices, dtype=np.int64)
    choice = choice.astype(np.int64)
    step_entity, step_from, step_to = _upgrades(passes)
    order_starts, order_place = _places(passes, sequence, per_device)
    _upgrade(
        passes.first,
        passes.count,
        order_starts,
        order_place,
        sequence,
        caps,
        passes.choice_memory,
        step_entity,
        step_from,
        step_to,
        choice,
        peak,
    )
    duration[0::2] = passes.choice_forward_ns[rows, choice]
    duration[1::2] = passes.choice_backward_ns[rows, choice]
    makespan = _retime(
        passes.first, passes.count, duration, need_starts, need_of, need_ns, sequence, passes.num_devices, start
    )
    return Order(passes=sequence, start_ns=start, choice=choice, peak=peak, makespan_ns=int(makespan))


def _stage_peaks(passes: Passes, memory: Column, queue: Column, queue_starts: Column) -> Column:
    """By device: the most that stages hold at once, whose order is that of their keys."""
    peaks = np.zeros(passes.num_devices, dtype=np.int64)
    for device in range(passes.num_devices):
        own = queue[queue_starts[device] : queue_starts[device + 1]]
        own = own[~passes.is_part[own // 2]]
        if len(own):
            peaks[device] = np.cumsum(np.where(own % 2 == 0, memory[own // 2], -memory[own // 2])).max()
    return peaks


def _places(passes: Passes, sequence: Column, per_device: list[list[int]]) -> tuple[Column, Column]:
    """For every entity and each of its devices: where its forward and its backward stand in that device's order.
    [sum of counts, 2], with where each entity begins."""
    starts = np.cumsum([0, *passes.count.tolist()]).astype(np.int64)
    places = np.zeros((int(starts[-1]), 2), dtype=np.int64)
    _fill_places(passes.first, passes.count, sequence, passes.num_devices, starts, places)
    return starts, places


@njit(cache=True, nogil=True)
def _fill_places(first, count, sequence, num_devices, starts, places):
    length = np.zeros(num_devices, np.int64)
    for number in sequence:
        entity = number // 2
        for member in range(count[entity]):
            device = first[entity] + member
            places[starts[entity] + member, number % 2] = length[device]
            length[device] += 1


def _upgrades(passes: Passes) -> tuple[Column, Column, Column]:
    """Steps (entity, from, to) to richer memory choices along the lower hull of time over memory, by most time saved
    for each byte; then, once more, from every choice to the next, for what the hull leaves out."""
    time = passes.choice_forward_ns + passes.choice_backward_ns
    distinct, row_of = np.unique(
        np.concatenate([time, passes.choice_memory, passes.choice_count[:, None]], axis=1), axis=0, return_inverse=True
    )
    width = time.shape[1]
    steps_of_row = [_hull_steps(row[: row[-1]].tolist(), row[width : width + row[-1]].tolist()) for row in distinct]
    entities, before, after, gains = [], [], [], []
    for entity, row in enumerate(row_of.ravel().tolist()):
        for gain, source, target in steps_of_row[row]:
            entities.append(entity)
            before.append(source)
            after.append(target)
            gains.append(gain)
    order = np.lexsort((np.array(after), np.array(entities), -np.array(gains)))
    columns = [np.array(column, dtype=np.int64)[order] for column in (entities, before, after)]
    more, number = np.nonzero(np.arange(1, width)[None, :] < passes.choice_count[:, None])
    return (
        np.concatenate([columns[0], more]),
        np.concatenate([columns[1], number]),
        np.concatenate([columns[2], number + 1]),
    )


def _hull_steps(times: list[int], sizes: list[int]) -> list[tuple[float, int, int]]:
    """Time saved per extra byte, from, to: the corners of the lower hull, from the leanest choice on."""
    steps, current = [], 0
    while current + 1 < len(times):
        gain, target = max(
            ((times[current] - times[to]) / max(1, sizes[to] - sizes[current]), to)
            for to in range(current + 1, len(times))
        )
        if gain <= 0:
            break
        steps.append((gain, current, target))
        current = target
    return steps


@njit(cache=True, nogil=True)
def _walk(
    first,
    count,
    is_part,
    key,
    duration,
    memory,
    need_starts,
    follow_starts,
    follow_of,
    follow_ns,
    queue_starts,
    queue,
    part_budget,
    start,
    sequence,
):
    """Fills starts and the order of passes; returns how many could run."""
    num_passes, num_devices = len(duration), len(queue_starts) - 1
    waiting = need_starts[1:] - need_starts[:-1]
    ready = np.zeros(num_passes, np.int64)
    busy = np.zeros(num_devices, np.int64)
    low = queue_starts[:-1].copy()
    used = np.zeros(num_devices, np.int64)
    never = np.int64(2**62)
    now = np.int64(0)
    done = 0
    while done < num_passes:
        next_time = never
        has_started = True
        while has_started:
            has_started = False
            for device in range(num_devices):
                if busy[device] > now:
                    continue
                while low[device] < queue_starts[device + 1] and start[queue[low[device]]] >= 0:
                    low[device] += 1
                hold = never
                is_full = False
                for place in range(low[device], queue_starts[device + 1]):
                    number = queue[place]
                    if start[number] >= 0 or waiting[number] > 0:
                        continue
                    entity = number // 2
                    is_gated = is_part[entity] and number % 2 == 0
                    if is_gated:
                        if is_full:
                            continue
                        for member in range(first[entity], first[entity] + count[entity]):
                            if used[member] + memory[entity] > part_budget[member]:
                                is_full = True
                        if is_full:
                            continue
                    free = ready[number]
                    for member in range(first[entity], first[entity] + count[entity]):
                        free = max(free, busy[member])
                    if free > now:
                        hold = min(hold, free)
                        next_time = min(next_time, free)
                        continue
                    # A pass that began now would hold up one with a smaller key: only if it is short enough.
                    if now + duration[number] > hold + duration[number] // 4:
                        continue
                    start[number] = now
                    sequence[done] = number
                    done += 1
                    end = now + duration[number]
                    for member in range(first[entity], first[entity] + count[entity]):
                        busy[member] = end
                        if is_part[entity]:
                            used[member] += memory[entity] if number % 2 == 0 else -memory[entity]
                    for edge in range(follow_starts[number], follow_starts[number + 1]):
                        follower = follow_of[edge]
                        waiting[follower] -= 1
                        ready[follower] = max(ready[follower], end + follow_ns[edge])
                    has_started = True
                    break
        for device in range(num_devices):
            if busy[device] > now:
                next_time = min(next_time, busy[device])
        if next_time == never:
            break
        now = next_time
    return done


@njit(cache=True, nogil=True)
def _upgrade(
    first, count, starts, places, sequence, caps, choice_memory, step_entity, step_from, step_to, choice, peak
):
    """Raises memory choices in the order of gains as long as every device of an entity has memory for it, from its
    forward to its backward. Fills the peaks."""
    num_devices = len(caps)
    length = np.zeros(num_devices + 1, np.int64)
    for entity in range(len(first)):
        for device in range(first[entity], first[entity] + count[entity]):
            length[device + 1] += 2
    for device in range(num_devices):
        length[device + 1] += length[device]
    live = np.zeros(length[num_devices] + 1, np.int64)
    for entity in range(len(first)):
        for member in range(count[entity]):
            device = first[entity] + member
            here = choice_memory[entity, choice[entity]]
            for place in range(places[starts[entity] + member, 0], places[starts[entity] + member, 1]):
                live[length[device] + place] += here
    for step in range(len(step_entity)):
        entity, to = step_entity[step], step_to[step]
        if choice[entity] != step_from[step]:
            continue
        extra = choice_memory[entity, to] - choice_memory[entity, choice[entity]]
        fits = True
        for member in range(count[entity]):
            device = first[entity] + member
            for place in range(places[starts[entity] + member, 0], places[starts[entity] + member, 1]):
                if live[length[device] + place] + extra > caps[device]:
                    fits = False
                    break
            if not fits:
                break
        if fits:
            choice[entity] = to
            for member in range(count[entity]):
                device = first[entity] + member
                for place in range(places[starts[entity] + member, 0], places[starts[entity] + member, 1]):
                    live[length[device] + place] += extra
    for device in range(num_devices):
        for place in range(length[device], length[device + 1]):
            peak[device] = max(peak[device], live[place])


@njit(cache=True, nogil=True)
def _retime(first, count, duration, need_starts, need_of, need_ns, sequence, num_devices, start):
    """When passes run, if every device keeps its order."""
    busy = np.zeros(num_devices, np.int64)
    makespan = np.int64(0)
    for number in sequence:
        entity = number // 2
        begin = np.int64(0)
        for edge in range(need_starts[number], need_starts[number + 1]):
            before = need_of[edge]
            begin = max(begin, start[before] + duration[before] + need_ns[edge])
        for device in range(first[entity], first[entity] + count[entity]):
            begin = max(begin, busy[device])
        start[number] = begin
        for device in range(first[entity], first[entity] + count[entity]):
            busy[device] = begin + duration[number]
        makespan = max(makespan, begin + duration[number])
    return makespan
