"""Timelines: spans of instructions in columns, measures of them, and Chrome/Perfetto traces."""

from spindle.timeline.measures import Measures, busy_intervals, measure
from spindle.timeline.timeline import Timeline
from spindle.timeline.trace import chrome_trace

__all__ = ["Measures", "Timeline", "busy_intervals", "chrome_trace", "measure"]
