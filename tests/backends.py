"""The backend that the processes of the pool use: gloo on CPUs; NCCL or `spindle_ipc` on one GPU that all ranks share.

SPINDLE_TEST_BACKEND names it. On a GPU, MPS should run (`gpu/all.py` starts it): otherwise ranks take turns on the GPU.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from replay import graphs_without_cuda
from spindle.launch.mps import VIRTUAL_VARIABLE
from spindle.run import heartbeat, ipc

BACKEND_VARIABLE = "SPINDLE_TEST_BACKEND"
GRAPHS_VARIABLE = "SPINDLE_TEST_GRAPHS"  # "off": no CUDA graphs, even on a GPU
MAX_RANKS_VARIABLE = "SPINDLE_TEST_MAX_RANKS"  # tests that ask for more ranks get this many
BACKENDS = ("gloo", "nccl", "ipc")
GPU_RANKS = 4


def backend() -> str:
    name = os.environ.get(BACKEND_VARIABLE, "gloo")
    if name not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE}={name}: expected one of {', '.join(BACKENDS)}")
    return name


def on_gpu() -> bool:
    return backend() != "gloo"


def max_ranks() -> int:
    return int(os.environ.get(MAX_RANKS_VARIABLE, str(GPU_RANKS) if on_gpu() else "1000"))


def rank_device() -> torch.device:
    """The device that every rank of a test trains on."""
    return torch.device("cuda", 0) if on_gpu() else torch.device("cpu")


def graphs_enabled() -> bool:
    return os.environ.get(GRAPHS_VARIABLE, "on") == "on"


def graphs_on_any_device() -> Any:
    """Inside, slots can be captured: in CUDA graphs on a GPU, in their emulation on a CPU."""
    return nullcontext() if on_gpu() else graphs_without_cuda()


def to_device(nest: Any, device: torch.device | str | None = None) -> Any:
    """Tensors of a nest on a device, by default that of the rank."""
    place = rank_device() if device is None else device
    return tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, torch.Tensor) else leaf, nest)


def on_cpu(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Trained modules moved to the CPU, where references are computed."""
    nn.ModuleDict(modules).cpu()
    return modules


def prepare_rank(rank: int) -> None:
    """Sets the environment of a rank and its device. Must come before anything starts CUDA in this process."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", heartbeat.LIMIT_VARIABLE: "0"}
    if not on_gpu():
        return
    os.environ |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}
    if backend() == "nccl":
        os.environ.pop(VIRTUAL_VARIABLE, None)
        # NCCL refuses two ranks on one GPU only where both name the same host.
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    else:
        os.environ.setdefault(VIRTUAL_VARIABLE, str(max_ranks()))
        os.environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 // max_ranks()))
        ipc.register()
    torch.cuda.set_device(rank_device())
    torch.backends.cudnn.allow_tf32 = False  # references are in full precision


def init_process_group(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, name: str = "") -> None:
    """Joins a process group of the backend under test, or of one that is named."""
    if name == ipc.BACKEND:
        ipc.register()
    names = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "ipc": ipc.BACKEND}
    device = {"device_id": rank_device()} if backend() == "nccl" else {}
    name = name or names[backend()]
    dist.init_process_group(name, store=store, rank=rank, world_size=num_ranks, timeout=timeout, **device)


def leave_subgroups() -> None:
    """Destroys all process groups but the default one, in the order in which all ranks made them."""
    default = dist.group.WORLD
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not default]:
        dist.destroy_process_group(group)
