"""The processes of a job: who we are, and what all ranks do together outside a program.

`python train.py` is a world of one, which needs no process group. `spindle launch` and `torchrun` say in the
environment who is who; then the world is a `torch.distributed` process group, ours or one that the script
made already. Under `spindle launch --virtual-devices` all ranks use one GPU, each its share of the memory, and tensors
go through our own backend (`ipc`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from spindle.errors import InputError, PeerLostError
from spindle.launch.failure import install_hook
from spindle.launch.mps import VIRTUAL_VARIABLE
from spindle.run import ipc
from spindle.run.heartbeat import start_heartbeat

_SHARED_MEMORY = 0.92  # of a GPU is for its ranks; contexts and what they exchange tensors through take the rest


class World:
    """This process among all of them. Groups are made once for each purpose and set of ranks, on all ranks at once."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}

    def group(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        """The group of these ranks. Every rank must ask for every group, in one order, before any rank uses it.

        Lanes run side by side, so each has groups of its own: two ranks may start a lane's work in different orders
        relative to another's.
        """
        key = (purpose, ranks)
        if key not in self._groups:
            # Small records stay on the host, whatever the device is.
            backend = "gloo" if purpose == CONTROL else None
            with peers("making a group"):
                self._groups[key] = dist.new_group(list(ranks), backend=backend)
        return self._groups[key]

    def forget_groups(self) -> None:
        """Lets go of all groups but that for control, on all ranks at once: some hold memory of their device."""
        for key in [key for key in self._groups if key[0] != CONTROL]:
            group = self._groups.pop(key)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                with peers("leaving a group"):
                    dist.destroy_process_group(group)

    @property
    def control(self) -> Any:
        return self.group(CONTROL, tuple(range(self.size)))

    def start_all_gather(self, record: torch.Tensor) -> Gathering:
        """Starts to give every rank's record (a small tensor on the host) to all ranks."""
        if self.size == 1:
            return Gathering(None, [record])
        table = [torch.empty_like(record) for _ in range(self.size)]
        with peers("exchanging headers"):
            return Gathering(dist.all_gather(table, record, group=self.control, async_op=True), table)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """One rank's value, on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        with peers(f"sharing what rank {source} has"):
            dist.broadcast_object_list(box, src=source, group=self.control)
        return box[0]

    def add_up(self, value: torch.Tensor, purpose: str, ranks: tuple[int, ...]) -> None:
        """The sum over these ranks, of which this is one, in the tensor's place. Its group must have been made."""
        if len(ranks) > 1:
            with peers("adding up"):
                dist.all_reduce(value, group=self.group(purpose, ranks))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; nothing elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with peers("gathering"):
            dist.gather_object(value, values, dst=0, group=self.control)
        return values or []

    def barrier(self) -> None:
        if self.size > 1:
            with peers("meeting"):
                dist.barrier(group=self.control)

    def meet(self) -> None:
        """All ranks stand here at once, and so do their devices."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier()


CONTROL = "control"


@cache
def compute_stream() -> torch.cuda.Stream:
    """The one stream of this process for compute beside the default one: libraries keep a workspace for each."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Gathering:
    """Records on their way."""

    def __init__(self, request: Any, table: list[torch.Tensor]) -> None:
        self._request, self._table = request, table

    def wait(self) -> list[torch.Tensor]:
        if self._request is not None:
            with peers("exchanging headers"):
                self._request.wait()
        return self._table


@contextmanager
def peers(doing: str) -> Iterator[None]:
    """What torch raises inside when another process is gone becomes a PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        raise lost(doing, error) from error


def wait(request: Any) -> None:
    """Waits for something on its way to or from other ranks."""
    with peers("waiting for it"):
        request.wait()


def lost(doing: str, error: BaseException) -> PeerLostError:
    return PeerLostError(f"another rank is gone, noticed while {doing}: {str(error).splitlines()[0]}")


def join_world() -> World:
    """The world that the environment describes."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        install_hook()
        start_heartbeat()
        on_host = dist.get_backend() == "gloo"  # which cannot send a GPU's tensors
        return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu") if on_host else _device())
    if size == 1:
        return World(0, 1, _device())
    device = _device()
    if VIRTUAL_VARIABLE in os.environ:
        ipc.register()
        dist.init_process_group(ipc.BACKEND)
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    atexit.register(_leave)
    install_hook()  # after torch, whose own hook would swallow what ours says before it ends the process
    start_heartbeat()
    return World(dist.get_rank(), dist.get_world_size(), device)


def _device() -> torch.device:
    sharers = int(os.environ.get(VIRTUAL_VARIABLE, "0"))
    if not torch.cuda.is_available():
        if sharers:
            raise InputError(
                f"torch {torch.__version__} sees no GPU for this virtual device; it needs a build with CUDA that the "
                "driver supports (python -c 'import torch; torch.cuda.init()' says what is wrong)"
            )
        return torch.device("cpu")
    place, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= num_gpus and not sharers:
        raise InputError(
            f"rank {place} of this host has no GPU of its own: there are {num_gpus}. Start as many processes as GPUs, "
            f"share one (spindle launch --virtual-devices {os.environ.get('LOCAL_WORLD_SIZE', 'N')} ...), or train on "
            "the CPU (CUDA_VISIBLE_DEVICES= in the environment)"
        )
    device = torch.device("cuda", 0 if sharers else place)
    torch.cuda.set_device(device)
    if sharers:
        torch.cuda.set_per_process_memory_fraction(_SHARED_MEMORY / sharers, device)
    return device


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
