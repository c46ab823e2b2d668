"""A measured Timeline from the spans that every rank has recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spindle.program import Exchange, GatherParameters, Program, SyncGradients, instances_of
from spindle.run.step import HeldBytes, Spans
from spindle.timeline import Timeline


def timeline_of(program: Program, ranks: Sequence[Spans], held: Sequence[HeldBytes] = ()) -> Timeline:
    """The timeline of one step.

    The clocks of ranks must agree, as those of one host do. A transfer starts when both sides have posted it, and ends
    when the receiver has waited for it; a collective starts with the last rank that joins. `held` is the memory of each
    rank, read in a step of the same program; without it, the timeline has no bytes. Memory allocated between two
    instructions counts from the start of the later one.
    """
    # As the ranks recorded them; an instruction that a rank did not run takes no time.
    instances = instances_of(program)
    origin = min(spans.begin for spans in ranks)
    count = instances.num_instances
    posted, start, end = (np.zeros(count, dtype=np.int64) for _ in range(3))
    where = {}
    for instance, (rank, number) in enumerate(
        zip(instances.rank.tolist(), instances.instruction.tolist(), strict=True)
    ):
        spans = ranks[rank]
        where[rank, number] = instance
        first = spans.posted.get(number, spans.begin)
        posted[instance] = first - origin
        end[instance] = spans.end.get(number, first) - origin
        start[instance] = spans.start.get(number, first) - origin
    # When communication starts depends on all ranks that take part; each rank recorded only when it posted its side.
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Exchange(link=link, backward=backward):
                flows = program.links[link].backward if backward else program.links[link].forward
                begun: dict[int, int] = {}
                for source, to in zip(flows.source.tolist(), flows.destination.tolist(), strict=True):
                    sender, receiver = where[source, number], where[to, number]
                    ready = int(max(posted[sender], posted[receiver]))
                    end[sender] = max(end[sender], end[receiver])
                    for side in (sender, receiver):
                        begun[side] = min(begun.get(side, ready), ready)
                for side, ready in begun.items():
                    start[side] = min(ready, int(end[side]))
            case SyncGradients(bucket=bucket) | GatherParameters(bucket=bucket):
                members = [where[rank, number] for rank in program.buckets[bucket].ranks.tolist()]
                ready = int(posted[members].max())
                start[members] = np.minimum(ready, end[members])
            case _:
                pass
    bytes_at_start, bytes_at_end = (np.zeros(count, dtype=np.int64) for _ in range(2))
    for rank, of_rank in enumerate(held):
        live = of_rank.begin
        for number, (peak_bytes, after_bytes) in of_rank.instructions.items():
            bytes_at_start[where[rank, number]] = peak_bytes - live
            bytes_at_end[where[rank, number]] = after_bytes - peak_bytes
            live = after_bytes
    static_bytes = [of_rank.begin for of_rank in held] or [0] * program.num_ranks
    return Timeline(
        instructions=program.instructions,
        num_ranks=program.num_ranks,
        rank=instances.rank,
        lane=instances.lane,
        instruction=instances.instruction,
        posted=posted,
        start=start,
        end=end,
        bytes_at_start=bytes_at_start,
        bytes_at_end=bytes_at_end,
        static_bytes=np.array(static_bytes, dtype=np.int64),
    )
