"""Clusters: kinds of devices, islands, links; presets and files. Knows no workload."""

from spindle.cluster.cluster import MAX_DEVICES, Cluster, DeviceKind, Island, Link, SmGroups, shared
from spindle.cluster.presets import (
    PRESETS,
    cluster_from_toml,
    cluster_named,
    read_cluster_file,
    read_toml_file,
    uniform_cluster,
)

__all__ = [
    "MAX_DEVICES",
    "PRESETS",
    "Cluster",
    "DeviceKind",
    "Island",
    "Link",
    "SmGroups",
    "cluster_from_toml",
    "cluster_named",
    "read_cluster_file",
    "read_toml_file",
    "shared",
    "uniform_cluster",
]
