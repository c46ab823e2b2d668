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
from threading import Lock

from spindle.errors import DoesNotFitError
from spindle.plan import Plan, relaxed
from spindle.planners.anneal import DONE, STOP, Mixes, new_control, search
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.bounds import graph_bound_s, lp_bound
from spindle.planners.build import (
    Attempt,
    best_over_stages,
    closest_of,
    in_rounds,
    optimizer_settings,
    realise,
    refuse_hopeless,
    stages,
    time_of,
    with_cuts,
)
from spindle.planners.finish import cut_for_gathers, finished, scored
from spindle.planners.options import PlanOptions, Progress
from spindle.planners.paper import schedule_paper
from spindle.planners.problem import Problem, Timed
from spindle.profile import Profile, Setting
from spindle.program import counts_bytes

# Folded schedules tried in all. Where bytes count, a candidate must also be placed and simulated, which takes longer
# the more devices there are; so then may the search.
PLAIN_EVALUATIONS = 400_000
WITH_BYTES_EVALUATIONS = 64_000
LARGE_CLUSTER = 256
MOST_DEGREES = 4  # choices of tensor degrees that are worth annealing
MOST_UNSHARDED = 2  # annealed schedules that are tried without a sharded optimizer, too
_GLANCE_S = 0.05  # how often a waiting planner looks at the clock
# For each annealing run: how many pieces an op may have (few make short programs, many fill gaps), and the share of the
# work in the objective at the end.
PLAIN_RUNS = ((4, 0.2), (3, 0.0))
WITH_BYTES_RUNS = ((2, 0.2), (3, 0.2), (4, 0.2), (2, 0.0))


def plan_wavefront(profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Make the best plan of all candidates.

    `progress` hears how much of an attempt's annealing is done, from 0 to 1.
    """
    clock = _Clock(options.time_limit_s)
    runs = WITH_BYTES_RUNS if counts_bytes(profile) else PLAIN_RUNS
    evaluations = options.evaluations
    if evaluations is None:
        evaluations = WITH_BYTES_EVALUATIONS if counts_bytes(profile) else PLAIN_EVALUATIONS
        evaluations *= 4 if profile.cluster.num_devices > LARGE_CLUSTER else 1
    evaluations = max(1, evaluations // len(runs))
    spent: list[int] = []
    refused: list[DoesNotFitError] = []
    unsharded_refused: list[DoesNotFitError] = []  # says nothing about whether memory is short
    tried: list[Attempt] = []

    def plan_for(attempt: Attempt) -> Plan:
        tried.append(attempt)
        frugal, *others = optimizer_settings(profile, attempt.setting, options.shard_optimizer)
        plans: list[Plan] = []
        annealed: list[tuple[Plan, list[Timed]]] = []
        running = _annealed(profile, attempt, runs, options.seed, evaluations, clock, progress, spent)
        known_schedules = _known_schedules(profile, attempt)  # made while the other threads anneal
        for schedule in running:
            # Annealed schedules wait for nothing, so folded time is about the least that a step of theirs takes.
            if not plans or max(piece.end_s for piece in schedule) < min(plans, key=time_of).makespan_s:
                variants = _annealed_plans(profile, frugal, schedule, options.seed, refused)
                plans += variants
                annealed += [(plan, schedule) for plan in variants]
        for setting in others:
            for _, schedule in sorted(annealed, key=lambda pair: time_of(pair[0]))[:MOST_UNSHARDED]:
                plans += _tried(profile, setting, schedule, options.seed, plans, unsharded_refused)
        for schedule in known_schedules:
            plans += _tried(profile, frugal, schedule, options.seed, plans, refused)
            for setting in others:
                plans += _tried(profile, setting, schedule, options.seed, plans, unsharded_refused)
        if not plans:
            raise closest_of(refused)
        return min(plans, key=time_of)

    plans: list[Plan] = []
    refusal: DoesNotFitError | None = None
    try:
        plans.append(best_over_stages(profile, plan_for, MOST_DEGREES))
    except DoesNotFitError as error:
        refusal = error
    if refused or refusal or tried != [Attempt(setting=profile.default_setting)]:
        # Memory is short or batches are small, so others may have their best plan where we did not look.
        for attempt in [attempt for stage in stages(profile) for attempt in stage]:
            for schedule in _known_schedules(profile, attempt):
                for setting in optimizer_settings(profile, attempt.setting, options.shard_optimizer):
                    plans += _tried(profile, setting, schedule, options.seed, plans, unsharded_refused)
    if not plans:
        assert refusal is not None
        raise refusal
    best = min(plans, key=time_of)
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
    setting: Setting,
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
        plan = realise(profile, setting, "wavefront", schedule, seed)
        variants = with_cuts(plan, profile)
        if any(piece.wave is not None for piece in schedule) and (profile.gangs or setting.shard_optimizer):
            variants += with_cuts(relaxed(plan, profile, setting), profile)
        return variants
    except DoesNotFitError as error:
        refused.append(error)
        return []


def _annealed_plans(
    profile: Profile, setting: Setting, schedule: list[Timed], seed: int, refused: list[DoesNotFitError]
) -> list[Plan]:
    """The plan of an annealed schedule, with slots cut for gathers; none if it does not fit."""
    try:
        return [scored(cut_for_gathers(realise(profile, setting, "wavefront", schedule, seed), profile), profile)]
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
    runs: tuple[tuple[int, float], ...],
    seed: int,
    evaluations: int,
    clock: _Clock,
    progress: Progress | None,
    spent: list[int],
) -> Iterator[list[Timed]]:
    """Start annealing, two runs at a time; yields schedules as they are done. `spent` collects evaluations."""
    controls = [new_control() for _ in runs]
    mixes: dict[tuple[int, ...], Mixes] = {}
    lock = Lock()

    def run(number: int) -> list[Timed]:
        def schedule(problem: Problem) -> list[Timed]:
            with lock:
                if problem.ops not in mixes:
                    mixes[problem.ops] = lp_bound(problem).mixes
            schedule = search(
                problem,
                mixes[problem.ops],
                *runs[number],
                seed=seed * len(runs) + number,
                evaluations=evaluations,
                control=controls[number],
            )
            spent.append(int(controls[number][DONE]))
            return schedule

        return in_rounds(profile, attempt.setting, attempt.num_rounds, schedule)

    pool = ThreadPoolExecutor(max_workers=2)
    futures = [pool.submit(run, number) for number in range(len(runs))]

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
