"""Which rows of a batch go from which rank to which between two slots, by interval overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from spindle.graph import MetaGraph
from spindle.program.program import Column, Flows, Link, SlotShape


def share_bounds(num_rows: int, num_shares: int) -> Column:
    """Bounds of equal shares of a batch; if it does not divide evenly, the first shares are one row longer."""
    small, longer = divmod(num_rows, num_shares)
    shares = np.arange(num_shares + 1)
    return shares * small + np.minimum(shares, longer)


def placement_key(shape: SlotShape) -> tuple[int, int, int]:
    """A key that slots of one program share if they have the same rows on the same ranks."""
    return id(shape.ranks), id(shape.bounds), shape.tensor_degree


def common_scale(first: SlotShape, second: SlotShape) -> int:
    """The smallest number of equal units of a batch in which the bounds of both slots are integers."""
    return math.lcm(first.num_slices, second.num_slices)


def bytes_per_row(graph: MetaGraph, shapes: Sequence[SlotShape], producer: Column, consumer: Column) -> list[float]:
    """For each link between these slots, bytes of one row in the link's unit (`common_scale`); 0 if no cost is
    known."""
    costs = [graph.metaops[shape.op].cost for shape in shapes]
    degree = np.array([shape.tensor_degree for shape in shapes], dtype=np.int64)
    slices = np.array([shape.num_slices for shape in shapes], dtype=np.int64)
    rows = np.array([shape.num_rows for shape in shapes], dtype=np.int64)
    cut_bytes = np.array(
        [cost.cut_bytes_at(shape.tensor_degree) if cost else 0.0 for cost, shape in zip(costs, shapes, strict=True)]
    )
    output_bytes = np.array([cost.output_bytes if cost else 0.0 for cost in costs], dtype=np.float64)
    # Tensor groups of equal size send shards from member to member; other groups have to send whole rows.
    is_alike = degree[producer] == degree[consumer]
    row_bytes = np.where(is_alike, cut_bytes[producer], output_bytes[producer])
    in_bytes: list[float] = (row_bytes * rows[producer] / np.lcm(slices[producer], slices[consumer])).tolist()
    return in_bytes


def flows_between(producer: SlotShape, consumer: SlotShape) -> Flows:
    """The rows that ranks of `producer` send so that every rank of `consumer` has its rows.

    A row is sent to every member of the consumer's tensor-parallel group, by one member of the producer's. A rank that
    already has a row does not receive it.
    """
    scale = common_scale(producer, consumer)
    produced = producer.bounds * (scale // producer.num_slices)
    consumed = consumer.bounds * (scale // consumer.num_slices)
    # All rows between two neighbouring cuts have the same producing and the same consuming replica.
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
    # Members of the producer's group take turns in sending to members of the consumer's, which spreads the load.
    source = producer.ranks[group + member % producer.tensor_degree]
    if producer.tensor_degree > 1:
        # A destination in the producing group has the row: make it its own source, and drop it below.
        members = producer.ranks[group[:, None] + np.arange(producer.tensor_degree)]
        source = np.where((members == destination[:, None]).any(axis=1), destination, source)
    moves = source != destination
    return Flows(
        source=source[moves], destination=destination[moves], first=first[segment][moves], last=last[segment][moves]
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Messages:
    """The messages of all links in one direction, link after link."""

    link: Column
    source: Column
    destination: Column
    first: Column
    last: Column


def messages_of(links: Sequence[Link], backward: bool) -> Messages:
    flows = [link.backward if backward else link.forward for link in links]
    return Messages(
        link=np.repeat(np.arange(len(links)), np.array([len(each.source) for each in flows], dtype=np.int64)),
        source=_joined(each.source for each in flows),
        destination=_joined(each.destination for each in flows),
        first=_joined(each.first for each in flows),
        last=_joined(each.last for each in flows),
    )


def _joined(columns: Iterable[Column]) -> Column:
    return np.concatenate([np.zeros(0, dtype=np.int64), *columns])
