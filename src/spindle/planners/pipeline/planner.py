"""Planner `pipeline`: for every batch, the order of its passes and which activations each stage keeps (DIP §4).

A layout, chosen before training, places the chunks. The schedule that the search finds becomes a plan, a program and a
simulated step like any other. Only the simulation counts bytes in flight between ranks; if these do not fit, the search
runs again with a smaller activation budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from spindle.plan import Plan
from spindle.planners.finish import finished
from spindle.planners.options import Layout, PlanOptions, Progress
from spindle.planners.pipeline.bound import pipeline_bound_s
from spindle.planners.pipeline.chains import pipeline_ranks_of
from spindle.planners.pipeline.choose import pipeline_layout
from spindle.planners.pipeline.gates import least_caps
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.rank_parameters import owning_ranks_in
from spindle.planners.pipeline.search import SearchResult, search
from spindle.planners.pipeline.segments import Column, Segments
from spindle.planners.pipeline.stages import Batch, batches_of, plan_of
from spindle.profile import Profile
from spindle.program import lower, posted_peaks, refuse_overfull
from spindle.simulate import simulate

EVALUATIONS = 4000
_ATTEMPTS = 8
_EXACT_ATTEMPTS = 3  # attempts that reduce the budget by the excess; later ones by two, four, ... times the excess
_MARGIN = 1 / 4096  # share of a device's memory by which an activation budget shrinks in addition to the excess
_FIRST_EVALUATIONS = 16  # evaluations of the trial, which measures how many bytes are in flight between ranks


def plan_pipeline(profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Search for the best plan of a batch."""
    return search_pipeline(profile, options, progress)[0]


def search_pipeline(
    profile: Profile, options: PlanOptions, progress: Progress | None = None
) -> tuple[Plan, list[SearchResult]]:
    """Search for the best plan of a batch; returns it with the search result of each replica."""
    layout = options.layouts[0] if options.layouts else pipeline_layout(profile, pipeline_ranks_of(profile, options))
    batches = batches_of(profile, layout)
    num_evaluations = EVALUATIONS if options.evaluations is None else options.evaluations
    results: list[SearchResult] = []

    def schedules(activation_budgets: Sequence[Column], is_trial: bool) -> list[Schedule]:
        results.clear()
        for number, (batch, activation_budget) in enumerate(zip(batches, activation_budgets, strict=True)):

            def tell(evaluations: int, _: int, before: int = number) -> None:
                if progress is not None:
                    progress((before + min(1.0, evaluations / num_evaluations)) / len(batches))

            limit_s = None if options.time_limit_s is None else options.time_limit_s / len(batches)
            results.append(
                search(
                    batch.segments,
                    activation_budget,
                    evaluations=min(num_evaluations, _FIRST_EVALUATIONS) if is_trial else num_evaluations,
                    seed=options.seed + number,
                    time_limit_s=limit_s,
                    progress=tell,
                )
            )
        return [result.schedule for result in results]

    # A short search needs no trial: it costs as much.
    has_trial = num_evaluations > _FIRST_EVALUATIONS
    plan = fitting_plan(
        profile, layout, "pipeline", batches, schedules, options.bound_s, has_trial, is_draft=options.is_draft
    )
    plan = replace(
        plan,
        seed=options.seed,
        evaluations=sum(result.evaluations for result in results),
        cut_s=options.time_limit_s if any(result.is_cut for result in results) else None,
        settings=layout.text,
    )
    return plan, results


def fitting_plan(
    profile: Profile,
    layout: Layout,
    planner: str,
    batches: Sequence[Batch],
    schedules: Callable[[Sequence[Column], bool], Sequence[Schedule]],
    bound_s: float | None = None,
    has_trial: bool = False,
    is_draft: bool = False,
) -> Plan:
    """Make a plan from schedules that fits into memory, including bytes in flight between ranks.

    Only a program knows what is in flight, so budgets shrink by the excess from attempt to attempt. The excess is that
    of the larger of two peaks: of the simulated step, and with exchanges posted as early as the runtime posts them.
    With `has_trial`, a trial comes first, which only measures the bytes in flight; the second argument of `schedules`
    says whether this is the trial. `bound_s` is the bound of the profile unless given. A draft is neither checked nor
    verified.
    """
    limit = profile.cluster.kind.memory_bytes
    owning_ranks = tuple(sorted(owning_ranks_in(profile.graph, layout).items()))
    activation_budgets = [batch.activation_budget for batch in batches]
    for attempt in range(_ATTEMPTS):
        is_trial = has_trial and attempt == 0
        tried = schedules(activation_budgets, is_trial)
        plan = plan_of(profile, layout, planner, batches, tried)
        program = lower(plan, profile)
        timeline = simulate(program, profile)
        plan = replace(plan, makespan_s=timeline.makespan_s)
        # Members of a tensor-parallel group need the same memory.
        peak_bytes = timeline.peak_bytes().reshape(-1, layout.tensor_degree).max(axis=1)
        first_members = range(0, profile.cluster.num_devices, layout.tensor_degree)
        # A device holds the weights of its chunks even in steps that do not use them.
        owned = replace(program, owning_ranks=owning_ranks)
        peak_bytes = np.maximum(peak_bytes, posted_peaks(owned, profile, first_members))
        by_rank = peak_bytes.reshape(layout.num_replicas, layout.num_ranks)
        excesses = [by_rank[batch.replica] - limit for batch in batches]
        if max(excess.max() for excess in excesses) <= 0 and not is_trial:
            break
        # The peak of a step may be at another moment than the peak of its schedule: then the excess stays the same
        # while the budget falls, so reduce the budget faster from attempt to attempt.
        factor = 1 << max(0, attempt + 1 - _EXACT_ATTEMPTS)
        activation_budgets = [
            _smaller_budget(budget, schedule.peak, factor * excess, batch.segments, int(_MARGIN * limit))
            for budget, schedule, excess, batch in zip(activation_budgets, tried, excesses, batches, strict=True)
        ]
    refuse_overfull(np.repeat(peak_bytes, layout.tensor_degree), profile)
    if bound_s is None:
        bound_s = pipeline_bound_s([profile], layout.num_ranks)
    return finished(plan, profile, bound_s, is_draft)


def _smaller_budget(budget: Column, peak: Column, excess: Column, segments: Segments, margin: int) -> Column:
    """The activation budget of each rank for the next attempt, after a schedule with this peak exceeded the memory.

    A schedule may need less than its budget, so only a budget below its peak leads to another schedule. No budget
    becomes so small that one microbatch alone no longer fits.
    """
    smaller = np.minimum(budget, peak) - excess - margin
    return np.where(excess > 0, np.maximum(smaller, np.minimum(budget, least_caps(segments))), budget)
