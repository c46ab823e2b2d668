"""A measured Timeline from what every rank noted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spindle.program import Exchange, GatherParameters, Program, SyncGradients, instances_of
from spindle.run.step import Spans
from spindle.timeline import Timeline


def timeline_of(program: Program, ranks: Sequence[Spans]) -> Timeline:
    """One step as it was. Ranks' clocks must agree, as those of one host do.

    A transfer can begin when both sides are ready and ends when the receiver takes it up; a synchronisation begins with
    the last rank that joins. Bytes are not measured.
    """
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
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Exchange(link=link, backward=backward):
                flows = program.links[link].backward if backward else program.links[link].forward
                begun: dict[int, int] = {}
                for source, to in zip(flows.source.tolist(), flows.destination.tolist(), strict=True):
                    giver, taker = where[source, number], where[to, number]
                    ready = int(max(posted[giver], posted[taker]))
                    end[giver] = max(end[giver], end[taker])
                    for one in (giver, taker):
                        begun[one] = min(begun.get(one, ready), ready)
                for one, ready in begun.items():
                    start[one] = min(ready, int(end[one]))
            case SyncGradients(bucket=bucket) | GatherParameters(bucket=bucket):
                members = [where[rank, number] for rank in program.buckets[bucket].ranks.tolist()]
                ready = int(posted[members].max())
                start[members] = np.minimum(ready, end[members])
            case _:
                pass
    nothing = np.zeros(count, dtype=np.int64)
    return Timeline(
        instructions=program.instructions,
        num_ranks=program.num_ranks,
        rank=instances.rank,
        lane=instances.lane,
        instruction=instances.instruction,
        posted=posted,
        start=start,
        end=end,
        bytes_at_start=nothing,
        bytes_at_end=nothing,
        static_bytes=np.zeros(program.num_ranks, dtype=np.int64),
    )
