"""Which parameters each pipeline rank holds under a layout, and their bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from spindle.graph import MetaGraph
from spindle.planners.options import DEDICATED, FIRST, SPREAD, Chain, Layout
from spindle.planners.pipeline.segments import Column
from spindle.profile import Profile, Setting, state_bytes


def setting_in(profile: Profile, layout: Layout) -> Setting:
    """The setting of a layout: the tensor degree of each module, and whether the optimizer is sharded."""
    degrees = {
        module: chain.tensor_degree or layout.tensor_degree
        for chain in layout.chains
        for module in chain.modules
        if module in profile.graph.modules
    }
    return profile.setting(degrees, shard_optimizer=layout.shards_optimizer)


def held_by_ranks(graph: MetaGraph, layout: Layout) -> list[set[int]]:
    """The parameters of the chunks on each rank, as far as they occur in the graph."""
    parameters: dict[tuple[str, int], tuple[int, ...]] = {}
    for op in graph.metaops:
        for layer, used in enumerate(op.parameters):
            parameters[op.module or "", op.first_layer + layer] = used
    held: list[set[int]] = [set() for _ in range(layout.num_ranks)]
    for chain in layout.chains:
        counts = zip(chain.modules, chain.num_layers, strict=True)
        places = [(module, layer) for module, count in counts for layer in range(count)]
        if chain.placement != SPREAD:
            for rank in ranks_of_whole(layout, chain):
                held[rank].update(parameter for place in places for parameter in parameters.get(place, ()))
            continue
        for chunk, (first, last) in enumerate(pairwise(chain.bounds)):
            for place in places[first:last]:
                rank = layout.num_dedicated + chunk % layout.num_spread_ranks
                held[rank].update(parameters.get(place, ()))
    return held


def ranks_of_whole(layout: Layout, chain: Chain) -> range:
    """The pipeline ranks on whose devices a chain stands whole."""
    if chain.placement == FIRST:
        return range(1)
    return range(layout.num_dedicated if chain.placement == DEDICATED else layout.num_ranks)


def owning_ranks_in(graph: MetaGraph, layout: Layout) -> dict[int, tuple[int, ...]]:
    """Parameter → the devices that hold it, in all replicas."""
    devices_of: dict[int, list[int]] = {}
    for replica in range(layout.num_replicas):
        for rank, parameters in enumerate(held_by_ranks(graph, layout)):
            for parameter in parameters:
                devices_of.setdefault(parameter, []).extend(layout.devices(replica, rank))
    return {parameter: tuple(sorted(devices)) for parameter, devices in devices_of.items()}


def held_bytes(profile: Profile, layout: Layout) -> tuple[Column, Column]:
    """For a device of each rank, the bytes of weights, gradients and optimizer state, and the nanoseconds of its
    optimizer step.

    With `shards_optimizer`, replicas share the optimizer state, and so do the groups that each have a whole chain.
    """
    graph = profile.graph
    degree_of: dict[int, int] = {}
    owners_of: dict[int, int] = {}
    num_replicas = layout.num_replicas if layout.shards_optimizer else 1
    for chain in layout.chains:
        degree = chain.tensor_degree or layout.tensor_degree
        seen: set[tuple[str | None, int]] = set()
        for op in graph.metaops if chain.placement != SPREAD else ():
            if op.module in chain.modules and (op.module, op.first_layer) not in seen:
                seen.add((op.module, op.first_layer))
                num_groups = len(ranks_of_whole(layout, chain)) * layout.tensor_degree // degree
                for parameter in (parameter for layer in op.parameters for parameter in layer):
                    degree_of[parameter] = degree
                    owners_of[parameter] = num_groups * num_replicas if layout.shards_optimizer else 1
    static = np.zeros(layout.num_ranks, dtype=np.int64)
    elements = np.zeros(layout.num_ranks)
    for rank, parameters in enumerate(held_by_ranks(graph, layout)):
        for parameter in parameters:
            degree, owners = degree_of.get(parameter, layout.tensor_degree), owners_of.get(parameter, num_replicas)
            static[rank] += state_bytes(graph, parameter, degree, owners)
            if graph.parameters[parameter].trainable:
                elements[rank] += graph.parameters[parameter].elements_at(degree) / owners
    moved = elements * graph.numerics.update_bytes / profile.cluster.kind.memory_bytes_per_s
    return static, np.ceil(moved * 1e9).astype(np.int64)
