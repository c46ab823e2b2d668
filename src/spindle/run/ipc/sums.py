"""The sum of tensors of one shape, accumulated in float32; in one pass over memory if Triton is installed.

The parts are memory of other processes, so no single tensor holds them all. Elements are added in the order of the
parts, so that every path gives the same bits.
"""

from __future__ import annotations

from functools import cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

_BLOCK = 2048
_ALIGNMENT = 16  # bytes that a thread can take at once
_MAX_CACHED = 4096

HALF_PRECISIONS = (torch.bfloat16, torch.float16)
SUMMED = (*HALF_PRECISIONS, torch.float32)

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


def sum_into(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Write the sum of parts of one dtype into a tensor of the same dtype, which may be one of them."""
    aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (into, *parts))
    if aligned and into.is_cuda and _one_pass_works(into.device, into.dtype):
        _sum_in_one_pass(into, parts)
    else:
        _sum_one_by_one(into, parts)


@cache
def _one_pass_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel compiles and gives the expected sum here; tried once, as there may be no compiler."""
    if triton is None:
        return False
    numbers = torch.arange(3 * _BLOCK + 5, device=device)
    parts = [torch.sin(numbers * (1 + part)).to(dtype) for part in range(3)]
    ours, expected = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    try:
        _sum_in_one_pass(ours, parts)
    except Exception:
        return False
    _sum_one_by_one(expected, parts)
    return torch.equal(ours, expected)


def _sum_one_by_one(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    into.copy_(total)


def _sum_in_one_pass(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    key = tuple(part.data_ptr() for part in parts)
    addresses = _addresses.get(key)
    if addresses is None:
        if len(_addresses) > _MAX_CACHED:
            _addresses.clear()
        addresses = _addresses[key] = torch.tensor(key, dtype=torch.int64, device=into.device)
    grid = (-(-into.numel() // _BLOCK),)
    _sum_kernel[grid](addresses, into, into.numel(), NUM_PARTS=len(parts), BLOCK=_BLOCK, num_warps=8)
