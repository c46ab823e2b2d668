"""Memory of ranks whose exchanges are posted as early as the runtime posts them.

A rank posts its exchanges in the order of their lane, each as soon as what it sends exists. So a receive buffer may be
allocated long before the exchange that the simulator times; when, depends on the rank's own order alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from spindle.profile import Profile
from spindle.program.instances import instances_of
from spindle.program.instructions import COMPUTE, TRANSFER, Backward, Exchange, Forward
from spindle.program.memory import Memory
from spindle.program.program import Column, Program


def posted_peaks(program: Program, profile: Profile, ranks: Iterable[int]) -> Column:
    """The peak memory of some ranks.

    In addition to what `Memory` counts: the output of a slot until its backward has run, gradients that were received
    for it, and, where sent gradients keep their memory until the step ends (`Profile.sends_stay`), those.
    """
    instances, memory = instances_of(program), Memory(program, profile)
    at_start, at_end = memory.changes(instances)
    outputs = np.zeros_like(memory.saved)
    for number, shape in enumerate(program.slots):
        cost = profile.graph.metaops[shape.op].cost
        if cost is not None:
            outputs[number, shape.ranks] = shape.rows_of_ranks() * cost.cut_bytes_at(shape.tensor_degree)
    # By link and rank, and by slot and rank: bytes of gradients that arrive and that leave.
    arriving = np.zeros((len(program.links), program.num_ranks), dtype=np.int64)
    arrived, left = np.zeros_like(memory.saved), np.zeros_like(memory.saved)
    for number, link in enumerate(program.links):
        flows = link.backward
        num_bytes = ((flows.last - flows.first) * link.bytes_per_row).astype(np.int64)
        np.add.at(arriving[number], flows.destination, num_bytes)
        np.add.at(left[link.consumer], flows.source, num_bytes)
        arrived[link.producer] += arriving[number]

    def peak(rank: int) -> int:
        places = np.flatnonzero((instances.lane == COMPUTE) & (instances.rank == rank))
        begin, end = at_start[places], at_end[places]
        # By slot: after how many instructions its output exists, and the gradients of its inputs.
        forwarded: dict[int, int] = defaultdict(int)
        returned: dict[int, int] = defaultdict(int)
        for place, number in enumerate(instances.instruction[places].tolist()):
            match program.instructions[number]:
                case Forward(slot=slot):
                    forwarded[slot] = place + 1
                    end[place] += outputs[slot, rank]
                case Backward(slot=slot, first=first, last=last, makes_inputs=True):
                    if last == program.plan.slots[slot].last:
                        end[place] -= outputs[slot, rank] + arrived[slot, rank]
                    if first == program.plan.slots[slot].first:
                        returned[slot] = place + 1
                        end[place] += left[slot, rank] if profile.sends_stay else 0
                case _:
                    pass
        # Bytes of receive buffers by how many compute instructions are over when they are posted. `place` only grows:
        # an exchange is not posted before one that stands before it in the lane.
        posted = np.zeros(len(places) + 1, dtype=np.int64)
        place = 0
        for number in program.lanes[TRANSFER].of_rank(rank).tolist():
            exchange = program.instructions[number]
            assert isinstance(exchange, Exchange)
            link = program.links[exchange.link]
            if exchange.backward:
                place = max(place, forwarded[link.producer], returned[link.consumer])
                posted[place] += arriving[exchange.link, rank]
            else:
                place = max(place, forwarded[link.producer])
                posted[place] += memory.arrived[exchange.link, rank]
        # Live bytes while each instruction runs: what those before it left, what it takes, and all posted buffers.
        before = np.concatenate([[0], np.cumsum(begin + end)])
        live = before[:-1] + begin + np.cumsum(posted)[:-1]
        return int(memory.static_bytes[rank] + live.max(initial=0))

    return np.array([peak(rank) for rank in ranks], dtype=np.int64)
