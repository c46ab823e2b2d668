"""How long the FLOPs of a step would take at the devices' peak, for model FLOPs utilization (MFU)."""

from __future__ import annotations

import os
import re

from spindle.cluster import PRESETS
from spindle.graph import MetaGraph
from spindle.launch import VIRTUAL_VARIABLE
from spindle.profile import Profile


def flops_per_sample(graph: MetaGraph) -> dict[str, float]:
    """Task → FLOPs of one sample's forward and backward pass, without recomputation; only for tasks with known
    FLOPs."""
    flops: dict[str, float] = {}
    unknown = {op.task for op in graph.metaops if op.cost is None}
    for op in graph.metaops:
        if op.task not in unknown and op.cost is not None:
            per_layer = op.cost.forward_flops + op.cost.backward_flops
            flops[op.task] = flops.get(op.task, 0.0) + op.num_layers * per_layer
    return {task: count for task, count in flops.items() if count}


def peak_flops(profile: Profile) -> float | None:
    """Dense 16-bit FLOP/s of all devices. None if a device is not among the presets. Virtual devices share the peak of
    their GPU."""
    total = 0.0
    for island in profile.cluster.islands:
        peak = _peak_of(island.kind.name)
        if peak is None:
            return None
        total += peak * island.num_devices
    return total / max(1, int(os.environ.get(VIRTUAL_VARIABLE, "1")))


def _peak_of(device_name: str) -> float | None:
    """By the name that torch gives a GPU: "NVIDIA H100 80GB HBM3"."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    return next((island.kind.peak_flops for name, island in PRESETS.items() if name in words and name != "cpu"), None)
