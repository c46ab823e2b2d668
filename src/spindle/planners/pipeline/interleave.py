"""Dual-queue interleaving: choose the next pass on each rank, under given priorities (PipeWeaver §4.2), compiled.

Every rank has a queue of forwards and one of backwards. The rank that can start soonest goes next. If both its queues
are ready, it alternates between them; otherwise it takes the pass that can start first, ties by highest priority.

What the paper leaves open: a pass is ready if its start is `<=` the end of the last pass; ranks are ordered by max(end
of the last pass, first start), then by number; passes by (max(start, end of the last pass), priority, start, pair
number); hops and wraps count as time before a pass may start. Times are as early as the order allows: `retime` of the
order gives the same. Memory gates are in `gates`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.errors import InputError
from spindle.jit import njit
from spindle.planners.pipeline.gates import (
    ADMISSION,
    HARD,
    NONE,
    SAFE,
    UNLIMITED,
    check_fits,
    is_safe_state,
    limits_of,
    need_of,
)
from spindle.planners.pipeline.segments import Column, Segments, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The passes of each rank in order. Rows are padded with pair -1 if ranks have different numbers of passes."""

    pair: Column  # [P, passes]
    kind: Column  # [P, passes]: FORWARD, BACKWARD, INPUT or WEIGHT
    start_ns: Column  # [P, passes]
    end_ns: Column
    peak: Column  # [P]: the most memory held at once
    makespan_ns: int
    choice: Column | None = None  # [n, P]: the memory choices; None: the leanest


@njit(inline="always")
def _comes_first(at, priority, pair, rival_at, rival_priority, rival_pair, last):
    """Whether the first of two ready passes comes before its rival, by (max(start, last), -priority, start, pair)."""
    start = max(at, last)
    rival_start = max(rival_at, last)
    if start != rival_start:
        return start < rival_start
    if priority != rival_priority:
        return priority > rival_priority
    if at != rival_at:
        return at < rival_at
    return pair < rival_pair


@njit(inline="always")
def _can_be_admitted(reserved, footprint, caps, microbatch):
    """For ADMISSION: whether every rank has room for all pairs of one more microbatch."""
    fits = True
    for rank in range(caps.size):
        if reserved[rank] + footprint[microbatch, rank] > caps[rank]:
            fits = False
            break
    return fits


