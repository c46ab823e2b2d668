"""Clusters by name and from files.

`a800x32` is 32 A800s in islands of eight. Peak FLOP/s (dense, 16-bit) and link rates (one direction) are from the
vendors' data sheets; uplinks are what such hosts usually have. The Spindle paper says that its A800 hosts have "400
Gb/s InfiniBand"; its share of synchronisation (at most 15 % of 1231 ms for 9.25 B parameters on eight hosts, not
overlapped) needs at least 175 GB/s out of each host, so we assume four such adapters. H800 hosts are as in the DIP
paper: eight adapters of 200 Gb/s, 256 GB of host memory for eight devices. Host links, if given, are PCIe 5 (about
50 GB/s per direction). A host of RTX cards has four of them, connected by PCIe; a GB200 island is one NVLink domain of
72 GPUs. Only the H200 has been measured. A TOML file describes any other cluster:

    name = "two hosts"
    [kinds.big]
    peak_flops = 312e12
    memory_bytes = 80e9
    memory_bytes_per_s = 2.0e12
    [[islands]]
    kind = "big"
    count = 2                 # two such islands; 1 if left out
    num_devices = 4
    link = {bytes_per_s = 200e9, latency_s = 5e-6}
    uplink = {bytes_per_s = 25e9, latency_s = 12e-6}
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spindle.artifact import from_json, read_integer, read_number, read_text_file, shown
from spindle.cluster.cluster import MAX_DEVICES, Cluster, DeviceKind, Island, Link
from spindle.errors import ClusterError, InputError

_GIB = 1 << 30
MAX_ISLANDS = 100_000  # beyond this a file is surely a mistake
_INSIDE_S, _BETWEEN_S = 5e-6, 12e-6


def _island(
    name: str,
    peak_flops: float,
    memory_gib: float,
    memory_tb_s: float,
    link_gb_s: float,
    uplink_gb_s: float,
    devices: int = 8,
    host_gb_s: float = 0,
    host_gb: float = 0,
) -> Island:
    return Island(
        kind=DeviceKind(
            name=name,
            peak_flops=peak_flops,
            memory_bytes=int(memory_gib * _GIB),
            memory_bytes_per_s=memory_tb_s * 1e12,
            host_bytes_per_s=host_gb_s * 1e9,
            host_memory_bytes=int(host_gb * 1e9),
        ),
        num_devices=devices,
        link=Link(bytes_per_s=link_gb_s * 1e9, latency_s=_INSIDE_S),
        uplink=Link(bytes_per_s=uplink_gb_s * 1e9, latency_s=_BETWEEN_S),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _IslandBody:
    """An island in a file, without its kind, which the file gives by name."""

    num_devices: int
    link: Link
    uplink: Link


PRESETS: dict[str, Island] = {
    "a100": _island("A100-80GB", 312e12, 80, 2.039, 300, 200),
    "a800": _island("A800-80GB", 312e12, 80, 2.039, 200, 200),
    "h100": _island("H100-SXM", 989e12, 80, 3.35, 450, 400, host_gb_s=50, host_gb=128),
    "h800": _island("H800-SXM", 989e12, 80, 3.35, 200, 200, host_gb_s=50, host_gb=32),
    "h200": _island("H200-SXM", 989e12, 141, 4.8, 450, 400, host_gb_s=50, host_gb=128),
    "h20": _island("H20-96GB", 148e12, 96, 4.0, 450, 200, host_gb_s=50, host_gb=128),
    "b200": _island("B200", 2250e12, 180, 7.7, 900, 400, host_gb_s=50, host_gb=256),
    "gb200": _island("GB200", 2500e12, 186, 8.0, 900, 400, devices=72, host_gb_s=225, host_gb=240),
    "mi300x": _island("MI300X", 1307e12, 192, 5.3, 448, 400, host_gb_s=50, host_gb=128),
    "l40s": _island("L40S", 362e12, 48, 0.864, 25, 25),
    "rtx4090": _island("RTX 4090", 165e12, 24, 1.008, 25, 12, devices=4),
    "rtx5090": _island("RTX 5090", 209e12, 32, 1.792, 50, 12, devices=4),
    "rtx6000ada": _island("RTX 6000 Ada", 364e12, 48, 0.96, 25, 25, devices=4),
    "cpu": _island("CPU process", 50e9, 4, 0.01, 2, 1),
}


def cluster_named(name: str) -> Cluster:
    """The cluster for a name like `a800x32`."""
    match = re.fullmatch(r"([a-z0-9]+?)x([0-9]+)", name.lower())
    if match is None or match[1] not in PRESETS:
        raise ClusterError(
            f"unknown cluster {name!r}; write KINDxCOUNT with a kind of {', '.join(PRESETS)} "
            "(a800x32), or give a .toml file"
        )
    if len(match[2]) > 9 or not 1 <= int(match[2]) <= MAX_DEVICES:
        raise ClusterError(
            f"cluster {name!r}: expected at least 1 and at most {MAX_DEVICES:,} devices, got {match[2][:20]}"
        )
    count = int(match[2])
    return uniform_cluster(name.lower(), PRESETS[match[1]], count)


def uniform_cluster(name: str, island: Island, num_devices: int) -> Cluster:
    """`num_devices` devices in islands like this one; the last island may be smaller."""
    num_full, num_left = divmod(num_devices, island.num_devices)
    islands = (island,) * num_full
    if num_left:
        islands += (replace(island, num_devices=num_left),)
    return Cluster(name=name, islands=islands)


def read_cluster_file(path: Path) -> Cluster:
    """Read a cluster from a TOML file; the module docstring shows the format."""
    return cluster_from_toml(read_toml_file(path), path)


def read_toml_file(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file. Raises an InputError of one sentence if it is not one."""
    text = read_text_file(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, deeply nested lists
        raise InputError(f"{path}: not TOML that can be read ({error})") from error


def cluster_from_toml(data: dict[str, Any], path: Path) -> Cluster:
    """The cluster that the tables of a TOML file describe; `path` is for errors."""
    for key in data:
        if key not in ("name", "kinds", "islands"):
            raise InputError(f"{path}: unknown key {key!r}; a cluster file has name, [kinds.NAME] and [[islands]]")
    kinds = {name: _kind(name, body, f"{path}: kinds.{name}") for name, body in _table(data, "kinds", path).items()}
    islands: list[Island] = []
    entries = data.get("islands")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: expected one or more [[islands]]")
    for position, entry in enumerate(entries):
        where = f"{path}: islands[{position}]"
        if not isinstance(entry, dict):
            raise InputError(f"{where}: expected a table with kind, num_devices, link and uplink, got {shown(entry)}")
        count = read_integer(entry.get("count", 1), f"{where}.count")
        if not 1 <= count <= MAX_ISLANDS:
            raise InputError(f"{where}.count: must be 1 to {MAX_ISLANDS}, got {count}")
        name = entry.get("kind")
        if not isinstance(name, str) or name not in kinds.keys() | PRESETS.keys():
            raise InputError(
                f"{where}.kind: unknown kind {name!r}; this file has {', '.join(kinds) or 'none'}, "
                f"presets are {', '.join(PRESETS)}"
            )
        kind = kinds[name] if name in kinds else PRESETS[name].kind
        body = {key: value for key, value in entry.items() if key not in ("kind", "count")}
        island = from_json(_IslandBody, body, where)
        try:
            complete = Island(kind=kind, num_devices=island.num_devices, link=island.link, uplink=island.uplink)
        except ClusterError as error:
            raise InputError(f"{where}: {error}") from error
        islands += [complete] * count
    name = data.get("name", path.stem)
    if not isinstance(name, str):
        raise InputError(f"{path}: name must be a string")
    return Cluster(name=name, islands=tuple(islands))


def _table(data: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise InputError(f"{path}: {key} must be a table")
    return table


def _kind(name: str, body: Any, where: str) -> DeviceKind:
    if not isinstance(body, dict):
        raise InputError(
            f"{where}: expected a table with peak_flops, memory_bytes and memory_bytes_per_s, got {shown(body)}"
        )
    if "name" in body:
        raise InputError(f"{where}: the name of a kind is in its heading, [kinds.{name}]; leave out `name`")
    for key in ("memory_bytes", "host_memory_bytes"):
        if isinstance(body.get(key), float):  # in TOML, 80e9 is a float
            body = body | {key: int(read_number(body[key], f"{where}.{key}"))}
    return from_json(DeviceKind, {"name": name} | body, where)
