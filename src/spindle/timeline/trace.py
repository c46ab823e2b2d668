"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from spindle.program import NUM_LANES, Instruction, lane_name
from spindle.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from one span to another: what a rank sends and another receives."""

    source: int
    destination: int
    name: str


def chrome_trace(timeline: Timeline, name_of: Callable[[Instruction], str], flows: Iterable[Flow] = ()) -> str:
    """JSON text with one process per rank, one thread per lane, a counter of live memory, and arrows of flows."""
    events: list[dict[str, object]] = []
    num_lanes = max(NUM_LANES, 1 + int(timeline.lane.max(initial=0)))
    for rank in range(timeline.num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": lane_name(lane)}}
            for lane in range(num_lanes)
        ]
        times, live = timeline.memory_of(rank)
        events += [
            {"ph": "C", "name": "memory", "pid": rank, "ts": time / 1e3, "args": {"bytes": value}}
            for time, value in zip(times.tolist(), live.tolist(), strict=True)
        ]
    names = [name_of(instruction) for instruction in timeline.instructions]
    columns = (timeline.instruction, timeline.rank, timeline.lane, timeline.start, timeline.end, timeline.posted)
    for number, rank, lane, start, end, posted in zip(
        *(np.asarray(column).tolist() for column in columns), strict=True
    ):
        events.append(
            {
                "ph": "X",
                "name": names[number],
                "pid": rank,
                "tid": lane,
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"waited_us": (start - posted) / 1e3},
            }
        )
    for number, flow in enumerate(flows):
        # An arrow binds to the spans that enclose its ends: it leaves as the transfer begins, and arrives as it ends.
        for phase, span, time in (("s", flow.source, timeline.start), ("f", flow.destination, timeline.end)):
            events.append(
                {
                    "ph": phase,
                    "id": number,
                    "cat": "flow",
                    "name": flow.name,
                    "pid": int(timeline.rank[span]),
                    "tid": int(timeline.lane[span]),
                    "ts": int(time[span]) / 1e3,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
