"""Peak memory of ranks, with exchanges posted as early as the runtime posts them.

A rank posts its exchanges in lane order, each as soon as the data that it sends exists. So a receive buffer may be
allocated long before the exchange runs in the simulator; when it is allocated depends on the rank's own order alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spindle.profile import Profile
from spindle.program.columns import BACKWARD, FORWARD
from spindle.program.instructions import COMPUTE, TRANSFER
from spindle.program.memory import Memory
from spindle.program.program import Column, Program
from spindle.program.row_flows import messages_of


def posted_peaks(program: Program, profile: Profile, ranks: Iterable[int]) -> Column:
    """The peak memory of these ranks.

    Counts, in addition to `Memory`: the output of a slot until its backward has run, received gradients of this output,
    and, with `Profile.sends_stay`, sent gradients until the step ends.
    """
    memory, columns = Memory(program, profile), program.columns
    at_start, at_end = memory.changes_by_rank()
    outputs = memory.outputs
    # Bytes of gradients that arrive, by link and rank; and that arrive and leave, by slot and rank.
    producer = np.array([link.producer for link in program.links], dtype=np.int64)
    consumer = np.array([link.consumer for link in program.links], dtype=np.int64)
    messages = messages_of(program.links, backward=True)
    row_bytes = np.array([link.bytes_per_row for link in program.links], dtype=np.float64)[messages.link]
    num_bytes = ((messages.last - messages.first) * row_bytes).astype(np.int64)
    arriving = np.zeros((len(program.links), program.num_ranks), dtype=np.int64)
    arrived, left = np.zeros_like(memory.saved), np.zeros_like(memory.saved)
    np.add.at(arriving, (messages.link, messages.destination), num_bytes)
    np.add.at(left, (consumer[messages.link], messages.source), num_bytes)
    np.add.at(arrived, producer, arriving)
    begins = np.array([slot.first for slot in program.plan.slots], dtype=np.int64)
    ends = np.array([slot.last for slot in program.plan.slots], dtype=np.int64)

    def peak(rank: int) -> int:
        numbers = program.lanes[COMPUTE].of_rank(rank)
        begin, end = at_start[numbers, rank], at_end[numbers, rank]
        kind, slot = columns.kind[numbers], columns.index[numbers]
        # After how many instructions each slot's output exists, and the gradients of its inputs.
        forwarded, returned = np.zeros(len(begins), dtype=np.int64), np.zeros(len(begins), dtype=np.int64)
        places = np.flatnonzero(kind == FORWARD)
        forwarded[slot[places]] = places + 1
        end[places] += outputs[slot[places], rank]
        is_backward = (kind == BACKWARD) & columns.makes_inputs[numbers]
        places = np.flatnonzero(is_backward & (columns.last[numbers] == ends[slot]))
        end[places] -= outputs[slot[places], rank] + arrived[slot[places], rank]
        places = np.flatnonzero(is_backward & (columns.first[numbers] == begins[slot]))
        returned[slot[places]] = places + 1
        end[places] += left[slot[places], rank] if profile.sends_stay else 0
        # Bytes of receive buffers, by the number of compute instructions before they are posted. It never decreases
        # along the lane: an exchange is not posted before an earlier one.
        exchanges = program.lanes[TRANSFER].of_rank(rank)
        link, is_backward = columns.index[exchanges], columns.is_backward[exchanges]
        place = np.where(
            is_backward, np.maximum(forwarded[producer[link]], returned[consumer[link]]), forwarded[producer[link]]
        )
        posted = np.zeros(len(numbers) + 1, dtype=np.int64)
        buffers = np.where(is_backward, arriving[link, rank], memory.arrived[link, rank])
        np.add.at(posted, np.maximum.accumulate(place), buffers)
        # Live bytes while each instruction runs: what earlier ones left, what it allocates, and all posted buffers.
        before = np.concatenate([[0], np.cumsum(begin + end)])
        live = before[:-1] + begin + np.cumsum(posted)[:-1]
        return int(memory.static_bytes[rank] + live.max(initial=0))

    return np.array([peak(rank) for rank in ranks], dtype=np.int64)
