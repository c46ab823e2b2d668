"""Times of passes in a fixed order on each rank, each as early as possible, compiled.

Used for interleaved orders, for orders whose stages got other memory choices, and for the orders of baselines, whose
backwards may be cut into input and weight passes.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import PlanError
from spindle.jit import njit
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.segments import BACKWARD, FORWARD, INPUT, WEIGHT, Column, Segments, Table, table_of

_UNKNOWN = -1


@njit(cache=True, nogil=True)
def retime_passes(
    table,
    forward_ns,
    backward_ns,
    weight_ns,
    memory,
    order_pair,
    order_kind,
    start_ns,
    end_ns,
    peak,
    forward_end,
    back_end,
):
    """Fill start and end times, and peaks. Returns the makespan, or -1 for a deadlock.

    `forward_end` and `back_end` [n, P] are scratch; `back_end` is when the gradient of a stage's input is complete."""
    ranks, length = order_pair.shape
    forward_end[:] = _UNKNOWN
    back_end[:] = _UNKNOWN
    position = np.zeros(ranks, np.int64)
    last = np.zeros(ranks, np.int64)
    live = np.zeros(ranks, np.int64)
    peak[:] = 0
    makespan = 0
    # Run every rank as far as its inputs are there, until no rank moves: an end is known only once its pass is placed.
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in range(ranks):
            while position[rank] < length and order_pair[rank, position[rank]] >= 0:
                pair = order_pair[rank, position[rank]]
                kind = order_kind[rank, position[rank]]
                # When it can start: after the rank's last pass, and after its inputs on the neighbour, or, at an end of
                # the pipeline, on the far end.
                ready = last[rank]
                is_ready = True
                if kind == FORWARD:
                    if rank > 0:
                        is_ready = forward_end[pair, rank - 1] >= 0
                        ready = max(ready, forward_end[pair, rank - 1] + table.hop_ns[pair])
                    else:
                        for edge in range(table.predecessor_starts[pair], table.predecessor_starts[pair + 1]):
                            before = forward_end[table.predecessors[edge], ranks - 1]
                            if before < 0:
                                is_ready = False
                                break
                            ready = max(ready, before + table.predecessor_wrap[edge])
                elif kind == WEIGHT:
                    is_ready = back_end[pair, rank] >= 0
                else:
                    is_ready = forward_end[pair, rank] >= 0
                    if rank < ranks - 1:
                        is_ready = is_ready and back_end[pair, rank + 1] >= 0
                        ready = max(ready, back_end[pair, rank + 1] + table.hop_ns[pair])
                    else:
                        for edge in range(table.successor_starts[pair], table.successor_starts[pair + 1]):
                            before = back_end[table.successors[edge], 0]
                            if before < 0:
                                is_ready = False
                                break
                            ready = max(ready, before + table.successor_wrap[edge])
                if not is_ready:
                    break
                # Place it. A stage's memory is held from its forward to its weight gradients.
                if kind == FORWARD:
                    end = ready + forward_ns[pair, rank]
                    forward_end[pair, rank] = end
                    live[rank] += memory[pair, rank]
                    peak[rank] = max(peak[rank], live[rank])
                elif kind == WEIGHT:
                    end = ready + weight_ns[pair, rank]
                    live[rank] -= memory[pair, rank]
                elif kind == INPUT:
                    end = ready + backward_ns[pair, rank] - weight_ns[pair, rank]
                    back_end[pair, rank] = end
                else:
                    end = ready + backward_ns[pair, rank]
                    back_end[pair, rank] = end
                    live[rank] -= memory[pair, rank]
                start_ns[rank, position[rank]] = ready
                end_ns[rank, position[rank]] = end
                last[rank] = end
                makespan = max(makespan, end)
                position[rank] += 1
                is_moving = True
    for rank in range(ranks):
        if position[rank] < length and order_pair[rank, position[rank]] >= 0:  # passes are left: a deadlock
            return -1
    return makespan


def retime(
    segments: Segments, pair: Column, kind: Column, choice: Column | None = None, table: Table | None = None
) -> Schedule:
    """The schedule of fixed orders [P, passes], padded with pair -1, with memory choices [n, P] (None: the leanest)."""
    order_pair, order_kind = (np.array(column, dtype=np.int64, order="C") for column in (pair, kind))
    _check_passes(segments, order_pair, order_kind)
    forward, backward, memory = stage_columns(segments, choice)
    start, end = np.full_like(order_pair, -1), np.full_like(order_pair, -1)
    peak = np.zeros(segments.num_ranks, dtype=np.int64)
    makespan = retime_passes(
        table_of(segments) if table is None else table,
        forward,
        backward,
        segments.weight_ns.copy(),
        memory,
        order_pair,
        order_kind,
        start,
        end,
        peak,
        np.empty_like(forward),
        np.empty_like(forward),
    )
    if makespan < 0:
        raise PlanError("these orders of passes deadlock: every rank waits for another one")
    return Schedule(
        pair=order_pair,
        kind=order_kind,
        start_ns=start,
        end_ns=end,
        peak=peak,
        makespan_ns=int(makespan),
        choice=choice,
    )


def stage_columns(segments: Segments, choice: Column | None) -> tuple[Column, Column, Column]:
    """Forward and backward times and memory of each stage under its memory choice, as writable columns."""
    if choice is None:
        return segments.forward_ns.copy(), segments.backward_ns.copy(), segments.memory.copy()
    tables = (segments.choice_forward_ns, segments.choice_backward_ns, segments.choice_memory)
    forward, backward, memory = (np.ascontiguousarray(column[segments.choice_of, choice]) for column in tables)
    return forward, backward, memory


def _check_passes(segments: Segments, pair: Column, kind: Column) -> None:
    """Every rank runs every pair's forward once, and its backward once, whole or in its two parts."""
    for rank in range(segments.num_ranks):
        is_used = pair[rank] >= 0
        counts = np.zeros((4, segments.num_pairs), dtype=np.int64)
        np.add.at(counts, (kind[rank, is_used], pair[rank, is_used]), 1)
        is_right = (counts[FORWARD] == 1) & (counts[BACKWARD] + counts[INPUT] == 1) & (counts[INPUT] == counts[WEIGHT])
        if not is_right.all():
            wrong = int(np.flatnonzero(~is_right)[0])
            raise PlanError(f"rank {rank}: pair {wrong} needs one forward and one backward, whole or in two parts")
