"""The processes of a job: this rank, its device, and what all ranks do together outside a program.

`python train.py` is a world of one, which needs no process group. `spindle launch` and `torchrun` set ranks in the
environment; then the world is a `torch.distributed` process group, made here or by the script. Small records on the
host go through gloo everywhere. CUDA tensors go through NCCL, with one GPU per rank; under `spindle launch
--virtual-devices` all ranks share one GPU and its memory, and tensors go through the backend in `ipc`.
"""

from __future__ import annotations

import atexit
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # importing it after the default group was made would keep that group alive
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import InputError, PeerLostError, TrainingError
from spindle.launch import VIRTUAL_VARIABLE, die_with_parent, install_hook, recorder, variables
from spindle.run import ipc, signed_pickle
from spindle.run.heartbeat import start_heartbeat
from spindle.run.pytrees import on_device

_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_NCCL_DEFAULTS = {
    # Kernels of several communicators then start on every GPU in the order in which the host launches them, which is
    # the same on all ranks (`program.launch_order`). NCCL reads the variable with its first operation.
    _LAUNCH_ORDER: "1",
    # otherwise ranks that lose a peer flood the terminal before the first cause is reported
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # part of the message when a host tensor cannot be allocated
_LOST_WORKER = re.compile(r"DataLoader worker \(pid")
_GLOO_WORKER = "pt_gloo_runloop"  # the name of its threads
_LEFT = "spindle/left"  # in the store: how many ranks have ended their script
_RENDEZVOUS_PAUSE_S, _RENDEZVOUS_LONGEST_PAUSE_S = 0.0002, 0.05  # between looks at the store
_RENDEZVOUS_NOTICE_S = 10.0
# Before this process ends, it waits up to `_GLOO_WAIT_S` until gloo's threads were idle in several checks in a row.
_GLOO_WAIT_S, _IDLE_CHECKS, _IDLE_CHECK_S = 10.0, 3, 0.002
_SHARED_MEMORY = 0.92  # the share of a GPU for the tensors of its ranks; CUDA contexts and IPC segments take the rest


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor to or from a peer. Tags distinguish messages of one pair, if the backend supports tags."""

    tensor: torch.Tensor
    peer: int
    tag: int = 0


class World:
    """This process among all ranks. All ranks together make one process group for each purpose and set of ranks."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.shares_gpu = device.type == "cuda" and VIRTUAL_VARIABLE in os.environ
        self.uses_nccl = size > 1 and device.type == "cuda" and not self.shares_gpu
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        _worlds().add(self)
        if self.uses_nccl:
            _set_nccl_defaults()

    def group(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        """The process group of these ranks.

        Every rank must ask for every group, in the same order, before any rank uses it. Lanes run concurrently, so each
        lane has groups of its own: two ranks may start the operations of two lanes in different orders. NCCL
        communicators take GPU memory, and all ranks launch in one order, so under NCCL collectives over the same ranks
        share a communicator; those inside layers do not, because compute would wait for others.
        """
        if self.uses_nccl and purpose in _SHARED_PURPOSES:
            purpose = _SHARED_PURPOSES[0]
        key = (purpose, ranks)
        if key not in self._groups:
            with peers("making a group"):
                self._groups[key] = self._new_group(purpose, ranks)
        return self._groups[key]

    def _new_group(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        if purpose == CONTROL:  # small records stay on the host
            return dist.new_group(list(ranks), backend="gloo")
        if not self.uses_nccl:
            return dist.new_group(list(ranks))
        group = dist.new_group(list(ranks), backend="nccl", group_desc=f"{purpose} {ranks}")
        if self.rank in ranks:
            # create the communicator now, not in the middle of a step
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    def destroy_groups(self) -> None:
        """Destroy all groups except the one for control, on all ranks together, because some hold device memory. NCCL's
        are kept, for the next plan to reuse."""
        for key in [key for key in self._groups if key[0] != CONTROL and not self.uses_nccl]:
            group = self._groups.pop(key)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                with peers("leaving a group"):
                    dist.destroy_process_group(group)

    def release_groups(self) -> None:
        """Drop all references to groups, which must not be used any more."""
        self._groups.clear()

    @property
    def launches_in_order(self) -> bool:
        """Whether communication is launched in one order, the same on all ranks, and each exchange as one group
        call."""
        return self.uses_nccl

    @property
    def everyone(self) -> Any:
        """The group of all ranks for device tensors."""
        return self.group(TRANSFER, tuple(range(self.size))) if self.uses_nccl else None

    def start_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        """Start to send and receive device tensors, in no particular order. Returns one request for each.

        Under NCCL this is one group call without tags, so both ranks of a pair must list their messages in the same
        order.
        """
        with peers("exchanging tensors"):
            if not self.uses_nccl:
                # post receives first, so that a message finds its buffer when it arrives
                incoming = [dist.irecv(receive.tensor, receive.peer, tag=receive.tag) for receive in receives]
                return [dist.isend(send.tensor, send.peer, tag=send.tag) for send in sends], incoming
            calls = [(dist.isend, send) for send in sends] + [(dist.irecv, receive) for receive in receives]
            if not calls:
                return [], []
            # as bytes, because NCCL does not support all dtypes
            operations = [
                dist.P2POp(call, message.tensor.view(-1).view(torch.uint8), message.peer, self.everyone)
                for call, message in calls
            ]
            # coalesced into one NCCL group call, which has one request for all its messages
            (request,) = dist.batch_isend_irecv(operations)
            return [request] * len(sends), [request] * len(receives)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive some tensors, of the device or the host, and wait for them."""
        of_device = [
            [message for message in messages if message.tensor.device == self.device] for messages in (sends, receives)
        ]
        requests = [request for started in self.start_exchange(*of_device) for request in started]
        with peers("exchanging tensors"):
            # Host tensors beside a GPU go through gloo.
            for call, messages in ((dist.irecv, receives), (dist.isend, sends)):
                requests += [
                    call(message.tensor, message.peer, group=self.control)
                    for message in messages
                    if message.tensor.device != self.device
                ]
        for request in requests:
            wait(request)

    def send_on_host(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send a host tensor."""
        with peers("sending"):
            return dist.isend(tensor, peer, tag=tag, group=self.control if self.uses_nccl else None)

    def receive_on_host(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        with peers("receiving"):
            dist.recv(tensor, peer, tag=tag, group=self.control if self.uses_nccl else None)

    @property
    def control(self) -> Any:
        return self.group(CONTROL, tuple(range(self.size)))

    def start_all_gather(self, record: torch.Tensor) -> PendingGather:
        """Start an all-gather of every rank's record, a small tensor on the host."""
        if self.size == 1:
            return PendingGather(None, [record])
        table = [torch.empty_like(record) for _ in range(self.size)]
        with peers("exchanging headers"):
            return PendingGather(dist.all_gather(table, record, group=self.control, async_op=True), table)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Broadcast one rank's value, pickled and signed, to all ranks. Not for tensors."""
        if self.size == 1:
            return value
        message = signed_pickle.to_tensor(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([message.numel()])
        with peers(doing := f"broadcasting from rank {source}"):
            dist.broadcast(length, source, group=self.control)
        if self.rank != source:
            message = torch.empty(int(length), dtype=torch.uint8)
        with peers(doing):
            dist.broadcast(message, source, group=self.control)
        return value if self.rank == source else signed_pickle.from_tensor(message)

    def all_reduce(self, value: torch.Tensor, purpose: str, ranks: tuple[int, ...]) -> None:
        """All-reduce a tensor in place over these ranks, of which this is one. Its group must exist."""
        if len(ranks) > 1:
            with peers("all-reducing"):
                dist.all_reduce(value, group=self.group(purpose, ranks))

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather every rank's value, pickled and signed, on rank 0; an empty list elsewhere. Not for tensors."""
        if self.size == 1:
            return [value]
        message, lengths = _padded(signed_pickle.to_tensor(value), self.control, self.size)
        messages = [torch.empty_like(message) for _ in range(self.size)] if self.rank == 0 else None
        with peers("gathering"):
            dist.gather(message, messages, dst=0, group=self.control)
        return _unpickled(messages or [], lengths)

    def all_gather_objects(self, value: Any, purpose: str, ranks: tuple[int, ...]) -> list[Any]:
        """Gather a value of each of these ranks, of which this is one, on all of them. Their group must exist."""
        group, device = self.group(purpose, ranks), self.device if self.uses_nccl else torch.device("cpu")
        message, lengths = _padded(signed_pickle.to_tensor(value).to(device), group, len(ranks))
        messages = [torch.empty_like(message) for _ in ranks]
        with peers("gathering"):
            dist.all_gather(messages, message, group=group)
        return _unpickled(messages, lengths)

    def rendezvous(self, call: str, notify: Callable[[str], None], limit_s: float | None) -> None:
        """Wait until all ranks make this call, before it communicates: a collective that only some ranks run hangs, or
        is taken for another one, for which gloo aborts the process.

        Raises an error if a rank has ended its script instead, or after a limit. All ranks count their calls alike,
        because they run the same script.
        """
        if self.size == 1:
            return
        # Not `peers`, which would record this rank as waiting for others, though they may never make this call.
        with _backend_errors(f"waiting until all ranks call {call}"):
            self._rendezvous(call, notify, limit_s)

    def _rendezvous(self, call: str, notify: Callable[[str], None], limit_s: float | None) -> None:
        store = _store()
        number = store.add(f"spindle/calls/{self.rank}", 1)  # of this rank's calls since the group was made
        key = f"spindle/call/{number}"
        start_s, pause_s = time.monotonic(), _RENDEZVOUS_PAUSE_S
        is_notified = False
        store.add(key, 1)
        while store.add(key, 0) < self.size:
            waited_s = time.monotonic() - start_s
            has_left = store.add(_LEFT, 0) > 0 and store.add(key, 0) < self.size
            if has_left or (limit_s is not None and waited_s > limit_s):
                others = "a rank that has ended its script" if has_left else f"all ranks within {limit_s:g} s"
                raise TrainingError(
                    f"{call} was called on rank {self.rank}, but not on {others}: call it on all ranks, without a "
                    "condition such as `if rank == 0:`"
                )
            if limit_s is not None and waited_s > _RENDEZVOUS_NOTICE_S and not is_notified:
                is_notified = True
                notify(f"{call} waits until all ranks call it")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RENDEZVOUS_LONGEST_PAUSE_S)

    def barrier(self) -> None:
        if self.size > 1:
            with peers("waiting at a barrier"):
                dist.barrier(group=self.control)

    def synchronize(self) -> None:
        """Synchronize the device, then barrier."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier()


def _padded(message: torch.Tensor, group: Any, size: int) -> tuple[torch.Tensor, list[int]]:
    """A message padded to the longest of a group, and the lengths of all of them: collectives take equal sizes."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=message.device) for _ in range(size)]
    length = torch.full_like(lengths[0], message.numel())
    with peers("gathering"):
        dist.all_gather(lengths, length, group=group)
    lengths_on_host = [int(length) for length in lengths]
    return torch.nn.functional.pad(message, (0, max(lengths_on_host) - message.numel())), lengths_on_host


def _unpickled(messages: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[Any]:
    return [signed_pickle.from_tensor(message[:length]) for message, length in zip(messages, lengths, strict=False)]


CONTROL, TRANSFER = "control", "transfer"
_SHARED_PURPOSES = ("sync", "loss", "norm")


@cache
def compute_stream() -> torch.cuda.Stream:
    """The compute stream of this process, beside the default one. Only one: libraries keep a workspace per stream."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@contextmanager
def on_compute_stream(device: torch.device) -> Iterator[None]:
    """Run on the compute stream, ordered after earlier and before later work of the current stream.

    Whatever computes gradients should run here: autograd remembers the stream on which a parameter was first used, and
    a capture must not wait for another stream.
    """
    if device.type != "cuda":
        yield
        return
    current, stream = torch.cuda.current_stream(), compute_stream()
    # In both directions, so that callers need not know that there is another stream.
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@cache
def _copy_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def to_device(device: torch.device, tree: Any) -> Any:
    """A batch on its device. Copies to a GPU run on a stream of their own, concurrently with compute; the current
    stream waits for them."""
    leaves = tree_leaves(tree)
    if device.type != "cuda" or all(leaf.device == device for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return on_device(tree, device)
    copying = _copy_stream()

    def to_gpu(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        moved = leaf.to(device, non_blocking=True)
        # The allocator must not reuse this memory for the copy stream while compute still reads it.
        moved.record_stream(compute_stream())
        return moved

    with torch.cuda.stream(copying):
        moved = tree_map(to_gpu, tree)
    torch.cuda.current_stream().wait_stream(copying)
    return moved


class PendingGather:
    """An all-gather of records in flight."""

    def __init__(self, request: Any, table: list[torch.Tensor]) -> None:
        self._request, self._table = request, table

    def wait(self) -> list[torch.Tensor]:
        if self._request is not None:
            with peers("exchanging headers"):
                self._request.wait()
        return self._table


@contextmanager
def peers(doing: str) -> Iterator[None]:
    """Turn the RuntimeError that a backend raises when another process is gone into a PeerLostError.

    Nothing but calls of the backend belongs here: gloo raises plain RuntimeErrors, as everything else in torch does.
    """
    before, recorder.waiting = recorder.waiting, doing
    recorder.num_events += 1
    try:
        with _backend_errors(doing):
            yield
    finally:
        recorder.waiting = before


@contextmanager
def _backend_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # errors of this rank
        raise
    except RuntimeError as error:
        # memory that the backend asked for; or a worker process that was lost, which a signal handler of torch reports
        # in the middle of anything
        if _CPU_ALLOCATOR in str(error) or _LOST_WORKER.match(str(error)):
            raise
        raise lost(doing, error) from error


def wait(request: Any) -> None:
    """Wait for a transfer in flight."""
    with peers("waiting for it"):
        request.wait()


def lost(doing: str, error: BaseException) -> PeerLostError:
    return PeerLostError(f"another rank is gone, noticed while {doing}: {str(error).splitlines()[0]}")


def join_world() -> World:
    """Join the world that the environment describes."""
    size, is_ordered = int(os.environ.get("WORLD_SIZE", "1")), _LAUNCH_ORDER in os.environ
    if _TORCHRUN_VARIABLE in os.environ:  # its ranks would continue without it
        die_with_parent()
    if dist.is_initialized():
        _watch_ranks()
        on_host = dist.get_backend() == "gloo"  # which cannot send CUDA tensors
        world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu") if on_host else _device())
        if world.uses_nccl and not is_ordered:
            warnings.warn(
                f"the process group was made before spindle.Trainer: set {_LAUNCH_ORDER}=1 in the environment, so that "
                "kernels of several NCCL communicators start in the order in which they are launched",
                stacklevel=3,
            )
        return world
    if size == 1:
        recorder.start()
        return World(0, 1, _device())
    device = _device()
    if VIRTUAL_VARIABLE in os.environ:
        ipc.register()
        backend = ipc.BACKEND
    else:
        _set_nccl_defaults()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if variables.STORE in os.environ:  # a file that no other user can read, where a TCP store would be open to all
        store = dist.FileStore(os.environ[variables.STORE], size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=size)
    elif variables.LISTENING in os.environ:
        tcp_store = _tcp_store(size, os.environ.pop(variables.LISTENING))
        dist.init_process_group(backend, store=tcp_store, rank=int(os.environ["RANK"]), world_size=size)
    else:
        dist.init_process_group(backend)
    _watch_ranks()
    return World(dist.get_rank(), dist.get_world_size(), device)


def _tcp_store(size: int, descriptor: str) -> Any:
    """The store of ranks on several nodes. Rank 0 listens on a socket that was bound before, with this descriptor, so
    that no other process could take its port."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not descriptor:
        return dist.TCPStore(address, port, size, is_master=False)  # type: ignore[attr-defined]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, is_master=True, master_listen_fd=int(descriptor)
    )


def _watch_ranks() -> None:
    """Detect, report and end a failure of this rank or another."""
    atexit.unregister(_leave)
    atexit.register(_leave)
    install_hook()  # after torch, whose own hook would end the process before this one reports
    start_heartbeat()
    recorder.start()


def _set_nccl_defaults() -> None:
    for name, value in _NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)


def _device() -> torch.device:
    sharers = int(os.environ.get(VIRTUAL_VARIABLE, "0"))
    if not torch.cuda.is_available():
        if sharers:
            raise InputError(
                f"torch {torch.__version__} sees no GPU for this virtual device; it needs a build with CUDA that the "
                "driver supports (python -c 'import torch; torch.cuda.init()' says what is wrong)"
            )
        return torch.device("cpu")
    # A script that made its process group without torchrun has set its device.
    chosen = torch.cuda.current_device() if dist.is_initialized() else 0
    place, num_gpus = int(os.environ.get("LOCAL_RANK", chosen)), torch.cuda.device_count()
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


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@cache
def _worlds() -> WeakSet[World]:
    """The worlds of this process that are alive."""
    return WeakSet()


def _leave() -> None:
    """Destroy all process groups before the interpreter shuts down.

    A thread of gloo takes the GIL to release the tensors of a collective that has completed. Once the interpreter shuts
    down, Python ends a thread that asks for the GIL, in a way that C++ does not allow there: std::terminate, SIGABRT.
    `destroy_process_group` joins these threads only if nothing else refers to the groups.
    """
    for world in tuple(_worlds()):
        world.release_groups()
    if dist.is_initialized():
        with suppress(RuntimeError):  # the process that has the store may be gone
            _store().add(_LEFT, 1)
        dist.destroy_process_group()
    _wait_for_gloo()


def _wait_for_gloo() -> None:
    """Wait until no worker thread of gloo holds a collective: of groups to which the script still refers.

    A worker thread sleeps while it waits for a collective, and while it waits for the GIL, which sleeping releases.
    """
    end_s, num_idle = time.monotonic() + _GLOO_WAIT_S, 0
    while num_idle < _IDLE_CHECKS and time.monotonic() < end_s:
        workers = gloo_workers()
        if not workers:
            return
        num_idle = num_idle + 1 if set(workers.values()) == {"S"} else 0
        time.sleep(_IDLE_CHECK_S)


def gloo_workers() -> dict[int, str]:
    """The threads of this process that run collectives of gloo, with their states; none where there is no /proc."""
    workers = {}
    for folder in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            name, _, fields = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _GLOO_WORKER:
                workers[int(folder.name)] = fields.split()[0]
    return workers
