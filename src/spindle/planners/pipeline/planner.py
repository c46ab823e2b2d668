"""Planner `pipeline`: for every batch the order of its passes, and what each stage keeps (DIP §4).

Chunks stand where a layout has them, chosen before training. What the search finds becomes a plan, a program and a
simulated step like any other; only there is counted what waits between ranks, so a plan that does not fit with it is
made again with a smaller activation budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.plan import Plan
from spindle.planners.bounds import bound_ns
from spindle.planners.finish import finished
from spindle.planners.options import Layout, PlanOptions, Progress
from spindle.planners.pipeline.chains import (
    layer_counts,
    layer_loads,
    layout_of,
    modules_in_rows,
    pipeline_ranks_of,
    separate_chains,
)
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.memory import fastest_choices
from spindle.planners.pipeline.retime import stage_columns
from spindle.planners.pipeline.search import SearchResult, search
from spindle.planners.pipeline.segments import Column
from spindle.planners.pipeline.stages import NS, Batch, batches_of, plan_of
from spindle.profile import Profile
from spindle.program import lower, posted_peaks, refuse_overfull
from spindle.simulate import simulate

EVALUATIONS = 4000
_LAYOUT_EVALUATIONS = 32
_NEARLY = 1.01  # as short: chains of fewer chunks are searched faster
_ATTEMPTS = 6
_MARGIN = 1 / 4096  # of a device's memory: taken from an activation budget beyond the excess
_FIRST_EVALUATIONS = 16  # of a first attempt, which finds out how much is on its way between ranks


def natural_rounds(profile: Profile) -> dict[str, int]:
    """How often each module passes all ranks: as many times as its longest call takes the shortest module's (DIP §4.1,
    K = floor(T / T_1)). Modules of one layer, which cannot be spread, do not count."""
    setting = profile.default_setting
    times: dict[str, dict[tuple[str, str], float]] = {}
    for position, op in enumerate(profile.graph.metaops):
        curve = profile.curve(position, setting)
        calls = times.setdefault(op.module or "", {})
        key = (op.task, op.call or "")
        calls[key] = calls.get(key, 0.0) + op.num_layers * curve.layer_s(curve.num_devices[0])
    longest = {module: max(calls.values()) for module, calls in times.items()}
    counts = layer_counts(profile.graph)
    shortest = min((longest[module] for module in longest if counts[module] > 1), default=max(longest.values()))
    return {module: max(1, int(time_s / max(shortest, 1e-12))) for module, time_s in longest.items()}


def pipeline_layout(profile: Profile, num_ranks: int) -> Layout:
    """Choose where the chunks of each module stand, on a representative batch.

    Chains that pass the ranks more often fill and drain them faster, and send more; the best of a few is taken.
    """
    loads, rounds, rows = layer_loads(profile), natural_rounds(profile), modules_in_rows(profile.graph)
    candidates: list[tuple[int, Layout]] = []  # with the length of the best schedule
    refusals: list[DoesNotFitError] = []
    for factor in (1, 2, 4):
        times = {module: factor * count for module, count in rounds.items()}
        layout = layout_of(profile, num_ranks, separate_chains(loads, times, num_ranks, rows))
        if any(layout == candidate for _, candidate in candidates):
            continue
        try:
            results = [
                search(batch.segments, batch.activation_budget, evaluations=_LAYOUT_EVALUATIONS)
                for batch in batches_of(profile, layout)
            ]
        except DoesNotFitError as error:
            refusals.append(error)
            continue
        candidates.append((max(result.schedule.makespan_ns for result in results), layout))
    if not candidates:
        raise refusals[0]
    shortest = min(makespan for makespan, _ in candidates)
    return next(layout for makespan, layout in candidates if makespan <= _NEARLY * shortest)


def plan_pipeline(profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Search the best plan for a batch."""
    return search_pipeline(profile, options, progress)[0]


def search_pipeline(
    profile: Profile, options: PlanOptions, progress: Progress | None = None
) -> tuple[Plan, list[SearchResult]]:
    """Search the best plan for a batch; returns it with the search result of each replica."""
    layout = options.layouts[0] if options.layouts else pipeline_layout(profile, pipeline_ranks_of(profile, options))
    batches = batches_of(profile, layout)
    num_evaluations = EVALUATIONS if options.evaluations is None else options.evaluations
    results: list[SearchResult] = []

    def schedules(activation_budgets: Sequence[Column], is_first: bool) -> list[Schedule]:
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
                    evaluations=min(num_evaluations, _FIRST_EVALUATIONS) if is_first else num_evaluations,
                    seed=options.seed + number,
                    time_limit_s=limit_s,
                    progress=tell,
                )
            )
        return [result.schedule for result in results]

    plan = fitting_plan(profile, layout, "pipeline", batches, schedules)
    plan = replace(
        plan,
        seed=options.seed,
        evaluations=sum(result.evaluations for result in results),
        cut_s=options.time_limit_s if any(result.is_cut for result in results) else None,
    )
    return plan, results


def fitting_plan(
    profile: Profile,
    layout: Layout,
    planner: str,
    batches: Sequence[Batch],
    schedules: Callable[[Sequence[Column], bool], Sequence[Schedule]],
) -> Plan:
    """Make a plan of schedules that fits, bytes in flight between ranks included.

    Only a program knows what is in flight, so budgets shrink by the excess from attempt to attempt. What counts is the
    more of two peaks: of the simulated step, and with exchanges posted as early as the runtime posts them. `schedules`
    is told whether this is the first attempt, which only finds out how much that is.
    """
    limit = profile.cluster.kind.memory_bytes
    activation_budgets = [batch.activation_budget for batch in batches]
    for attempt in range(_ATTEMPTS):
        plan = plan_of(profile, layout, planner, batches, schedules(activation_budgets, attempt == 0))
        program = lower(plan, profile)
        timeline = simulate(program, profile)
        plan = replace(plan, makespan_s=timeline.makespan_s)
        # Members of a tensor parallel group hold the same.
        peak_bytes = timeline.peak_bytes().reshape(-1, layout.tensor_degree).max(axis=1)
        first_members = range(0, profile.cluster.num_devices, layout.tensor_degree)
        peak_bytes = np.maximum(peak_bytes, posted_peaks(program, profile, first_members))
        by_rank = peak_bytes.reshape(layout.num_replicas, layout.num_ranks)
        excesses = [by_rank[batch.replica] - limit for batch in batches]
        if max(excess.max() for excess in excesses) <= 0 and attempt:
            break
        activation_budgets = [
            activation_budget - np.maximum(0, excess + (excess > 0) * int(_MARGIN * limit))
            for activation_budget, excess in zip(activation_budgets, excesses, strict=True)
        ]
    refuse_overfull(np.repeat(peak_bytes, layout.tensor_degree), profile)
    return finished(plan, profile, bound_s(batches))


def bound_s(batches: Sequence[Batch]) -> float:
    """Below this no plan with these chunks comes: the passes of a replica, and the optimizer's step behind the last of
    them. Several replicas could share the microbatches in another way: they are not through before the work of a rank,
    spread evenly over its counterparts."""
    update_ns = min(int(batch.update_ns.min()) for batch in batches)
    if len(batches) == 1:
        return (bound_ns(batches[0].least) + update_ns) / NS
    fastest = [fastest_choices(batch.segments) for batch in batches]
    work = sum(
        sum(column.sum(axis=0) for column in stage_columns(batch.segments, choice)[:2])
        for batch, choice in zip(batches, fastest, strict=True)
    )
    return (float(np.max(work)) / len(batches) + update_ns) / NS