@njit(cache=True, nogil=True)
def interleave_passes(
    table, forward_ns, backward_ns, memory, priority, caps, gate, order_pair, order_kind, start_ns, end_ns, peak
):
    """Fill the order of each rank, with times and peaks. Returns the makespan, or -1 for a deadlock (`HARD`).

    A list scheduler that places one pass at a time: (1) update the best entry of each rank's two queues, among those
    that the gate allows; (2) take the rank that can start soonest, and one of its queues; (3) account for the memory of
    the pass, which the SAFE gate may still refuse; (4) append it to the rank's order; (5) enqueue the passes that it
    makes ready: the same pair on the next rank, or at an end of the pipeline the pairs that wait for this one.

    This is one function on purpose: with a function for each phase, even inlined, references to its arrays are counted
    at every pass, which is 5 to 10 % slower.
    """
    pairs, ranks = forward_ns.shape
    num_microbatches = table.serial_starts.size - 1
    # By rank and direction: unordered entries that are ready or will be, their start times, their number, and the best.
    queue = np.empty((ranks, 2, pairs), np.int64)
    queue_at = np.empty((ranks, 2, pairs), np.int64)
    count = np.zeros((ranks, 2), np.int64)
    best = np.full((ranks, 2), -1, np.int64)
    # By rank: the end and the direction of its last pass, the number of passes so far, and the memory held.
    last = np.zeros(ranks, np.int64)
    last_kind = np.ones(ranks, np.int64)
    num_passes = np.zeros(ranks, np.int64)
    live = np.zeros(ranks, np.int64)
    # By pair: how many neighbours it still waits for in each direction, and the latest time at which one was done.
    waits_forward = np.empty(pairs, np.int64)
    waits_backward = np.empty(pairs, np.int64)
    ready_forward = np.zeros(pairs, np.int64)
    ready_backward = np.zeros(pairs, np.int64)
    # ADMISSION: reserved memory by rank, and the number of backwards on rank 0 that each microbatch still has.
    reserved = np.zeros(ranks, np.int64)
    is_admitted = np.zeros(num_microbatches, np.bool_)
    num_left = np.zeros(num_microbatches, np.int64)
    footprint = np.zeros((num_microbatches, ranks), np.int64)
    # SAFE: a refused forward is tried again only once the answer may have changed (`epoch`).
    safe_pairs = pairs if gate == SAFE else 0
    is_started = np.zeros((safe_pairs, ranks), np.bool_)
    is_ended = np.zeros((safe_pairs, ranks), np.bool_)
    refused = np.full((safe_pairs, ranks), -1, np.int64)
    refused_epoch = np.full((num_microbatches, ranks), -1, np.int64)
    refused_size = np.zeros((num_microbatches, ranks), np.int64)
    has_refused = np.zeros(ranks, np.bool_)
    held = np.zeros((num_microbatches, ranks), np.int64)
    need = np.zeros((num_microbatches, ranks), np.int64)
    free = caps.copy()
    ends = np.zeros(num_microbatches + 1, np.int64)
    place = np.full(num_microbatches, -1, np.int64)
    left_scratch = np.empty(num_microbatches, np.int64)
    work_scratch = np.empty(ranks, np.int64)
    epoch = np.zeros(ranks, np.int64)

    # Passes that can start immediately: pairs without predecessors, on rank 0.
    for pair in range(pairs):
        microbatch = table.microbatch[pair]
        num_left[microbatch] += 1
        for rank in range(ranks):
            footprint[microbatch, rank] += memory[pair, rank]
        waits_forward[pair] = table.predecessor_starts[pair + 1] - table.predecessor_starts[pair]
        waits_backward[pair] = table.successor_starts[pair + 1] - table.successor_starts[pair]
        if waits_forward[pair] == 0:
            queue[0, 0, count[0, 0]] = pair
            queue_at[0, 0, count[0, 0]] = 0
            count[0, 0] += 1
    for rank in range(ranks):
        peak[rank] = 0
    if gate == SAFE:
        for microbatch in range(num_microbatches):
            for rank in range(ranks):
                need[microbatch, rank] = (
                    footprint[microbatch, rank]
                    if table.has_one_end[microbatch]
                    else need_of(table, memory, is_started, is_ended, microbatch, rank)
                )

    changed = 0
    rescan = False
    placed = 0
    makespan = 0
    while placed < 2 * pairs * ranks:
        # (1) Find the best entry of both queues of the rank that changed; with `rescan`, also of ranks with refused
        # forwards. Those of other ranks were updated in (5).
        for rank in range(ranks):
            if rank != changed and not (rescan and has_refused[rank]):
                continue
            has_refused[rank] = False
            for direction in range(2):
                chosen = -1
                chosen_priority = 0
                for entry in range(count[rank, direction]):
                    pair = queue[rank, direction, entry]
                    if direction == 0 and gate != NONE:
                        if gate == ADMISSION:
                            microbatch = table.microbatch[pair]
                            if not is_admitted[microbatch] and not _can_be_admitted(
                                reserved, footprint, caps, microbatch
                            ):
                                continue
                        elif live[rank] + memory[pair, rank] > caps[rank]:
                            continue
                        elif gate == SAFE:
                            # If one pair ends the microbatch, a forward that takes at least as much memory as a refused
                            # one of the same microbatch would be refused, too.
                            microbatch = table.microbatch[pair]
                            if refused[pair, rank] == epoch[rank] or (
                                refused_epoch[microbatch, rank] == epoch[rank]
                                and memory[pair, rank] >= refused_size[microbatch, rank]
                            ):
                                has_refused[rank] = True
                                continue
                    entry_priority = priority[table.group[pair], direction]
                    if chosen < 0 or _comes_first(
                        queue_at[rank, direction, entry],
                        entry_priority,
                        pair,
                        queue_at[rank, direction, chosen],
                        chosen_priority,
                        queue[rank, direction, chosen],
                        last[rank],
                    ):
                        chosen = entry
                        chosen_priority = entry_priority
                best[rank, direction] = chosen

        # (2) Take the rank that can start soonest, and one of its queues: they alternate if both are ready when the
        # last pass ends; otherwise, the pass that can start first.
        rank = -1
        soonest = UNLIMITED
        for candidate in range(ranks):
            for direction in range(2):
                if best[candidate, direction] >= 0:
                    start = max(last[candidate], queue_at[candidate, direction, best[candidate, direction]])
                    if start < soonest:
                        soonest = start
                        rank = candidate
        if rank < 0:
            return -1
        best_forward = best[rank, 0]
        best_backward = best[rank, 1]
        if best_backward < 0:
            direction = 0
        elif best_forward < 0:
            direction = 1
        else:
            forward_at = queue_at[rank, 0, best_forward]
            backward_at = queue_at[rank, 1, best_backward]
            if forward_at <= last[rank] and backward_at <= last[rank]:
                direction = 1 - last_kind[rank]
            elif _comes_first(
                forward_at,
                priority[table.group[queue[rank, 0, best_forward]], 0],
                queue[rank, 0, best_forward],
                backward_at,
                priority[table.group[queue[rank, 1, best_backward]], 1],
                queue[rank, 1, best_backward],
                last[rank],
            ):
                direction = 0
            else:
                direction = 1
        entry = best[rank, direction]
        pair = queue[rank, direction, entry]
        microbatch = table.microbatch[pair]
        start = max(last[rank], queue_at[rank, direction, entry])

        # (3) Memory: a forward takes it, a backward frees it. A pass that the SAFE gate refuses stays in its queue.
        changed = rank
        rescan = False
        if direction == 0:
            if gate == SAFE:
                old_need = need[microbatch, rank]
                is_started[pair, rank] = True
                held[microbatch, rank] += memory[pair, rank]
                free[rank] -= memory[pair, rank]
                # If one pair ends the microbatch, no backward comes before all its forwards, so its need is a sum, from
                # which this forward is subtracted.
                need[microbatch, rank] -= memory[pair, rank]
                if not table.has_one_end[microbatch]:
                    need[microbatch, rank] = need_of(table, memory, is_started, is_ended, microbatch, rank)
                if not is_safe_state(free, held, need, microbatch, rank, ends, place, left_scratch, work_scratch):
                    is_started[pair, rank] = False
                    held[microbatch, rank] -= memory[pair, rank]
                    free[rank] += memory[pair, rank]
                    need[microbatch, rank] = old_need
                    refused[pair, rank] = epoch[rank]
                    if table.has_one_end[microbatch]:
                        refused_epoch[microbatch, rank] = epoch[rank]
                        refused_size[microbatch, rank] = memory[pair, rank]
                    continue
                # A forward reduces the free memory by as much as the microbatch's need, so it cannot make room for
                # others until the microbatch needs no more on this rank.
                if not table.has_one_end[microbatch]:
                    epoch += 1
                    rescan = True
                elif need[microbatch, rank] == 0:
                    epoch[rank] += 1
            elif gate == ADMISSION and not is_admitted[microbatch]:
                is_admitted[microbatch] = True
                for each in range(ranks):
                    reserved[each] += footprint[microbatch, each]
            live[rank] += memory[pair, rank]
            peak[rank] = max(peak[rank], live[rank])
        else:
            live[rank] -= memory[pair, rank]
            if gate == SAFE:
                is_ended[pair, rank] = True
                held[microbatch, rank] -= memory[pair, rank]
                free[rank] += memory[pair, rank]
                # With one end, the microbatch needs no more by now, and its memory was already counted as available.
                if not table.has_one_end[microbatch]:
                    need[microbatch, rank] = need_of(table, memory, is_started, is_ended, microbatch, rank)
                    epoch += 1
                    rescan = True
            elif rank == 0:
                # Every backward ends on rank 0, which alone starts microbatches, none before this pass ends. So the
                # release needs no time of its own.
                num_left[microbatch] -= 1
                if num_left[microbatch] == 0 and gate == ADMISSION:
                    for each in range(ranks):
                        reserved[each] -= footprint[microbatch, each]

        # (4) Append the pass to the rank's order, and fill its place in the queue with the last entry.
        count[rank, direction] -= 1
        queue[rank, direction, entry] = queue[rank, direction, count[rank, direction]]
        queue_at[rank, direction, entry] = queue_at[rank, direction, count[rank, direction]]
        end = start + (forward_ns[pair, rank] if direction == 0 else backward_ns[pair, rank])
        last[rank] = end
        last_kind[rank] = direction
        makespan = max(makespan, end)
        position = num_passes[rank]
        order_pair[rank, position] = pair
        order_kind[rank, position] = direction
        start_ns[rank, position] = start
        end_ns[rank, position] = end
        num_passes[rank] += 1
        placed += 1

        # (5) Enqueue what it makes ready: one entry on the next rank, or several on rank 0 or P-1, following edges
        # [first, beyond) of the table. Edge -1: a pair without successors turns around on rank P-1.
        first = 0
        beyond = 1
        if direction == 0 and rank == ranks - 1:
            first = table.successor_starts[pair]
            beyond = table.successor_starts[pair + 1]
            if first == beyond:
                first = -1
                beyond = 0
        elif direction == 1 and rank == 0:
            first = table.predecessor_starts[pair]
            beyond = table.predecessor_starts[pair + 1]
        for edge in range(first, beyond):
            next_pair = pair
            next_direction = direction
            if direction == 0 and rank < ranks - 1:
                next_rank = rank + 1
                at = end + table.hop_ns[pair]
            elif direction == 1 and rank > 0:
                next_rank = rank - 1
                at = end + table.hop_ns[pair]
            elif direction == 0:
                if edge < 0:
                    next_rank = rank
                    next_direction = 1
                    at = end
                else:
                    next_rank = 0
                    next_pair = table.successors[edge]
                    ready_forward[next_pair] = max(ready_forward[next_pair], end + table.successor_wrap[edge])
                    waits_forward[next_pair] -= 1
                    if waits_forward[next_pair] > 0:
                        continue
                    at = ready_forward[next_pair]
            else:
                next_rank = ranks - 1
                next_pair = table.predecessors[edge]
                ready_backward[next_pair] = max(ready_backward[next_pair], end + table.predecessor_wrap[edge])
                waits_backward[next_pair] -= 1
                if waits_backward[next_pair] > 0:
                    continue
                at = ready_backward[next_pair]
            entry = count[next_rank, next_direction]
            queue[next_rank, next_direction, entry] = next_pair
            queue_at[next_rank, next_direction, entry] = at
            count[next_rank, next_direction] += 1
            # Update the best entry of its queue, as far as the gate allows it on this rank alone.
            is_gated = next_direction == 0 and gate % 2 == 1  # HARD or SAFE
            if is_gated and live[next_rank] + memory[next_pair, next_rank] > caps[next_rank]:
                continue
            chosen = best[next_rank, next_direction]
            if chosen < 0 or _comes_first(
                at,
                priority[table.group[next_pair], next_direction],
                next_pair,
                queue_at[next_rank, next_direction, chosen],
                priority[table.group[queue[next_rank, next_direction, chosen]], next_direction],
                queue[next_rank, next_direction, chosen],
                last[next_rank],
            ):
                best[next_rank, next_direction] = entry
    return makespan


