"""Planner `wavefront`: ours. No barrier between levels, any number of devices, allocations that change as the step
unfolds.

It anneals schedules in folded time under several rules, places each on devices, and lets the simulator choose: with
transfers, synchronisation, the optimizer and memory. The baselines' and the paper's schedules stand among the
candidates, so it is never slower than they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace


from spindle.errors import DoesNotFitError
from spindle.plan import Plan
from spindle.planners.anneal import search
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.build import Attempt, Scheduler, best_over_stages, counts_bytes, in_rounds, realise, scored
from spindle.planners.paper import schedule_paper
from spindle.planners.problem import Problem, Timed
from spindle.profile import Profile

# What each rule costs in simulations is small beside annealing; what it may find is not known before.
PLAIN_EVALUATIONS = 240_000
WITH_BYTES_EVALUATIONS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search. The same effort and seed give the same plan, unless a time limit cuts the search short."""

    seed: int = 0
    evaluations: int | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to anneal: pieces an op may have, and how much of the optimizer's time to charge to layers.

    A layer on n devices has its weights updated on n devices. Charging that to its time leads the search to plans that
    hold fewer copies; charging none leads to the shortest passes.
    """

    piece_limit: int
    update_share: float = 0.0
    seed: int = 0


PLAIN_RULES = (Rule(piece_limit=4), Rule(piece_limit=3, seed=1))
WITH_BYTES_RULES = (
    Rule(piece_limit=2, update_share=1.0),
    Rule(piece_limit=3, update_share=1.0, seed=1),
    Rule(piece_limit=3, update_share=0.5, seed=2),
    Rule(piece_limit=4, seed=3),
)


def plan_wavefront(profile: Profile, effort: Effort) -> Plan:
    """The best plan of all rules, in the first stage of memory saving at which one fits."""
    clock = _Clock(effort.time_limit_s)
    rules = WITH_BYTES_RULES if counts_bytes(profile) else PLAIN_RULES
    default = WITH_BYTES_EVALUATIONS if counts_bytes(profile) else PLAIN_EVALUATIONS
    evaluations = max(1, (default if effort.evaluations is None else effort.evaluations) // len(rules))

    def plan_for(attempt: Attempt) -> Plan:
        best: Plan | None = None
        refusal: DoesNotFitError | None = None
        for schedule in _candidates(profile, attempt, rules, effort.seed, evaluations):
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
    return replace(plan, evaluations=evaluations * len(rules), cut_s=clock.cut_s)


class _Clock:
    """Says when the time limit is over, and when it was found so."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._began, self.cut_s = limit_s, time.monotonic(), None

    def is_over(self) -> bool:
        elapsed = time.monotonic() - self._began
        if self._limit_s is None or elapsed < self._limit_s:
            return False
        self.cut_s = self.cut_s or round(elapsed, 3)
        return True


def _candidates(
    profile: Profile, attempt: Attempt, rules: tuple[Rule, ...], seed: int, evaluations: int
) -> Iterator[list[Timed]]:
    """Schedules to place and simulate: annealed ones, two at a time on two cores, then everyone else's."""

    def annealed(rule: Rule) -> list[Timed]:
        def schedule(problem: Problem) -> list[Timed]:
            charged = _with_updates(problem, rule.update_share)
            return search(charged, rule.piece_limit, seed * len(rules) + rule.seed, evaluations)

        return in_rounds(profile, attempt.setting, attempt.num_rounds, schedule)

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(annealed, rules)
    others: tuple[Scheduler, ...] = (schedule_paper, schedule_task_level, schedule_distmm, schedule_sequential)
    for scheduler in others:
        timed = in_rounds(profile, attempt.setting, attempt.num_rounds, scheduler)
        yield [replace(one, wave=None) for one in timed]


def _with_updates(problem: Problem, share: float) -> Problem:
    """The problem with a share of each layer's optimizer time added to its layer time."""
    if not share:
        return problem
    graph = problem.profile.graph
    update_bytes = graph.numerics.update_bytes / problem.profile.cluster.kind.memory_bytes_per_s
    choices = []
    for number, op in enumerate(problem.ops):
        elements = sum(
            graph.parameters[parameter].num_elements
            for layer in graph.metaops[op].parameters
            for parameter in layer
            if graph.parameters[parameter].trainable
        )
        per_layer = elements / problem.num_layers[number] / problem.setting.tensor_degrees[op]
        one = problem.choices[number]
        choices.append(replace(one, layer_s=one.layer_s + share * per_layer * update_bytes))
    return replace(problem, choices=tuple(choices))
