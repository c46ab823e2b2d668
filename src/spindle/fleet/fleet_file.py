"""Fleets by name and from files.

`a100x16,l40sx8` is 16 A100s and 8 L40Ss in nodes of eight. A TOML file is that of a cluster, whose islands are nodes,
with the teams that share it:

    storage_bytes_per_s = 5e9      # of checkpoints
    [[islands]]
    kind = "a100"
    count = 4
    num_devices = 8
    link = {bytes_per_s = 300e9, latency_s = 5e-6}
    uplink = {bytes_per_s = 200e9, latency_s = 12e-6}
    [[teams]]
    name = "vision"
    guaranteed = {a100 = 8}        # lent while idle
    limits = {a100 = 24}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spindle.artifact import read_integer, read_number, shown
from spindle.cluster import Cluster, cluster_from_toml, cluster_named, read_toml_file
from spindle.errors import FleetError, InputError
from spindle.fleet.fleet import DeviceCount, Fleet, Team
from spindle.fleet.public_traces import arena_fleet

ARENA = "arena"


def fleet_named(name: str) -> Fleet:
    """A fleet for a name like `a100x16,l40sx8`, for `arena` (Arena's 1,280 devices), or from a .toml file."""
    if name == ARENA:
        return arena_fleet()
    if name.endswith(".toml"):
        return read_fleet_file(Path(name))
    islands = tuple(island for part in name.split(",") for island in cluster_named(part.strip()).islands)
    return Fleet(cluster=Cluster(name=name, islands=islands))


def read_fleet_file(path: Path) -> Fleet:
    data = read_toml_file(path)
    teams = data.pop("teams", [])
    storage = read_number(data.pop("storage_bytes_per_s", 2e9), f"{path}: storage_bytes_per_s")
    if not data.get("islands"):
        raise InputError(f"{path}: a fleet needs at least one node; give [[islands]] with kind and num_devices")
    cluster = cluster_from_toml(data, path)
    if not isinstance(teams, list):
        raise InputError(f"{path}: teams: expected [[teams]] with name, guaranteed and limits, got {shown(teams)}")
    try:
        bare = Fleet(cluster=cluster)
        read = tuple(_team(entry, bare, f"{path}: teams[{position}]") for position, entry in enumerate(teams))
        return Fleet(cluster=cluster, teams=read, storage_bytes_per_s=storage)
    except FleetError as error:
        raise InputError(f"{path}: {error}") from error


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
