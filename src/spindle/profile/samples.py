"""Curves from measurements: piecewise α–β (§3.2 of the Spindle paper).

The time of a layer depends on the rows (samples) on one device. Between two measured sizes it is α + β·rows, with
separate α and β for each piece, because kernels change with the load. A curve follows with rows = ceil(batch / n).
Sizes outside the measured range are never extrapolated: an n that would need them is left out of the curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from spindle.cluster import Cluster
from spindle.errors import ProfileError
from spindle.graph import MetaGraph
from spindle.profile.communication import tensor_group_s
from spindle.profile.curve import Contention, Curve, SmTimes, tensor_degrees
from spindle.profile.profile import Profile
from spindle.workload import LayerCost

LEAVES_OUT = ("what the measurement did not cover: load of neighbours, clocks, other sizes",)
TENSOR_LEAVES_OUT = (
    "tensor degrees above one, which were not measured: compute divided by the degree, plus all-reduces",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSamples:
    """Measured seconds of one layer at several numbers of rows on one device; `launch_s`, `contention` and `sm_times`
    are as in `Curve`. `weight_share` is the part of backward that computes weight gradients, if known."""

    rows: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    launch_s: tuple[float, float] = (0.0, 0.0)
    contention: tuple[Contention, ...] = ()
    weight_share: float | None = None
    sm_times: SmTimes | None = None

    def __post_init__(self) -> None:
        if not self.rows or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)) or self.rows[0] < 1:
            raise ProfileError(f"measured rows must be increasing and at least 1, got {list(self.rows)}")
        if not len(self.rows) == len(self.forward_s) == len(self.backward_s):
            raise ProfileError("expected one forward and one backward time for each number of rows")
        if self.contention and len(self.contention) != len(self.rows):
            raise ProfileError("expected one contention for each number of rows, or none")
        if self.weight_share is not None and not 0 <= self.weight_share <= 1:
            raise ProfileError(f"weight_share is a part of backward: between 0 and 1, got {self.weight_share:g}")

    def at(self, rows: int) -> tuple[float, float]:
        """Forward and backward seconds for this many rows, interpolated."""
        if not self.rows[0] <= rows <= self.rows[-1]:
            raise ProfileError(f"{rows} rows were not measured; measured: {self.rows[0]} to {self.rows[-1]}")
        # On the piece between two measured sizes the time is linear.
        upper = bisect_left(self.rows, rows)
        if self.rows[upper] == rows:
            return self.forward_s[upper], self.backward_s[upper]
        lower = upper - 1
        share = (rows - self.rows[lower]) / (self.rows[upper] - self.rows[lower])
        return (
            self.forward_s[lower] + share * (self.forward_s[upper] - self.forward_s[lower]),
            self.backward_s[lower] + share * (self.backward_s[upper] - self.backward_s[lower]),
        )


def curve_from_samples(samples: LayerSamples, batch_size: int, max_devices: int) -> Curve:
    """The data-parallel curve of a layer whose batch is split over n devices, for every n within the measured sizes."""
    points = []
    for num_devices in range(1, min(batch_size, max_devices) + 1):
        rows = -(-batch_size // num_devices)
        if samples.rows[0] <= rows <= samples.rows[-1]:
            points.append((num_devices, *samples.at(rows)))
    if not points:
        raise ProfileError(
            f"a batch of {batch_size} on up to {max_devices} devices needs "
            f"{-(-batch_size // min(batch_size, max_devices))} to {batch_size} rows on each; "
            f"measured: {samples.rows[0]} to {samples.rows[-1]}"
        )
    counts, forward_s, backward_s = zip(*points, strict=True)
    contention: tuple[Contention, ...] = ()
    if samples.contention:
        shares = [-(-batch_size // count) for count in counts]
        contention = tuple(samples.contention[bisect_left(samples.rows, share)] for share in shares)
    return Curve(
        num_devices=counts,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=() if samples.weight_share is None else tuple(samples.weight_share * time_s for time_s in backward_s),
        launch_s=samples.launch_s,
        contention=contention,
        sm_times=samples.sm_times,
        measured=tuple(count for count in counts if -(-batch_size // count) in samples.rows),
    )


def tensor_curve(
    samples: LayerSamples, cost: LayerCost, batch_size: int, cluster: Cluster, degree: int
) -> Curve | None:
    """The curve of a layer in tensor groups: the time on one device divided by the degree, plus all-reduces. None if
    none of the sizes that it needs was measured."""
    points = []
    max_replicas = 1 if cost.whole_batch else min(cluster.num_tensor_groups(degree), batch_size)
    for num_replicas in range(1, max_replicas + 1):
        rows = -(-batch_size // num_replicas)
        if samples.rows[0] <= rows <= samples.rows[-1]:
            all_reduce_time_s = tensor_group_s(cost, rows, degree, cluster)
            forward_s, backward_s = (
                time_s / cost.work_divisor(degree) + all_reduce_time_s for time_s in samples.at(rows)
            )
            points.append((num_replicas * degree, forward_s, backward_s))
    if not points:
        return None
    counts, forward, backward = zip(*points, strict=True)
    return Curve(
        num_devices=counts,
        forward_s=forward,
        backward_s=backward,
        tensor_degree=degree,
        launch_s=samples.launch_s,
    )


def sampled_profile(
    graph: MetaGraph, cluster: Cluster, samples: Mapping[str, LayerSamples], host_rates: tuple[float, ...] = ()
) -> Profile:
    """A profile from measured samples, by name of the MetaOp or else of its module."""
    curves = []
    for op in graph.metaops:
        measured = samples.get(op.name) or samples.get(op.module or "")
        if measured is None or op.batch_size is None:
            raise ProfileError(f"op {op.name!r}: no samples under its name or its module's ({op.module!r})")
        max_devices = 1 if op.cost is not None and op.cost.whole_batch else cluster.num_devices
        op_curves = [curve_from_samples(measured, op.batch_size, max_devices)]
        for degree in tensor_degrees(op.cost, cluster)[1:]:
            assert op.cost is not None
            curve = tensor_curve(measured, op.cost, op.batch_size, cluster, degree)
            op_curves += [] if curve is None else [curve]
        curves.append(tuple(op_curves))
    leaves_out = LEAVES_OUT + (TENSOR_LEAVES_OUT if any(len(curve) > 1 for curve in curves) else ())
    return Profile(graph=graph, cluster=cluster, curves=tuple(curves), host_rates=host_rates, leaves_out=leaves_out)
