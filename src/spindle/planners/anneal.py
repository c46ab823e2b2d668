"""Simulated annealing over lists of pieces, each list decoded to a schedule in folded time.

A piece is some layers of one op on one number of devices. The list order is the priority: a decoder places the pieces
one by one, each as early as its producers and the free devices allow. Pieces of one op run in list order. The search
changes the list, decodes it from the first change on, and keeps it or not. It starts from the LP's mixes of widths.

It counts devices and does not name them; it knows no bytes. Deterministic for a seed; the budget is a number of
evaluations, not seconds. An evaluation takes time linear in the number of pieces.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.jit import njit
from spindle.planners.problem import Problem, Timed

Mixes = Sequence[Sequence[tuple[int, float]]]  # by op: layers, not whole, on numbers of devices

# Columns of the piece table.
OP, LAYERS, OPTION = 0, 1, 2

# Entries of the control array, through which another thread watches a run and ends it.
STOP, DONE = 0, 1

# Times in the loops are shares of a lower bound; two closer than this are the same.
TIME_STEP = 1e-10

REJECTED = 1e300

# How many entries of the profile before its end a piece may start in: gaps of before are taken to be filled.
LOOKBACK = 64

# The decoder's state is saved this many times on its way through a list.
CHECKPOINTS = 8

# Temperature at the end, on the same scale.
LAST_TEMPERATURE = 0.0002

# Share of the work (devices times time) in the objective: work that is saved
# lets later moves shorten the schedule, long before the makespan shows it.
FIRST_WORK_SHARE = 0.4

# Price of one piece, on the same scale: breaks ties towards few.
PIECE_PRICE = 1e-5

# How many moves are followed by another one before the list is decoded.
COMPOUND_SHARE = 0.2

# Cumulative shares of the moves; splitting has the rest.
TRADE_BELOW = 0.1
RELOCATE_BELOW = 0.39
WIDTH_BELOW = 0.64
LAYERS_BELOW = 0.85

Table = namedtuple(
    "Table",
    [
        "devices",  # devices in all
        "option_count",  # per op: number of device counts allowed
        "option_devices",  # per op, option: devices, ascending
        "option_time",  # per op, option: time per layer, descending
        "predecessor_count",  # per op
        "predecessors",  # per op: the ops it waits for
        "before",  # before[a, b]: a must end before b starts
        "tail",  # per op: least time from its end to the end of all
        "least_work",  # per op: least devices times time of a layer
        "piece_limit",  # most pieces per op
        "last_work_share",  # share of the work in the objective at the end
        "first_temperature",
        "narrows",  # whether a piece takes the devices that are free now instead of waiting for its own number
    ],
)

Checkpoint = namedtuple(
    "Checkpoint",
    [
        "buffer",  # per checkpoint: which of the two buffers belongs to the list kept
        "entries",  # per buffer, checkpoint: number of entries of the profile
        "times",  # per buffer, checkpoint: the profile
        "used",
        "op_end",
        "makespan",
        "work",
    ],
)


@dataclass(frozen=True, slots=True)
class Run:
    """What differs between the runs for one problem.

    Few pieces per op make short programs, many fill gaps. A share of the work in the objective at the end keeps waste
    away, and with it ops that must be wide for little gain. A high temperature at the start leaves the LP's mixes, and
    pieces that wait for all their devices allow schedules with gaps: both pay where a few ops are each a large part of
    the schedule.
    """

    piece_limit: int
    last_work_share: float
    first_temperature: float = 0.003
    narrows: bool = True


@njit(inline="always")
def random_share(state):
    """A number in [0, 1) from an xorshift generator: own state, so that runs
    in one process do not disturb each other."""
    word = state[0]
    word ^= word << np.uint64(13)
    word ^= word >> np.uint64(7)
    word ^= word << np.uint64(17)
    state[0] = word
    return (word >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(inline="always")
def random_below(state, limit):
    """A whole number in [0, limit)."""
    return int(random_share(state) * limit)


@njit(cache=True, nogil=True)
def find_entry(times, count, time):
    """The last profile entry that starts at or before the time."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) >> 1
        if times[middle] > time:
            high = middle
        else:
            low = middle
    return low


