"""Sums into parts, and parts into a whole: collectives on a flat tensor of as many equal parts as a group has ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from spindle.run import ipc
from spindle.run.world import World, peers

# As torch 2.13 calls them, and those before it.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Request(Protocol):
    def wait(self) -> Any: ...


def start_reduce_scatter(flat: torch.Tensor, ranks: tuple[int, ...], world: World) -> Request:
    """Starts to sum a flat tensor over these ranks, each part where its rank has it; what others are then is open."""
    with peers("synchronising gradients"):
        return start_sums(flat, world.group("sync", ranks), ranks, world.rank)


def start_sums(flat: torch.Tensor, group: Any, ranks: tuple[int, ...], own: int) -> Request:
    """The same in any group, whose ranks are in rising order."""
    parts, place = flat.chunk(len(ranks)), ranks.index(own)
    if not _goes_by_hand(flat, group):
        return _as_request(_reduce_scatter(parts[place], flat, group=group, async_op=True))
    others = [(part, rank) for part, rank in zip(parts, ranks, strict=True) if rank != own]
    arriving = [torch.empty_like(parts[place]) for _ in others]
    receives = [dist.irecv(one, rank, group=group) for one, (_, rank) in zip(arriving, others, strict=True)]
    sends = [dist.isend(part, rank, group=group) for part, rank in others]
    return _Messages([*receives, *sends], parts[place], arriving)


def start_all_gather(flat: torch.Tensor, ranks: tuple[int, ...], world: World) -> Request:
    """Starts to give every rank the parts of a flat tensor that the others of these ranks have."""
    group, parts, place = world.group("sync", ranks), flat.chunk(len(ranks)), ranks.index(world.rank)
    with peers("gathering parameters"):
        if not _goes_by_hand(flat, group):
            return _as_request(_all_gather(flat, parts[place], group=group, async_op=True))
        shared = zip(parts, ranks, strict=True)
        return _Messages([dist.broadcast(part, rank, group=group, async_op=True) for part, rank in shared])


def _goes_by_hand(flat: torch.Tensor, group: Any) -> bool:
    """Gloo's reduce-scatter sums everything everywhere and throws most of it away, and its all-gather makes copies.
    Parts sent to whom they belong, and parts broadcast, take half as long as its all-reduce each."""
    return flat.device.type == "cpu" and dist.get_backend(group) != ipc.BACKEND


def _as_request(request: Any) -> Request:
    assert request is not None
    result: Request = request
    return result


class _Messages:
    """Messages under way, and a sum that what arrives is added to."""

    def __init__(
        self, requests: list[Any], total: torch.Tensor | None = None, arriving: list[torch.Tensor] | None = None
    ) -> None:
        self._requests, self._total, self._arriving = requests, total, arriving or []

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        for one in self._arriving:  # in the order of ranks, whoever came first
            assert self._total is not None
            self._total += one
        self._requests, self._arriving = [], []
