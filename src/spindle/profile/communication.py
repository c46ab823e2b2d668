"""What collectives cost on a link.

Left out: switches, protocol changes with size, and the compute that a collective takes from its device.
"""

from __future__ import annotations

import math

from spindle.cluster import Cluster, Link
from spindle.workload import LayerCost


def ring_bytes(num_bytes: float, num_members: int) -> float:
    """Bytes each member of a ring all-reduce sends (and receives)."""
    return 2 * num_bytes * (num_members - 1) / num_members


def collective_latency_s(num_members: int, latency_s: float) -> float:
    """What small messages pay: the hops of a tree there and back, which libraries use when latency matters."""
    return 2 * math.ceil(math.log2(num_members)) * latency_s


def all_reduce_s(num_bytes: float, num_members: int, link: Link) -> float:
    """Seconds of an all-reduce inside one island, alone on its links."""
    if num_members == 1:
        return 0.0
    beside_s = collective_latency_s(num_members, link.latency_s) if link.collective_s is None else link.collective_s
    return ring_bytes(num_bytes, num_members) / link.bytes_per_s + beside_s


def tensor_group_s(cost: LayerCost, rows: int, degree: int, cluster: Cluster) -> float:
    """What a layer's pass over so many rows adds up in its tensor group, over the slowest link inside an island.

    Backward adds up the gradients of as much as forward added up.
    """
    if not (cost.tensor_share or cost.tensor_bytes):  # members do the same, each for itself
        return 0.0
    slowest = min((island.link for island in cluster.islands), key=lambda link: link.bytes_per_s)
    return all_reduce_s(rows * cost.tensor_bytes, degree, slowest)
