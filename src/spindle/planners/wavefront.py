"""Planner `wavefront`: ours. No barrier between levels, any number of devices, allocations that change as the step
unfolds.

It anneals schedules in folded time, places each on devices, and lets the simulator choose: with transfers,
synchronisation, the optimizer and memory. The plans of the baselines and of the paper are among the candidates, so it
is never slower than they are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Lock

from spindle.errors import DoesNotFitError
from spindle.plan import Plan, relaxed, setting_of
from spindle.planners.anneal import DONE, STOP, Mixes, Run, new_control, search
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.bounds import lp_bound, step_bound_s
from spindle.planners.build import (
    Attempt,
    best_over_stages,
    closest_of,
    fastest,
    in_rounds,
    optimizer_settings,
    realise,
    refuse_hopeless,
    stages,
    time_of,
    with_cuts,
)
from spindle.planners.exhaustive import shorten
from spindle.planners.finish import cut_for_gathers, finished, scored
from spindle.planners.options import PlanOptions, Progress
from spindle.planners.paper import schedule_paper
from spindle.planners.problem import Problem, Timed, problem_of
from spindle.profile import Profile, Setting
from spindle.program import counts_bytes

# How many folded schedules are tried for a setting. An evaluation takes time linear in the number of ops. The start
# from the LP is the better the more ops there are, so large problems need no more time than ones of middle size.
MOST_EVALUATIONS = 400_000
EVALUATIONS_TIMES_OPS = 32_000_000
WITH_BYTES_EVALUATIONS_PER_OP = 6_400
# With bytes, a candidate must also be placed and simulated, which takes longer the more devices there are.
LARGE_CLUSTER = 256
MOST_SIMULATED = 2  # annealed schedules that are placed and simulated on a large cluster
REFINED = 4  # how many times as many evaluations the best of several settings gets
MOST_DEGREES = 4  # choices of tensor degrees that are annealed
MOST_UNSHARDED = 1  # annealed schedules that are also tried without a sharded optimizer
MOST_UNSHARDED_MEASURED = 4  # the same, if a sharded optimizer must win by a margin
# A step takes at least this share of the folded time of its plan without barriers: 0.992 to 1.07 were observed. It may
# be shorter because ranks of a slot that get their rows early start early.
LEAST_STEP = 0.98
_GLANCE_S = 0.05  # seconds between looks at the clock while a planner waits
FEW_OPS = 6
FEW_OPS_RUNS = (Run(4, 0.2), Run(3, 0.0, 0.03, narrows=False))
PLAIN_RUNS = (Run(4, 0.2), Run(3, 0.0))
WITH_BYTES_RUNS = (Run(2, 0.2), Run(3, 0.2), Run(4, 0.2), Run(2, 0.0))


def plan_wavefront(profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Make the best plan of all candidates. `progress` is called with the share of an attempt's annealing that is done,
    from 0 to 1."""
    clock = _Clock(options.time_limit_s)
    runs: tuple[Run, ...] = FEW_OPS_RUNS if len(profile.graph.metaops) <= FEW_OPS else PLAIN_RUNS
    if counts_bytes(profile):
        runs = WITH_BYTES_RUNS
    evaluations = max(1, (options.evaluations or _default_evaluations(profile)) // len(runs))
    is_large = profile.cluster.num_devices > LARGE_CLUSTER
    spent: list[int] = []
    refused: list[DoesNotFitError] = []
    unsharded_refused: list[DoesNotFitError] = []  # this says nothing about whether memory is short
    tried: list[Attempt] = []

    def plan_for(attempt: Attempt, refines: int = 1) -> Plan:
        """The best plan of an attempt; the best of all attempts so far if no new one can be better."""
        tried.append(attempt)
        frugal, *others = optimizer_settings(profile, attempt.setting, options.shard_optimizer)
        if plans and lp_bound(problem_of(profile, attempt.setting)).bound_s > best_s():
            return fastest(plans, profile)
        plans_before = len(plans)
        annealed: list[tuple[Plan, list[Timed]]] = []
        first_seed = (2 * options.seed + (refines > 1)) * len(runs)
        running = _annealed_schedules(profile, attempt, runs, first_seed, evaluations * refines, clock, progress, spent)
        known_schedules = [] if refines > 1 else _known_schedules(profile, attempt)  # while the other threads anneal
        if is_large:
            running = iter(
                sorted(running, key=lambda schedule: max(piece.end_s for piece in schedule))[:MOST_SIMULATED]
            )
        if not counts_bytes(profile):
            running = _shortest_first(problem_of(profile, attempt.setting), list(running))
        for schedule in running:
            # Annealed schedules have no barriers, so a step takes about their folded time at least. On small problems,
            # several runs find the same schedule.
            is_new = all(schedule != known for _, known in annealed)
            if is_new and (not plans or max(piece.end_s for piece in schedule) < best_s()):
                variants = _annealed_plans(profile, frugal, schedule, options.seed, plans, refused)
                plans.extend(variants)
                annealed += [(plan, schedule) for plan in variants]
        for setting in others:
            most = MOST_UNSHARDED_MEASURED if profile.measured_on else MOST_UNSHARDED
            for _, schedule in sorted(annealed, key=lambda pair: time_of(pair[0]))[:most]:
                plans.extend(_plans_of_schedule(profile, setting, schedule, options.seed, plans, unsharded_refused))
        for schedule in known_schedules:
            plans.extend(_plans_of_schedule(profile, frugal, schedule, options.seed, plans, refused))
            for setting in others:
                plans.extend(_plans_of_schedule(profile, setting, schedule, options.seed, plans, unsharded_refused))
        if len(plans) == plans_before:
            if plans:
                return fastest(plans, profile)
            raise closest_of(refused)
        return fastest(plans[plans_before:], profile)

    plans: list[Plan] = []

    def best_s() -> float:
        return min(plan.makespan_s for plan in plans)

    best: Plan | None = None
    refusal: DoesNotFitError | None = None
    try:
        best = best_over_stages(profile, plan_for, MOST_DEGREES)
        if len(tried) > 1:
            plan_for(_attempt_of(best, profile), REFINED)
    except DoesNotFitError as error:
        refusal = error
    if refused or refusal or tried != [Attempt(setting=profile.default_setting)]:
        # Memory is short or batches are small, so other settings may have their best plan where we did not look.
        for attempt in [attempt for stage in stages(profile) for attempt in stage if attempt not in tried]:
            if plans and lp_bound(problem_of(profile, attempt.setting)).bound_s > best_s():
                continue
            for schedule in _known_schedules(profile, attempt):
                for setting in optimizer_settings(profile, attempt.setting, options.shard_optimizer):
                    plans.extend(_plans_of_schedule(profile, setting, schedule, options.seed, plans, unsharded_refused))
    if not plans:
        assert refusal is not None
        raise refusal
    shortest = fastest(plans if best is None else [best, *plans], profile)
    if best is None or shortest is not best:
        best = finished(shortest, profile, step_bound_s(profile))
    return replace(best, seed=options.seed, evaluations=sum(spent), cut_s=clock.cut_s)


def _default_evaluations(profile: Profile) -> int:
    num_ops = len(profile.graph.metaops)
    most = EVALUATIONS_TIMES_OPS // num_ops
    if not counts_bytes(profile):
        return min(most, MOST_EVALUATIONS)
    return min(most, WITH_BYTES_EVALUATIONS_PER_OP * num_ops)


def _attempt_of(plan: Plan, profile: Profile) -> Attempt:
    return Attempt(setting=replace(setting_of(plan, profile), shard_optimizer=False), num_rounds=plan.num_rounds)


def _known_schedules(profile: Profile, attempt: Attempt) -> list[list[Timed]]:
    """The schedules of the paper and the baselines under an attempt; none if the bytes cannot fit anyway."""
    try:
        refuse_hopeless(profile, attempt)
    except DoesNotFitError:
        return []
    schedulers = (schedule_paper, schedule_task_level, schedule_distmm, schedule_sequential)
    return [in_rounds(profile, attempt.setting, attempt.num_rounds, scheduler) for scheduler in schedulers]


def _plans_of_schedule(
    profile: Profile,
    setting: Setting,
    schedule: list[Timed],
    seed: int,
    plans: list[Plan],
    refused: list[DoesNotFitError],
) -> list[Plan]:
    """The plans of a schedule: unchanged, and without barriers if it has waves. None if it cannot be better.

    That is checked before it is placed on devices, and again before it is simulated. The simulated step has no
    barriers, so removing them only changes folded time, which is all that counts without bytes.
    """
    if plans and _least_s(schedule, profile.cluster.num_devices) > min(plans, key=time_of).makespan_s:
        return []
    try:
        plan = realise(profile, setting, "wavefront", schedule, seed)
        has_waves = any(piece.wave is not None for piece in schedule)
        without_barriers = relaxed(plan, profile, setting) if has_waves else plan
        if _is_hopeless(without_barriers, profile, plans):
            return []
        variants = with_cuts(plan, profile)
        if has_waves and (profile.gangs or setting.shard_optimizer):
            variants.append(scored(cut_for_gathers(without_barriers, profile), profile))
        return variants
    except DoesNotFitError as error:
        refused.append(error)
        return []


def _is_hopeless(plan: Plan, profile: Profile, plans: list[Plan]) -> bool:
    """Whether a plan without barriers takes longer than the best one so far, judged by its folded time alone.

    Always False with measured times: a sharded optimizer must win by a margin there, and idle neighbours make devices
    faster.
    """
    if not plans or profile.measured_on or not counts_bytes(profile):
        return False
    return LEAST_STEP * plan.folded_s > min(plan.makespan_s for plan in plans)


def _least_s(schedule: list[Timed], num_devices: int) -> float:
    """A lower bound on steps with these pieces: the total device time, and the pieces of an op or team, which run one
    after another."""
    busy_s = sum((piece.end_s - piece.start_s) * piece.num_devices for piece in schedule) / num_devices
    in_turn_s: dict[int | str, float] = defaultdict(float)
    for piece in schedule:
        in_turn_s[piece.op if piece.team is None else piece.team] += piece.end_s - piece.start_s
    return max(busy_s, *in_turn_s.values())


def _shortest_first(problem: Problem, schedules: list[list[Timed]]) -> Iterator[list[Timed]]:
    """The schedules by folded time, after the optimal one if the problem is tiny."""
    in_order = sorted(schedules, key=lambda schedule: max(piece.end_s for piece in schedule))
    shortest = shorten(problem, in_order[0])
    yield shortest
    yield from in_order if shortest is not in_order[0] else in_order[1:]


def _annealed_plans(
    profile: Profile,
    setting: Setting,
    schedule: list[Timed],
    seed: int,
    plans: list[Plan],
    refused: list[DoesNotFitError],
) -> list[Plan]:
    """The plans of an annealed schedule, with slots cut for gathers. Empty if it does not fit or cannot be better."""
    try:
        plan = realise(profile, setting, "wavefront", schedule, seed)
        return [] if _is_hopeless(plan, profile, plans) else [scored(cut_for_gathers(plan, profile), profile)]
    except DoesNotFitError as error:
        refused.append(error)
        return []


class _Clock:
    """The time limit: whether it has passed, and when that was noticed."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._began = limit_s, time.monotonic()
        self.cut_s: float | None = None

    def is_over(self) -> bool:
        elapsed = time.monotonic() - self._began
        if self._limit_s is None or elapsed < self._limit_s:
            return False
        self.cut_s = self.cut_s or round(elapsed, 3)
        return True


def _annealed_schedules(
    profile: Profile,
    attempt: Attempt,
    runs: tuple[Run, ...],
    first_seed: int,
    evaluations: int,
    clock: _Clock,
    progress: Progress | None,
    spent: list[int],
) -> Iterator[list[Timed]]:
    """Anneal, two runs at a time; yields schedules as they are found. `spent` collects the number of evaluations."""
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
                runs[number],
                seed=first_seed + number,
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