@njit(cache=True, nogil=True)
def find_wide(times, used, count, first, ready, duration, most_used):
    """Earliest window with room for the full width.

    Return its start, the profile entry it starts in, and the first entry at
    or after its end."""
    start = ready
    low = first
    high = first
    while True:
        if used[high] > most_used:
            high += 1
            low = high
            start = times[high]
        else:
            high += 1
            if high >= count or times[high] >= start + duration - TIME_STEP:
                return start, low, high


@njit(cache=True, nogil=True)
def find_narrow(times, used, count, first, ready, deadline, devices, op, layers, option, option_devices, option_time):
    """The widest option not above `option` that starts at the first free
    device and ends before the deadline; option -1 where there is none.

    A piece that takes what is free now instead of waiting keeps a change
    elsewhere in the list from tearing the rest of the schedule apart. With
    the options taken written back to the list, this took the mean excess
    over the LP bound from 2.4 % to 2.0 % at 100k evaluations."""
    low = first
    while used[low] > devices - option_devices[op, 0]:
        low += 1
    start = ready if low == first else times[low]
    free = devices - used[low]
    while option_devices[op, option] > free:
        option -= 1
    end = start + layers * option_time[op, option]
    high = low + 1
    while high < count and times[high] < end - TIME_STEP and end < deadline:
        if devices - used[high] < free:
            free = devices - used[high]
            while option >= 0 and option_devices[op, option] > free:
                option -= 1
            if option < 0:
                return option, start, low, high, end
            end = start + layers * option_time[op, option]
        high += 1
    if end >= deadline:
        option = -1
    return option, start, low, high, end


@njit(cache=True, nogil=True)
def insert_entry(times, used, count, position, time):
    """A new profile entry that goes on with the use before it."""
    for k in range(count, position, -1):
        times[k] = times[k - 1]
        used[k] = used[k - 1]
    times[position] = time
    used[position] = used[position - 1]
    return count + 1


@njit(cache=True, nogil=True)
def occupy(times, used, count, low, high, start, end, width):
    """Take the devices from the profile; return its new number of entries
    and the end, snapped to the entry it meets."""
    if times[low] < start - TIME_STEP:
        low += 1
        high += 1
        count = insert_entry(times, used, count, low, start)
    if high >= count or times[high] > end + TIME_STEP:
        count = insert_entry(times, used, count, high, end)
    else:
        end = times[high]
    for k in range(low, high):
        used[k] += width
    return count, end


@njit(cache=True, nogil=True)
def sum_durations(table, pieces, begin, count, remaining):
    """Time of each op's pieces as listed, from one of them on, for the decoder's bound."""
    remaining[:] = 0.0
    for i in range(begin, count):
        op = pieces[i, OP]
        remaining[op] += pieces[i, LAYERS] * table.option_time[op, pieces[i, OPTION]]


