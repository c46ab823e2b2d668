"""Which rows go from which rank to which: resharding is interval overlap on the batch."""

from __future__ import annotations

import math

import numpy as np

from spindle.program.program import Column, Flows, SlotShape


def share_bounds(num_rows: int, num_shares: int) -> Column:
    """Where the shares of a batch begin and end; the first ones are one row longer when it does not divide."""
    small, longer = divmod(num_rows, num_shares)
    shares = np.arange(num_shares + 1)
    return shares * small + np.minimum(shares, longer)


def same_place(shape: SlotShape) -> tuple[int, int, int]:
    """Equal for slots of one program that lie alike on the same ranks."""
    return id(shape.ranks), id(shape.bounds), shape.tensor_degree


def common_scale(first: SlotShape, second: SlotShape) -> int:
    """Rows on a scale that both sides can be cut on; their own when both have the same batch."""
    return math.lcm(first.num_rows, second.num_rows)


def flows_between(giver: SlotShape, taker: SlotShape) -> Flows:
    """What must move so that every rank of `taker` has its rows, when the ranks of `giver` have theirs.

    A row goes to every member of the taker's tensor group, from one member of the giver's. A rank that has a row itself
    sends nothing to itself.
    """
    scale = common_scale(giver, taker)
    given = giver.bounds * (scale // giver.num_rows)
    taken = taker.bounds * (scale // taker.num_rows)
    cuts = np.unique(np.concatenate([given, taken]))
    first, last = cuts[:-1], cuts[1:]
    giving_replica = np.searchsorted(given, first, side="right") - 1
    taking_replica = np.searchsorted(taken, first, side="right") - 1

    # One entry for each segment and each member of the taker's group.
    degree = taker.tensor_degree
    segment = np.repeat(np.arange(len(first)), degree)
    member = np.tile(np.arange(degree), len(first))
    destination = taker.ranks[taking_replica[segment] * degree + member]
    group = giving_replica[segment] * giver.tensor_degree
    source = giver.ranks[group + member % giver.tensor_degree]
    if giver.tensor_degree > 1:
        members = giver.ranks[group[:, None] + np.arange(giver.tensor_degree)]
        source = np.where((members == destination[:, None]).any(axis=1), destination, source)
    moves = source != destination
    return Flows(
        source=source[moves], destination=destination[moves], first=first[segment][moves], last=last[segment][moves]
    )
