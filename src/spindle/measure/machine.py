"""Measure the profile of a workload, on the processes that will train it."""

from __future__ import annotations

import math
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from spindle.cluster import Cluster, DeviceKind, Island, SmGroups, cluster_named
from spindle.display import count_of
from spindle.graph import MetaGraph
from spindle.launch import VIRTUAL_VARIABLE, ProfileCapture
from spindle.measure.cache import Cache
from spindle.measure.host import measure_host_overhead
from spindle.measure.layers import Kind, LayerMeter, measure_items, measure_layers
from spindle.measure.links import measure_all_to_all, measure_link
from spindle.measure.overlap import Overlap, measure_overlap
from spindle.measure.p2p_latency import measure_p2p_latency
from spindle.measure.rank_sync import RankSync
from spindle.measure.rates import measure_rates
from spindle.measure.update import measure_gradient_sum
from spindle.profile import ItemTimes, LayerSamples, Profile, sampled_profile
from spindle.run import Axes, Lengths, OpCode, World, sm_groups

# The usable share of a GPU's memory: in a step that filled it, 7 % were lost to fragmentation in torch's allocator.
_USABLE = 0.9


def local_profile(
    graph: MetaGraph,
    code: Sequence[OpCode],
    kinds: Sequence[Kind],
    batches: Mapping[str, Any],
    batch_axes: Mapping[str, Axes],
    world: World,
    *,
    update_bytes_per_s: Callable[[], float | None] = lambda: None,
    progress: Callable[[float], None] = lambda share: None,
    notify: Callable[[str], None] = lambda text: None,
    graphs: bool = False,
    lanes: int = 1,
    quotas: bool = False,
    lengths: Mapping[str, Lengths] | None = None,
    capture: ProfileCapture | None = None,
) -> Profile:
    """Measure layers, optimizer and links. All ranks call it, and get the same profile.

    Without a shared GPU, rank 0 measures layers and optimizer alone. Processes that share cores slow each other down: k
    busy processes of a host run at the rate of its cores divided by the number of their threads. Ranks that share one
    GPU measure at the same time, so curves hold while all neighbours are busy, and rates say how much faster a device
    is with fewer.

    On a GPU, where times are repeatable, layers are looked up in the cache; on a CPU, whose load changes, only if a
    profile was requested. With `lengths` (of the items of each batch), single items are measured, too. With `quotas`,
    layers are also measured on some of the SMs, if lanes may share a GPU.
    """
    # Links first, while nothing computes; then layers, and whatever else needs the longest of them.
    rank_sync = RankSync(world, enabled=VIRTUAL_VARIABLE in os.environ)
    is_half = graph.numerics.gradient_bytes == 2 and world.device.type == "cuda"
    summed = torch.bfloat16 if is_half else torch.float32
    cluster = _cluster(world, summed)
    # sequence groups are for items, and stay inside an island
    exchanges = lengths is not None and any(lengths.values()) and world.size > 1 and len(cluster.islands) == 1
    all_to_all = measure_all_to_all(world) if exchanges else None
    samples: dict[str, LayerSamples] = {}
    item_times: tuple[tuple[str, ItemTimes], ...] = ()
    rates: tuple[float, ...] = ()
    overlap, update, longest = Overlap(), None, None
    shares_device = lanes > 1 and world.device.type == "cuda" and not world.shares_gpu and _has_modules(graph)
    groups = _sm_groups(world, notify) if quotas and shares_device and world.size == 1 else None
    if rank_sync.size > 1 or world.rank == 0:
        cache = None
        if world.rank == 0 and (world.device.type == "cuda" or capture is not None):
            cache = Cache(_machine(world, rank_sync), notify, fresh=capture is not None and capture.fresh)
        meter = LayerMeter(rank_sync, cache)
        samples = measure_layers(
            graph,
            code,
            kinds,
            batches,
            batch_axes,
            world.size,
            world.device,
            meter,
            graphs=graphs,
            lanes=shares_device,
            sm_groups=groups,
            notify=notify,
            progress=progress,
        )
        if lengths is not None:
            item_times = measure_items(graph, code, kinds, batches, lengths, world.device, meter)
        rates = _host_rates(world) if rank_sync.size == 1 else measure_rates(meter.longest, rank_sync)
        if world.device.type == "cuda":
            overlap = measure_overlap(meter.longest, rank_sync, world, cluster.islands[0].link, summed)
        longest = meter.longest if rank_sync.size > 1 else None
        updates = [rate for (rate,) in rank_sync.all_gather(update_bytes_per_s() or math.nan) if not math.isnan(rate)]
        update = statistics.median(updates) if updates else None
    # Again with all ranks: messages while devices compute, and launches.
    latency_s = measure_p2p_latency(longest, world)
    host = measure_host_overhead(world)
    is_alone = world.device.type == "cuda" and world.size == 1
    sums = measure_gradient_sum(world.device, summed) if is_alone else None
    profile: Profile | None = None
    if world.rank == 0:
        adjusted = _with_measured_costs(cluster, update, overlap.collective_s, latency_s)
        if groups is not None:
            kind = replace(adjusted.kind, sm_groups=groups)
            adjusted = replace(adjusted, islands=tuple(replace(island, kind=kind) for island in adjusted.islands))
        profile = replace(
            sampled_profile(graph, adjusted, samples, rates),
            overlap=overlap.overlap,
            exchange_overlap=overlap.exchange_overlap,
            # a single process has its gradients in the memory of its graphs, after activations
            gradients_stay=world.device.type == "cuda" and world.size > 1,
            lane_bytes=_lane_bytes(world),
            sends_stay=world.device.type != "cuda",
            host=host,
            measured_on=_where_and_when(world),
            item_times=item_times,
            all_to_all=all_to_all,
            # with several ranks, gradients go to buffers, and layers are measured that way
            gradient_sum_bytes_per_s=sums,
        )
    shared: Profile = world.broadcast_object(profile)
    return shared


