"""Costs of collectives on a link.

Not modelled: switches, protocols that depend on the message size, and the SMs that a collective takes from compute.
"""

from __future__ import annotations

import math

from spindle.cluster import Cluster, Link
from spindle.workload import LayerCost


def ring_bytes(num_bytes: float, num_members: int) -> float:
    """Bytes that each member of a ring all-reduce sends (and receives)."""
    return 2 * num_bytes * (num_members - 1) / num_members


def collective_latency_s(num_members: int, latency_s: float) -> float:
    """Latency of an all-reduce: up and down a tree, the algorithm that libraries use for small messages."""
    return 2 * math.ceil(math.log2(num_members)) * latency_s


def all_reduce_s(num_bytes: float, num_members: int, link: Link) -> float:
    """Seconds of an all-reduce inside one island, with no other traffic on its links."""
    if num_members == 1:
        return 0.0
    fixed_s = collective_latency_s(num_members, link.latency_s) if link.collective_s is None else link.collective_s
    return ring_bytes(num_bytes, num_members) / link.bytes_per_s + fixed_s


def all_to_all_s(num_bytes: float, num_members: int, link: Link, count: int = 1) -> float:
    """Seconds of `count` all-to-alls inside one island, with no other traffic on its links. `num_bytes` is what each
    member holds in all of them together."""
    fixed_s = 2 * link.latency_s if link.collective_s is None else link.collective_s
    return num_bytes * (num_members - 1) / num_members / link.bytes_per_s + count * fixed_s


def tensor_group_s(cost: LayerCost, rows: int, degree: int, cluster: Cluster) -> float:
    """Seconds of the tensor-parallel all-reduces of one layer's forward over `rows`, on the slowest link inside an
    island. Those of its backward take the same time, for gradients of the same size."""
    if degree == 1 or not (cost.tensor_share or cost.tensor_bytes):  # every member computes the whole layer
        return 0.0
    slowest = min((island.link for island in cluster.islands), key=lambda link: link.bytes_per_s)
    return all_reduce_s(rows * cost.tensor_bytes, degree, slowest)
