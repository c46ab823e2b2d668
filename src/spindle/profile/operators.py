"""The operators of a layer, with the FLOPs, memory bytes and network bytes of each.

A union of frozen values, one class per kind of kernel. All sizes are those of one member of a tensor group. Bytes count
every operand once; a kernel that reads an operand twice has a lower efficiency instead. Knows no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """Attention of `count` sequences of equal length, each to itself; scores never reach memory (flash attention).

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
    bytes.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
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
