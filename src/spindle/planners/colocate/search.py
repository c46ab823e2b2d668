"""A search on request: on which devices do the parts of a replica stand, and when do they come?

A part moves to where another of its kind stands, changes places with another, or comes earlier or later. A change stays
if the order is no longer than before. The same seed and number of evaluations give the same order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from spindle.planners.colocate.order import Column, Order

Devices = list[tuple[int, int]]  # by part: its first device, and its sequence degree
OrderOf = Callable[[Devices, Column], Order | None]  # of parts on these devices, with keys shifted by so much

_MOVED, _SWAPPED = 0.4, 0.7  # of the changes: moved up to the first, changed places up to the second, else shifted


def searched_order(
    kinds: Sequence[Hashable],
    devices: Devices,
    order_of: OrderOf,
    num_stages: int,
    shift: int,
    *,
    evaluations: int,
    seed: int,
    ends: float | None = None,
) -> tuple[Devices, Order] | None:
    """The shortest order that was found, and the devices of its parts; None if those given have no order.

    Parts of the same kind and sequence degree may stand where each other do. Keys are shifted by about `shift`. A time
    at which the search `ends` only cuts it.
    """
    choose = random.Random(seed)
    best = order_of(devices, np.zeros(0, dtype=np.int64))
    if best is None or not devices:
        return None if best is None else (devices, best)
    shifts = np.zeros(len(best.passes), dtype=np.int64)
    peers: dict[Hashable, list[int]] = {}
    for number, (kind, (_, degree)) in enumerate(zip(kinds, devices, strict=True)):
        peers.setdefault((kind, degree), []).append(number)
    peers_of = [peers[kind, degree] for kind, (_, degree) in zip(kinds, devices, strict=True)]
    places_of = {id(numbers): sorted({devices[number][0] for number in numbers}) for numbers in peers.values()}
    for _ in range(evaluations - 1):
        if ends is not None and time.monotonic() > ends:
            break
        number = choose.randrange(len(devices))
        change, changed, shifted = choose.random(), list(devices), shifts
        if change < _MOVED:
            changed[number] = choose.choice(places_of[id(peers_of[number])]), devices[number][1]
        elif change < _SWAPPED:
            other = choose.choice(peers_of[number])
            changed[number], changed[other] = devices[other], devices[number]
        else:
            shifted = shifts.copy()
            shifted[2 * (num_stages + number) + choose.randrange(2)] += round(choose.gauss(0, 1) * shift)
        order = order_of(changed, shifted)
        if order is not None and order.makespan_ns <= best.makespan_ns:
            best, devices, shifts = order, changed, shifted
    return devices, best
