"""Layouts that encoders in parts may have: placement, tensor degree, and the chunks of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from spindle.errors import PlanError
from spindle.graph import MetaGraph
from spindle.planners.options import DEDICATED, FIRST, Chain, Layout
from spindle.planners.pipeline.chains import layer_counts, layer_loads, lightest_cuts, tensor_degree_of
from spindle.profile import Profile

_ROUNDS = (1, 2, 4)  # how often the language model passes its ranks


def layouts_with(
    profile: Profile, num_ranks: int, placements: Sequence[str], shards_optimizer: bool = True
) -> tuple[Layout, ...]:
    """Layouts whose modules that run in parts stand as one of the placements says; the others are cut into one chunk
    for each rank, or several, lighter on rank 0 where encoders stand there alone. Empty where nothing runs in parts."""
    graph = profile.graph
    rows = rows_of_item_modules(graph)
    item_modules = [module for row in rows for module in row]
    counts, loads = layer_counts(graph), layer_loads(profile)
    spread = [module for module in counts if module not in item_modules]
    if not item_modules or not spread:
        return ()
    degree = tensor_degree_of(profile)
    num_replicas, rest = divmod(profile.cluster.num_devices, num_ranks * degree)
    if num_replicas < 1 or rest:
        raise PlanError(
            f"{num_ranks} pipeline ranks of {degree} devices need a multiple of {num_ranks * degree} devices, got "
            f"{profile.cluster.num_devices}"
        )
    spread_loads = np.concatenate([loads[module] for module in spread])
    degrees_of = [
        sorted(set.intersection(*(set(profile.degrees_of(module)) for module in row)) & set(divisors_of(degree)))
        for row in rows
    ]
    layouts = []
    seconds_of = {
        (row, each): sum(seconds_of_module(profile, module, each) for module in row)
        for row, degrees in zip(rows, degrees_of, strict=True)
        for each in degrees
    }
    for placement, degrees, rounds in product(placements, product(*degrees_of), _ROUNDS):
        for num_dedicated in range(1, num_ranks) if placement == DEDICATED else (0,):
            num_chunks = rounds * (num_ranks - num_dedicated)
            if rounds > 1 and (num_chunks > len(spread_loads) or num_chunks == rounds):
                continue
            in_front = 0.0
            if placement == FIRST:
                in_front = sum(seconds_of[row, each] * each / degree for row, each in zip(rows, degrees, strict=True))
            whole = tuple(
                Chain(
                    modules=row,
                    num_layers=tuple(counts[module] for module in row),
                    bounds=(0, sum(counts[module] for module in row)),
                    placement=placement,
                    tensor_degree=each,
                )
                for row, each in zip(rows, degrees, strict=True)
            )
            chain = Chain(
                modules=tuple(spread),
                num_layers=tuple(counts[module] for module in spread),
                bounds=_cuts_behind(spread_loads, num_chunks, in_front),
            )
            layouts.append(
                Layout(
                    num_ranks=num_ranks,
                    num_replicas=num_replicas,
                    tensor_degree=degree,
                    chains=(*whole, chain),
                    num_dedicated=num_dedicated,
                    shards_optimizer=shards_optimizer,
                )
            )
    return tuple(layouts)


def rows_of_item_modules(graph: MetaGraph) -> list[tuple[str, ...]]:
    """Modules that run in parts, those together whose calls read each other: their parts stand on the same devices."""
    rows: list[list[str]] = [[module] for module in dict.fromkeys(op.module or "" for op in graph.metaops if op.items)]
    for producer, consumer in graph.edges:
        source, target = graph.metaops[producer], graph.metaops[consumer]
        if source.items and target.items and source.module != target.module:
            first = next(row for row in rows if source.module in row)
            second = next(row for row in rows if target.module in row)
            if first is not second:
                rows.remove(second)
                first += second
    return [tuple(row) for row in rows]


def divisors_of(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def seconds_of_module(profile: Profile, module: str, degree: int) -> float:
    """All passes of a module over a batch, each on one tensor group of this degree."""
    setting = profile.setting({module: degree})
    return sum(
        op.num_layers * profile.curve(position, setting).layer_s(degree)
        for position, op in enumerate(profile.graph.metaops)
        if op.module == module
    )


def _cuts_behind(loads: np.ndarray, num_chunks: int, in_front: float) -> tuple[int, ...]:
    """Bounds of chunks whose first has so much other work in front of it."""
    if not in_front:
        return lightest_cuts(loads, num_chunks)
    cuts = lightest_cuts(np.concatenate([[in_front], loads]), num_chunks)
    return (0, *(max(0, cut - 1) for cut in cuts[1:]))
