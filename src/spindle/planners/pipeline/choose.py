"""Choose the sizes of sub-microbatches and the placement of chunks, once, by simulation of a representative batch.

DIP takes the smallest sub-microbatches with 95 % of the best efficiency, and lets each module pass the ranks in
proportion to its time (§4.1). Here these are candidates among others: smaller sub-microbatches leave more freedom to
the schedule, larger ones run faster, and which matters more depends on the batch and on memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.planners.options import Layout
from spindle.planners.pipeline.chains import layer_counts, layer_loads, layout_of, modules_in_rows, separate_chains
from spindle.planners.pipeline.search import search
from spindle.planners.pipeline.stage_costs import NS
from spindle.planners.pipeline.stages import batches_of
from spindle.profile import Profile

_FACTORS = (1, 2, 3, 4)  # candidates: `natural_rounds` times a factor
_ROUNDS = (1, 2, 3, 4)  # candidates: the same number of rounds for all modules
_FIRST_EVALUATIONS, _FINAL_EVALUATIONS = 32, 256
_NUM_FINALISTS = 6
_NEARLY = 1.003  # within this factor of the shortest, prefer fewer chunks: they are searched faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split of microbatches (which the profile has) and a layout. `work_s` is the work of the fullest rank: no step
    is shorter."""

    profile: Profile
    layout: Layout
    work_s: float


def choose_layout(
    profiles: Sequence[Profile], num_ranks: int, shards_optimizer: bool = False
) -> tuple[Profile, Layout]:
    """Choose a layout, and one of several profiles of a batch that differ in how microbatches are split.

    Each gets a short search, those with the least work first, and none whose work alone takes longer than the best
    schedule so far; the best few get a longer search. With `shards_optimizer`, replicas share the optimizer state.
    """
    unique = {profile.graph.fingerprint: profile for profile in reversed(profiles)}  # the first of equal ones
    candidates = [
        candidate for profile in unique.values() for candidate in _candidates(profile, num_ranks, shards_optimizer)
    ]
    lengths: list[tuple[float, int, Candidate]] = []  # seconds of the step, number of pairs
    refusals: list[DoesNotFitError] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.work_s):
        if lengths and candidate.work_s >= min(length_s for length_s, _, _ in lengths):
            break
        try:
            lengths.append((*_searched(candidate, _FIRST_EVALUATIONS), candidate))
        except DoesNotFitError as error:
            refusals.append(error)
    if not lengths:
        raise refusals[0]
    lengths.sort(key=lambda entry: entry[:2])
    finalists = [candidate for _, _, candidate in lengths[:_NUM_FINALISTS]]
    if len(finalists) > 1:
        lengths = [(*_searched(candidate, _FINAL_EVALUATIONS), candidate) for candidate in finalists]
    shortest = min(length_s for length_s, _, _ in lengths)
    nearly = [entry for entry in lengths if entry[0] <= _NEARLY * shortest]
    _, _, chosen = min(nearly, key=lambda entry: (entry[1], entry[0]))
    return chosen.profile, chosen.layout


def pipeline_layout(profile: Profile, num_ranks: int, shards_optimizer: bool = False) -> Layout:
    """Choose where the chunks of each module are placed, on a representative batch."""
    return choose_layout([profile], num_ranks, shards_optimizer)[1]


def _searched(candidate: Candidate, evaluations: int) -> tuple[float, int]:
    """The length in seconds of the best schedule after this many evaluations, and its number of pairs."""
    batches = batches_of(candidate.profile, candidate.layout)
    results = [search(batch.segments, batch.activation_budget, evaluations=evaluations) for batch in batches]
    makespan_ns = max(result.schedule.makespan_ns for result in results)
    return makespan_ns / NS, sum(batch.segments.num_pairs for batch in batches)


def _candidates(profile: Profile, num_ranks: int, shards_optimizer: bool) -> list[Candidate]:
    """Layouts with each module cut by itself, which differ in how often chains pass the ranks."""
    loads, natural, rows = layer_loads(profile), natural_rounds(profile), modules_in_rows(profile.graph)
    rounds = [{module: factor * count for module, count in natural.items()} for factor in _FACTORS]
    rounds += [dict.fromkeys(natural, count) for count in _ROUNDS]
    layouts = dict.fromkeys(
        layout_of(profile, num_ranks, separate_chains(loads, counts, num_ranks, rows), shards_optimizer)
        for counts in rounds
    )
    candidates = []
    for layout in layouts:
        ranks_s = np.zeros(num_ranks)
        for chain in layout.chains:
            ends = np.cumsum([0.0, *(load for module in chain.modules for load in loads[module])])
            ranks_s += np.diff(ends[list(chain.bounds)]).reshape(-1, num_ranks).sum(axis=0)
        work_s = float(ranks_s.max()) / layout.num_replicas
        candidates.append(Candidate(profile=profile, layout=layout, work_s=work_s))
    return candidates


def natural_rounds(profile: Profile) -> dict[str, int]:
    """How often each module passes all ranks: K = floor(T / T_1), where T is the time of its longest call and T_1 that
    of the shortest module (DIP §4.1). Modules of one layer, which cannot be spread, do not count for T_1."""
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
