"""SEMU: the time of a layer, from its operators (DIP §4.4; the step emulator of the paper's v1).

The time of an operator is the largest of its compute, memory and network times at the efficiency of such a kernel, plus
a launch:

    max(α_flop · N_flop / F,  α_mem · N_mem / B_mem,  α_net · N_net / B_net) + launch        α = 1 / efficiency

Efficiencies are flat numbers or measured tables (`efficiency`). A layer is evaluated once for each tensor degree,
however many microbatches, stages and devices it appears in. So a batch of many microbatches costs one evaluation for
each distinct shape ("reuse in space and time", v1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never

from spindle.cluster import Cluster, DeviceKind, Link
from spindle.profile.communication import collective_latency_s
from spindle.profile.curve import Curve
from spindle.profile.efficiency import Efficiencies, Lookup
from spindle.profile.operators import (
    Attention,
    Collective,
    Gemm,
    LayerOperators,
    MemoryBound,
    Operator,
    sequence_shares,
)

LEAVES_OUT = (
    "how compute and communication on one device slow each other down; collectives of tensor groups overlap nothing",
    "data loading, and host time between layers: kernels are launched in time",
    "the second all-gather that sequence parallelism needs for weight gradients (usually hidden by other work)",
)


class LayerShape(Protocol):
    """A kind of layer with the sizes of one sub-microbatch. Hashable, so that equal layers are evaluated once."""

    def operators(self, tensor_degree: int) -> LayerOperators: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One layer over one sub-microbatch on a tensor group; `input_s` and `weight_s` are the two parts of backward."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


class Semu:
    """Times of layers on one kind of device, memoized."""

    def __init__(self, kind: DeviceKind, link: Link, efficiencies: Efficiencies = Efficiencies()) -> None:  # noqa: B008
        self.kind, self.link, self.efficiencies = kind, link, efficiencies
        self.evaluations = 0  # layers evaluated, without those found in the memo
        self.extrapolated: set[str] = set()  # operators outside the measured sizes, as text
        self._lookup = Lookup(efficiencies)
        self._operators: dict[Operator, float] = {}
        self._layers: dict[tuple[LayerShape, int, int], LayerTime] = {}
        self._curves: dict[tuple[LayerShape, int, tuple[int, ...]], Curve] = {}

    @staticmethod
    def of(cluster: Cluster, efficiencies: Efficiencies = Efficiencies()) -> Semu:  # noqa: B008
        """Times on the devices of a cluster, with the slowest link inside its islands."""
        slowest = min((island.link for island in cluster.islands), key=lambda link: link.bytes_per_s)
        return Semu(cluster.kind, slowest, efficiencies)

    def operator_s(self, operator: Operator) -> float:
        """Seconds of one operator."""
        time_s = self._operators.get(operator)
        if time_s is None:
            time_s = self._operators[operator] = self._operator_s(operator)
        return time_s

    def _operator_s(self, operator: Operator) -> float:
        launch_s = self.efficiencies.launch_s
        match operator:
            case Gemm():
                efficiency, is_inside = self._lookup.gemm(operator)
            case Attention():
                efficiency, is_inside = self._lookup.attention(operator)
            case MemoryBound():
                efficiency, is_inside = self._lookup.memory(operator)
            case Collective():
                if operator.num_members == 1:
                    return 0.0
                efficiency, is_inside = self.efficiencies.network, True
                measured_s = self.link.collective_s
                hops_s = collective_latency_s(operator.num_members, self.link.latency_s)
                launch_s += hops_s if measured_s is None else measured_s
            case _:
                assert_never(operator)
        if not is_inside:  # the efficiency at the table's edge was used, which `leaves_out` reports
            self.extrapolated.add(_size_text(operator))
        roofline_s = max(
            operator.flops / self.kind.peak_flops,
            operator.memory_bytes / self.kind.memory_bytes_per_s,
            operator.network_bytes / self.link.bytes_per_s,
        )
        return roofline_s / efficiency + launch_s

    def layer(self, shape: LayerShape, tensor_degree: int, sequence_degree: int = 1) -> LayerTime:
        """The times of one layer on a sequence group of `sequence_degree` tensor groups."""
        key = (shape, tensor_degree, sequence_degree)
        if key not in self._layers:
            self.evaluations += 1
            operators = sequence_shares(shape.operators(tensor_degree), sequence_degree)
            parts = (operators.forward, operators.input, operators.weight)
            forward_s, input_s, weight_s = (sum(map(self.operator_s, part)) for part in parts)
            self._layers[key] = LayerTime(forward_s=forward_s, input_s=input_s, weight_s=weight_s)
        return self._layers[key]

    def curve(self, shape: LayerShape, tensor_degree: int, sequence_degrees: tuple[int, ...] = (1,)) -> Curve:
        """The curve of a layer on sequence groups of these numbers of tensor groups."""
        key = (shape, tensor_degree, sequence_degrees)
        curve = self._curves.get(key)
        if curve is None:
            times = [self.layer(shape, tensor_degree, degree) for degree in sequence_degrees]
            curve = self._curves[key] = Curve(
                num_devices=tuple(tensor_degree * degree for degree in sequence_degrees),
                forward_s=tuple(time.forward_s for time in times),
                backward_s=tuple(time.backward_s for time in times),
                tensor_degree=tensor_degree,
                weight_s=tuple(time.weight_s for time in times),
            )
        return curve

    @property
    def leaves_out(self) -> tuple[str, ...]:
        """What these times do not model or had to assume, in words, for a profile."""
        sentences = list(LEAVES_OUT)
        efficiencies = self.efficiencies
        if efficiencies.measured_on:
            sentences.append(
                f"kernels were measured on {efficiencies.measured_on}; a device of another kind is assumed to reach "
                "the same shares of its own peaks"
            )
        else:
            sentences.append("nothing was measured: kernels reach the same share of the peaks at all sizes")
        sentences.append(f"links were not measured: collectives reach {efficiencies.network:.0%} of their link")
        if self.extrapolated:
            names = sorted(self.extrapolated)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            sentences.append(
                f"{len(names)} operators lie beyond what was measured and have the efficiency of its edge: "
                f"{'; '.join(names[:3])}{more}"
            )
        return tuple(sentences)


def _size_text(operator: Operator) -> str:
    match operator:
        case Gemm():
            return f"GEMM of {operator.tokens} tokens, {operator.inputs} to {operator.outputs}"
        case Attention():
            return (
                f"attention of {operator.queries} to {operator.keys} tokens, {operator.count * operator.heads} heads "
                f"of {operator.head_width}"
            )
        case MemoryBound():
            return f"{operator.kind} of {operator.num_bytes / 1e6:.1f} MB"
        case Collective():
            return f"{operator.kind} of {operator.num_bytes / 1e6:.1f} MB"
        case _:
            assert_never(operator)
