"""Curves without measurements: a roofline model with a fixed overhead per layer.

A layer on n devices, in tensor groups of d, takes ceil(batch / (n / d)) samples, so n need not divide the batch. Its
time is the overhead, plus the larger of FLOPs over effective peak and bytes over effective bandwidth, plus the
all-reduces of its tensor group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spindle.cluster import Cluster
from spindle.errors import ProfileError
from spindle.graph import MetaGraph, MetaOp
from spindle.profile.communication import tensor_group_s
from spindle.profile.curve import Curve, tensor_degrees
from spindle.profile.profile import Profile

LEAVES_OUT = (
    "kernels whose efficiency changes with their size (one efficiency holds for all)",
    "how compute and communication on one device slow each other down",
    "data loading, the loss, and host time between layers beyond the fixed overhead",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Efficiencies are shares of peak; `overhead_s` is per layer, forward and backward together (a third is
    forward)."""

    efficiency: float = 0.5
    bandwidth_efficiency: float = 0.8
    overhead_s: float = 300e-6

    def __post_init__(self) -> None:
        for name in ("efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ProfileError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if not self.overhead_s >= 0:
            raise ProfileError(f"overhead_s must not be negative, got {self.overhead_s}")


def roofline_profile(graph: MetaGraph, cluster: Cluster, roofline: Roofline = Roofline()) -> Profile:
    """The analytic profile of a graph whose ops carry their costs."""
    return Profile(
        graph=graph,
        cluster=cluster,
        curves=tuple(_curves(graph, op, cluster, roofline) for op in graph.metaops),
        leaves_out=LEAVES_OUT,
    )


def _curves(graph: MetaGraph, op: MetaOp, cluster: Cluster, roofline: Roofline) -> tuple[Curve, ...]:
    if op.cost is None or op.batch_size is None:
        raise ProfileError(f"op {op.name!r} has no cost to derive times from; give it measured times")
    return tuple(_curve(graph, op, cluster, roofline, degree) for degree in tensor_degrees(op.cost, cluster))


def _curve(graph: MetaGraph, op: MetaOp, cluster: Cluster, roofline: Roofline, degree: int) -> Curve:
    cost, kind = op.cost, cluster.kind
    assert cost is not None
    assert op.batch_size is not None
    max_replicas = 1 if cost.whole_batch else min(cluster.num_tensor_groups(degree), op.batch_size)
    # One entry per number of replicas: the largest share of the batch decides the time.
    num_replicas = np.arange(1, max_replicas + 1)
    rows = -(-op.batch_size // num_replicas)
    weights = sum(graph.parameters[parameter].elements_at(degree) for parameter in op.parameters[0])
    weight_bytes = weights * graph.numerics.parameter_bytes
    divisor = cost.work_divisor(degree)
    effective_flops = kind.peak_flops * roofline.efficiency * divisor
    effective_bandwidth = kind.memory_bytes_per_s * roofline.bandwidth_efficiency

    def pass_s(flops: float, traffic_passes: int, overhead_s: float) -> list[float]:
        # Weights are read once per pass, whatever the rows; backward reads and writes twice as much.
        with np.errstate(over="ignore"):  # a Curve refuses times that are not finite
            traffic = traffic_passes * (rows * cost.traffic_bytes / divisor + weight_bytes)
            compute = np.maximum(rows * flops / effective_flops, traffic / effective_bandwidth)
        link_s = np.array([tensor_group_s(cost, count, degree, cluster) for count in rows.tolist()])
        return [float(time_s) for time_s in overhead_s + compute + link_s]

    return Curve(
        num_devices=tuple(int(count) * degree for count in num_replicas),
        forward_s=tuple(pass_s(cost.forward_flops, 1, roofline.overhead_s / 3)),
        backward_s=tuple(pass_s(cost.backward_flops, 2, roofline.overhead_s * 2 / 3)),
        tensor_degree=degree,
    )