def natural_priorities(segments: Segments) -> Column:
    """Priorities by microbatch; within one, its groups in order forward, then in reverse backward. [groups, 2]"""
    microbatch_of = np.zeros(segments.num_groups, dtype=np.int64)
    microbatch_of[segments.group] = segments.microbatch
    order: list[tuple[int, int]] = []
    for microbatch in range(segments.num_microbatches):
        groups = np.flatnonzero(microbatch_of == microbatch).tolist()
        order += [(group, 0) for group in groups] + [(group, 1) for group in reversed(groups)]
    priority = np.empty((segments.num_groups, 2), dtype=np.int64)
    for position, (group, direction) in enumerate(order):
        priority[group, direction] = len(order) - position
    return priority


def interleave(
    segments: Segments,
    priority: Column | None = None,
    caps: Column | int | None = None,
    gate: int = SAFE,
) -> Schedule | None:
    """The schedule for priorities [groups, 2], higher ones first; None for a deadlock, which only `HARD` can have."""
    limits = limits_of(segments, caps)
    if caps is None:
        gate = NONE
    check_fits(segments, limits, gate)
    chosen = natural_priorities(segments) if priority is None else np.array(priority, dtype=np.int64)
    if chosen.shape != (segments.num_groups, 2):
        raise InputError(f"priorities have shape {chosen.shape}, expected {(segments.num_groups, 2)}")
    shape = (segments.num_ranks, 2 * segments.num_pairs)
    pair, kind, start, end = (np.full(shape, -1, dtype=np.int64) for _ in range(4))
    peak = np.zeros(segments.num_ranks, dtype=np.int64)
    makespan = interleave_passes(
        table_of(segments),
        segments.forward_ns.copy(),
        segments.backward_ns.copy(),
        segments.memory.copy(),
        chosen,
        limits,
        gate,
        pair,
        kind,
        start,
        end,
        peak,
    )
    if makespan < 0:
        assert gate == HARD, "only the hard gate can deadlock"
        return None
    return Schedule(pair=pair, kind=kind, start_ns=start, end_ns=end, peak=peak, makespan_ns=int(makespan))