def _sm_groups(world: World, notify: Callable[[str], None]) -> SmGroups | None:
    groups = sm_groups(torch.cuda.current_device())
    if groups is None:
        notify("no quotas: this driver has no green contexts for this GPU; they come with CUDA 12.5")
    return groups


def _lane_bytes(world: World) -> int:
    """The memory that libraries keep for each stream: cuBLAS has a workspace for each thread that computes, one of
    which is autograd's (32 MiB from compute capability 9 on, as torch chooses)."""
    if world.device.type != "cuda":
        return 0
    is_large = torch.cuda.get_device_capability(world.device)[0] >= 9
    return 2 * (32 * 2**20 if is_large else 2**23 + 2**17)


def _has_modules(graph: MetaGraph) -> bool:
    """Whether modules, or their input and weight gradients, could share a device. Losses are not worth it."""
    return any(any(op.parameters) for op in graph.metaops)


def _machine(world: World, rank_sync: RankSync) -> dict[str, str]:
    """What a measured time depends on besides the layer. Part of the cache key."""
    switches = (
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled(world.device.type),
        torch.get_autocast_dtype(world.device.type),
        torch.get_float32_matmul_precision(),
    )
    facts = {"torch": torch.__version__, "busy devices": str(rank_sync.size), "switches": str(switches)}
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return facts | {"device": properties.name, "multiprocessors": str(properties.multi_processor_count)}
    return facts | {"device": _processor(), "threads": str(torch.get_num_threads())}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def _where_and_when(world: World) -> str:
    """Where and when a profile was measured, as text."""
    name = _processor()
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        name = f"{properties.name}, {properties.multi_processor_count} multiprocessors for each device"
    return f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}"


def _cluster(world: World, summed: torch.dtype) -> Cluster:
    """One island per host, in the order of ranks. Its link is measured between two ranks of one host, its uplink
    between two hosts."""
    hosts = world.broadcast_object(world.gather_objects(_host()))
    sizes = [len(list(ranks)) for _, ranks in groupby(hosts)]
    island = cluster_named("cpux1").islands[0]
    link, uplink = island.link, island.uplink
    if len(sizes) > 1:
        link = uplink = measure_link(world, (0, sizes[0]))
        if max(sizes) > 1:
            first = sum(sizes[: sizes.index(max(sizes))])
            link = measure_link(world, (first, first + 1))
    elif world.size > 1:
        link = measure_link(world, summed=summed)
    islands = tuple(
        Island(
            kind=_kind(world, island.kind, max_ranks=max(sizes)),
            num_devices=size,
            link=link,
            uplink=uplink,
        )
        for size in sizes
    )
    where = f"{len(sizes)} hosts" if len(sizes) > 1 else "this machine"
    return Cluster(name=f"{count_of(world.size, 'process', 'processes')} on {where}", islands=islands)


def _host() -> str:
    """A name that the ranks of one host share. Containers may all have the same host name, so it includes torchrun's
    node number."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _with_measured_costs(
    cluster: Cluster, update_bytes_per_s: float | None, collective_s: float | None, latency_s: float | None
) -> Cluster:
    """The cluster with the measured speed of the optimizer, and with the overhead of an all-reduce and of a message
    while devices compute, if these were measured."""
    islands = cluster.islands
    if update_bytes_per_s is not None:
        islands = tuple(
            replace(island, kind=replace(island.kind, memory_bytes_per_s=update_bytes_per_s)) for island in islands
        )
    if collective_s is not None:
        islands = tuple(replace(island, link=replace(island.link, collective_s=collective_s)) for island in islands)
    if latency_s is not None:
        islands = tuple(
            replace(
                island,
                link=replace(island.link, latency_s=latency_s),
                uplink=replace(island.uplink, latency_s=max(latency_s, island.uplink.latency_s)),
            )
            for island in islands
        )
    return replace(cluster, islands=islands)


def _kind(world: World, guess: DeviceKind, max_ranks: int) -> DeviceKind:
    """The device of a rank: its GPU, or its share of the host's memory."""
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        share = _USABLE * torch.cuda.get_per_process_memory_fraction(world.device)
        memory = int(properties.total_memory * share)
        return replace(guess, name=properties.name, memory_bytes=memory, memory_bytes_per_s=2e12)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(guess, memory_bytes=memory // max_ranks)


def _host_rates(world: World) -> tuple[float, ...]:
    if world.device.type == "cuda":
        return ()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    rates = tuple(min(1.0, cores / (busy * threads)) for busy in range(1, world.size + 1))
    return rates if min(rates) < 1 else ()
