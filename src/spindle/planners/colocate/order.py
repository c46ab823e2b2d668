"""A list scheduler that orders the passes of every device, compiled.

Passes have devices, a duration, passes they wait for, and a key: when they would run if encoders took no time. An idle
device takes, by increasing key, the first of its passes that can start. While a pass with a smaller key is about to be
ready, or waits for another device of its group, a later one may run only if it ends by then (or little after it). So
encoders run just in time while all devices are busy, and earlier if one would be idle.

The order on every device is that of one run, so no plan made from it can deadlock. Forwards of parts are gated by
memory: the language model's own order never waits for them, and parts of a device start in the order of their keys. If
memory holds too few parts for the language model to go on, the run ends early, and there is no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.jit import njit
from spindle.program import COPIES_AHEAD

Column = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
_REPEATS = 3  # orders from one level of memory choices, each with the times of what the last one keeps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Work on devices: entity e has the passes 2e (forward) and 2e + 1 (backward), on devices `[first, first + count)`.
    The backwards of the entities `split` are cut: 2e + 1 makes gradients of inputs, and pass 2n + i, for the i-th of
    them and n entities in all, those of weights, in `weight_ns`.

    `needs` [edges, 3] are (pass, pass it waits for, nanoseconds between them). Memory choices are columns of the tables
    [entities, choices], `choice_count` of them, rising in memory; `choice_copied` is on the device only while it is
    copied to the host or back (`program/copies.py`), `choice_recomputed` from a cut backward to its weight gradients.
    `is_part` tells encoders' parts from stages. `key` is by pass. Stages never hold more than in the order of
    `place_held`, by pass. If the order `foresees`, parts also make way for a stage that waits for others still.
    """

    first: Column
    count: Column
    is_part: NDArray[np.bool_]
    needs: Column
    key: Column
    place_held: Column
    foresees: bool
    split: Column
    weight_ns: Column
    choice_forward_ns: Column
    choice_backward_ns: Column
    choice_memory: Column
    choice_copied: Column
    choice_recomputed: Column
    choice_count: Column
    num_devices: int

    @property
    def num_passes(self) -> int:
        return 2 * len(self.first) + len(self.split)

    @property
    def entity(self) -> Column:
        """The entity of each pass."""
        return np.concatenate([np.repeat(np.arange(len(self.first)), 2), self.split])

    @property
    def kind(self) -> Column:
        """The kind of each pass."""
        return np.concatenate([np.tile([FORWARD, BACKWARD], len(self.first)), np.full(len(self.split), WEIGHT)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """Passes in the order in which they start, when, the memory choice of each entity, and the peak of each device."""

    passes: Column
    start_ns: Column  # by pass
    choice: Column  # by entity
    peak: Column  # by device
    makespan_ns: int
    split: Column  # entities


def ordered(passes: Passes, caps: Column, levels: Sequence[int], num_levels: int) -> Order | None:
    """The shortest order of passes whose entities begin with the memory choices of a level (0: the leanest), then keep
    more where the order leaves memory; None where memory allows no order at any of the levels.

    What an order keeps says how long its passes take, so they are put in order again with these times.
    """
    rows = np.arange(len(passes.first))
    edges = (*_edges(passes.needs, passes.num_passes, 0), *_edges(passes.needs, passes.num_passes, 1))
    queues = _queues(passes, np.argsort(passes.key, kind="stable"))
    steps = _upgrades(passes)
    best: Order | None = None
    for level in levels:
        lean = ((passes.choice_count - 1) * level // num_levels).astype(np.int64)
        memory = passes.choice_memory[rows, lean]
        room = caps - _stage_peaks(passes, lean)
        if room.min() < 0:
            continue
        timed = lean
        order: Order | None = None
        for _ in range(_REPEATS):
            order = _order(passes, caps, room, lean, timed, memory, edges, queues, steps, order)
            if order is None:
                break
            if best is None or order.makespan_ns < best.makespan_ns:
                best = order
            if (order.choice == timed).all():
                break
            timed = order.choice
    return best


def _order(
    passes: Passes,
    caps: Column,
    room: Column,
    lean: Column,
    timed: Column,
    memory: Column,
    edges: tuple[Column, ...],
    queues: tuple[Column, Column],
    steps: tuple[Column, Column, Column],
    before: Order | None,
) -> Order | None:
    """One order: with the times of the choices `timed`, those of the order `before` if there is one, while parts have
    `room` for the memory of the choices `lean`, and then with more than these."""
    start = np.full(passes.num_passes, -1, dtype=np.int64)
    sequence = np.empty(passes.num_passes, dtype=np.int64)
    of_passes = passes.entity, passes.kind
    count = _walk(
        passes.first,
        passes.count,
        *of_passes,
        passes.is_part,
        _durations(passes, timed),
        memory,
        *edges,
        passes.foresees,
        *queues,
        room,
        start,
        sequence,
    )
    if count < passes.num_passes:
        return None
    if before is not None and np.array_equal(sequence, before.passes):
        return before
    choice, peak = lean.copy(), np.zeros(passes.num_devices, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(passes.count)])
    places = np.full((int(starts[-1]), 3), -1, dtype=np.int64)
    length = np.zeros(passes.num_devices, dtype=np.int64)
    _fill_places(passes.first, passes.count, *of_passes, sequence, starts, places, length)
    tables = (passes.choice_memory, passes.choice_copied, passes.choice_recomputed)
    _upgrade(passes.first, passes.count, starts, places, length, caps, *tables, *steps, choice, peak)
    makespan = _retime(
        passes.first,
        passes.count,
        passes.entity,
        _durations(passes, choice),
        *edges[:3],
        sequence,
        passes.num_devices,
        start,
    )
    return Order(
        passes=sequence, start_ns=start, choice=choice, peak=peak, makespan_ns=int(makespan), split=passes.split
    )


def _edges(needs: Column, num_passes: int, by: int) -> tuple[Column, Column, Column]:
    """Needs grouped by one of their passes: starts, the other pass, nanoseconds."""
    order = np.argsort(needs[:, by], kind="stable")
    starts = np.zeros(num_passes + 1, dtype=np.int64)
    np.cumsum(np.bincount(needs[:, by], minlength=num_passes), out=starts[1:])
    return starts, needs[order, 1 - by].copy(), needs[order, 2].copy()


def _queues(passes: Passes, in_order: Column) -> tuple[Column, Column]:
    """The passes of each device in this order, and where those of each device begin."""
    entity = passes.entity[in_order]
    width = passes.count[entity]
    number = np.repeat(in_order, width)
    member = np.arange(len(number)) - np.repeat(np.cumsum(width) - width, width)
    device = np.repeat(passes.first[entity], width) + member
    starts = np.zeros(passes.num_devices + 1, dtype=np.int64)
    np.cumsum(np.bincount(device, minlength=passes.num_devices), out=starts[1:])
    return starts, number[np.argsort(device, kind="stable")]


def _durations(passes: Passes, choice: Column) -> Column:
    """The duration of every pass with these memory choices."""
    rows = np.arange(len(choice))
    forward, backward = passes.choice_forward_ns[rows, choice], passes.choice_backward_ns[rows, choice].copy()
    backward[passes.split] -= passes.weight_ns
    return np.concatenate([np.stack([forward, backward], axis=1).ravel(), passes.weight_ns])


def _stage_peaks(passes: Passes, choice: Column) -> Column:
    """By device: the most that stages hold at once with these memory choices."""
    peaks = np.zeros(passes.num_devices, dtype=np.int64)
    in_order = np.lexsort((passes.key, passes.place_held))
    in_order = in_order[~passes.is_part[passes.entity[in_order]]]
    rows, starts = np.arange(len(choice)), np.concatenate([[0], np.cumsum(passes.count)])
    places = np.full((int(starts[-1]), 3), -1, dtype=np.int64)
    length = np.zeros(passes.num_devices, dtype=np.int64)
    _fill_places(passes.first, passes.count, passes.entity, passes.kind, in_order, starts, places, length)
    tables = [table[rows, choice] for table in (passes.choice_memory, passes.choice_copied, passes.choice_recomputed)]
    _fill_peaks(passes.first, passes.count, passes.is_part, starts, places, length, *tables, peaks)
    return peaks


@njit(cache=True, nogil=True)
def _fill_peaks(first, count, is_part, starts, places, length, memory, copied, recomputed, peaks):
    begin = np.zeros(len(length) + 1, np.int64)
    for device in range(len(length)):
        begin[device + 1] = begin[device] + length[device]
    change = np.zeros(begin[-1] + 1, np.int64)
    for entity in range(len(first)):
        for member in range(0 if is_part[entity] else count[entity]):
            place = places[starts[entity] + member]
            _note(change, begin[first[entity] + member], place, memory[entity], copied[entity], recomputed[entity])
    live = np.int64(0)
    for device in range(len(length)):
        for place in range(begin[device], begin[device + 1]):
            live += change[place]
            peaks[device] = max(peaks[device], live)


@njit(inline="always")
def _held(begin, places):
    """Where an entity is held on a device whose places begin at `begin`: from which place to before which; up to the
    third place and from the fourth one on with what it offloads, beside the passes beside which that is copied, as in
    `program/copies.py`, or all the time; and from the last one on with what it recomputed for gradients of weights.
    Instructions are at least as many as passes, so a device never holds more."""
    first, last = begin + places[0], begin + max(places[1], places[2]) + 1
    released, fetched = first + COPIES_AHEAD + 1, begin + places[1] - COPIES_AHEAD
    if released >= fetched:
        released, fetched = last, last
    return first, last, released, fetched, begin + places[1] if places[2] >= 0 else last


@njit(inline="always")
def _note(change, begin, places, memory, copied, recomputed):
    """Adds what an entity holds to changes from place to place."""
    first, last, released, fetched, cut = _held(begin, places)
    change[first] += memory + copied
    change[released] -= copied
    change[fetched] += copied
    change[cut] += recomputed
    change[last] -= memory + copied + recomputed


@njit(inline="always")
def _hold(live, begin, places, memory, copied, recomputed):
    """The same to what is held at each place."""
    first, last, released, fetched, cut = _held(begin, places)
    _add(live, first, last, memory)
    if copied:
        _add(live, first, released, copied)
        _add(live, fetched, last, copied)
    if recomputed:
        _add(live, cut, last, recomputed)


@njit(inline="always")
def _fits(live, begin, places, memory, copied, recomputed, cap):
    """Whether a device would hold at most `cap` with what `_hold` adds."""
    first, last, released, fetched, cut = _held(begin, places)
    room = cap - memory
    if copied == 0 and recomputed == 0:
        return _most(live, first, last) <= room
    if released == last:  # what would be copied stays on the device
        released = fetched = cut
    return (
        _most(live, first, released) <= room - copied
        and _most(live, released, fetched) <= room
        and _most(live, fetched, cut) <= room - copied
        and _most(live, cut, last) <= room - copied - recomputed
    )


# Views that begin at 0 make these loops vector instructions.
@njit(inline="always")
def _add(live, begin, end, change):
    held = live[begin:end]
    for place in range(len(held)):
        held[place] += change


@njit(inline="always")
def _most(live, begin, end):
    held = live[begin:end]
    most = np.int64(-(2**62))
    for place in range(len(held)):
        most = max(most, held[place])
    return most


@njit(cache=True, nogil=True)
def _fill_places(first, count, entity_of, kind_of, sequence, starts, places, length):
    """By entity and member: the places of its forward, its backward and its weight gradients on the device; and the
    passes of each device."""
    for number in sequence:
        entity = entity_of[number]
        for member in range(count[entity]):
            device = first[entity] + member
            places[starts[entity] + member, kind_of[number]] = length[device]
            length[device] += 1


def _upgrades(passes: Passes) -> tuple[Column, Column, Column]:
    """Steps (entity, from, to) to richer memory choices along the lower hull of time over memory, by most time saved
    for each byte; then, once more, from every choice to the next, for what the hull leaves out."""
    time, width = passes.choice_forward_ns + passes.choice_backward_ns, passes.choice_memory.shape[1]
    most = len(time) * (width - 1)
    entities, before, after = (np.empty(most, dtype=np.int64) for _ in range(3))
    gains = np.empty(most)
    count = _hull_steps(time, passes.choice_memory, passes.choice_count, entities, before, after, gains)
    order = np.argsort(-gains[:count], kind="stable")
    more, number = np.nonzero(np.arange(1, width)[None, :] < passes.choice_count[:, None])
    return (
        np.concatenate([entities[order], more]),
        np.concatenate([before[order], number]),
        np.concatenate([after[order], number + 1]),
    )


@njit(cache=True, nogil=True)
def _hull_steps(times, sizes, counts, entities, before, after, gains):
    """Fills, entity by entity, the corners of the lower hull from the leanest choice on: from, to, and the time saved
    for each extra byte. Returns how many there are."""
    step = 0
    for entity in range(len(times)):
        current = 0
        while current + 1 < counts[entity]:
            gain, target = -1.0, current
            for to in range(current + 1, counts[entity]):
                extra = max(np.int64(1), sizes[entity, to] - sizes[entity, current])
                saved = (times[entity, current] - times[entity, to]) / extra
                if saved >= gain:  # of equal gains the largest step
                    gain, target = saved, to
            if gain <= 0:
                break
            entities[step], before[step], after[step], gains[step] = entity, current, target, gain
            step += 1
            current = target
    return step


@njit(inline="always")
def _expected(number, start, duration, need_starts, need_of, need_ns, waiting, ready):
    """When a pass may begin at the earliest, by one of the chains of passes that it waits for."""
    behind = np.int64(0)
    while waiting[number] > 0:
        for edge in range(need_starts[number], need_starts[number + 1]):
            if start[need_of[edge]] < 0:
                behind += duration[need_of[edge]] + need_ns[edge]
                number = need_of[edge]
                break
    return ready[number] + behind


@njit(inline="always")
def _insert(values, begin, length, value):
    """Puts a value into falling values."""
    place = begin + length
    while place > begin and values[place - 1] < value:
        values[place] = values[place - 1]
        place -= 1
    values[place] = value


@njit(inline="always")
def _remove(values, begin, length, value):
    """Takes a value out of falling values."""
    place = begin + length - 1
    while values[place] != value:
        place -= 1
    while place < begin + length - 1:
        values[place] = values[place + 1]
        place += 1


@njit(cache=True, nogil=True)
def _walk(
    first,
    count,
    entity_of,
    kind_of,
    is_part,
    duration,
    memory,
    need_starts,
    need_of,
    need_ns,
    follow_starts,
    follow_of,
    follow_ns,
    foresees,
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
    used = np.zeros(num_devices, np.int64)
    never = np.int64(2**62)
    # An idle device looks at its queue again at `wake`: when one of its passes may begin, or when a device that it
    # shares passes with began one. The latter are neighbours.
    wake = np.zeros(num_devices, np.int64)
    first_peer = np.arange(num_devices)
    last_peer = np.arange(num_devices)
    for entity in range(len(first)):
        last = first[entity] + count[entity] - 1
        for member in range(first[entity], last + 1):
            first_peer[member] = min(first_peer[member], first[entity])
            last_peer[member] = max(last_peer[member], last)
    # By device, falling: the places in its queue of passes that wait for no other and have not begun. `place_of`
    # [members of entities, kinds] is where a pass stands in the queues of its devices.
    member_starts = np.zeros(len(first) + 1, np.int64)
    member_starts[1:] = np.cumsum(count)
    place_of = np.empty((member_starts[-1], 3), np.int64)
    open_places = np.empty(len(queue), np.int64)
    num_open = np.zeros(num_devices, np.int64)
    stage_places = np.empty(len(queue), np.int64)  # of all stages; `low` is the first of a device that has not begun
    num_stages = np.zeros(num_devices, np.int64)
    low = queue_starts[:-1].copy()
    for device in range(num_devices):
        for place in range(queue_starts[device + 1] - 1, queue_starts[device] - 1, -1):
            number = queue[place]
            entity = entity_of[number]
            place_of[member_starts[entity] + device - first[entity], kind_of[number]] = place
            if waiting[number] == 0:
                open_places[queue_starts[device] + num_open[device]] = place
                num_open[device] += 1
        for place in range(queue_starts[device], queue_starts[device + 1]):
            if not is_part[entity_of[queue[place]]]:
                stage_places[queue_starts[device] + num_stages[device]] = place
                num_stages[device] += 1
    now = np.int64(0)
    done = 0
    while done < num_passes:
        has_started = True
        while has_started:
            has_started = False
            for device in range(num_devices):
                if wake[device] > now or busy[device] > now:
                    continue
                wake[device] = never
                # The first stage that waits for others.
                begin, end = queue_starts[device], queue_starts[device] + num_stages[device]
                while low[device] < end and start[queue[stage_places[low[device]]]] >= 0:
                    low[device] += 1
                late = low[device]
                while late < end and waiting[queue[stage_places[late]]] == 0:
                    late += 1
                expected = stage_places[late] if foresees and late < end else queue_starts[device + 1]
                hold = never
                hold_parts = never
                is_full = False
                for entry in range(begin + num_open[device] - 1, begin - 1, -1):
                    place = open_places[entry]
                    number = queue[place]
                    if hold_parts == never and expected < place:
                        hold_parts = _expected(
                            queue[expected], start, duration, need_starts, need_of, need_ns, waiting, ready
                        )
                        if hold_parts > now:
                            wake[device] = min(wake[device], hold_parts)
                    entity = entity_of[number]
                    is_gated = is_part[entity] and kind_of[number] == FORWARD
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
                        wake[device] = min(wake[device], free)
                        continue
                    # A pass that began now would hold up one with a smaller key: only if it is short enough.
                    until = min(hold, hold_parts) if is_part[entity] else hold
                    if now + duration[number] > until + duration[number] // 4:
                        continue
                    start[number] = now
                    sequence[done] = number
                    done += 1
                    end = now + duration[number]
                    for member in range(first[entity], first[entity] + count[entity]):
                        busy[member] = end
                        own = place_of[member_starts[entity] + member - first[entity], kind_of[number]]
                        _remove(open_places, queue_starts[member], num_open[member], own)
                        num_open[member] -= 1
                        if is_part[entity]:
                            used[member] += memory[entity] if kind_of[number] == FORWARD else -memory[entity]
                        for peer in range(first_peer[member], last_peer[member] + 1):
                            wake[peer] = now
                    for edge in range(follow_starts[number], follow_starts[number + 1]):
                        follower = follow_of[edge]
                        waiting[follower] -= 1
                        ready[follower] = max(ready[follower], end + follow_ns[edge])
                        if waiting[follower] == 0:
                            entity = entity_of[follower]
                            for member in range(first[entity], first[entity] + count[entity]):
                                wake[member] = min(wake[member], ready[follower])
                                own = place_of[member_starts[entity] + member - first[entity], kind_of[follower]]
                                _insert(open_places, queue_starts[member], num_open[member], own)
                                num_open[member] += 1
                    has_started = True
                    break
        next_time = never
        for device in range(num_devices):
            next_time = min(next_time, max(busy[device], wake[device]))
        if next_time == never:
            break
        now = next_time
    return done


@njit(cache=True, nogil=True)
def _upgrade(
    first,
    count,
    starts,
    places,
    length,
    caps,
    choice_memory,
    choice_copied,
    choice_recomputed,
    step_entity,
    step_from,
    step_to,
    choice,
    peak,
):
    """Raises memory choices in the order of gains as long as every device of an entity has memory for it, from its
    forward to its last pass. Fills the peaks."""
    num_devices = len(caps)
    begin = np.zeros(num_devices + 1, np.int64)
    for device in range(num_devices):
        begin[device + 1] = begin[device] + length[device]
    live = np.zeros(begin[num_devices] + 1, np.int64)  # first as changes; what a device holds ends with its places
    for entity in range(len(first)):
        memory, copied = choice_memory[entity, choice[entity]], choice_copied[entity, choice[entity]]
        recomputed = choice_recomputed[entity, choice[entity]]
        for member in range(count[entity]):
            _note(live, begin[first[entity] + member], places[starts[entity] + member], memory, copied, recomputed)
    for place in range(1, len(live)):
        live[place] += live[place - 1]
    for step in range(len(step_entity)):
        entity, to = step_entity[step], step_to[step]
        if choice[entity] != step_from[step]:
            continue
        memory = choice_memory[entity, to] - choice_memory[entity, choice[entity]]
        copied = choice_copied[entity, to] - choice_copied[entity, choice[entity]]
        recomputed = choice_recomputed[entity, to] - choice_recomputed[entity, choice[entity]]
        fits = True
        for member in range(count[entity]):
            device = first[entity] + member
            passes = places[starts[entity] + member]
            fits = fits and _fits(live, begin[device], passes, memory, copied, recomputed, caps[device])
        if not fits:
            continue
        choice[entity] = to
        for member in range(count[entity]):
            passes = places[starts[entity] + member]
            _hold(live, begin[first[entity] + member], passes, memory, copied, recomputed)
    for device in range(num_devices):
        for place in range(begin[device], begin[device + 1]):
            peak[device] = max(peak[device], live[place])


@njit(cache=True, nogil=True)
def _retime(first, count, entity_of, duration, need_starts, need_of, need_ns, sequence, num_devices, start):
    """Fill the start of every pass, if every device keeps its order. Returns the makespan."""
    busy = np.zeros(num_devices, np.int64)
    makespan = np.int64(0)
    for number in sequence:
        entity = entity_of[number]
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
