"""What happened when? Spans in columns, the measures taken from them, and their Chrome/Perfetto trace."""

from spindle.timeline.measures import Measures, measure
from spindle.timeline.timeline import Timeline
from spindle.timeline.trace import chrome_trace

__all__ = ["Measures", "Timeline", "chrome_trace", "measure"]
