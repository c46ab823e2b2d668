"""The choice of a layout and of a size of parts, by the schedules of batches that stand for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import MetaGraph
from spindle.planners.colocate.columns import EVERYTHING, Known
from spindle.planners.colocate.layouts import layouts_with, seconds_of_module
from spindle.planners.colocate.planner import SYSTEMS, System, first_look, glance, plan_system, schedule_parts
from spindle.planners.options import DEDICATED, FIRST, REPLICATED, SPREAD, Layout, PlanOptions
from spindle.planners.pipeline.baselines import baseline_layouts
from spindle.planners.pipeline.choose import choose_layout
from spindle.planners.pipeline.planner import plan_pipeline
from spindle.planners.pipeline.rank_parameters import ranks_of_whole
from spindle.planners.pipeline.stage_costs import NS
from spindle.profile import Profile

_LEAST_LOSS = 1.03  # of a schedule over all its work, spread evenly: no layout is tried that has to lose less
_FIRST_NEAR, _NEAR = 1.08, 1.03  # layouts within these factors of the shortest get a second look, and become plans
_FAR = 1.25  # with several batches, layouts whose work alone is longer are left out
_NUM_FINALISTS = 4  # layouts that become plans, which differ by some percent from their schedules
_EVALUATIONS = 256  # of planner `pipeline`, where the two are compared


def choose_colocation(
    planner: str,
    part_profiles: Sequence[Profile],
    split_profiles: Sequence[Profile],
    num_ranks: int,
    shards_optimizer: bool | None = None,
    other_batches: Sequence[Sequence[Profile]] = (),
) -> tuple[Profile, Layout]:
    """Choose placement, tensor degree and parts of encoders for a system, on a batch that stands for all: among
    profiles whose item calls are in parts, the first of them in whole calls, by the lengths of their schedules; the
    best of these against planner `pipeline` on `split_profiles`, by simulation. The optimizer is sharded where encoders
    stand whole, unless `shards_optimizer` decides.

    `other_batches` have the extremes of a mix, and parts of the same sizes. Then the layout has to fit the first batch
    and as many of the others as any does; of these, its worst step is the shortest, each in proportion to the shortest
    that any layout has there. Planner `pipeline` has to be faster on the first batch.
    """
    system = SYSTEMS[planner]
    refusals: list[DoesNotFitError] = []
    known: dict[tuple[int, str, int], float] = {}
    stages: Known = {}
    batches = [part_profiles, *(each for each in other_batches if len(each) == len(part_profiles))]
    candidates = [
        (size, layout)
        for size in range(len(part_profiles))
        if (size == 0) == system.whole_calls
        for layout in layouts_with(part_profiles[size], num_ranks, system.placements, shards_optimizer is not False)
        if not system.whole_calls or all(chain.tensor_degree in (0, layout.tensor_degree) for chain in layout.chains)
    ]
    candidates.sort(key=lambda candidate: _work_s(part_profiles[candidate[0]], candidate[1], known))
    far = 1.0 if len(batches) == 1 else _FAR
    best_s: np.ndarray | None = None  # by batch: the shortest that any layout has
    for rules, near in ((glance(system.rules), _FIRST_NEAR), (first_look(system.rules), _NEAR)):
        lengths = np.full((len(batches), len(candidates)), np.inf)
        for number, batch in enumerate(batches):
            least = np.zeros(len(candidates))
            if best_s is None:
                least[:] = [_LEAST_LOSS * _work_s(batch[size], layout, known) for size, layout in candidates]
            for place in np.argsort(least, kind="stable").tolist():
                if least[place] >= far * lengths[number].min():
                    continue
                size, layout = candidates[place]
                try:
                    lengths[number, place] = schedule_parts(batch[size], layout, rules, known=stages).makespan_ns / NS
                except DoesNotFitError as error:
                    refusals.append(error)
        if np.isfinite(lengths).any():  # else more settings may fit
            best_s = lengths.min(axis=1) if best_s is None else best_s
            places, of_first = _closest(lengths, best_s, near), int(lengths[0].argmin())
            if of_first not in places[:_NUM_FINALISTS]:  # of the others, none may become a plan that fits
                places.insert(_NUM_FINALISTS - 1, of_first)
            candidates = [candidates[place] for place in places]
    finalists = candidates[:_NUM_FINALISTS]
    steps_s = np.array(
        [[_simulated_s(planner, batch[size], layout) for size, layout in finalists] for batch in batches]
    ).reshape(len(batches), len(finalists))
    best: tuple[float, Profile, Layout] | None = None
    if finalists:
        place = _closest(steps_s, steps_s.min(axis=1), 1.0)[0]
        size, layout = finalists[place]
        best = steps_s[0, place], part_profiles[size], layout
    if not system.may_spread and not part_profiles:
        layout = baseline_layouts("static", split_profiles[0], num_ranks)[0]
        return split_profiles[0], replace(layout, shards_optimizer=shards_optimizer is True)
    if system.may_spread and split_profiles:
        try:
            profile, layout = choose_layout(split_profiles, num_ranks, shards_optimizer is True)
            if best is None:
                return profile, layout
            spread = plan_pipeline(profile, PlanOptions(evaluations=_EVALUATIONS, layouts=(layout,)))
            if spread.makespan_s < best[0]:
                return profile, layout
        except DoesNotFitError as error:
            refusals.append(error)
    if best is None and not refusals:
        raise PlanError(f"planner {planner!r}: {_why_no_layout(system, part_profiles[0].graph, num_ranks)}")
    if best is None:
        raise min(refusals, key=lambda refusal: refusal.needed_bytes)
    return best[1], best[2]


def _closest(lengths: np.ndarray, best_s: np.ndarray, near: float) -> list[int]:
    """Which layouts come close to the best, by batch and layout: of those that fit the first batch and most others, by
    their worst length in proportion to `best_s`, the best first, up to `near` times it."""
    fits = np.isfinite(lengths)
    worst = (np.where(fits, lengths, 0.0) / best_s[:, None]).max(axis=0)
    num_fits = fits.sum(axis=0) * (fits[0] | ~fits[0].any())  # the first batch comes first
    worst[num_fits < num_fits.max()] = np.inf
    order = np.argsort(worst, kind="stable")
    return [int(place) for place in order if worst[place] <= near * worst.min()]


def _why_no_layout(system: System, graph: MetaGraph, num_ranks: int) -> str:
    if {op.module for op in graph.metaops} == {op.module for op in graph.metaops if op.items}:
        return (
            "all modules read items alone, and none is left to spread over the ranks; use another planner (wavefront)"
        )
    if num_ranks == 1 and system.placements == (DEDICATED,):
        return (
            "encoders need a rank that runs nothing else, and a pipeline of one rank has none; use more ranks, or "
            "another planner (colocate)"
        )
    return "no layout has encoders at the tensor degree of the language model; use another planner (colocate)"


def _work_s(profile: Profile, layout: Layout, known: dict[tuple[int, str, int], float]) -> float:
    """No step of a layout is shorter: all work over the devices that may do it, nothing computed twice. `known` keeps
    the seconds of modules."""
    spread, whole, devices = 0.0, 0.0, range(0)
    for chain in layout.chains:
        degree = chain.tensor_degree or layout.tensor_degree
        seconds = 0.0
        for module in chain.modules:
            key = (id(profile), module, degree)
            if key not in known:
                known[key] = seconds_of_module(profile, module, degree)
            seconds += known[key] * degree
        if chain.placement == SPREAD:
            spread += seconds
        else:
            whole += seconds
            devices = ranks_of_whole(layout, chain)
    per_rank = layout.num_replicas * layout.tensor_degree
    if len(devices) == layout.num_ranks:
        return (spread + whole) / (per_rank * layout.num_ranks)
    both_s = (spread + whole) / (per_rank * layout.num_ranks)
    return max(both_s, whole / (per_rank * max(1, len(devices))), spread / (per_rank * layout.num_spread_ranks))


def _simulated_s(planner: str, profile: Profile, layout: Layout) -> float:
    """The simulated step of a layout; without end where it does not fit after all."""
    try:
        return plan_system(planner, profile, PlanOptions(layouts=(layout,))).makespan_s
    except DoesNotFitError:
        return float("inf")


def compare_placements(part_profiles: Sequence[Profile], num_ranks: int) -> list[tuple[str, float | None, str]]:
    """Every placement and tensor degree of encoders: in words, the seconds of its shortest schedule over sizes of parts
    and numbers of chunks, or None and why it does not fit."""
    rules = replace(glance(SYSTEMS["colocate"].rules), num_blocks=(EVERYTHING,))
    best: dict[str, tuple[float | None, str]] = {}
    stages: Known = {}
    for profile in part_profiles[1:]:
        for layout in layouts_with(profile, num_ranks, (REPLICATED, DEDICATED, FIRST)):
            text = layout.whole_text
            try:
                length_s = schedule_parts(profile, layout, rules, known=stages).makespan_ns / NS
            except DoesNotFitError as error:
                best.setdefault(text, (None, str(error)))
                continue
            before = best.get(text, (None, ""))[0]
            best[text] = (length_s if before is None else min(before, length_s), "")
    return [(text, length_s, why) for text, (length_s, why) in best.items()]
