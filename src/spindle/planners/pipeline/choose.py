"""Choose the sizes of sub-microbatches and the placement of chunks, once, by simulation of a representative batch.

DIP takes the smallest sub-microbatches at 95 % of the best efficiency, and lets each module pass the ranks as often as
its time asks (§4.1). Here these are candidates among others: smaller sub-microbatches leave more freedom to the
schedule, larger ones take less work, and which of the two is worth more depends on the batch and on memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.planners.options import Layout
from spindle.planners.pipeline.chains import layer_counts, layer_loads, layout_of, modules_in_rows, separate_chains
from spindle.planners.pipeline.search import search
from spindle.planners.pipeline.stages import NS, batches_of
from spindle.profile import Profile

_FACTORS = (1, 2, 3, 4)  # of the natural rounds
_ROUNDS = (1, 2, 3, 4)  # the same for all modules
_FIRST_EVALUATIONS, _FINAL_EVALUATIONS = 32, 256
_NUM_FINALISTS = 6
_NEARLY = 1.003  # as short: fewer chunks are searched faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to split microbatches (by its profile) and a layout; no step is shorter than the fullest rank's work."""

    profile: Profile
    layout: Layout
    work_s: float


def choose_layout(
    profiles: Sequence[Profile], num_ranks: int, shards_optimizer: bool = False
) -> tuple[Profile, Layout]:
    """Choose among profiles of one batch, which differ in how microbatches are split, and among layouts.

    All are searched for a moment, those with least work first and none whose work alone is longer than what was found
    before; the best few are searched longer. With `shards_optimizer`, replicas share the optimizer state.
    """
    different = {profile.graph.fingerprint: profile for profile in reversed(profiles)}  # the first of equal ones
    candidates = [
        candidate for profile in different.values() for candidate in _candidates(profile, num_ranks, shards_optimizer)
    ]
    lengths: list[tuple[float, int, Candidate]] = []  # seconds, pairs
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
    """The length of the best schedule after this many evaluations, and its number of pairs."""
    batches = batches_of(candidate.profile, candidate.layout)
    results = [search(batch.segments, batch.activation_budget, evaluations=evaluations) for batch in batches]
    makespan_ns = max(result.schedule.makespan_ns for result in results)
    return makespan_ns / NS, sum(batch.segments.num_pairs for batch in batches)


def _candidates(profile: Profile, num_ranks: int, shards_optimizer: bool) -> list[Candidate]:
    """Layouts with each module cut by itself, that pass the ranks more or less often."""
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
