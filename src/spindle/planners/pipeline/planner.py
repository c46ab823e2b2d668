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
from spindle.planners.pipeline.chains import Layout, layer_loads, layout_of, separate_chains
from spindle.planners.pipeline.interleave import Schedule
from spindle.planners.pipeline.search import search
from spindle.planners.pipeline.segments import Column
from spindle.planners.pipeline.stages import NS, Batch, batches_of, plan_of
from spindle.planners.wavefront import Effort, Progress
from spindle.profile import Profile
from spindle.program import lower, refuse_overfull, verify
from spindle.simulate import simulate

EVALUATIONS = 4000
_LAYOUT_EVALUATIONS = 64
_ATTEMPTS = 5


def natural_rounds(profile: Profile) -> dict[str, int]:
    """How often each module passes all ranks: as many times as its longest call takes the shortest module's (DIP §4.1,
    K = floor(T / T_1))."""
    setting = profile.default_setting
    times: dict[str, dict[tuple[str, str], float]] = {}
    for position, op in enumerate(profile.graph.metaops):
        curve = profile.curve(position, setting)
        calls = times.setdefault(op.module or "", {})
        key = (op.task, op.call or "")
        calls[key] = calls.get(key, 0.0) + op.num_layers * curve.layer_s(curve.num_devices[0])
    longest = {module: max(calls.values()) for module, calls in times.items()}
    return {module: max(1, int(time_s / min(longest.values()))) for module, time_s in longest.items()}


def pipeline_layout(profile: Profile, num_ranks: int) -> Layout:
    """Where the chunks of each module stand, chosen on a batch that stands for all.

    Chains that pass the ranks more often fill and drain them faster, and send more; the best of a few is taken.
    """
    loads, rounds = layer_loads(profile), natural_rounds(profile)
    found: list[tuple[int, int, Layout]] = []
    refusals: list[DoesNotFitError] = []
    for factor in (1, 2, 4):
        times = {module: factor * count for module, count in rounds.items()}
        layout = layout_of(profile, num_ranks, separate_chains(loads, times, num_ranks))
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
        found.append((max(one.schedule.makespan_ns for one in results), factor, layout))
    if not found:
        raise refusals[0]
    return min(found, key=lambda one: one[:2])[2]
