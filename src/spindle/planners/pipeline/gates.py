"""Gates of the interleaving: which forwards does memory allow?

The gate of the paper, `HARD` (a forward runs only if it fits), deadlocks: forwards of many microbatches fill a rank
before any of them can turn around. It is here for golden values only. The others never deadlock, if `least_caps` fit:

- `ADMISSION` reserves memory for all pairs of a microbatch on every rank, from before its first forward until its last
  backward. An admitted microbatch is never blocked, so it ends, and its memory is freed.
- `SAFE` is the banker's algorithm: a forward runs if afterwards all microbatches that hold memory can still end one
  after another, in some order, each by its serial passes (`Table`). Proof: let x be the first in that order. The next
  of its serial passes is ready or will be, because the passes before it are done. If it is a backward, nothing blocks
  it. If it is a forward, the same order still works after it, so it is allowed. So as long as passes are left, one can
  run. A microbatch that holds nothing can always come last, because it fits alone. Memory counts as freed once the
  backward is placed: what a rank holds depends on that rank's order alone.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.jit import njit
from spindle.planners.pipeline.segments import Column, Segments, footprints, serial_peaks

NONE, HARD, ADMISSION, SAFE = 0, 1, 2, 3

UNLIMITED = np.int64(2**62)


@njit(cache=True, nogil=True)
def need_of(table, memory, is_started, is_ended, microbatch, rank):
    """How much more memory than now a microbatch needs at most on a rank, if it ends by its serial passes."""
    running = 0
    most = 0
    for entry in range(table.serial_starts[microbatch], table.serial_starts[microbatch + 1]):
        pair = table.serial_pair[entry]
        if table.serial_direction[entry] == 0:
            if not is_started[pair, rank]:
                running += memory[pair, rank]
                most = max(most, running)
        elif not is_ended[pair, rank]:
            running -= memory[pair, rank]
    return most


@njit(cache=True, nogil=True)
def is_safe_state(free, held, need, microbatch, rank, order, place, left, work):
    """Whether, after a forward of a microbatch on a rank, all microbatches that hold memory can end in some order.

    `order` is such an order from before that forward (its last entry is its length), and `place` the position of each
    microbatch in it, or -1; both are updated. The forward takes memory on its rank alone, and only from microbatches
    that end before its own, so usually the old order still works. `left` and `work` are scratch."""
    if free[rank] < 0:
        return False
    num_microbatches, ranks = held.shape
    length = order[num_microbatches]
    is_new = place[microbatch] < 0
    beyond = length if is_new else place[microbatch]
    available = free[rank]
    fits = True
    for position in range(beyond):
        holder = order[position]
        if need[holder, rank] > available:
            fits = False
            break
        available += held[holder, rank]
    if fits and need[microbatch, rank] <= available:
        if is_new:
            order[length] = microbatch
            place[microbatch] = length
            order[num_microbatches] += 1
        return True
    # Search for another order, from the start.
    num_left = 0
    for holder in range(num_microbatches):
        for each_rank in range(ranks):
            if held[holder, each_rank] > 0:
                left[num_left] = holder
                num_left += 1
                break
    for each_rank in range(ranks):
        work[each_rank] = free[each_rank]
    # `left` is filled again from its end with those that can end, latest first.
    length = num_left
    while num_left > 0:
        was_left = num_left
        position = 0
        while position < num_left:
            holder = left[position]
            fits = True
            for each_rank in range(ranks):
                if need[holder, each_rank] > work[each_rank]:
                    fits = False
                    break
            if fits:
                for each_rank in range(ranks):
                    work[each_rank] += held[holder, each_rank]
                num_left -= 1
                left[position] = left[num_left]
                left[num_left] = holder
            else:
                position += 1
        if num_left == was_left:
            return False
    place[:] = -1
    for position in range(length):
        holder = left[length - 1 - position]
        order[position] = holder
        place[holder] = position
    order[num_microbatches] = length
    return True


def least_caps(segments: Segments, gate: int = SAFE) -> Column:
    """The smallest memory of each rank under which a gate lets every microbatch through, with the leanest choices."""
    if gate not in (ADMISSION, SAFE):
        return np.zeros(segments.num_ranks, dtype=np.int64)
    peaks = footprints(segments) if gate == ADMISSION else serial_peaks(segments)
    return np.asarray(peaks.max(axis=0), dtype=np.int64)


def check_fits(segments: Segments, caps: Column, gate: int = SAFE) -> None:
    """Raise a DoesNotFitError if one microbatch alone does not fit under the caps; it names the smallest that do."""
    least = least_caps(segments, gate)
    short = np.flatnonzero(least > caps)
    if len(short):
        rank = int(short[np.argmax((least - caps)[short])])
        raise DoesNotFitError(
            f"rank {rank} may hold {int(caps[rank]):,} bytes of activations, but one microbatch alone needs "
            f"{int(least[rank]):,} there; the smallest sufficient limits, by rank: {least.tolist()}",
            needed_bytes=int(least[rank]),
        )


def limits_of(segments: Segments, caps: Column | int | None) -> Column:
    """One cap per rank."""
    limits = np.empty(segments.num_ranks, dtype=np.int64)
    limits[:] = UNLIMITED if caps is None else caps
    return limits
