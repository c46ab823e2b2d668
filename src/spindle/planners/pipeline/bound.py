"""A lower bound on the step time of any pipelined plan of a batch, for all layouts, orders and memory choices.

A profile has its microbatches split in one way. If a planner may choose among several splits, the bound of the workload
is the smallest of theirs. Memory is left out, because it gives no bound: if every layer kept its activations only as
long as its microbatch would take alone, all of them would fit in a step of this length, for all recipes and sizes that
were tried (experiments/LOG.md). Hops between ranks, filling and draining are left out, because they become negligible
with chunks of one layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from spindle.planners.pipeline.chains import tensor_degree_of
from spindle.profile import Profile

_ROUNDING_S = 1e-9  # per layer and direction: the simulator counts in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBound:
    """Three bounds in seconds: `work_s`, all passes and optimizer steps spread evenly over the devices; `layer_s`, all
    passes of the longest layer, which is on one rank of each replica; `path_s`, the longest path of a microbatch,
    forward and backward, without the weight gradients that may run later."""

    work_s: float
    layer_s: float
    path_s: float

    @property
    def bound_s(self) -> float:
        return max(self.work_s, self.layer_s, self.path_s)


def pipeline_bound_s(profiles: Iterable[Profile], num_ranks: int) -> float:
    """The smallest bound of profiles that differ in how their microbatches are split."""
    return min(pipeline_bound(profile, num_ranks).bound_s for profile in profiles)


def pipeline_bound(profile: Profile, num_ranks: int) -> PipelineBound:
    """The bounds of every plan of a profile on `num_ranks` pipeline ranks."""
    graph, cluster, setting = profile.graph, profile.cluster, profile.default_setting
    is_part = [bool(op.items) for op in graph.metaops]
    degree = tensor_degree_of(profile)
    num_replicas = max(1, cluster.num_devices // (num_ranks * degree))
    # Seconds of all passes by layer of a module, and seconds on the path through each op.
    layer_s: dict[tuple[str, int], float] = defaultdict(float)
    path_s: list[float] = []
    area_s = 0.0  # device-seconds of all passes
    degree_of: dict[int, int] = {}  # by parameter
    for position, op in enumerate(graph.metaops):
        curves = profile.curves[position] if is_part[position] else (profile.curve(position, setting),)
        # A part may run on any of its groups, alone or on a sequence group: its work counts on the cheapest, its path
        # on the fastest.
        totals_s, paths_s = [], []
        groups = [
            (curve, count) for curve in curves for count in (curve.num_devices if is_part[position] else (degree,))
        ]
        for curve, num_devices in groups:
            forward_s, backward_s = curve.times_s(num_devices)
            backward_s += forward_s * setting.recompute[position]
            totals_s.append(num_devices * (forward_s + backward_s - 2 * _ROUNDING_S))
            weight_s = curve.weight_time_s(num_devices) or 0.0
            paths_s.append(forward_s + backward_s - weight_s - 2 * _ROUNDING_S)
        area_s += op.num_layers * min(totals_s)
        for layer in range(op.num_layers) if not is_part[position] else ():
            layer_s[op.module or "", op.first_layer + layer] += totals_s[0] / degree
        path_s.append(op.num_layers * min(paths_s))
        for of_layer in op.parameters:
            degree_of.update(dict.fromkeys(of_layer, curves[0].tensor_degree))
    # Device-seconds of the optimizer step for one copy of all parameters.
    update_s = sum(
        graph.parameters[parameter].elements_at(held_at) * held_at
        for parameter, held_at in degree_of.items()
        if graph.parameters[parameter].trainable
    ) * (graph.numerics.update_bytes / cluster.kind.memory_bytes_per_s)
    # If speed depends on busy neighbours, no layer is faster than at the best rate, and k busy devices of an island do
    # at most k times the work of their rate.
    rate, capacity = 1.0, float(num_ranks * num_replicas * degree)
    if profile.host_rates:
        rates = np.array(profile.host_rates)
        together = np.arange(1, 1 + len(rates)) * rates
        rate = float(rates.max())
        capacity = sum(float(together[: island.num_devices].max()) for island in cluster.islands)
    # Each replica updates its own copy, unless optimizer state is sharded, as it may be in layouts with parts.
    copies = 1 if any(is_part) else num_replicas
    work_s = (area_s + copies * update_s) / capacity
    ends_s: dict[int, float] = {}
    for position in graph.order:
        before_s = max((ends_s[producer] for producer in graph.predecessors[position]), default=0.0)
        ends_s[position] = before_s + path_s[position]
    return PipelineBound(
        work_s=work_s,
        layer_s=max(layer_s.values()) / num_replicas / rate,
        path_s=max(ends_s.values()) / rate,
    )
