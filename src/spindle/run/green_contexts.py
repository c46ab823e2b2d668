"""Streams that run on a part of a GPU's SMs: disjoint green contexts, from one split of the device by the driver.

The driver splits a device into equal groups of SMs (8 from compute capability 9 on), which keep what a cluster of
blocks needs, and some that are left over. A partition has the SMs of several groups. Splitting the device once for each
partition, as `torch.cuda.GreenContext.create` does, would give all of them the same SMs; so a kernel notes on which SMs
it runs, on each stream, before anything else does.

A kernel of a CUDA graph runs on the SMs of the stream on which it was captured, wherever the graph is launched. Memory,
its bandwidth and caches are shared by all partitions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from spindle.cluster import SmGroups
from spindle.errors import ClusterError, TrainingError
from spindle.run.ipc.driver import Driver, SmResource

_MAX_SMS = 1024  # the largest number of SMs that a device may have
_BLOCKS_PER_SM, _THREADS, _SPIN_CYCLES = 8, 1024, 20_000
_TRIES = 5

# Adds one to a counter of the SM on which a block runs, and stays there for a while, so that the following blocks go to
# other SMs.
_NOTE_SM = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry note_sm(.param .u64 counters, .param .u64 cycles)
{
    .reg .pred %waits;
    .reg .b32 %sm, %one;
    .reg .b64 %counter, %offset, %begin, %now, %passed, %cycles;
    ld.param.u64 %counter, [counters];
    ld.param.u64 %cycles, [cycles];
    cvta.to.global.u64 %counter, %counter;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %sm, 4;
    add.s64 %counter, %counter, %offset;
    mov.u32 %one, 1;
    red.global.add.u32 [%counter], %one;
    mov.u64 %begin, %clock64;
spin:
    mov.u64 %now, %clock64;
    sub.s64 %passed, %now, %begin;
    setp.lt.s64 %waits, %passed, %cycles;
    @%waits bra spin;
    ret;
}
\0"""


@dataclass(frozen=True, slots=True)
class Partition:
    """A stream, and the numbers of the SMs on which its kernels run."""

    stream: torch.cuda.Stream
    sms: frozenset[int]


def sm_groups(device: int) -> SmGroups | None:
    """How the SMs of a device can be split. None if the driver has no green contexts, or none for this device."""
    driver = Driver()
    if not driver.has_green_contexts:
        return None
    try:
        groups, rest = driver.split_sms(device)
    except RuntimeError:
        return None
    return _described(groups, rest) if groups else None


def partitions(quotas: Sequence[int]) -> tuple[Partition, ...]:
    """Disjoint partitions of the current device with these numbers of SMs. Equal quotas give the same partitions,
    because libraries keep a workspace for each stream."""
    return _partitions(tuple(quotas), torch.cuda.current_device())


@cache
def _partitions(quotas: tuple[int, ...], device: int) -> tuple[Partition, ...]:
    driver, listed = Driver(), ", ".join(map(str, quotas))
    if not driver.has_green_contexts:
        raise TrainingError(
            f"lanes have quotas of {listed} SMs, for which this driver has no green contexts (it needs CUDA 12.5 or "
            "later); plan without quotas"
        )
    torch.cuda.init()  # type: ignore[no-untyped-call]
    made, first = [], 0
    try:
        groups, rest = driver.split_sms(device)
        parts = _described(groups, rest).parts(quotas)
        for quota, (num_groups, has_rest) in zip(quotas, parts, strict=True):
            handle = driver.green_stream(device, groups[first : first + num_groups] + [rest] * has_rest)
            stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
            made.append(Partition(stream, sms_of(stream, quota)))
            first += num_groups
    except (ClusterError, RuntimeError) as error:
        raise TrainingError(
            f"this GPU cannot give its lanes quotas of {listed} SMs: {error}; plan on this machine, or without quotas"
        ) from error
    seen = [partition.sms for partition in made]
    if [len(sms) for sms in seen] != list(quotas) or len(frozenset().union(*seen)) != sum(quotas):
        raise TrainingError(
            f"lanes have quotas of {listed} SMs, and their kernels run on {', '.join(str(len(sms)) for sms in seen)}, "
            f"of which {sum(map(len, seen)) - len(frozenset().union(*seen))} are shared; plan without quotas"
        )
    return tuple(made)


def _described(groups: Sequence[SmResource], rest: SmResource) -> SmGroups:
    group_sms = groups[0].num_sms if groups else 0  # the remaining group, which the driver refuses to return
    return SmGroups(group_sms=group_sms, num_groups=len(groups), rest_sms=rest.num_sms)


def sms_of(stream: torch.cuda.Stream, expected: int) -> frozenset[int]:
    """The numbers of the SMs on which kernels of a stream run. Tries again if there are fewer than expected, because
    another process may keep an SM busy."""
    counters = torch.zeros(_MAX_SMS, dtype=torch.int32, device="cuda")
    seen: frozenset[int] = frozenset()
    for _ in range(_TRIES):
        stream.wait_stream(torch.cuda.current_stream())
        note_sm(counters, stream)
        torch.cuda.current_stream().wait_stream(stream)
        seen = frozenset(torch.nonzero(counters).flatten().tolist())
        if len(seen) >= expected:
            break
    return seen


def note_sm(counters: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Count in `counters`, by SM, the blocks of a kernel that has enough blocks for all SMs. It may be captured."""
    driver, kernel = _kernel()
    num_blocks = _BLOCKS_PER_SM * torch.cuda.get_device_properties(stream.device).multi_processor_count
    arguments = ctypes.c_uint64(counters.data_ptr()), ctypes.c_uint64(_SPIN_CYCLES)
    driver.launch_kernel(kernel, stream.cuda_stream, num_blocks, _THREADS, arguments)


@cache
def _kernel() -> tuple[Driver, int]:
    driver = Driver()
    return driver, driver.load_kernel(_NOTE_SM, b"note_sm")
