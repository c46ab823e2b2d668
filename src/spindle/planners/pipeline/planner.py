"""Planner `pipeline`: for every batch the order of its passes, and what each stage keeps (DIP §4).

Chunks stand where a layout has them, chosen before training. What the search finds becomes a plan, a program and a
simulated step like any other; only there is counted what waits between ranks, so a plan that does not fit with it is
made again with a little less room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.plan import Plan, check
from spindle.planners.pipeline.bound import bound_ns
from spindle.planners.pipeline.chains import (
    Layout,
    layer_counts,
    layer_loads,
    layout_of,
    modules_in_rows,
    separate_chains,
)
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.memory import fastest_choices
from spindle.planners.pipeline.retime import stage_columns
from spindle.planners.pipeline.search import Found, search
from spindle.planners.pipeline.segments import Column
from spindle.planners.pipeline.stages import NS, Batch, batches_of, plan_of
from spindle.planners.wavefront import Effort, Progress
from spindle.profile import Profile
from spindle.program import lower, refuse_overfull, verify
from spindle.simulate import simulate

EVALUATIONS = 4000
_LAYOUT_EVALUATIONS = 32
_NEARLY = 1.01  # as short: chains of fewer chunks are searched faster
_ATTEMPTS = 6
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
    """Where the chunks of each module stand, chosen on a batch that stands for all.

    Chains that pass the ranks more often fill and drain them faster, and send more; the best of a few is taken.
    """
    loads, rounds, rows = layer_loads(profile), natural_rounds(profile), modules_in_rows(profile.graph)
    found: list[tuple[int, int, Layout]] = []
    refusals: list[DoesNotFitError] = []
    for factor in (1, 2, 4):
        times = {module: factor * count for module, count in rounds.items()}
        layout = layout_of(profile, num_ranks, separate_chains(loads, times, num_ranks, rows))
        if any(layout == other for _, _, other in found):
            continue
        try:
            results = [
                search(batch.segments, batch.room, evaluations=_LAYOUT_EVALUATIONS)
                for batch in batches_of(profile, layout)
            ]
        except DoesNotFitError as error:
            refusals.append(error)
            continue
        found.append((max(result.schedule.makespan_ns for result in results), factor, layout))
    if not found:
        raise refusals[0]
    shortest = min(makespan for makespan, _, _ in found)
    return next(layout for makespan, _, layout in found if makespan <= _NEARLY * shortest)


def plan_pipeline(profile: Profile, layout: Layout, effort: Effort, progress: Progress | None = None) -> Plan:
    """The best plan found for a batch, finished."""
    return search_pipeline(profile, layout, effort, progress)[0]


def search_pipeline(
    profile: Profile, layout: Layout, effort: Effort, progress: Progress | None = None
) -> tuple[Plan, list[Found]]:
    """The best plan found for a batch, finished, and how the search of each replica came to it."""
    batches = batches_of(profile, layout)
    budget = EVALUATIONS if effort.evaluations is None else effort.evaluations
    found: list[Found] = []

    def schedules(rooms: Sequence[Column], is_first: bool) -> list[Schedule]:
        found.clear()
        for number, (batch, room) in enumerate(zip(batches, rooms, strict=True)):

            def tell(evaluations: int, _: int, before: int = number) -> None:
                if progress is not None:
                    progress((before + min(1.0, evaluations / budget)) / len(batches))

            limit_s = None if effort.time_limit_s is None else effort.time_limit_s / len(batches)
            found.append(
                search(
                    batch.segments,
                    room,
                    evaluations=min(budget, _FIRST_EVALUATIONS) if is_first else budget,
                    seed=effort.seed + number,
                    time_limit_s=limit_s,
                    progress=tell,
                )
            )
        return [one.schedule for one in found]

    plan = fitting_plan(profile, layout, "pipeline", batches, schedules)
    plan = replace(
        plan,
        seed=effort.seed,
        evaluations=sum(one.evaluations for one in found),
        cut_s=effort.time_limit_s if any(one.is_cut for one in found) else None,
    )
    return plan, found


def fitting_plan(
    profile: Profile,
    layout: Layout,
    planner: str,
    batches: Sequence[Batch],
    schedules: Callable[[Sequence[Column], bool], Sequence[Schedule]],
) -> Plan:
    """The finished plan of the schedules under the room there is, less what turned out to be on its way between ranks.

    `schedules` hears whether this is the first attempt, which only finds that out.
    """
    limit = profile.cluster.kind.memory_bytes
    rooms = [batch.room for batch in batches]
    for attempt in range(_ATTEMPTS):
        plan = plan_of(profile, layout, planner, batches, schedules(rooms, attempt == 0))
        timeline = simulate(lower(plan, profile), profile)
        peaks = timeline.peak_bytes()
        by_rank = peaks.reshape(layout.num_replicas, layout.num_ranks, -1).max(axis=2)
        over = [by_rank[batch.replica] - limit for batch in batches]
        if max(one.max() for one in over) <= 0 and attempt:
            break
        rooms = [room - np.maximum(0, one + (one > 0) * (1 << 24)) for room, one in zip(rooms, over, strict=True)]
    refuse_overfull(peaks, profile)
    check(plan, profile)
    verify(lower(plan, profile), profile)
    return replace(plan, makespan_s=timeline.makespan_s, bound_s=bound_s(batches))


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
