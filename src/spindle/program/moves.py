"""The cost of changing the plan: bytes of weights and optimizer state that ranks send each other, and seconds.

The runtime sends the same bytes, but does not prefer sources in the same island.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from spindle.cluster import Cluster
from spindle.graph import MetaGraph
from spindle.program.program import Program
from spindle.program.sharding import Sharding, keep_unused, optimizer_sharding, transfer, weight_sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSharding:
    """Which ranks hold which weights and optimizer state."""

    weights: Sharding
    optimizer: Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bytes of a parameter and of its optimizer state that one rank sends to another."""

    parameter: str
    source: int
    destination: int
    num_bytes: int


def state_sharding(program: Program, graph: MetaGraph, before: StateSharding | None = None) -> StateSharding:
    """Where a program keeps weights and optimizer state. State that it does not use stays with one rank that had it
    before."""
    weights = weight_sharding(program, graph)
    optimizer = optimizer_sharding(program, graph, weights)
    if before is None:
        return StateSharding(weights=weights, optimizer=optimizer)
    return StateSharding(
        weights=keep_unused(weights, before.weights), optimizer=keep_unused(optimizer, before.optimizer)
    )


def moves_between(before: StateSharding, after: StateSharding, graph: MetaGraph, cluster: Cluster) -> tuple[Move, ...]:
    """What ranks send each other when the plan changes; from a rank of the same island if one has it."""
    num_bytes: Counter[tuple[str, int, int]] = Counter()
    for old, new, element_bytes in (
        (before.weights, after.weights, graph.numerics.parameter_bytes),
        (before.optimizer, after.optimizer, graph.numerics.optimizer_bytes),
    ):
        for sent in transfer(old, new, cluster.island_of):
            num_bytes[sent.parameter, sent.source, sent.destination] += sent.box.num_elements * element_bytes
    return tuple(
        Move(parameter=parameter, source=source, destination=destination, num_bytes=size)
        for (parameter, source, destination), size in num_bytes.items()
    )


def moving_s(moves: tuple[Move, ...], cluster: Cluster) -> float:
    """How long the busiest port takes. A device's port carries all that it sends or receives, an island's uplink what
    its devices send to or receive from other islands. Directions are independent; latencies are left out."""
    island_of = cluster.island_of
    busy_s: dict[tuple[str, str, int], float] = defaultdict(float)
    for move in moves:
        crosses = island_of[move.source] != island_of[move.destination]
        for direction, rank in (("out", move.source), ("in", move.destination)):
            island = cluster.islands[island_of[rank]]
            ports = [("device", rank, island.link)] + [("island", island_of[rank], island.uplink)] * crosses
            for kind, number, link in ports:
                busy_s[kind, direction, number] += move.num_bytes / link.bytes_per_s
    return max(busy_s.values(), default=0.0)
