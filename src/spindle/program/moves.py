"""What must move when one plan follows another: weights and optimizer state, to ranks that did not hold them before.

Leaves out sharded optimizers, whose ranks keep parts of the state. The runtime moves the same bytes, but asks whoever
sent least, in whichever island.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle.cluster import Cluster
from spindle.graph import MetaGraph
from spindle.program.program import Program

Shard = tuple[int, int]  # place in its tensor group, and its size
Holders = Mapping[str, Mapping[int, Shard]]  # by parameter: ranks, and what each has of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    parameter: str
    source: int
    destination: int
    num_bytes: int


def held_by(program: Program, graph: MetaGraph) -> list[dict[int, Shard]]:
    """What ranks have of each parameter, in the graph's order: those whose slots use it, or that keep it all the
    same."""
    found: list[dict[int, Shard]] = [{} for _ in graph.parameters]
    for shape, slot in zip(program.slots, program.plan.slots, strict=True):
        for number in {one for layer in graph.metaops[shape.op].parameters[slot.first : slot.last] for one in layer}:
            degree = shape.tensor_degree if graph.parameters[number].is_split else 1
            places = enumerate(shape.ranks.tolist())
            found[number].update((rank, (position % degree, degree)) for position, rank in places)
    for number, ranks in program.holders:
        degree = next((size for _, size in found[number].values()), 1)
        for position, rank in enumerate(ranks):
            found[number].setdefault(rank, (position % degree, degree))
    return found


def holders_of(program: Program, graph: MetaGraph, before: Holders | None = None) -> Holders:
    """The ranks whose slots use each parameter. What none uses any more stays with the first that had it before."""
    held = zip(graph.parameters, held_by(program, graph), strict=True)
    found = {parameter.name: shards for parameter, shards in held if shards}
    for name, had in (before or {}).items():
        if name not in found:
            first = {shard: rank for rank, shard in sorted(had.items(), reverse=True)}
            found[name] = {rank: shard for shard, rank in first.items()}
    return found


def moves_between(before: Holders, after: Holders, graph: MetaGraph, cluster: Cluster) -> tuple[Move, ...]:
    """Each from a rank of the same island where one has it, among these from the one that sent least so far.

    `graph` is that of the plan that follows. What nobody had is new, and no move. With another tensor degree nobody has
    the same shard: its bytes then count as from one of those that have a part.
    """
    island, num_sent = cluster.island_of, [0] * cluster.num_devices
    parameters, numerics = {parameter.name: parameter for parameter in graph.parameters}, graph.numerics
    moves = []
    for name, held in after.items():
        had = before.get(name, {})
        for to, shard in held.items():
            if not had or had.get(to) == shard:
                continue
            alike = [rank for rank, other in had.items() if other == shard] or list(had)
            _, _, source = min((island[rank] != island[to], num_sent[rank], rank) for rank in alike)
            one = parameters[name]
            state_bytes = numerics.parameter_bytes + (numerics.optimizer_bytes if one.trainable else 0)
            num_bytes = one.elements_at(shard[1]) * state_bytes
            num_sent[source] += num_bytes
            moves.append(Move(parameter=name, source=source, destination=to, num_bytes=num_bytes))
    return tuple(moves)


def moving_s(moves: tuple[Move, ...], cluster: Cluster) -> float:
    """How long the busiest port takes: a device's own for all that it sends, or receives, and an island's uplink for
    what its devices together send to others, or receive from them. Both directions run at once; latencies are left
    out."""
    island_of = cluster.island_of
    busy_s: dict[tuple[str, str, int], float] = {}
    for move in moves:
        crosses = island_of[move.source] != island_of[move.destination]
        for way, rank in (("out", move.source), ("in", move.destination)):
            island = cluster.islands[island_of[rank]]
            ports = [("device", rank, island.link)] + [("island", island_of[rank], island.uplink)] * crosses
            for kind, number, link in ports:
                key = (kind, way, number)
                busy_s[key] = busy_s.get(key, 0.0) + move.num_bytes / link.bytes_per_s
    return max(busy_s.values(), default=0.0)
