"""Plans: how they are assembled from pieces, checked, timed, and written as text."""

from spindle.plan.assemble import Piece, assemble, assemble_passes, relaxed, slots_per_op
from spindle.plan.check import MAX_LANES, check
from spindle.plan.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    PASS_KINDS,
    WEIGHT,
    Pass,
    Plan,
    Slot,
    setting_of,
)
from spindle.plan.text import (
    PASS_LETTERS,
    format_devices,
    format_plan,
    is_text_file,
    ops_in,
    parse_plan,
    read_plan,
    write_plan,
)
from spindle.plan.times import FOLDED, Span, forward_spans, pass_s, pass_times, slot_links, slot_needs, spans

__all__ = [
    "BACKWARD",
    "FOLDED",
    "FORWARD",
    "INPUT",
    "MAX_LANES",
    "PASS_KINDS",
    "PASS_LETTERS",
    "WEIGHT",
    "Pass",
    "Piece",
    "Plan",
    "Slot",
    "Span",
    "assemble",
    "assemble_passes",
    "check",
    "format_devices",
    "format_plan",
    "forward_spans",
    "is_text_file",
    "ops_in",
    "parse_plan",
    "pass_s",
    "pass_times",
    "read_plan",
    "relaxed",
    "setting_of",
    "slot_links",
    "slot_needs",
    "slots_per_op",
    "spans",
    "write_plan",
]
