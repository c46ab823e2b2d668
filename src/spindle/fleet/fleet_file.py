"""Fleets by name and from files.

`a100x16,l40sx8` is 16 A100s and 8 L40Ss in nodes of eight. A TOML file is that of a cluster, whose islands are nodes,
with the teams that share it:

    storage_bytes_per_s = 5e9      # of checkpoints
    [[islands]]
    kind = "a100"
    count = 4
    num_devices = 8
    shares = 1                     # 8: each GPU of these nodes is eight devices, for small jobs (h200/8x64 by name)
    link = {bytes_per_s = 300e9, latency_s = 5e-6}
    uplink = {bytes_per_s = 200e9, latency_s = 12e-6}
    [[teams]]
    name = "vision"
    guaranteed = {a100 = 8}        # lent while idle
    limits = {a100 = 24}
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from spindle.artifact import read_integer, read_number, shown
from spindle.cluster import Cluster, Island, cluster_from_toml, cluster_named, read_toml_file, shared
from spindle.cluster.presets import MAX_ISLANDS
from spindle.errors import FleetError, InputError
from spindle.fleet.fleet import DeviceCount, Fleet, Team
from spindle.fleet.public_traces import arena_fleet

ARENA = "arena"
SHARES = (1, 2, 4, 8)  # devices that a GPU may be


def fleet_named(name: str) -> Fleet:
    """A fleet for a name like `a100x16,l40sx8`, for `arena` (Arena's 1,280 devices), or from a .toml file."""
    if name == ARENA:
        return arena_fleet()
    if name.endswith(".toml"):
        return read_fleet_file(Path(name))
    islands = tuple(island for part in name.split(",") for island in _islands_named(part.strip()))
    return Fleet(cluster=Cluster(name=name, islands=islands))


def _islands_named(name: str) -> tuple[Island, ...]:
    match = re.fullmatch(r"(\w+)/(\d{1,3})x(\d+)", name)
    if match is None:
        return cluster_named(name).islands
    kind, num_shares, count = match[1], _num_shares(int(match[2]), name), int(match[3])
    if count % num_shares:
        raise InputError(f"{name}: {count} devices are no whole GPUs of {num_shares} shares each")
    whole = cluster_named(f"{kind}x{count // num_shares}")
    return tuple(shared(island, num_shares) for island in whole.islands)


def _num_shares(value: int, where: str) -> int:
    if value not in SHARES:
        raise InputError(f"{where}: a GPU is one device, or {', '.join(map(str, SHARES[1:]))} shares; got {value}")
    return value


def read_fleet_file(path: Path) -> Fleet:
    data = read_toml_file(path)
    teams = data.pop("teams", [])
    storage = read_number(data.pop("storage_bytes_per_s", 2e9), f"{path}: storage_bytes_per_s")
    if not data.get("islands"):
        raise InputError(f"{path}: a fleet needs at least one node; give [[islands]] with kind and num_devices")
    shares = _pop_shares(data["islands"], path)
    cluster = cluster_from_toml(data, path)
    cluster = replace(cluster, islands=tuple(map(shared, cluster.islands, shares)))
    if not isinstance(teams, list):
        raise InputError(f"{path}: teams: expected [[teams]] with name, guaranteed and limits, got {shown(teams)}")
    try:
        bare = Fleet(cluster=cluster)
        read = tuple(_team(entry, bare, f"{path}: teams[{position}]") for position, entry in enumerate(teams))
        return Fleet(cluster=cluster, teams=read, storage_bytes_per_s=storage)
    except FleetError as error:
        raise InputError(f"{path}: {error}") from error


def _pop_shares(entries: Any, path: Path) -> list[int]:
    """Take `shares` out of the islands of a file: one number for each island, repeated as often as it stands there."""
    shares: list[int] = []
    for position, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict):
            where = f"{path}: islands[{position}]"
            value = _num_shares(read_integer(entry.pop("shares", 1), f"{where}.shares"), f"{where}.shares")
            count = entry.get("count", 1)
            shares += [value] * (count if isinstance(count, int) and 0 <= count <= MAX_ISLANDS else 0)
    return shares


def _team(entry: Any, fleet: Fleet, where: str) -> Team:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise InputError(f"{where}: expected a table with name, guaranteed and limits, got {shown(entry)}")
    for key in entry:
        if key not in ("name", "guaranteed", "limits"):
            raise InputError(f"{where}: unknown key {key!r}; a team has name, guaranteed and limits")
    return Team(
        name=entry["name"],
        guaranteed=_counts(entry.get("guaranteed", {}), fleet, f"{where}.guaranteed"),
        limits=_counts(entry.get("limits", {}), fleet, f"{where}.limits"),
    )


def _counts(entry: Any, fleet: Fleet, where: str) -> tuple[DeviceCount, ...]:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a table of kinds and counts, got {shown(entry)}")
    return tuple(
        DeviceCount(kind=fleet.kinds[fleet.kind_number(kind)].name, num_devices=read_integer(count, f"{where}.{kind}"))
        for kind, count in entry.items()
    )
