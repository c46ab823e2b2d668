"""Layers of large multimodal models over one sub-microbatch, as operators of one member of a tensor group.

A shape is a kind of layer with the lengths of its instances, `((length, count), ...)`; equal shapes are equal values,
so SEMU evaluates each only once. Tensor parallelism is that of Megatron-LM with sequence parallelism: matrices are
split by columns, then by rows; norms, sums and saved activations by tokens; with an all-gather before and a
reduce-scatter after each pair of matrices.

Bytes saved for backward, per token, 16-bit, flash attention, no dropout: the input, norm output, queries and attention
output of attention and the input and norm output of the MLP (12·h), keys and values (2·k), and the MLP's hidden tensors
(2·f each; two, or three if gated). A causal mask halves the FLOPs of attention. Model FLOPs of backward are twice those
of forward, although flash attention computes scores again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from spindle.profile import Attention, Collective, Gemm, LayerOperators, MemoryBound, Operator
from spindle.recipes.transformer import Tower
from spindle.workload import LayerCost

Lengths = tuple[tuple[int, int], ...]  # (tokens of an instance, number of such instances), by increasing tokens

_BYTES = 2
_ACCUMULATE_BYTES = 6  # per element: a gradient is added to a 32-bit sum while its GEMM writes it


def lengths_of(instances: Iterable[int]) -> Lengths:
    counts: dict[int, int] = {}
    for tokens in instances:
        counts[tokens] = counts.get(tokens, 0) + 1
    return tuple(sorted(counts.items()))


def num_tokens(lengths: Lengths) -> int:
    return sum(tokens * count for tokens, count in lengths)


def _norm(num_bytes: float) -> tuple[Operator, Operator]:
    """Forward reads and writes a tensor of `num_bytes`; backward reads two and writes one."""
    return MemoryBound(kind="norm", num_bytes=2 * num_bytes), MemoryBound(kind="norm_backward", num_bytes=3 * num_bytes)


def _gather(num_bytes: float, degree: int) -> Operator:
    return Collective(kind="all_gather", num_bytes=num_bytes, num_members=degree)


def _scatter(num_bytes: float, degree: int) -> Operator:
    return Collective(kind="reduce_scatter", num_bytes=num_bytes, num_members=degree)


def _products(tokens: int, outputs: int, inputs: int) -> tuple[Operator, Operator, tuple[Operator, ...]]:
    """A linear layer: forward, the gradient of its input, and the gradient of its weights, which is accumulated."""
    return (
        Gemm(tokens=tokens, outputs=outputs, inputs=inputs),
        Gemm(tokens=tokens, outputs=outputs, inputs=inputs, pass_="input"),
        (
            Gemm(tokens=tokens, outputs=outputs, inputs=inputs, pass_="weight"),
            MemoryBound(kind="accumulate", num_bytes=_ACCUMULATE_BYTES * outputs * inputs),
        ),
    )


def _cost(
    flops: float,
    saved_bytes: float,
    output_bytes: float,
    tensor_bytes: float,
    max_tensor_degree: int,
    input_bytes: float | None = None,
) -> LayerCost:
    return LayerCost(
        forward_flops=flops,
        backward_flops=2 * flops,
        traffic_bytes=2 * saved_bytes,
        saved_bytes=saved_bytes,
        output_bytes=output_bytes,
        tensor_bytes=tensor_bytes,
        max_tensor_degree=max_tensor_degree,
        input_bytes=input_bytes,
        sequence_parallel=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer layer. With cross attention every instance also attends to its `context` tokens, which are passed
    on to the next layer."""

    tower: Tower
    lengths: Lengths
    causal: bool = False
    context: Lengths = ()  # the same number of instances as `lengths`, in no particular order

    @property
    def cost(self) -> LayerCost:
        tower, width = self.tower, self.tower.width
        tokens, seen = num_tokens(self.lengths), num_tokens(self.context)
        squares = sum(count * length**2 for length, count in self.lengths)
        flops = 2.0 * tokens * tower.self_elements + 4.0 * squares * width * (0.5 if self.causal else 1.0)
        saved = float(tokens * self._saved_per_token)
        if seen:
            flops += 4.0 * width * width * (tokens + seen) + 4.0 * tokens * self._mean_context * width
            saved += 8.0 * tokens * width + 4.0 * seen * width
        return _cost(
            flops,
            saved,
            float(_BYTES * (tokens + seen) * width),
            float((3 if seen else 2) * _BYTES * tokens * width),
            tower.max_tensor_degree,
        )

    @property
    def _saved_per_token(self) -> int:
        tower = self.tower
        keys = 2 * tower.width * (tower.num_key_heads or tower.num_heads) // tower.num_heads
        return 12 * tower.width + _BYTES * keys + _BYTES * (3 if tower.gated else 2) * tower.hidden

    @property
    def _mean_context(self) -> int:
        instances = sum(count for _, count in self.context)
        return -(-num_tokens(self.context) // instances) if instances else 0

    def operators(self, tensor_degree: int) -> LayerOperators:
        tower, degree = self.tower, tensor_degree
        tokens, width = num_tokens(self.lengths), tower.width
        rows = _BYTES * tokens * width / degree  # bytes of one tensor of the layer's width on a member
        heads, head_width = tower.num_heads // degree, width // tower.num_heads
        key_heads = max(1, (tower.num_key_heads or tower.num_heads) // degree)
        hidden = tower.hidden // degree
        norm, norm_back = _norm(rows)
        add = MemoryBound(kind="add", num_bytes=3 * rows)
        gather, scatter = _gather(degree * rows, degree), _scatter(degree * rows, degree)
        forward: list[Operator] = []
        back: list[Operator] = []
        weight: list[Operator] = []

        def linear(outputs: int, inputs: int, over: int = tokens) -> None:
            product, input_, weights = _products(over, outputs, inputs)
            forward.append(product)
            back.append(input_)
            weight.extend(weights)

        def attention(keys_of: int = 0) -> None:
            for length, count in self.lengths:
                for operators, backward in ((forward, False), (back, True)):
                    operators.append(
                        Attention(
                            count=count,
                            queries=length,
                            keys=keys_of or length,
                            heads=heads,
                            key_heads=heads if keys_of else key_heads,
                            head_width=head_width,
                            causal=self.causal and not keys_of,
                            backward=backward,
                        )
                    )

        def append(of_forward: Iterable[Operator], of_backward: Iterable[Operator]) -> None:
            forward.extend(of_forward)
            back.extend(of_backward)

        append((norm, gather), (norm_back, scatter))
        linear((heads + 2 * key_heads) * head_width, width)
        if self.causal:  # language models rotate queries and keys by their positions (RoPE)
            turned = MemoryBound(kind="activation", num_bytes=2 * _BYTES * tokens * (heads + key_heads) * head_width)
            append((turned,), (turned,))
        attention()
        linear(width, heads * head_width)
        append((scatter, add), (gather, add))
        if self.context:
            append((norm, gather), (norm_back, scatter))
            linear(heads * head_width, width)
            linear(2 * heads * head_width, width, over=num_tokens(self.context))
            attention(keys_of=self._mean_context)
            linear(width, heads * head_width)
            append((scatter, add), (gather, add))
        append((norm, gather), (norm_back, scatter))
        linear(hidden * (2 if tower.gated else 1), width)
        tensor_bytes = _BYTES * tokens * hidden
        append(
            (MemoryBound(kind="activation", num_bytes=(3 if tower.gated else 2) * tensor_bytes),),
            (MemoryBound(kind="activation", num_bytes=(5 if tower.gated else 3) * tensor_bytes),),
        )
        linear(width, hidden)
        append((scatter, add), (gather, add))
        return LayerOperators(
            forward=tuple(forward),
            input=tuple(reversed(back)),
            weight=tuple(weight),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A lookup in a table whose rows are split over a tensor group; only the token numbers are saved."""

    tower: Tower
    lengths: Lengths

    @property
    def cost(self) -> LayerCost:
        tokens, rows = num_tokens(self.lengths), float(_BYTES * num_tokens(self.lengths) * self.tower.width)
        return _cost(0.0, 4.0 * tokens, rows, rows, self.tower.max_tensor_degree, 4.0 * tokens)

    def operators(self, tensor_degree: int) -> LayerOperators:
        row_bytes = self.cost.output_bytes
        lookup = MemoryBound(kind="lookup", num_bytes=2 * row_bytes)
        return LayerOperators(
            forward=(lookup, _scatter(row_bytes, tensor_degree)),
            input=(_gather(row_bytes, tensor_degree),),
            weight=(lookup,),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A norm, logits over the vocabulary and their loss; 16-bit logits are saved, the output is one number per
    token."""

    tower: Tower
    lengths: Lengths

    @property
    def cost(self) -> LayerCost:
        tokens, tower = num_tokens(self.lengths), self.tower
        return _cost(
            2.0 * tokens * tower.width * tower.vocabulary,
            float(_BYTES * tokens * (2 * tower.width + tower.vocabulary)),
            float(_BYTES * tokens),
            2.0 * _BYTES * tokens,
            tower.max_tensor_degree,
            float(_BYTES * tokens * tower.width),
        )

    def operators(self, tensor_degree: int) -> LayerOperators:
        tokens, width, degree = num_tokens(self.lengths), self.tower.width, tensor_degree
        rows = _BYTES * tokens * width / degree
        logits = -(-self.tower.vocabulary // degree)
        norm, norm_back = _norm(rows)
        product, input_, weights = _products(tokens, logits, width)
        summed = Collective(kind="all_reduce", num_bytes=3 * 4 * tokens, num_members=degree)
        return LayerOperators(
            forward=(
                norm,
                _gather(degree * rows, degree),
                product,
                MemoryBound(kind="loss", num_bytes=8.0 * tokens * logits),  # 16-bit logits, 32-bit sums over them
                summed,
            ),
            input=(
                MemoryBound(kind="loss", num_bytes=6.0 * tokens * logits),
                input_,
                _scatter(degree * rows, degree),
                norm_back,
            ),
            weight=weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """Patches into tokens: one matrix, replicated on every member, which each have a part of the tokens. The input is
    data and needs no gradient."""

    tower: Tower
    lengths: Lengths
    patch_elements: int

    @property
    def cost(self) -> LayerCost:
        tokens = num_tokens(self.lengths)
        return _cost(
            2.0 * tokens * self.patch_elements * self.tower.width,
            float(_BYTES * tokens * self.patch_elements),
            float(_BYTES * tokens * self.tower.width),
            0.0,
            self.tower.max_tensor_degree,
            float(_BYTES * tokens * self.patch_elements),
        )

    def operators(self, tensor_degree: int) -> LayerOperators:
        share = -(-num_tokens(self.lengths) // tensor_degree)
        product, _, weights = _products(share, self.tower.width, self.patch_elements)
        return LayerOperators(
            forward=(product, MemoryBound(kind="add", num_bytes=3.0 * _BYTES * share * self.tower.width)),
            input=(),
            weight=weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A norm and an MLP into another module's width; every `merge` neighbouring tokens become one."""

    tower: Tower
    lengths: Lengths
    output_width: int
    merge: int = 1

    @property
    def _merged(self) -> int:
        return sum(-(-length // self.merge) * count for length, count in self.lengths)

    @property
    def cost(self) -> LayerCost:
        tokens, width = num_tokens(self.lengths), self.tower.width
        inner = self.output_width * (self.merge * width + self.output_width)
        return _cost(
            2.0 * self._merged * inner,
            float(_BYTES * (2 * tokens * width + 2 * self._merged * self.output_width)),
            float(_BYTES * self._merged * self.output_width),
            float(_BYTES * self._merged * self.output_width),
            self.tower.max_tensor_degree,
            float(_BYTES * tokens * width),
        )

    def operators(self, tensor_degree: int) -> LayerOperators:
        degree, rows = tensor_degree, self._merged
        width = self.tower.width
        come_in, go_out = (
            _BYTES * num_tokens(self.lengths) * width / degree,
            _BYTES * rows * self.output_width / degree,
        )
        norm, norm_back = _norm(come_in)
        first = _products(rows, self.output_width // degree, self.merge * width)
        second = _products(rows, self.output_width, self.output_width // degree)
        return LayerOperators(
            forward=(
                norm,
                _gather(degree * come_in, degree),
                first[0],
                MemoryBound(kind="activation", num_bytes=2 * go_out),
                second[0],
                _scatter(degree * go_out, degree),
            ),
            input=(
                _gather(degree * go_out, degree),
                second[1],
                MemoryBound(kind="activation", num_bytes=3 * go_out),
                first[1],
                _scatter(degree * come_in, degree),
                norm_back,
            ),
            weight=tuple(chain(first[2], second[2])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """A norm and one matrix back into patches, with their loss; replicated on every member, which each have a part of
    the tokens."""

    tower: Tower
    lengths: Lengths
    patch_elements: int

    @property
    def cost(self) -> LayerCost:
        tokens = num_tokens(self.lengths)
        return _cost(
            2.0 * tokens * self.patch_elements * self.tower.width,
            float(_BYTES * tokens * (2 * self.tower.width + self.patch_elements)),
            float(_BYTES * tokens),
            0.0,
            self.tower.max_tensor_degree,
            float(_BYTES * tokens * self.tower.width),
        )

    def operators(self, tensor_degree: int) -> LayerOperators:
        share = -(-num_tokens(self.lengths) // tensor_degree)
        rows = float(_BYTES * share * self.tower.width)
        norm, norm_back = _norm(rows)
        product, input_, weights = _products(share, self.patch_elements, self.tower.width)
        loss = MemoryBound(kind="loss", num_bytes=8.0 * share * self.patch_elements)
        return LayerOperators(
            forward=(norm, product, loss),
            input=(loss, input_, norm_back),
            weight=weights,
        )


Shape = Block | Embedding | Head | Patches | Adapter | Final
