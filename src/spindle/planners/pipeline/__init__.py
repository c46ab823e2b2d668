"""Planner `pipeline`: which order of passes on each pipeline rank, and with which memory choices?

Here it works on columns of numbers (`Segments`), in nanoseconds and bytes; it knows neither profiles nor plans.
"""

from __future__ import annotations

from spindle.planners.pipeline.bound import bound_ns
from spindle.planners.pipeline.gates import ADMISSION, HARD, NONE, SAFE, check_fits, least_caps, limits_of
from spindle.planners.pipeline.interleave import Schedule, interleave, natural_priorities
from spindle.planners.pipeline.memory import fastest_choices, with_memory_choices
from spindle.planners.pipeline.orders import encoders_in_bubbles, interleaved, one_forward_one_backward, zero_bubble
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.search import Found, search
from spindle.planners.pipeline.segments import BACKWARD, FORWARD, INPUT, WEIGHT, Segments, without_choices

__all__ = [
    "ADMISSION",
    "BACKWARD",
    "FORWARD",
    "HARD",
    "INPUT",
    "NONE",
    "SAFE",
    "WEIGHT",
    "Found",
    "Schedule",
    "Segments",
    "bound_ns",
    "check_fits",
    "encoders_in_bubbles",
    "fastest_choices",
    "interleave",
    "interleaved",
    "least_caps",
    "limits_of",
    "natural_priorities",
    "one_forward_one_backward",
    "retime",
    "search",
    "with_memory_choices",
    "without_choices",
    "zero_bubble",
]
