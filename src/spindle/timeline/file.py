"""Timelines on disk: a gzip file of columns; 36,736 spans take tens of kilobytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from spindle.artifact import read_bytes_file, shown, write_bytes_atomically
from spindle.errors import InputError
from spindle.program import Instruction, code, instruction_of_code
from spindle.timeline.columns import Column, pack, unpack
from spindle.timeline.timeline import Timeline

KIND = "timeline"
VERSION = 1
_SPAN_COLUMNS = ("rank", "lane", "instruction", "gap", "duration", "waited", "bytes_at_start", "bytes_at_end")


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a timeline completely or not at all; the same timeline gives the same bytes."""
    write_bytes_atomically(path, timeline_bytes(timeline))


def read_timeline(path: Path) -> Timeline:
    """Read what `write_timeline` wrote. Raises an InputError of one sentence if it is truncated or something else."""
    return timeline_from_bytes(read_bytes_file(path), str(path))


def timeline_bytes(timeline: Timeline) -> bytes:
    header = {
        "spindle": KIND,
        "version": VERSION,
        "num_ranks": timeline.num_ranks,
        "instructions": [code(instruction) for instruction in timeline.instructions],
    }
    return pack(header, {**time_columns(timeline), "static_bytes": timeline.static_bytes})


def time_columns(timeline: Timeline) -> dict[str, Column]:
    """The columns of a timeline as small numbers, which compress better than times: the gap since the span before, the
    duration, and how long the rank waited before it."""
    before = np.concatenate([[0], timeline.end[:-1]]) if len(timeline.end) else timeline.end
    return {
        "rank": timeline.rank,
        "lane": timeline.lane,
        "instruction": timeline.instruction,
        "gap": timeline.start - before,
        "duration": timeline.end - timeline.start,
        "waited": timeline.start - timeline.posted,
        "bytes_at_start": timeline.bytes_at_start,
        "bytes_at_end": timeline.bytes_at_end,
    }


def timeline_from_bytes(data: bytes, where: str) -> Timeline:
    header, columns = unpack(data, where)
    if header.get("spindle") != KIND:
        raise InputError(f"{where}: expected a Spindle {KIND}, this is {shown(header.get('spindle'))}")
    if header.get("version") != VERSION:
        raise InputError(
            f"{where}: this Spindle reads version {VERSION} of a {KIND}, got {shown(header.get('version'))}"
        )
    missing = [name for name in (*_SPAN_COLUMNS, "static_bytes") if name not in columns]
    if missing:
        raise InputError(f"{where}: the column {missing[0]!r} is missing")
    if len({len(columns[name]) for name in _SPAN_COLUMNS}) > 1:
        raise InputError(f"{where}: its columns have different lengths")
    num_ranks = header.get("num_ranks")
    if not isinstance(num_ranks, int) or len(columns["static_bytes"]) != num_ranks:
        raise InputError(f"{where}: expected static_bytes of {shown(num_ranks)} ranks")
    # start = end of the span before + gap, and end = start + duration.
    duration = columns["duration"]
    end = np.cumsum(columns["gap"] + duration)
    start = end - duration
    timeline = Timeline(
        instructions=_instructions(header.get("instructions"), where),
        num_ranks=num_ranks,
        rank=columns["rank"],
        lane=columns["lane"],
        instruction=columns["instruction"],
        posted=start - columns["waited"],
        start=start,
        end=end,
        bytes_at_start=columns["bytes_at_start"],
        bytes_at_end=columns["bytes_at_end"],
        static_bytes=columns["static_bytes"],
    )
    _refuse_nonsense(timeline, where)
    return timeline


def _instructions(codes: Any, where: str) -> tuple[Instruction, ...]:
    if not isinstance(codes, list):
        raise InputError(f"{where}: its header has no list of instructions")
    try:
        return tuple(instruction_of_code(word) for word in codes)
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: {error}") from error


def _refuse_nonsense(timeline: Timeline, where: str) -> None:
    bounds = {
        "rank": (timeline.rank, timeline.num_ranks),
        "instruction": (timeline.instruction, len(timeline.instructions)),
        "lane": (timeline.lane, 64),
    }
    for name, (column, count) in bounds.items():
        if len(column) and not (column.min() >= 0 and column.max() < count):
            raise InputError(f"{where}: a {name} lies outside of 0 to {count - 1}")
    if (timeline.end < timeline.start).any() or timeline.start.min(initial=0) < 0:
        raise InputError(f"{where}: a span ends before it starts, or starts before the step")
