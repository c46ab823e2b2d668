"""Planner `wavefront`: ours. No barrier between levels, any number of devices, allocations that change as the step
unfolds.

It anneals schedules in folded time under several rules, places each on devices, and lets the simulator choose: with
transfers, synchronisation, the optimizer and memory. The baselines' and the paper's schedules stand among the
candidates, so it is never slower than they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.plan import Plan
from spindle.planners.anneal import DONE, STOP, new_control, search
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.build import Attempt, Scheduler, best_over_stages, in_rounds, realise, scored
from spindle.planners.paper import schedule_paper
from spindle.planners.problem import Problem, Timed
from spindle.profile import Profile
from spindle.program import counts_bytes

# Folded schedules tried in all. Where bytes count, a candidate must also be placed and simulated, which takes longer
# the more devices there are; so then may the search.
PLAIN_EVALUATIONS = 400_000
WITH_BYTES_EVALUATIONS = 100_000
LARGE_CLUSTER = 256
_GLANCE_S = 0.05  # how often a waiting planner looks at the clock
# How many pieces an op may have, for one annealing run each: few make short programs, many fill gaps.
PLAIN_PIECE_LIMITS = (4, 3)
WITH_BYTES_PIECE_LIMITS = (2, 3, 4, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search. The same effort and seed give the same plan, unless a time limit cuts the search short."""

    seed: int = 0
    evaluations: int | None = None
    time_limit_s: float | None = None


Progress = Callable[[float], None]


def plan_wavefront(profile: Profile, effort: Effort, progress: Progress | None = None) -> Plan:
    """The best plan of all candidates, at the first stage of memory saving at which one fits.

    `progress` hears how much of an attempt's annealing is done, from 0 to 1.
    """
    clock = _Clock(effort.time_limit_s)
    limits = WITH_BYTES_PIECE_LIMITS if counts_bytes(profile) else PLAIN_PIECE_LIMITS
    evaluations = effort.evaluations
    if evaluations is None:
        evaluations = WITH_BYTES_EVALUATIONS if counts_bytes(profile) else PLAIN_EVALUATIONS
        evaluations *= 4 if profile.cluster.num_devices > LARGE_CLUSTER else 1
    evaluations = max(1, evaluations // len(limits))

    def plan_for(attempt: Attempt) -> Plan:
        best: Plan | None = None
        refusal: DoesNotFitError | None = None
        for schedule in _candidates(profile, attempt, limits, effort.seed, evaluations, clock, progress):
            if clock.is_over() and best is not None:
                break
            # A schedule that is much longer in folded time alone than another with everything cannot win. Much,
            # because placing it may still close gaps (the paper's barriers).
            if best is not None and max(one.end_s for one in schedule) > 1.15 * best.makespan_s:
                continue
            try:
                plan = realise(profile, attempt.setting, "wavefront", schedule, effort.seed)
                if best is None or plan.folded_s < best.makespan_s:
                    plan = scored(plan, profile)
                    best = plan if best is None or plan.makespan_s < best.makespan_s else best
            except DoesNotFitError as error:
                refusal = error
        if best is None:
            assert refusal is not None
            raise refusal
        return best

    plan = best_over_stages(profile, plan_for)
    return replace(plan, evaluations=evaluations * len(limits), cut_s=clock.cut_s)


class _Clock:
    """Says when the time limit is over, and when it was found so."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._began = limit_s, time.monotonic()
        self.cut_s: float | None = None

    def is_over(self) -> bool:
        elapsed = time.monotonic() - self._began
        if self._limit_s is None or elapsed < self._limit_s:
            return False
        self.cut_s = self.cut_s or round(elapsed, 3)
        return True


def _candidates(
    profile: Profile,
    attempt: Attempt,
    piece_limits: tuple[int, ...],
    seed: int,
    evaluations: int,
    clock: _Clock,
    progress: Progress | None,
) -> Iterator[list[Timed]]:
    """Schedules to place and simulate: annealed ones, two at a time on two cores, then everyone else's."""
    controls = [new_control() for _ in piece_limits]

    def annealed(run: int) -> list[Timed]:
        def schedule(problem: Problem) -> list[Timed]:
            run_seed = seed * len(piece_limits) + run
            return search(problem, piece_limits[run], run_seed, evaluations, controls[run])

        return in_rounds(profile, attempt.setting, attempt.num_rounds, schedule)

    with ThreadPoolExecutor(max_workers=2) as pool:
        try:
            for future in [pool.submit(annealed, run) for run in range(len(piece_limits))]:
                while not future.done():
                    wait([future], timeout=_GLANCE_S)
                    if clock.is_over():
                        _stop(controls)
                    if progress is not None:
                        progress(sum(int(control[DONE]) for control in controls) / (evaluations * len(controls)))
                yield future.result()
        finally:
            _stop(controls)  # whoever leaves early must not wait for the rest
    others: tuple[Scheduler, ...] = (schedule_paper, schedule_task_level, schedule_distmm, schedule_sequential)
    for scheduler in others:
        timed = in_rounds(profile, attempt.setting, attempt.num_rounds, scheduler)
        yield [replace(one, wave=None) for one in timed]


def _stop(controls: list[np.ndarray]) -> None:
    for control in controls:
        control[STOP] = 1
