"""SEMU: how long a layer takes, and what it holds, from its operators (DIP §4.4; v1's step emulator).

The time of an operator is the largest of its FLOPs, its bytes and its network bytes, each over what the device reaches
of that peak, plus a launch:

    max(α_flop · N_flop / F,  α_mem · N_mem / B_mem,  α_net · N_net / B_net) + launch        α = 1 / efficiency

Efficiencies are flat numbers or measured tables (`efficiency`). Rules of the user are asked first. A layer is evaluated
once for each (layer, tensor degree, memory strategy), whatever microbatch, stage or device it stands in: a stage's
graph does not depend on the schedule, so a batch of many microbatches costs as much as it has different shapes ("reuse
in space and time", v1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

from spindle.cluster import Cluster, DeviceKind, Link
from spindle.errors import ProfileError
from spindle.profile.communication import collective_latency_s
from spindle.profile.curve import Curve
from spindle.profile.efficiency import Efficiencies, Lookup
from spindle.profile.operators import Attention, Collective, Gemm, LayerOperators, MemoryBound, Operator

Strategy = Literal["keep", "recompute", "offload"]
STRATEGIES: tuple[Strategy, ...] = ("keep", "recompute", "offload")

# The seconds of an operator on a device, or nothing where the rule has no opinion.
Rule = Callable[[Operator, DeviceKind], float | None]

LEAVES_OUT = (
    "what compute and communication take from each other on one device; collectives of tensor groups overlap nothing",
    "data loading, and whatever the host does between layers: kernels are launched in time",
    "the second all-gather that sequence parallelism needs for gradients of weights (usually behind other work)",
)


class LayerShape(Protocol):
    """A kind of layer with the sizes of one sub-microbatch: hashable, so that equal ones are evaluated once."""

    def operators(self, tensor_degree: int) -> LayerOperators: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One layer over one sub-microbatch on a tensor group, under one memory strategy.

    `input_s` and `weight_s` are the two parts of backward; recomputation, or what offloading cannot hide, is in the
    first. `kept_bytes` stay on each device from forward to backward, `host_bytes` on its host. `working_bytes` are
    there during the backward pass besides (what was computed again or has come back). `cut_bytes` cross a cut behind
    the layer, all members' parts together.
    """

    forward_s: float
    input_s: float
    weight_s: float
    kept_bytes: float
    host_bytes: float
    working_bytes: float
    cut_bytes: float

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


