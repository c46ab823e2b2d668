"""The profile of a workload on the very processes that will train it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from spindle.cluster import Cluster, DeviceKind, Island, cluster_named
from spindle.graph import MetaGraph
from spindle.measure.layers import measure_layers
from spindle.measure.links import measure_link
from spindle.profile import Profile, sampled_profile
from spindle.run.code import OpCode
from spindle.run.rows import Axes
from spindle.run.world import World


def local_profile(
    graph: MetaGraph,
    code: Sequence[OpCode],
    batches: Mapping[str, Any],
    batch_axes: Mapping[str, Axes],
    world: World,
    update_bytes_per_s: Callable[[], float | None] = lambda: None,
    progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Rank 0 times the layers and the optimizer, ranks 0 and 1 a link; every rank gets the same profile.

    Processes that share cores slow each other: k busy ones of a host run at the rate of its cores over the threads
    they start.
    """
    cluster = _cluster(world)
    profile: Profile | None = None
    if world.rank == 0:
        samples = measure_layers(graph, code, batches, batch_axes, world.size, world.device, progress)
        profile = sampled_profile(graph, _updating(cluster, update_bytes_per_s()), samples, _host_rates(world))
    shared: Profile = world.broadcast_object(profile)
    return shared


def _cluster(world: World) -> Cluster:
    """One island for each host, in the order of ranks."""
    hosts = world.broadcast_object(world.gather_objects(socket.gethostname()))
    link = measure_link(world, 0, 1) if world.size > 1 else None
    island = cluster_named("cpux1").islands[0]
    inside = world.broadcast_object(link) or island.link
    sizes = [len(list(ranks)) for _, ranks in groupby(hosts)]
    islands = tuple(
        Island(
            kind=_kind(world, island.kind, most=max(sizes)),
            num_devices=size,
            link=inside,
            uplink=replace(island.uplink, latency_s=inside.latency_s) if len(sizes) > 1 else island.uplink,
        )
        for size in sizes
    )
    where = f"{len(sizes)} hosts" if len(sizes) > 1 else "this machine"
    return Cluster(name=f"{world.size} processes on {where}", islands=islands)


def _updating(cluster: Cluster, bytes_per_s: float | None) -> Cluster:
    """The cluster with the rate at which an optimizer step was seen to move its bytes."""
    if bytes_per_s is None:
        return cluster
    islands = (replace(island, kind=replace(island.kind, memory_bytes_per_s=bytes_per_s)) for island in cluster.islands)
    return replace(cluster, islands=tuple(islands))


def _kind(world: World, guess: DeviceKind, most: int) -> DeviceKind:
    """What a rank has: its GPU, or its part of the host's memory."""
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        memory = int(properties.total_memory * torch.cuda.get_per_process_memory_fraction(world.device))
        return replace(guess, name=properties.name, memory_bytes=memory, memory_bytes_per_s=2e12)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(guess, memory_bytes=memory // most)


def _host_rates(world: World) -> tuple[float, ...]:
    if world.device.type == "cuda":
        return ()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    rates = tuple(min(1.0, cores / (busy * threads)) for busy in range(1, world.size + 1))
    return rates if min(rates) < 1 else ()
