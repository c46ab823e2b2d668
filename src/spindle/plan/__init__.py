"""What is a plan, is this one legal? The Plan, how pieces become one, its check and its text form."""

from spindle.plan.assemble import Piece, assemble, relaxed, slots_per_op
from spindle.plan.check import check
from spindle.plan.plan import Plan, Slot, read_plan, setting_of, write_plan
from spindle.plan.text import format_devices, format_plan, parse_plan

__all__ = [
    "Piece",
    "Plan",
    "Slot",
    "assemble",
    "check",
    "format_devices",
    "format_plan",
    "parse_plan",
    "read_plan",
    "relaxed",
    "setting_of",
    "slots_per_op",
    "write_plan",
]
