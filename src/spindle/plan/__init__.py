"""The Plan: its assembly from pieces, its legality check and its text form."""

from spindle.plan.assemble import Piece, assemble, assemble_passes, relaxed, slots_per_op
from spindle.plan.check import MAX_LANES, check
from spindle.plan.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Plan, Slot, read_plan, setting_of, write_plan
from spindle.plan.text import PASS_LETTERS, format_devices, format_plan, parse_plan
from spindle.plan.times import FOLDED, Span, forward_spans, pass_s, slot_links, spans

__all__ = [
    "BACKWARD",
    "FOLDED",
    "FORWARD",
    "INPUT",
    "MAX_LANES",
    "PASS_LETTERS",
    "WEIGHT",
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
    "parse_plan",
    "pass_s",
    "read_plan",
    "relaxed",
    "setting_of",
    "slot_links",
    "slots_per_op",
    "spans",
    "write_plan",
]
