"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from spindle.program import NUM_LANES, Instruction, lane_name
from spindle.timeline.timeline import Timeline


def chrome_trace(timeline: Timeline, name_of: Callable[[Instruction], str]) -> str:
    """JSON text with one process per rank, one thread per lane, and a counter of live memory."""
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
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
