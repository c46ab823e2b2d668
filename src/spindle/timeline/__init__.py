"""Timelines: spans of instructions in columns, measures of them, files, and Chrome/Perfetto traces."""

from spindle.timeline.columns import pack, unpack
from spindle.timeline.file import read_timeline, time_columns, write_timeline
from spindle.timeline.measures import Intervals, Measures, busy_intervals, device_times, length, measure, union
from spindle.timeline.timeline import Column, Timeline
from spindle.timeline.trace import Flow, chrome_trace

__all__ = [
    "Column",
    "Flow",
    "Intervals",
    "Measures",
    "Timeline",
    "busy_intervals",
    "chrome_trace",
    "device_times",
    "length",
    "measure",
    "pack",
    "read_timeline",
    "time_columns",
    "union",
    "unpack",
    "write_timeline",
]
