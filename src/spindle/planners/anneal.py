"""Simulated annealing over lists of pieces, each list decoded to a schedule in folded time.

A piece is some layers of one op on one number of devices, and the list order is the priority (`decode`). The search
changes the list (`piece_moves`), decodes it from the first change on, and keeps it or not. It starts from the LP's
mixes of widths.

It counts devices and does not name them; it knows no bytes. Deterministic for a seed; the budget is a number of
evaluations, not seconds. An evaluation takes time linear in the number of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.jit import njit
from spindle.planners.decode import CHECKPOINTS, OP, OPTION, REJECTED, Checkpoint, Table, decode
from spindle.planners.piece_moves import copy_piece, move, random_share
from spindle.planners.problem import Problem, Timed

Mixes = Sequence[Sequence[tuple[int, float]]]  # by op: pairs of layers (not whole) and number of devices

# Entries of the control array, through which another thread observes a run and can end it.
STOP, DONE = 0, 1

# the temperature at the end, on the same scale
LAST_TEMPERATURE = 0.0002
# With more ops than this, each op is a small part of the schedule, and so is the effect of a move. At the same
# temperatures, the search would drift away from the start that the LP gives and not return.
COLDER_FROM = 36

# Share of the work (devices times time) in the objective: work that is saved
# lets later moves shorten the schedule, long before the makespan shows it.
FIRST_WORK_SHARE = 0.4

# The price of one piece, on the same scale. It breaks ties in favour of few pieces.
PIECE_PRICE = 1e-5

# How many moves are followed by another move before the list is decoded.
COMPOUND_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Run:
    """The settings in which the runs for one problem differ.

    Few pieces per op make short programs; many fill gaps. A share of the work in the objective at the end avoids waste,
    and with it ops that must be wide for little gain. A high temperature at the start moves away from the LP's mixes,
    and pieces that wait for all their devices allow schedules with gaps; both pay off if a few ops are each a large
    part of the schedule.
    """

    piece_limit: int
    last_work_share: float
    first_temperature: float = 0.003
    narrows: bool = True


@njit(cache=True, nogil=True)
def anneal(table, first_pieces, first_count, seed, evaluations, control):
    """Anneal, starting from the given list. Returns the best list found, its length, and its starts and ends."""
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
    # Three lists: the current candidate, the last accepted one, and the best one with its starts and ends.
    accepted, accepted_count = pieces.copy(), count
    accepted_start, accepted_end = start_at.copy(), end_at.copy()
    best, best_count, best_value = pieces.copy(), count, REJECTED
    best_start, best_end = start_at.copy(), end_at.copy()
    current = REJECTED
    first_temperature = table.first_temperature * min(1.0, (COLDER_FROM / ops) ** 2)
    temperature = first_temperature
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
            temperature = first_temperature * cooling**progress
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
            # also for a rejected list, because the objective is not the makespan alone
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
            # the list keeps the options that were actually taken
            for i in range(begin, count):
                pieces[i, OPTION] = chosen[i]
                copy_piece(pieces, i, accepted, i)
                accepted_start[i] = start_at[i]
                accepted_end[i] = end_at[i]
            accepted_count = count
            # the checkpoints that this list wrote now belong to the accepted list
            for number in range(begin // stride, min((count - 1) // stride, CHECKPOINTS)):
                checkpoint.buffer[number] = 1 - checkpoint.buffer[number]
        else:
            undo(pieces, count, accepted, accepted_count, changed, pieces_of)
    control[DONE] = min(step + 1, evaluations)
    return best, best_count, best_start, best_end


@njit(cache=True, nogil=True)
def undo(pieces, count, accepted, accepted_count, changed, pieces_of):
    """Restore the accepted list, and the counts per op."""
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

    It starts from the mixes of widths in the LP bound. Through `control`, another thread observes its progress and may
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
    """The arrays that the loops need, with times as shares of a lower bound, and that bound."""
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
    """The mixes of the LP, rounded to whole layers, with the wide pieces of an op first. Ops with the longest path to
    the end come first."""
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
                # rounding may leave less than the path of the consumers, which must come later nevertheless
                pieces.append((-max(way_s, tail[op]), op, whole, int(np.searchsorted(choices.num_devices, count))))
                way_s -= whole * choices.time_on(count)
                left -= whole
    # sorting is stable, so producers stay first
    return np.array([piece[1:] for piece in sorted(pieces, key=lambda piece: piece[0])], np.int64)
