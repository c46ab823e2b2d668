"""Random changes of a list of pieces: another place, other widths, other layers, one piece cut in two."""

from __future__ import annotations

import numpy as np

from spindle.jit import njit
from spindle.planners.decode import LAYERS, OP, OPTION

# Cumulative shares of the moves; splits get the rest.
TRADE_BELOW = 0.1
RELOCATE_BELOW = 0.39
WIDTH_BELOW = 0.64
LAYERS_BELOW = 0.85


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


@njit(inline="always")
def copy_piece(source, i, target, j):
    """Copy one row of a piece table, which is much faster than a slice for so few entries."""
    target[j, OP] = source[i, OP]
    target[j, LAYERS] = source[i, LAYERS]
    target[j, OPTION] = source[i, OPTION]


@njit(cache=True, nogil=True)
def relocate(table, pieces, count, i, state):
    """Move piece i within the list, mostly by a little, at most to an op that it must precede or follow. Returns its
    new position, or i if it did not move."""
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
    """Another option for the op, mostly one or two steps away, otherwise any. -1 if the step leaves the list."""
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
    """Widen piece i by one step and narrow another piece that comes a little later, or the reverse."""
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
    """The piece of i's op that comes after `skip` other pieces of the op, not counting i."""
    j = 0
    while True:
        if j != i and pieces[j, OP] == pieces[i, OP]:
            if skip == 0:
                return j
            skip -= 1
        j += 1


@njit(cache=True, nogil=True)
def shift_layers(pieces, count, pieces_of, i, state):
    """Move layers from piece i to another piece of its op, mostly one or two; a piece that becomes empty is dropped.
    Returns the number of pieces (0 for no move) and the first piece that changed."""
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
    """Split piece i into two pieces of different widths; the second one comes a little later in the list. Returns the
    number of pieces, or 0 for no move."""
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
    """Make one random change. Returns the number of pieces (0 for no change) and the first piece that changed."""
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