class Semu:
    """Times of layers on one kind of device, remembered. The only state is that memory and what it had to assume."""

    def __init__(
        self,
        kind: DeviceKind,
        link: Link,
        efficiencies: Efficiencies = Efficiencies(),  # noqa: B008
        rules: Sequence[Rule] = (),
    ) -> None:
        self.kind, self.link, self.efficiencies, self.rules = kind, link, efficiencies, tuple(rules)
        self.evaluations = 0  # layers that were worked out, not remembered
        self.beyond: set[str] = set()  # what lay outside the measured sizes
        self._lookup = Lookup(efficiencies)
        self._operators: dict[Operator, float] = {}
        self._layers: dict[tuple[LayerShape, int], tuple[float, float, float, LayerOperators]] = {}
        self._times: dict[tuple[LayerShape, int, Strategy], LayerTime] = {}
        self._curves: dict[tuple[LayerShape, int], Curve] = {}

    @staticmethod
    def of(
        cluster: Cluster,
        efficiencies: Efficiencies = Efficiencies(),  # noqa: B008
        rules: Sequence[Rule] = (),
    ) -> Semu:
        """For the one kind of device of a cluster, with the slowest link inside its islands."""
        slowest = min((island.link for island in cluster.islands), key=lambda link: link.bytes_per_s)
        return Semu(cluster.kind, slowest, efficiencies, rules)

    def operator_s(self, operator: Operator) -> float:
        """Seconds of one operator."""
        known = self._operators.get(operator)
        if known is None:
            known = self._operators[operator] = self._operator_s(operator)
        return known

    def _operator_s(self, operator: Operator) -> float:
        for rule in self.rules:
            given = rule(operator, self.kind)
            if given is not None:
                if not 0 <= given < float("inf"):
                    raise ProfileError(f"a rule gave {given} seconds for {operator}; expected a time of at least 0")
                return given
        launch_s = self.efficiencies.launch_s
        match operator:
            case Gemm():
                efficiency, inside = self._lookup.gemm(operator)
            case Attention():
                efficiency, inside = self._lookup.attention(operator)
            case MemoryBound():
                efficiency, inside = self._lookup.memory(operator)
            case Collective():
                if operator.num_members == 1:
                    return 0.0
                efficiency, inside = self.efficiencies.network, True
                given = self.link.collective_s
                hops_s = collective_latency_s(operator.num_members, self.link.latency_s)
                launch_s += hops_s if given is None else given
            case _:
                assert_never(operator)
        if not inside:
            self.beyond.add(_size_text(operator))
        roofline_s = max(
            operator.flops / self.kind.peak_flops,
            operator.memory_bytes / self.kind.memory_bytes_per_s,
            operator.network_bytes / self.link.bytes_per_s,
        )
        return roofline_s / efficiency + launch_s

    def layer(self, shape: LayerShape, tensor_degree: int, strategy: Strategy = "keep") -> LayerTime:
        """One layer under one memory strategy.

        Offloading copies what would be kept to the host during forward and back during backward. It costs nothing as
        long as the copy takes no longer than the pass beside it; a pass waits for what it cannot hide.
        """
        key = (shape, tensor_degree, strategy)
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = self._layer(shape, tensor_degree, strategy)
        return known

    def _layer(self, shape: LayerShape, tensor_degree: int, strategy: Strategy) -> LayerTime:
        if (shape, tensor_degree) not in self._layers:
            self.evaluations += 1
            operators = shape.operators(tensor_degree)
            forward, input_, weight = (
                sum(map(self.operator_s, part)) for part in (operators.forward, operators.input, operators.weight)
            )
            self._layers[shape, tensor_degree] = (forward, input_, weight, operators)
        forward_s, input_s, weight_s, operators = self._layers[shape, tensor_degree]
        kept_bytes, host_bytes, working_bytes = operators.saved_bytes, 0.0, 0.0
        match strategy:
            case "keep":
                pass
            case "recompute":
                input_s += forward_s
                kept_bytes, working_bytes = operators.input_bytes, operators.saved_bytes
            case "offload":
                if not self.kind.host_bytes_per_s:
                    raise ProfileError(
                        f"device kind {self.kind.name!r} has no known link to its host, so nothing can wait there; "
                        "give it host_bytes_per_s and host_memory_bytes, or leave out the strategy 'offload'"
                    )
                copy_s = operators.saved_bytes / self.kind.host_bytes_per_s
                input_s += max(0.0, copy_s - input_s - weight_s)
                forward_s = max(forward_s, copy_s)
                kept_bytes, host_bytes, working_bytes = 0.0, operators.saved_bytes, operators.saved_bytes
            case _:
                assert_never(strategy)
        return LayerTime(
            forward_s=forward_s,
            input_s=input_s,
            weight_s=weight_s,
            kept_bytes=kept_bytes,
            host_bytes=host_bytes,
            working_bytes=working_bytes,
            cut_bytes=operators.cut_bytes,
        )

    def curve(self, shape: LayerShape, tensor_degree: int) -> Curve:
        """The layer on one tensor group, everything kept, with the part of backward that makes weights' gradients."""
        key = (shape, tensor_degree)
        known = self._curves.get(key)
        if known is None:
            time = self.layer(shape, tensor_degree)
            known = self._curves[key] = Curve(
                num_devices=(tensor_degree,),
                forward_s=(time.forward_s,),
                backward_s=(time.backward_s,),
                tensor_degree=tensor_degree,
                weight_s=(time.weight_s,),
            )
        return known

    @property
    def leaves_out(self) -> tuple[str, ...]:
        """What these times do not know, for a profile's reader."""
        said = list(LEAVES_OUT)
        one = self.efficiencies
        if one.measured_on:
            said.append(
                f"kernels were measured on {one.measured_on}; a device of another kind is taken to reach as much of "
                "its own peaks"
            )
        else:
            said.append("nothing was measured: kernels reach the same share of the peaks at all sizes")
        said.append(f"links were not measured: collectives reach {one.network:.0%} of their link")
        if self.beyond:
            names = sorted(self.beyond)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(
                f"{len(names)} operators lie beyond what was measured and have the efficiency of its edge: "
                f"{'; '.join(names[:3])}{more}"
            )
        return tuple(said)


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
