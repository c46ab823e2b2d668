"""The machines of a live fleet (this one, fake nodes, or those of a Ray or Slurm cluster), and its engine."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spindle.cluster import PRESETS, Cluster, Island
from spindle.errors import InputError
from spindle.fleet.fleet import Fleet
from spindle.fleet.fleet_file import fleet_named
from spindle.fleet.state import SchedulerOptions
from spindle.fleet.store import Store

if TYPE_CHECKING:
    from spindle.fleet.engine import Engine

RAY, SLURM = "ray", "slurm"


def this_machine() -> Fleet:
    """This machine as a fleet: its GPUs, or CPU processes if it has none."""
    name = _node_name(socket.gethostname())
    kinds: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        kinds = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    if kinds:
        island = replace(preset_of(kinds[0], f"this machine's GPU {kinds[0]!r}"), num_devices=len(kinds))
    else:
        island = replace(PRESETS["cpu"], num_devices=len(os.sched_getaffinity(0)))
    return Fleet(cluster=Cluster(name=name, islands=(island,)), node_names=(name,))


def preset_of(kind: str, where: str) -> Island:
    """The island of a kind by the name that drivers and schedulers give it: `NVIDIA H100 80GB HBM3`, `A100-80G`."""
    words = re.sub(r"[^a-z0-9]", "", kind.lower())
    for name in sorted(PRESETS, key=len, reverse=True):
        if name in words or re.sub(r"[^a-z0-9]", "", PRESETS[name].kind.name.lower()) in words:
            return PRESETS[name]
    raise InputError(f"{where}: an unknown kind of device; describe it in a .toml file, and give that as --fleet")


def ray_fleet(address: str, described: Fleet | None) -> Fleet:
    """The nodes of a Ray cluster that have devices. Their kind is a label, and is described by a preset or by
    `described`."""
    from spindle.fleet.ray_cluster import RayCluster, node_name

    cluster = RayCluster(address)
    try:
        nodes = cluster.alive_nodes()
        found = {node_name(node): ray_island(node, described, address) for node in nodes}
    finally:
        cluster.close(end_machines=False)
    names = [name for name, island in found.items() if island is not None]
    islands = [island for island in found.values() if island is not None]
    if not islands:
        raise InputError(f"{address}: no node of this Ray has devices (GPU resources); add one with ray start")
    teams = () if described is None else described.teams
    return Fleet(cluster=Cluster(name=address, islands=tuple(islands)), node_names=tuple(names), teams=teams)


def ray_island(node: Mapping[str, Any], described: Fleet | None, address: str) -> Island | None:
    """The devices of a node, from what Ray says of it; None without any."""
    from spindle.fleet.ray_cluster import node_name
    from spindle.fleet.ray_nodes import KIND_LABEL

    labels, num_devices = node.get("Labels") or {}, int(node["Resources"].get("GPU", 0))
    if not num_devices:
        return None
    kind = labels.get(KIND_LABEL) or labels.get("ray.io/accelerator-type")
    if not kind:
        raise InputError(
            f"{address}: node {node_name(node)} has {num_devices} devices and no kind; start it with "
            f"ray start --labels={KIND_LABEL}=a100, or with its ray.io/accelerator-type"
        )
    return replace(_described(kind, described, f"{address}: node {node_name(node)}"), num_devices=num_devices)


def _described(kind: str, fleet: Fleet | None, where: str) -> Island:
    from spindle.fleet.ray_nodes import label_text

    for island in () if fleet is None else fleet.cluster.islands:
        if island.kind.num_shares == 1 and label_text(island.kind.name).lower().startswith(kind.lower()):
            return island
    return preset_of(kind, where)


def _node_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:63].strip("-._") or "node0"


def node_describer(fleet: Fleet, address: str) -> Callable[[Mapping[str, Any]], Island | None]:
    """Describes the nodes of a Ray cluster, as `ray_island` does. A node that joined without a kind, or with an unknown
    one, is left alone, which is said once."""
    refused: set[str] = set()

    def describe(node: Mapping[str, Any]) -> Island | None:
        try:
            return ray_island(node, fleet, address)
        except InputError as error:
            if node["NodeID"] not in refused:
                refused.add(node["NodeID"])
                logging.getLogger("spindle").warning(f"{error}; it is not used")
            return None

    return describe


def create_fleet(
    path: Path,
    options: SchedulerOptions,
    *,
    engine: str = RAY,
    fake: str = "",
    address: str = "",
    fleet: str = "",
) -> Store:
    """A new store, with the settings of its engine."""
    if engine not in (RAY, SLURM):
        raise InputError(f"--engine: expected {RAY} or {SLURM}, got {engine!r}")
    if engine == SLURM:
        if fake or address:
            raise InputError("--engine slurm: leave --fake and --address out; Slurm knows its nodes")
        from spindle.fleet.slurm_engine import slurm_fleet

        machines = slurm_fleet(fleet_named(fleet) if fleet else None)
    elif fake and address:
        raise InputError(f"give --fake {fake} or --address {address}, not both")
    elif fake:
        machines = fleet_named(fake)
    elif address:
        machines = ray_fleet(address, fleet_named(fleet) if fleet else None)
    else:
        machines = this_machine()
        if fleet:
            machines = replace(machines, teams=fleet_named(fleet).teams)
    if engine == RAY and not address:
        from spindle.fleet.ray_nodes import import_ray

        import_ray(is_local=True)  # before a store is made
    settings = {"id": secrets.token_hex(4), "engine": json.dumps({"engine": engine, "address": address})}
    return Store.create(path, machines, options, settings)


def open_engine(store: Store) -> Engine:
    """The engine of a store. A local Ray that still runs is used again."""
    settings, fleet_id = json.loads(store.meta("engine") or "{}"), store.meta("id") or ""
    if settings.get("engine") == SLURM:
        from spindle.fleet.slurm_engine import SlurmEngine

        return SlurmEngine(fleet_id, store.fleet, folder=Path(f"{store.path.absolute()}.d"))
    from spindle.fleet.ray_cluster import RayCluster
    from spindle.fleet.ray_engine import RayEngine
    from spindle.fleet.ray_nodes import LocalNode, LocalRay, end_local_ray, import_ray, is_listening, start_local_ray

    if settings.get("address"):
        address = settings["address"]
        return RayEngine(fleet_id, RayCluster(address, describe=node_describer(store.fleet, address)))
    import_ray(is_local=True)
    fleet, text = store.fleet, store.meta("ray")
    nodes = [
        LocalNode(name=name, kind=fleet.kinds[kind].name, num_devices=size)
        for name, kind, size in zip(fleet.node_names, fleet.kind_of_node, fleet.size_of_node, strict=True)
    ]

    def remember(started: LocalRay) -> None:
        store.set_meta("ray", started.text)

    local = LocalRay.parse(text) if text else None
    if local is not None and not is_listening(local.address):
        end_local_ray(local)  # processes that are left of it
        local = None
    if local is None:
        local = start_local_ray(nodes, remember)
    cluster = RayCluster(local.address, local=local, local_nodes=nodes, remember=remember)
    return RayEngine(fleet_id, cluster)
