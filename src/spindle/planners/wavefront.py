"""Planner `wavefront`: ours. No barrier between levels, any number of devices, allocations that change as the step
unfolds.

It anneals schedules in folded time, places each on devices, and lets the simulator choose: with transfers,
synchronisation, the optimizer and memory. The baselines' and the paper's own plans stand among the candidates, so it is
never slower than they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from spindle.errors import DoesNotFitError
from spindle.plan import Plan, relaxed
from spindle.planners.anneal import DONE, STOP, new_control, search
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.bounds import graph_bound_s
from spindle.planners.build import (
    Attempt,
    best_over_stages,
    closest_of,
    fastest,
    in_rounds,
    realise,
    refuse_hopeless,
    stages,
    time_of,
)
from spindle.planners.finish import finished, scored
from spindle.planners.options import PlanOptions, Progress
from spindle.planners.paper import schedule_paper
from spindle.planners.problem import Problem, Timed
from spindle.profile import Profile
from spindle.program import counts_bytes

# Folded schedules tried in all. Where bytes count, a candidate must also be placed and simulated, which takes longer
# the more devices there are; so then may the search.
PLAIN_EVALUATIONS = 400_000
WITH_BYTES_EVALUATIONS = 64_000
LARGE_CLUSTER = 256
MOST_SHARDED = 4  # choices of tensor degrees that are worth annealing
_GLANCE_S = 0.05  # how often a waiting planner looks at the clock
# How many pieces an op may have, for one annealing run each: few make short programs, many fill gaps.
PLAIN_PIECE_LIMITS = (4, 3)
WITH_BYTES_PIECE_LIMITS = (2, 3, 4, 2)


def plan_wavefront(profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Make the best plan of all candidates.

    `progress` hears how much of an attempt's annealing is done, from 0 to 1.
    """
    clock = _Clock(options.time_limit_s)
    limits = WITH_BYTES_PIECE_LIMITS if counts_bytes(profile) else PLAIN_PIECE_LIMITS
    evaluations = options.evaluations
    if evaluations is None:
        evaluations = WITH_BYTES_EVALUATIONS if counts_bytes(profile) else PLAIN_EVALUATIONS
        evaluations *= 4 if profile.cluster.num_devices > LARGE_CLUSTER else 1
    evaluations = max(1, evaluations // len(limits))
    spent: list[int] = []
    refused: list[DoesNotFitError] = []
    tried: list[Attempt] = []

    def plan_for(attempt: Attempt) -> Plan:
        tried.append(attempt)
        plans: list[Plan] = []
        annealed = _annealed(profile, attempt, limits, options.seed, evaluations, clock, progress, spent)
        known_schedules = _known_schedules(profile, attempt)  # made while the other threads anneal
        for schedule in annealed:
            # Annealed schedules wait for nothing, so folded time is about the least that a step of theirs takes.
            if not plans or max(piece.end_s for piece in schedule) < min(plans, key=time_of).makespan_s:
                plans += _tried(profile, attempt, schedule, options.seed, plans, refused)
        for schedule in known_schedules:
            plans += _tried(profile, attempt, schedule, options.seed, plans, refused)
        if not plans:
            raise closest_of(refused)
        return fastest(plans)

    plans: list[Plan] = []
    refusal: DoesNotFitError | None = None
    try:
        plans.append(best_over_stages(profile, plan_for, MOST_SHARDED, options.shard_optimizer))
    except DoesNotFitError as error:
        refusal = error
    plain = replace(profile.default_setting, shard_optimizer=options.shard_optimizer is True)
    if refused or refusal or tried != [Attempt(setting=plain)]:
        # Memory is short or batches are small, so others may have their best plan where we did not look.
        for attempt in [attempt for stage in stages(profile, None, options.shard_optimizer) for attempt in stage]:
            for schedule in _known_schedules(profile, attempt):
                plans += _tried(profile, attempt, schedule, options.seed, plans, refused)
    if not plans:
        assert refusal is not None
        raise refusal
    best = fastest(plans)
    if not best.bound_s:
        best = finished(best, profile, graph_bound_s(profile))
    return replace(best, seed=options.seed, evaluations=sum(spent), cut_s=clock.cut_s)


def _known_schedules(profile: Profile, attempt: Attempt) -> list[list[Timed]]:
    """The paper's and the baselines' schedules under an attempt; none where bytes cannot fit anyway."""
    try:
        refuse_hopeless(profile, attempt)
    except DoesNotFitError:
        return []
    schedulers = (schedule_paper, schedule_task_level, schedule_distmm, schedule_sequential)
    return [in_rounds(profile, attempt.setting, attempt.num_rounds, scheduler) for scheduler in schedulers]


def _tried(
    profile: Profile,
    attempt: Attempt,
    schedule: list[Timed],
    seed: int,
    plans: list[Plan],
    refused: list[DoesNotFitError],
) -> list[Plan]:
    """The plans of a schedule: as it is, and where it has waves also without barriers. None if it cannot be better.

    The step knows no barriers, so taking them out changes folded time alone, which is all there is without bytes.
    """
    busy_s = sum((piece.end_s - piece.start_s) * piece.num_devices for piece in schedule) / profile.cluster.num_devices
    if plans and busy_s > min(plans, key=time_of).makespan_s:
        return []  # its devices are busy for longer than another plan takes
    try:
        plan = realise(profile, attempt.setting, "wavefront", schedule, seed)
        variants = [scored(plan, profile)]
        if profile.gangs and any(piece.wave is not None for piece in schedule):
            variants.append(scored(relaxed(plan, profile, attempt.setting), profile))
        return variants
    except DoesNotFitError as error:
        refused.append(error)
        return []


class _Clock:
    """The time limit: whether it is over, and when that was noticed."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._began = limit_s, time.monotonic()
        self.cut_s: float | None = None

    def is_over(self) -> bool:
        elapsed = time.monotonic() - self._began
        if self._limit_s is None or elapsed < self._limit_s:
            return False
        self.cut_s = self.cut_s or round(elapsed, 3)
        return True


def _annealed(
    profile: Profile,
    attempt: Attempt,
    piece_limits: tuple[int, ...],
    seed: int,
    evaluations: int,
    clock: _Clock,
    progress: Progress | None,
    spent: list[int],
) -> Iterator[list[Timed]]:
    """Start annealing, two runs at a time; yields schedules as they are done. `spent` collects evaluations."""
    controls = [new_control() for _ in piece_limits]

    def run(number: int) -> list[Timed]:
        def schedule(problem: Problem) -> list[Timed]:
            run_seed = seed * len(piece_limits) + number
            schedule = search(problem, piece_limits[number], run_seed, evaluations, controls[number])
            spent.append(int(controls[number][DONE]))
            return schedule

        return in_rounds(profile, attempt.setting, attempt.num_rounds, schedule)

    pool = ThreadPoolExecutor(max_workers=2)
    futures = [pool.submit(run, number) for number in range(len(piece_limits))]

    def results() -> Iterator[list[Timed]]:
        with pool:
            for future in futures:
                while not future.done():
                    wait([future], timeout=_GLANCE_S)
                    if clock.is_over():
                        for control in controls:
                            control[STOP] = 1
                    if progress is not None:
                        progress(sum(int(control[DONE]) for control in controls) / (evaluations * len(controls)))
                yield future.result()

    return results()
