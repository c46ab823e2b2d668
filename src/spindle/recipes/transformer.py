"""Towers of transformer layers as modules, with their parameters and the costs of a call.

With s tokens per sample, width h, and W the elements of a layer's matrices, one layer costs per sample

    forward FLOPs   2·s·W + 4·s²·h       multiply-adds counted as 2; W = 12·h² for the plain layer, so 24·s·h² + 4·s²·h
    backward FLOPs  twice that
    saved bytes     s·(18·h + 2·k·f)     16-bit, flash attention (no s² scores); f is the MLP's width, k = 2 tensors of
                                         it, 3 when gated; 34·s·h for the plain layer with f = 4·h
    traffic bytes   twice the saved bytes: each saved tensor is written once and read once
    output bytes    2·s·h
    tensor bytes    two all-reduces of 2·s·h

A layer of a decoder that attends to m tokens of an encoder adds 4·h² matrices (half of them work on the m tokens),
4·s·m·h FLOPs, a third all-reduce, and 11·s·h + 4·m·h saved bytes.

Left out: patch and convolution stems, position tables and projections to the shared space (each below 1 % of a tower),
and the causal mask, which would halve the 4·s²·h.
"""

from __future__ import annotations

from dataclasses import dataclass

from spindle.errors import WorkloadError
from spindle.workload import Call, Layer, LayerCost, Module, Parameter

_BYTES = 2  # 16-bit activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Equal transformer layers, with an embedding before them or a head after them if these have many weights.

    Embedding and head share one table (tied weights); `table` names another tower's, for a head without an embedding. A
    vocabulary without either adds equal parts of the table to the blocks: as a layer of its own it would be a level of
    its own, and planners that go level by level would hold back the whole tower for a lookup.
    """

    name: str
    num_layers: int
    width: int
    num_heads: int
    mlp_width: int = 0  # 0: 4 times the width
    gated: bool = False
    num_key_heads: int = 0  # 0: the same as the number of heads
    cross_attention: bool = False
    vocabulary: int = 0
    has_embedding: bool = False
    has_head: bool = False
    table: str = ""
    max_tensor_degree: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.max_tensor_degree:
            raise WorkloadError(
                f"tower {self.name!r}: {self.num_heads} heads do not split over "
                f"max_tensor_degree={self.max_tensor_degree}; choose a divisor"
            )

    @property
    def hidden(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def self_elements(self) -> int:
        """Elements of one layer's matrices, without cross attention."""
        keys = 2 * self.width * self.width * (self.num_key_heads or self.num_heads) // self.num_heads
        return 2 * self.width * self.width + keys + (3 if self.gated else 2) * self.width * self.hidden

    @property
    def layer_elements(self) -> int:
        """Elements of one layer: matrices, biases and norms (counted as 13 vectors of its width)."""
        cross = 4 * self.width * self.width if self.cross_attention else 0
        return self.self_elements + cross + 13 * self.width


def module_of(tower: Tower) -> Module:
    """The tower as a chain of layers."""
    table = (tower.table or f"{tower.name}.table",)
    layers = [Layer(kind="block", parameters=(f"{tower.name}.blocks.{number}",)) for number in range(tower.num_layers)]
    if tower.has_embedding:
        layers.insert(0, Layer(kind="embedding", parameters=table))
    if tower.has_head:
        layers.append(Layer(kind="head", parameters=table))
    return Module(name=tower.name, layers=tuple(layers))


def parameters_of(tower: Tower) -> tuple[Parameter, ...]:
    """One parameter for each block, and the table if it is the tower's own."""
    spread = tower.vocabulary and not (tower.has_embedding or tower.has_head)
    part = tower.vocabulary * tower.width // tower.num_layers if spread else 0
    blocks = tuple(
        Parameter(name=f"{tower.name}.blocks.{number}", num_elements=tower.layer_elements + part)
        for number in range(tower.num_layers)
    )
    if tower.table or spread or not tower.vocabulary:
        return blocks
    table = Parameter(name=f"{tower.name}.table", num_elements=tower.vocabulary * tower.width)
    return (table, *blocks)


def call_name(module: str) -> str:
    """The name of a module's only call in a task."""
    return f"{module}#0"


def call_of(tower: Tower, num_tokens: int, memory_tokens: int = 0) -> Call:
    """A call of the tower on samples of `num_tokens` tokens, attending to `memory_tokens` of an encoder."""
    costs = []
    if tower.has_embedding:
        costs.append(("embedding", embedding_cost(tower, num_tokens)))
    if tower.num_layers:
        costs.append(("block", block_cost(tower, num_tokens, memory_tokens)))
    if tower.has_head:
        costs.append(("head", head_cost(tower, num_tokens)))
    return Call(name=call_name(tower.name), module=tower.name, costs=tuple(costs))


def block_cost(tower: Tower, num_tokens: int, memory_tokens: int = 0) -> LayerCost:
    """The cost of one transformer layer per sample."""
    tokens, width = num_tokens, tower.width
    flops = 2 * tokens * tower.self_elements + 4 * tokens * tokens * width
    saved = tokens * (18 * width + 2 * (3 if tower.gated else 2) * tower.hidden)
    if tower.cross_attention:
        flops += 4 * width * width * (tokens + memory_tokens) + 4 * tokens * memory_tokens * width
        saved += 11 * tokens * width + 4 * memory_tokens * width
    return LayerCost(
        forward_flops=flops,
        backward_flops=2 * flops,
        traffic_bytes=2 * saved,
        saved_bytes=saved,
        output_bytes=_BYTES * tokens * width,
        tensor_bytes=(3 if tower.cross_attention else 2) * _BYTES * tokens * width,
        max_tensor_degree=tower.max_tensor_degree,
    )


def embedding_cost(tower: Tower, num_tokens: int) -> LayerCost:
    """A lookup: rows are read and written, nothing is multiplied, only the token numbers (4 bytes each) are saved."""
    rows = _BYTES * num_tokens * tower.width
    return LayerCost(
        forward_flops=0,
        backward_flops=0,
        traffic_bytes=2 * rows,
        saved_bytes=4 * num_tokens,
        output_bytes=rows,
        tensor_bytes=rows,
        max_tensor_degree=tower.max_tensor_degree,
    )


def head_cost(tower: Tower, num_tokens: int) -> LayerCost:
    """Logits over the vocabulary and their loss; 16-bit logits are saved, the output is one number per token."""
    flops = 2 * num_tokens * tower.width * tower.vocabulary
    saved = _BYTES * num_tokens * (tower.width + tower.vocabulary)
    return LayerCost(
        forward_flops=flops,
        backward_flops=2 * flops,
        traffic_bytes=2 * saved,
        saved_bytes=saved,
        output_bytes=_BYTES * num_tokens,
        tensor_bytes=2 * _BYTES * num_tokens,
        max_tensor_degree=tower.max_tensor_degree,
    )
