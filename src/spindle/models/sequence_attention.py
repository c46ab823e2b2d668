"""Attention of a sequence group (Ulysses): each member has a slice of one sequence's tokens and all weights.

Everything but attention treats tokens one by one, so a member runs it on its slice. Around attention, members exchange
slices of the tokens of all heads for all tokens of a slice of the heads, and back:

    q, k, v  (heads, slice)  ── all-to-all ─▶  (heads / size, tokens)  ── attention ─▶  ── all-to-all ─▶  (heads, slice)

The adjoint of an all-to-all is an all-to-all, so backward exchanges as much. While the layers of a member run,
`torch.nn.functional.scaled_dot_product_attention` is replaced; attention that is computed otherwise would only see the
slice. A mask that hides part of the sequence must cover all tokens. Slices may differ in length; shorter ones are
padded for the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spindle.errors import TrainingError

Run = Callable[..., Any]
_HEADS, _TOKENS = -3, -2  # dimensions of queries, keys and values


class SequenceGroup(Protocol):
    """A sequence group as one of its members sees it. `group_rank` is the member's number, from 0."""

    size: int
    group_rank: int

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """From a row for each member to the rows that the members have for this one, in their order."""
        ...


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return group.all_to_all(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.all_to_all(gradient), None


def with_sequence_attention(run: Run, group: SequenceGroup, bounds: Sequence[int]) -> Run:
    """A layer's function that runs it as this member of a sequence group, whenever it is called: in forward and when it
    is recomputed. `bounds` are those of the members' tokens."""

    def run_as_member(*args: Any, **kwargs: Any) -> Any:
        with sequence_attention(group, bounds):
            return run(*args, **kwargs)

    return run_as_member


@contextmanager
def sequence_attention(group: SequenceGroup, bounds: Sequence[int]) -> Iterator[None]:
    """A context in which attention is that of all tokens of a sequence group, with the tokens `bounds` on its members.
    The backward pass needs it, too: a block may recompute its forward there."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        _check_shapes(group, bounds, query, key, value)
        mask = None if attn_mask is None else _mask_of_heads(group, bounds, attn_mask, query.shape[_HEADS])
        mixed = own_attention(
            *_tokens_of_heads(group, bounds, (query, key, value)),
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return _heads_of_tokens(group, bounds, mixed)

    with _replaced_attention(attention) as own_attention:
        yield


def with_own_attention(run: Run) -> Run:
    """A layer's function that runs it with torch's own attention, wherever it is called."""

    def run_alone(*args: Any, **kwargs: Any) -> Any:
        replaced = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = getattr(replaced, "replaced", replaced)
        try:
            return run(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = replaced

    return run_alone


@contextmanager
def _replaced_attention(attention: Callable[..., torch.Tensor]) -> Iterator[Callable[..., torch.Tensor]]:
    """A context in which attention is another function; yields torch's own."""
    replaced = F.scaled_dot_product_attention
    own = getattr(replaced, "replaced", replaced)
    attention.replaced = own  # type: ignore[attr-defined]
    # The fast path of nn.MultiheadAttention in evaluation mode is another function.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    F.scaled_dot_product_attention = attention
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield own
    finally:
        F.scaled_dot_product_attention = replaced
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def _check_shapes(group: SequenceGroup, bounds: Sequence[int], *tensors: torch.Tensor) -> None:
    own = bounds[group.group_rank + 1] - bounds[group.group_rank]
    for tensor in tensors:
        if tensor.dim() < 3 or tensor.shape[_TOKENS] != own:
            raise TrainingError(
                f"attention over tensors of shape {tuple(tensor.shape)}, where a member of a sequence group has {own} "
                "of the item's tokens; all of queries, keys and values must be (..., heads, tokens, width) of them"
            )
        if tensor.shape[_HEADS] % group.size:
            raise TrainingError(
                f"attention with {tensor.shape[_HEADS]} heads cannot be shared by {group.size} devices: expected a "
                f"sequence degree that divides {tensor.shape[_HEADS]}"
            )


def _tokens_of_heads(
    group: SequenceGroup, bounds: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """From a slice of the tokens of all heads to all tokens of a slice of the heads, of several tensors at once."""
    lengths = [last - first for first, last in pairwise(bounds)]
    parts, shapes = [], []
    for tensor in tensors:
        heads = torch.unflatten(tensor, _HEADS, (group.size, -1)).movedim(_HEADS - 1, 0)
        padded = F.pad(heads, (0, 0, 0, max(lengths) - heads.shape[_TOKENS]))
        shapes.append(padded.shape)
        parts.append(padded.reshape(group.size, -1))
    received = _exchanged(group, parts)
    return tuple(
        torch.cat(
            [slice_.narrow(_TOKENS, 0, length) for slice_, length in zip(part.view(shape), lengths, strict=True)],
            dim=_TOKENS,
        )
        for part, shape in zip(received, shapes, strict=True)
    )


def _heads_of_tokens(group: SequenceGroup, bounds: Sequence[int], mixed: torch.Tensor) -> torch.Tensor:
    """Back from all tokens of a slice of the heads to a slice of the tokens of all heads."""
    lengths = [last - first for first, last in pairwise(bounds)]
    slices = [
        F.pad(slice_, (0, 0, 0, max(lengths) - slice_.shape[_TOKENS]))
        for slice_ in torch.split(mixed, lengths, dim=_TOKENS)
    ]
    sent = torch.stack(slices)
    (received,) = _exchanged(group, [sent.reshape(group.size, -1)])
    own = received.view(sent.shape).narrow(_TOKENS, 0, lengths[group.group_rank])
    return own.movedim(0, _HEADS - 1).flatten(_HEADS - 1, _HEADS)


def _exchanged(group: SequenceGroup, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All-to-alls of tensors with a row for each member: one for each dtype."""
    results: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        numbers = [number for number, part in enumerate(parts) if part.dtype == dtype]
        whole = torch.cat([parts[number] for number in numbers], dim=1)
        received: torch.Tensor = _AllToAll.apply(whole, group)  # type: ignore[no-untyped-call]
        results |= zip(
            numbers, torch.split(received, [parts[number].shape[1] for number in numbers], dim=1), strict=True
        )
    return [results[number] for number in range(len(parts))]


def _mask_of_heads(
    group: SequenceGroup, bounds: Sequence[int], mask: torch.Tensor, num_heads: int
) -> torch.Tensor | None:
    """The part of a mask for this member's heads. A mask of the member's own tokens must not hide any, because nothing
    is known about the other tokens."""
    first, last, whole = bounds[group.group_rank], bounds[group.group_rank + 1], bounds[-1]
    sizes = set(mask.shape[-2:]) - {1}
    if sizes <= {whole}:
        if mask.dim() >= 3 and mask.shape[_HEADS] > 1:
            count = num_heads // group.size
            return mask.narrow(_HEADS, group.group_rank * count, count)
        return mask
    text = (
        f"an attention mask of shape {tuple(mask.shape)}, made from {last - first} of the {whole} tokens of an item "
        "that several devices share, hides some of them; make it from all tokens, before the blocks"
    )
    if not sizes <= {last - first}:
        raise TrainingError(text)
    hides_nothing = mask.all() if mask.dtype == torch.bool else (mask == 0).all()
    if mask.device.type == "cuda":  # reading it would wait for the GPU
        torch._assert_async(hides_nothing, text)
    elif not hides_nothing:
        raise TrainingError(text)
    return None


@dataclass(slots=True)
class AttentionCalls:
    """What attention has been called with: tokens and heads of its tensors, and bytes that a sequence group would
    exchange for it in forward."""

    tokens: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    num_bytes: int = 0


@contextmanager
def recorded_attention() -> Iterator[AttentionCalls]:
    """A context in which calls of attention are recorded."""
    calls = AttentionCalls()

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed: torch.Tensor = own_attention(query, key, value, *args, **kwargs)
        for tensor in (query, key, value):
            calls.tokens.append(tensor.shape[_TOKENS])
            calls.heads.append(tensor.shape[_HEADS] if tensor.dim() > 2 else 1)
        calls.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in (query, key, value, mixed))
        return mixed

    with _replaced_attention(attention) as own_attention:
        yield calls
