"""Which rows of a batch go from which rank to which between two slots: interval overlap on the batch."""

from __future__ import annotations

import math

import numpy as np

from spindle.graph import MetaGraph
from spindle.program.program import Column, Flows, SlotShape


def share_bounds(num_rows: int, num_shares: int) -> Column:
    """Bounds of equal shares of a batch; the first ones are one row longer where it does not divide."""
    small, longer = divmod(num_rows, num_shares)
    shares = np.arange(num_shares + 1)
    return shares * small + np.minimum(shares, longer)


def placement_key(shape: SlotShape) -> tuple[int, int, int]:
    """A key that is equal for slots of one program with the same rows on the same ranks."""
    return id(shape.ranks), id(shape.bounds), shape.tensor_degree


def common_scale(first: SlotShape, second: SlotShape) -> int:
    """The number of rows on the coarsest scale on which the bounds of both sides are integers; their own number where
    both have the same batch."""
    return math.lcm(first.num_slices, second.num_slices)


def bytes_per_row(graph: MetaGraph, producer: SlotShape, consumer: SlotShape) -> float:
    """Bytes of one row of a link, on the link's scale; 0 where no cost is known."""
    cost = graph.metaops[producer.op].cost
    if cost is None:
        return 0.0
    # Groups of equal size send parts from member to member; between others, rows have to be whole.
    is_alike = producer.tensor_degree == consumer.tensor_degree
    output_bytes = cost.cut_bytes_at(producer.tensor_degree) if is_alike else cost.output_bytes
    return output_bytes * producer.num_rows / common_scale(producer, consumer)


def flows_between(producer: SlotShape, consumer: SlotShape) -> Flows:
    """The rows that ranks of `producer` send so that every rank of `consumer` has its rows.

    A row goes to every member of the consumer's tensor-parallel group, from one member of the producer's. A rank that
    has a row already receives it from no one.
    """
    scale = common_scale(producer, consumer)
    produced = producer.bounds * (scale // producer.num_slices)
    consumed = consumer.bounds * (scale // consumer.num_slices)
    # Between neighbouring cuts, rows have one producing and one consuming replica.
    cuts = np.unique(np.concatenate([produced, consumed]))
    first, last = cuts[:-1], cuts[1:]
    producing_replica = np.searchsorted(produced, first, side="right") - 1
    consuming_replica = np.searchsorted(consumed, first, side="right") - 1

    # One entry for each segment of rows and each member of the consumer's group.
    degree = consumer.tensor_degree
    segment = np.repeat(np.arange(len(first)), degree)
    member = np.tile(np.arange(degree), len(first))
    destination = consumer.ranks[consuming_replica[segment] * degree + member]
    group = producing_replica[segment] * producer.tensor_degree
    # Members of the producer's group send to members of the consumer's in turn, which spreads the load.
    source = producer.ranks[group + member % producer.tensor_degree]
    if producer.tensor_degree > 1:
        # A destination that is itself in the producing group has the row: it "sends" to itself, and is left out below.
        members = producer.ranks[group[:, None] + np.arange(producer.tensor_degree)]
        source = np.where((members == destination[:, None]).any(axis=1), destination, source)
    moves = source != destination
    return Flows(
        source=source[moves], destination=destination[moves], first=first[segment][moves], last=last[segment][moves]
    )
