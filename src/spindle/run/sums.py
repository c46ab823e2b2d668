"""The sum of equal tensors of half precision, added up in float32: one pass over memory where Triton is there.

The parts are memory of other processes, so there is no one tensor of them all. Elements are added in the order of the
parts, so that the result is the same bits on every way.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without
    triton = tl = None

_BLOCK = 2048
_ALIGNMENT = 16  # bytes that a thread can take at once
_MOST_KNOWN = 4096

HALF_PRECISIONS = (torch.bfloat16, torch.float16)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _sum_kernel(addresses, into, size, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for number in tl.static_range(NUM_PARTS):
            part = tl.load(addresses + number).to(tl.pointer_type(into.dtype.element_ty))
            part = tl.multiple_of(part, 16)
            total += tl.load(part + places, mask=places < size, other=0.0).to(tl.float32)
        tl.store(into + places, total.to(into.dtype.element_ty), mask=places < size)


_addresses: dict[tuple[int, ...], torch.Tensor] = {}
_state: dict[str, Any] = {"works": triton is not None}


def sum_into(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Writes the sum of parts, of one half precision, into a tensor of the same, which may be one of them."""
    if _state["works"] and into.is_cuda and all(one.data_ptr() % _ALIGNMENT == 0 for one in (into, *parts)):
        try:
            _sum_in_one_pass(into, parts)
            return
        except Exception:  # no compiler on this machine, say
            _state["works"] = False
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total += part
    into.copy_(total)


def _sum_in_one_pass(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    key = tuple(part.data_ptr() for part in parts)
    if key not in _addresses:
        if len(_addresses) > _MOST_KNOWN:
            _addresses.clear()
        _addresses[key] = torch.tensor(key, dtype=torch.int64, device=into.device)
    grid = (-(-into.numel() // _BLOCK),)
    _sum_kernel[grid](_addresses[key], into, into.numel(), NUM_PARTS=len(parts), BLOCK=_BLOCK, num_warps=8)