@njit(cache=True, nogil=True)
def decode(
    table,
    pieces,
    count,
    changed,
    stride,
    checkpoint,
    threshold,
    work_share,
    chosen,
    op_end,
    remaining,
    times,
    used,
    start_at,
    end_at,
):
    """Place the pieces in list order; return the makespan and the work
    above the least, or REJECTED as soon as the objective must pass the
    threshold. `chosen` gets the options really taken.

    Pieces before `changed` are those of the accepted list, so it begins at the
    last checkpoint before it; the last value returned is where. Checkpoints
    on the way go to the buffers that the accepted list does not use."""
    devices = table.devices
    option_devices = table.option_devices
    option_time = table.option_time
    predecessor_count = table.predecessor_count
    predecessors = table.predecessors
    tail = table.tail
    least_work = table.least_work
    number = min(changed // stride, CHECKPOINTS)
    begin = number * stride
    sum_durations(table, pieces, begin, count, remaining)
    if number == 0:
        op_end[:] = 0.0
        times[0] = 0.0
        used[0] = 0
        entries = 1
        makespan = 0.0
        work = 0.0
    else:
        source = checkpoint.buffer[number - 1]
        entries = checkpoint.entries[source, number - 1]
        for k in range(entries):
            times[k] = checkpoint.times[source, number - 1, k]
            used[k] = checkpoint.used[source, number - 1, k]
        for k in range(op_end.shape[0]):
            op_end[k] = checkpoint.op_end[source, number - 1, k]
        makespan = checkpoint.makespan[source, number - 1]
        work = checkpoint.work[source, number - 1]
    for i in range(begin, count):
        if i == (number + 1) * stride and number < CHECKPOINTS:
            spare = 1 - checkpoint.buffer[number]
            checkpoint.entries[spare, number] = entries
            for k in range(entries):
                checkpoint.times[spare, number, k] = times[k]
                checkpoint.used[spare, number, k] = used[k]
            for k in range(op_end.shape[0]):
                checkpoint.op_end[spare, number, k] = op_end[k]
            checkpoint.makespan[spare, number] = makespan
            checkpoint.work[spare, number] = work
            number += 1
        op = pieces[i, OP]
        layers = pieces[i, LAYERS]
        option = pieces[i, OPTION]
        duration = layers * option_time[op, option]
        remaining[op] -= duration
        ready = op_end[op]
        for k in range(predecessor_count[op]):
            ready = max(ready, op_end[predecessors[op, k]])
        first = find_entry(times, entries, ready)
        if entries - first > LOOKBACK:
            first = entries - LOOKBACK
            ready = times[first]
        start, low, high = find_wide(times, used, entries, first, ready, duration, devices - option_devices[op, option])
        end = start + duration
        if table.narrows and start > ready + TIME_STEP and option > 0:
            narrow, start2, low2, high2, end2 = find_narrow(
                times, used, entries, first, ready, end, devices, op, layers, option, option_devices, option_time
            )
            if narrow >= 0:
                option, start, low, high, end = narrow, start2, low2, high2, end2
        width = option_devices[op, option]
        chosen[i] = option
        work += width * (end - start) - layers * least_work[op]
        bound = end + remaining[op] + tail[op]
        if (1.0 - work_share) * bound + work_share * work / devices > threshold:
            return REJECTED, work, begin
        entries, end = occupy(times, used, entries, low, high, start, end, width)
        start_at[i] = start
        end_at[i] = end
        op_end[op] = end
        makespan = max(makespan, end)
    return makespan, work, begin


@njit(inline="always")
def copy_piece(source, i, target, j):
    """One row of a piece table; much faster than a slice of so few."""
    target[j, OP] = source[i, OP]
    target[j, LAYERS] = source[i, LAYERS]
    target[j, OPTION] = source[i, OPTION]


@njit(cache=True, nogil=True)
def relocate(table, pieces, count, i, state):
    """Move piece i along the list, mostly a little, up to an op it must
    precede or follow. Return its new place, i for no move."""
    if random_share(state) < 0.1:
        target = random_below(state, count)
    else:
        step = 1 + random_below(state, 4)
        target = i + step if random_share(state) < 0.5 else i - step
    if target < 0 or target >= count:
        return i
    op, layers, option = pieces[i, OP], pieces[i, LAYERS], pieces[i, OPTION]
    place = i
    while place > target and not table.before[pieces[place - 1, OP], op]:
        copy_piece(pieces, place - 1, pieces, place)
        place -= 1
    while place < target and not table.before[op, pieces[place + 1, OP]]:
        copy_piece(pieces, place + 1, pieces, place)
        place += 1
    pieces[place, OP] = op
    pieces[place, LAYERS] = layers
    pieces[place, OPTION] = option
    return place


@njit(cache=True, nogil=True)
def near_option(table, op, option, state):
    """Another option for the op: mostly one or two steps away, else any; -1
    where the step leaves the list."""
    if random_share(state) < 0.3:
        changed = random_below(state, table.option_count[op])
    else:
        step = 1 + random_below(state, 2)
        changed = option + step if random_share(state) < 0.5 else option - step
    if changed < 0 or changed >= table.option_count[op] or changed == option:
        return -1
    return changed


@njit(cache=True, nogil=True)
def change_width(table, pieces, i, state):
    """Give piece i another number of devices."""
    option = near_option(table, pieces[i, OP], pieces[i, OPTION], state)
    if option < 0:
        return False
    pieces[i, OPTION] = option
    return True


@njit(cache=True, nogil=True)
def trade_devices(table, pieces, count, i, state):
    """Make piece i wider by a step and another a little later in the list
    narrower, or the reverse."""
    j = i + 1 + random_below(state, 4)
    if j >= count or pieces[i, OP] == pieces[j, OP]:
        return False
    step = 1 if random_share(state) < 0.5 else -1
    first = pieces[i, OPTION] + step
    second = pieces[j, OPTION] - step
    if min(first, second) < 0:
        return False
    if first >= table.option_count[pieces[i, OP]] or second >= table.option_count[pieces[j, OP]]:
        return False
    pieces[i, OPTION] = first
    pieces[j, OPTION] = second
    return True


@njit(cache=True, nogil=True)
def find_other(pieces, i, skip):
    """The piece of i's op that comes after `skip` others of it, i left out."""
    j = 0
    while True:
        if j != i and pieces[j, OP] == pieces[i, OP]:
            if skip == 0:
                return j
            skip -= 1
        j += 1


@njit(cache=True, nogil=True)
def shift_layers(pieces, count, pieces_of, i, state):
    """Move layers from piece i to another of its op, mostly one or two; a
    piece left empty is dropped. Return the number of pieces, 0 for no move,
    and the first piece changed."""
    op = pieces[i, OP]
    if pieces_of[op] < 2:
        return 0, i
    j = find_other(pieces, i, random_below(state, pieces_of[op] - 1))
    most = pieces[i, LAYERS]
    if most > 2 and random_share(state) < 0.7:
        most = 2
    shifted = 1 + random_below(state, most)
    pieces[j, LAYERS] += shifted
    pieces[i, LAYERS] -= shifted
    if pieces[i, LAYERS] > 0:
        return count, min(i, j)
    pieces_of[op] -= 1
    for k in range(i, count - 1):
        copy_piece(pieces, k + 1, pieces, k)
    return count - 1, min(i, j)


@njit(cache=True, nogil=True)
def split(table, pieces, count, pieces_of, i, state):
    """Cut piece i in two of different widths, the second part a little
    later in the list. Return the number of pieces, 0 for no move."""
    op = pieces[i, OP]
    if pieces_of[op] >= table.piece_limit or pieces[i, LAYERS] < 2:
        return 0
    option = near_option(table, op, pieces[i, OPTION], state)
    if option < 0:
        return 0
    place = i + 1
    last = min(count, place + random_below(state, 4))
    while place < last and not table.before[op, pieces[place, OP]]:
        place += 1
    for k in range(count, place, -1):
        copy_piece(pieces, k - 1, pieces, k)
    cut = 1 + random_below(state, pieces[i, LAYERS] - 1)
    copy_piece(pieces, i, pieces, place)
    pieces[place, LAYERS] -= cut
    pieces[i, LAYERS] = cut
    changed = i if random_share(state) < 0.5 else place
    pieces[changed, OPTION] = option
    pieces_of[op] += 1
    return count + 1


@njit(cache=True, nogil=True)
def move(table, pieces, count, pieces_of, state):
    """Make one random change; return the number of pieces, 0 for no change,
    and the first piece changed."""
    kind = random_share(state)
    i = random_below(state, count)
    if kind < TRADE_BELOW:
        return (count if trade_devices(table, pieces, count, i, state) else 0), i
    if kind < RELOCATE_BELOW:
        place = relocate(table, pieces, count, i, state)
        return (count if place != i else 0), min(i, place)
    if kind < WIDTH_BELOW:
        return (count if change_width(table, pieces, i, state) else 0), i
    if kind < LAYERS_BELOW:
        return shift_layers(pieces, count, pieces_of, i, state)
    return split(table, pieces, count, pieces_of, i, state), i


@njit(cache=True, nogil=True)
def anneal(table, first_pieces, first_count, seed, evaluations, control):
    """Anneal from the given list; return the best list found, its length
    and its starts and ends."""
    ops = table.tail.shape[0]
    most_pieces = ops * table.piece_limit
    most_entries = 2 * most_pieces + 2
    state = np.array([seed], np.uint64)
    for _ in range(10):
        random_share(state)
    times = np.zeros(most_entries)
    used = np.zeros(most_entries, np.int64)
    start_at = np.zeros(most_pieces)
    end_at = np.zeros(most_pieces)
    op_end = np.zeros(ops)
    remaining = np.zeros(ops)
    chosen = np.zeros(most_pieces, np.int64)
    checkpoint = Checkpoint(
        np.zeros(CHECKPOINTS, np.int64),
        np.zeros((2, CHECKPOINTS), np.int64),
        np.zeros((2, CHECKPOINTS, most_entries)),
        np.zeros((2, CHECKPOINTS, most_entries), np.int64),
        np.zeros((2, CHECKPOINTS, ops)),
        np.zeros((2, CHECKPOINTS)),
        np.zeros((2, CHECKPOINTS)),
    )
    pieces = np.zeros((most_pieces, 3), np.int64)
    pieces[:first_count] = first_pieces[:first_count]
    count = first_count
    pieces_of = np.zeros(ops, np.int64)
    for i in range(count):
        pieces_of[pieces[i, OP]] += 1
    accepted, accepted_count = pieces.copy(), count
    accepted_start, accepted_end = start_at.copy(), end_at.copy()
    best, best_count, best_value = pieces.copy(), count, REJECTED
    best_start, best_end = start_at.copy(), end_at.copy()
    current = REJECTED
    temperature = table.first_temperature
    cooling = LAST_TEMPERATURE / table.first_temperature
    work_share = FIRST_WORK_SHARE
    stride = 1 + first_count // CHECKPOINTS
    changed = 0
    for step in range(evaluations):
        if step & 63 == 0:
            control[DONE] = step
            if control[STOP] and step > 0:
                break
            progress = step / evaluations
            temperature = table.first_temperature * cooling**progress
            work_share = FIRST_WORK_SHARE + (table.last_work_share - FIRST_WORK_SHARE) * progress
        if step > 0:
            count, changed = move(table, pieces, accepted_count, pieces_of, state)
            if count == 0:
                continue
            while random_share(state) < COMPOUND_SHARE:
                next_count, next_changed = move(table, pieces, count, pieces_of, state)
                if next_count:
                    count = next_count
                    changed = min(changed, next_changed)
        # The threshold is drawn before decoding, so that a hopeless list is
        # given up half-way.
        price = PIECE_PRICE * count
        threshold = current - temperature * np.log(1.0 - random_share(state)) - price
        makespan, work, begin = decode(
            table,
            pieces,
            count,
            changed,
            stride,
            checkpoint,
            threshold,
            work_share,
            chosen,
            op_end,
            remaining,
            times,
            used,
            start_at,
            end_at,
        )
        value = (1.0 - work_share) * makespan + work_share * work / table.devices
        is_kept = makespan < REJECTED and value <= threshold
        if makespan + price < best_value:
            # Also one that is not kept: the objective is not the makespan alone.
            best_value = makespan + price
            for i in range(begin):
                copy_piece(accepted, i, best, i)
                best_start[i] = accepted_start[i]
                best_end[i] = accepted_end[i]
            for i in range(begin, count):
                copy_piece(pieces, i, best, i)
                best[i, OPTION] = chosen[i]
                best_start[i] = start_at[i]
                best_end[i] = end_at[i]
            best_count = count
        if is_kept:
            current = value + price
            # The options taken become the list's own.
            for i in range(begin, count):
                pieces[i, OPTION] = chosen[i]
                copy_piece(pieces, i, accepted, i)
                accepted_start[i] = start_at[i]
                accepted_end[i] = end_at[i]
            accepted_count = count
            for number in range(begin // stride, min((count - 1) // stride, CHECKPOINTS)):
                checkpoint.buffer[number] = 1 - checkpoint.buffer[number]
        else:
            undo(pieces, count, accepted, accepted_count, changed, pieces_of)
    control[DONE] = min(step + 1, evaluations)
    return best, best_count, best_start, best_end


@njit(cache=True, nogil=True)
def undo(pieces, count, accepted, accepted_count, changed, pieces_of):
    """Back to the list kept; the counts per op follow."""
    for i in range(changed, count):
        pieces_of[pieces[i, OP]] -= 1
    for i in range(changed, accepted_count):
        pieces_of[accepted[i, OP]] += 1
        copy_piece(accepted, i, pieces, i)


def new_control() -> np.ndarray:
    """A control array for one run."""
    return np.zeros(2, np.int64)


def search(
    problem: Problem,
    mixes: Mixes,
    run: Run,
    seed: int,
    evaluations: int,
    control: np.ndarray | None = None,
) -> list[Timed]:
    """A short schedule of a problem's ops, in start order.

    It begins with the widths that the LP bound mixes for each op. Whoever holds `control` sees how far it is, and may
    stop it.
    """
    table, scale_s = _table(problem, run)
    pieces = _first_pieces(problem, mixes, run.piece_limit)
    word = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64 or 1
    watched = new_control() if control is None else control
    best, count, starts, ends = anneal(table, pieces, len(pieces), np.uint64(word), max(1, evaluations), watched)
    timed = [
        Timed(
            op=problem.ops[op],
            num_layers=layers,
            num_devices=int(problem.choices[op].num_devices[option]),
            start_s=start * scale_s,
            end_s=end * scale_s,
        )
        for (op, layers, option), start, end in zip(
            best[:count].tolist(), starts[:count].tolist(), ends[:count].tolist(), strict=True
        )
    ]
    return sorted(timed, key=lambda piece: piece.start_s)


def _table(problem: Problem, run: Run) -> tuple[Table, float]:
    """The arrays the loops need, with times as shares of a lower bound, and that bound."""
    num_ops = problem.num_ops
    counts = np.array([len(choices.num_devices) for choices in problem.choices])
    option_devices = np.zeros((num_ops, counts.max()), np.int64)
    option_time = np.zeros((num_ops, counts.max()))
    for op, choices in enumerate(problem.choices):
        option_devices[op, : counts[op]] = choices.num_devices
        option_time[op, : counts[op]] = choices.layer_s
    layers = np.array(problem.num_layers)
    fastest = layers * option_time[np.arange(num_ops), counts - 1]
    order = sorted(range(num_ops), key=lambda op: problem.levels[op])
    before = np.zeros((num_ops, num_ops), np.bool_)
    tail = np.zeros(num_ops)
    for op in order:
        for producer in problem.predecessors[op]:
            before[:, op] |= before[:, producer]
            before[producer, op] = True
    for op in reversed(order):
        for producer in problem.predecessors[op]:
            tail[producer] = max(tail[producer], fastest[op] + tail[op])
    predecessors = np.zeros((num_ops, max(1, *(len(producers) for producers in problem.predecessors), 1)), np.int64)
    for op, producers in enumerate(problem.predecessors):
        predecessors[op, : len(producers)] = producers
    least_work = np.array([float((choices.num_devices * choices.layer_s).min()) for choices in problem.choices])
    bound_s = max(float((fastest + tail).max()), float(least_work @ layers) / problem.num_devices)
    table = Table(
        problem.num_devices,
        counts,
        option_devices,
        option_time / bound_s,
        np.array([len(producers) for producers in problem.predecessors]),
        predecessors,
        before,
        tail / bound_s,
        least_work / bound_s,
        run.piece_limit,
        run.last_work_share,
        run.first_temperature,
        run.narrows,
    )
    return table, bound_s


def _first_pieces(problem: Problem, mixes: Mixes, piece_limit: int) -> np.ndarray:
    """The LP's mixes, rounded to whole layers, wide pieces of an op first: those with the longest way to the end come
    first."""
    duration = [
        sum(layers * choices.time_on(count) for count, layers in mix)
        for choices, mix in zip(problem.choices, mixes, strict=True)
    ]
    order = sorted(range(problem.num_ops), key=lambda op: problem.levels[op])
    tail = [0.0] * problem.num_ops
    for op in reversed(order):
        for producer in problem.predecessors[op]:
            tail[producer] = max(tail[producer], tail[op] + duration[op])
    pieces: list[tuple[float, int, int, int]] = []
    for op in order:
        choices, left = problem.choices[op], problem.num_layers[op]
        heaviest = sorted(mixes[op], key=lambda part: part[1])[-piece_limit:]
        way_s = tail[op] + duration[op]
        for place, (count, layers) in enumerate(sorted(heaviest, reverse=True)):
            whole = left if place == len(heaviest) - 1 else min(left, round(layers))
            if whole:
                # Rounding may leave less than the way of the consumers, which come later all the same.
                pieces.append((-max(way_s, tail[op]), op, whole, int(np.searchsorted(choices.num_devices, count))))
                way_s -= whole * choices.time_on(count)
                left -= whole
    # Sorting is stable, so producers come first.
    return np.array([piece[1:] for piece in sorted(pieces, key=lambda piece: piece[0])], np.int64)
