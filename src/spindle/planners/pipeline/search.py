"""Search for the order of priorities with the shortest step: starting orders, then annealing.

The natural order comes first, so there is a plan at any time. The budget counts evaluations and is split in advance and
evenly among workers, each with its own seed; each round starts from the best order of all workers. So the same seed,
budget and number of workers give the same schedule on any number of cores. A time limit only ends the search early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from spindle.planners.anneal import DONE, STOP, new_control
from spindle.planners.bounds import bound_ns
from spindle.planners.pipeline.evaluate import (
    Load,
    bases_of,
    evaluate,
    least_caps_of,
    load_of,
    scratch_of,
    starting_orders,
)
from spindle.planners.pipeline.gates import SAFE, check_fits, limits_of
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.moves import anneal_order
from spindle.planners.pipeline.segments import Column, Segments

# How rounds share the evaluations that are left after the starting orders.
ROUNDS = (0.5, 0.5)

# Temperatures of annealing at the start of each round, and at its end, as shares of the makespan.
HOT = (0.02, 0.005)
COLD = 0.0003

# Seconds between two looks at the clock.
PATIENCE_S = 0.02

_NUM_WORKERS = 2  # the same on every machine, because plans depend on it
Progress = Callable[[int, int], None]  # evaluations done, best makespan so far


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best schedule of a search, and how the search went."""

    schedule: Schedule  # with its memory choices
    bound_ns: int
    natural_ns: int  # the makespan of the natural order, on its best base
    evaluations: int
    is_cut: bool  # by the time limit, before the budget was spent
    improvements: tuple[tuple[int, int], ...]  # (evaluations, makespan)


@dataclass(slots=True)
class _Best:
    makespan: int
    base: int
    order: Column

    def as_column(self) -> Column:
        return np.array([self.makespan, self.base], dtype=np.int64)


def search(
    segments: Segments,
    caps: Column | int | None = None,
    *,
    evaluations: int = 10_000,
    seed: int = 0,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best schedule found under caps on the memory of each rank."""
    began = time.monotonic()
    limits = limits_of(segments, caps)
    check_fits(segments, limits, SAFE)
    bound = bound_ns(segments)
    bases = bases_of(segments, limits)
    load = load_of(segments, limits, bases)
    best, done, improvements, natural = _start(segments, load, evaluations)
    budget, is_cut = evaluations - done, False
    with ThreadPoolExecutor(max_workers=_NUM_WORKERS) as pool:
        for number, share in enumerate(ROUNDS):
            per_worker = int(share * budget) // _NUM_WORKERS
            if per_worker < 1 or best.makespan <= bound or is_cut:
                continue
            if number > 0:
                bases = _with_choice_of_best(segments, limits, load, bases, best)
                load = load_of(segments, limits, bases)
            workers = [
                _Worker(segments, load, bound, best, seed * 8191 + number * 127 + worker, per_worker, number)
                for worker in range(_NUM_WORKERS)
            ]
            futures = [pool.submit(worker.run) for worker in workers]
            is_cut = _watch(futures, workers, began, time_limit_s, progress, done, best)
            for future in futures:
                future.result()
            improvements += sorted(
                (done + _NUM_WORKERS * count, makespan) for worker in workers for count, makespan in worker.record
            )
            done += sum(worker.done for worker in workers)
            winner = min(workers, key=lambda worker: int(worker.best[0]))
            if winner.best[0] < best.makespan:
                best = _Best(int(winner.best[0]), int(winner.best[1]), winner.order)
    return SearchResult(
        schedule=_schedule(segments, load, best),
        bound_ns=bound,
        natural_ns=natural,
        evaluations=done,
        is_cut=is_cut,
        improvements=_falling(improvements),
    )


def _start(segments: Segments, load: Load, evaluations: int) -> tuple[_Best, int, list[tuple[int, int]], int]:
    """Evaluate the natural order on every base, then other starting orders, as far as the budget goes, at least one."""
    scratch = scratch_of(segments)
    best, done, natural = None, 0, 0
    improvements = []
    for number, order in enumerate(starting_orders(segments)):
        for base in range(len(load.base_gate)):
            if done >= max(evaluations, 1):
                break
            makespan = int(evaluate(load, base, order, scratch))
            done += 1
            if best is None or makespan < best.makespan:
                best = _Best(makespan, base, order)
                improvements.append((done, makespan))
        if number == 0 and best is not None:
            natural = best.makespan
    assert best is not None
    return best, done, improvements, natural


class _Worker:
    """The part of a round that one thread runs."""

    def __init__(
        self, segments: Segments, load: Load, bound: int, best: _Best, seed: int, evaluations: int, number: int
    ) -> None:
        self.load, self.bound, self.seed, self.evaluations = load, bound, seed, evaluations
        self.hot = HOT[number]
        self.scratch = scratch_of(segments)
        self.control = new_control()
        self.order, self.best = best.order.copy(), best.as_column()
        self.record: list[tuple[int, int]] = []  # (evaluations, makespan) of every improvement

    @property
    def done(self) -> int:
        return int(self.control[DONE])

    def stop(self) -> None:
        self.control[STOP] = 1

    def run(self) -> None:
        record = anneal_order(
            self.load,
            self.scratch,
            self.bound,
            self.seed,
            self.evaluations,
            self.hot,
            COLD,
            self.control,
            self.order,
            self.best,
        )
        self.record = [(int(count), int(makespan)) for count, makespan in record]


def _watch(
    futures: list[Future[None]],
    workers: list[_Worker],
    began: float,
    time_limit_s: float | None,
    progress: Progress | None,
    done: int,
    best: _Best,
) -> bool:
    """Wait for a round, and end it at the time limit. Returns whether it was ended early."""
    if time_limit_s is None and progress is None:
        wait(futures)
        return False
    is_cut = False
    while wait(futures, timeout=PATIENCE_S).not_done:
        if time_limit_s is not None and time.monotonic() - began > time_limit_s:
            is_cut = True
            for worker in workers:
                worker.stop()
        if progress is not None:
            shortest = min(int(worker.best[0]) for worker in workers)
            progress(done + sum(worker.done for worker in workers), min(shortest, best.makespan))
    return is_cut


def _with_choice_of_best(
    segments: Segments, limits: Column, load: Load, bases: list[tuple[int, Column]], best: _Best
) -> list[tuple[int, Column]]:
    """The bases, and one more with the memory choices of the best schedule."""
    scratch = scratch_of(segments)
    evaluate(load, best.base, best.order, scratch)
    is_new = not any((scratch.choice == choice).all() for _, choice in bases)
    if is_new and (least_caps_of(segments, scratch.choice) <= limits).all():
        return [*bases, (SAFE, scratch.choice.copy())]
    return bases


def _schedule(segments: Segments, load: Load, best: _Best) -> Schedule:
    scratch = scratch_of(segments)
    makespan = int(evaluate(load, best.base, best.order, scratch))
    assert makespan == best.makespan, "the same order gave another schedule"
    return Schedule(
        pair=scratch.pair,
        kind=scratch.kind,
        start_ns=scratch.start_ns,
        end_ns=scratch.end_ns,
        peak=scratch.peak,
        makespan_ns=makespan,
        choice=scratch.choice,
    )


def _falling(improvements: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Those that improved on all earlier ones."""
    falling: list[tuple[int, int]] = []
    for count, makespan in improvements:
        if not falling or makespan < falling[-1][1]:
            falling.append((count, makespan))
    return tuple(falling)
