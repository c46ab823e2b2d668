"""The operators a layer is made of, with what each asks of a device: FLOPs, bytes of memory, bytes of network.

A union of frozen values, one class per kind of kernel; all sizes are those of one member of a tensor group. Bytes count
every operand once, so a kernel that reads something twice has a lower efficiency instead. Knows no time.
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
    """One of the three products of a linear layer over so many tokens: its output, the gradient of its input, or that
    of its weights. The three have the same FLOPs and operands in other places."""

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
    """`count` instances of one length, each seeing itself alone; scores never reach memory (flash attention).

    Backward has 2.5 times the FLOPs of forward: scores are computed again.
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
        # Forward: read Q, K, V, write O. Backward: these and the gradient of O are read, three gradients written.
        return float(_BYTES * (4 * queries + 4 * keys if self.backward else 2 * queries + 2 * keys))

    @property
    def network_bytes(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """A kernel that does little more than read and write: a norm, an activation, a sum, a look-up."""

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
    """A collective of a tensor group over `num_bytes` (all members' parts together), around a ring.

    With sequence parallelism an all-reduce is a reduce-scatter here and an all-gather there, each half of its bytes.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    num_bytes: float
    num_members: int

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def memory_bytes(self) -> float:
        return 0.0  # copies of what the network moves; counted there

    @property
    def network_bytes(self) -> float:
        whole = ring_bytes(self.num_bytes, self.num_members)
        return whole if self.kind == "all_reduce" else whole / 2


Operator = Gemm | Attention | MemoryBound | Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """A layer over one sub-microbatch, on one member of its tensor group.

    Backward in two parts: what makes the gradient of the layer's input, and what makes those of its weights and may run
    later. `saved_bytes` is kept between the passes, `input_bytes` is what recomputation keeps instead, both on each
    member; `cut_bytes` crosses a cut behind the layer, all members' parts together.
    """

    forward: tuple[Operator, ...]
    input: tuple[Operator, ...]
    weight: tuple[Operator, ...]
    saved_bytes: float
    input_bytes: float
    cut_bytes: float
