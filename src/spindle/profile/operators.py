"""The operators of a layer, with the FLOPs, memory bytes and network bytes of each.

A union of frozen values, one class per kind of kernel. All sizes are those of one member of a tensor group. Bytes count
every operand once; a kernel that reads an operand twice has a lower efficiency instead. Knows no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from spindle.profile.communication import ring_bytes

_BYTES = 2  # 16-bit operands

Pass = Literal["forward", "input", "weight"]
MemoryKind = Literal["norm", "norm_backward", "activation", "add", "lookup", "loss", "accumulate", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One of the three GEMMs of a linear layer: its output, the gradient of its input, or the gradient of its weights.
    All three have the same FLOPs and the same operands in different roles."""

    tokens: int
    outputs: int
    inputs: int
    pass_: Pass = "forward"

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.outputs * self.inputs

    @property
    def memory_bytes(self) -> float:
        return float(_BYTES * (self.tokens * self.outputs + self.tokens * self.inputs + self.outputs * self.inputs))

    @property
    def network_bytes(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention within each of `count` sequences of equal length; scores never reach memory (flash attention).

    Backward has 2.5 times the FLOPs of forward, because scores are recomputed.
    """

    count: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_width: int
    causal: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        forward = 4.0 * self.count * self.queries * self.keys * self.heads * self.head_width
        return forward * (0.5 if self.causal else 1.0) * (2.5 if self.backward else 1.0)

    @property
    def memory_bytes(self) -> float:
        queries = self.count * self.queries * self.heads * self.head_width
        keys = self.count * self.keys * self.key_heads * self.head_width
        # Forward reads Q, K, V and writes O. Backward reads these and the gradient of O, and writes three gradients.
        return float(_BYTES * (4 * queries + 4 * keys if self.backward else 2 * queries + 2 * keys))

    @property
    def network_bytes(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """A memory-bound kernel: a norm, an activation function, a sum, an embedding lookup."""

    kind: MemoryKind
    num_bytes: float

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def memory_bytes(self) -> float:
        return self.num_bytes

    @property
    def network_bytes(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A ring collective of a tensor group over `num_bytes` (of all members together).

    With sequence parallelism an all-reduce is split into a reduce-scatter and an all-gather, each with half of its
    bytes. In an all-to-all, every member holds 1/n of the bytes and sends all but 1/n of these.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    num_bytes: float
    num_members: int

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def memory_bytes(self) -> float:
        return 0.0  # memory traffic of a collective is part of its network time

    @property
    def network_bytes(self) -> float:
        if self.kind == "all_to_all":
            return self.num_bytes * (self.num_members - 1) / self.num_members**2
        whole = ring_bytes(self.num_bytes, self.num_members)
        return whole if self.kind == "all_reduce" else whole / 2


Operator = Gemm | Attention | MemoryBound | Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """The operators of a layer over one sub-microbatch, on one member of its tensor group.

    Backward has two parts: `input` computes the gradient of the layer's input; `weight` computes the gradients of its
    weights, and may run later.
    """

    forward: tuple[Operator, ...]
    input: tuple[Operator, ...]
    weight: tuple[Operator, ...]


def sequence_shares(operators: LayerOperators, sequence_degree: int) -> LayerOperators:
    """The operators on one member of a sequence group (Ulysses), which has a slice of the tokens and all weights.

    Around attention, all-to-alls exchange all heads of a slice of the tokens for all tokens of a slice of the heads.
    Weight gradients need no collective here: they are reduced over all devices that hold the weights, as always.
    """
    if sequence_degree == 1:
        return operators
    parts = (operators.forward, operators.input, operators.weight)
    forward, input_, weight = (tuple(_shares(part, sequence_degree)) for part in parts)
    return LayerOperators(forward=forward, input=input_, weight=weight)


def _shares(operators: Iterable[Operator], degree: int) -> Iterator[Operator]:
    for operator in operators:
        match operator:
            case Gemm():
                yield replace(operator, tokens=-(-operator.tokens // degree))
            case Attention():
                queries = operator.count * operator.queries * operator.heads * operator.head_width
                keys = operator.count * operator.keys * operator.key_heads * operator.head_width
                # Queries, keys and values before attention, the output after it; in backward, their gradients.
                inputs, outputs = float(_BYTES * (queries + 2 * keys)), float(_BYTES * queries)
                yield Collective(kind="all_to_all", num_bytes=inputs, num_members=degree)
                yield replace(operator, heads=-(-operator.heads // degree), key_heads=-(-operator.key_heads // degree))
                yield Collective(kind="all_to_all", num_bytes=outputs, num_members=degree)
            case MemoryBound():
                is_of_weights = operator.kind in ("accumulate", "update")
                yield operator if is_of_weights else replace(operator, num_bytes=operator.num_bytes / degree)
            case Collective():
                yield replace(operator, num_bytes=operator.num_bytes / degree)
            case _:
                assert_never(operator)
