"""What is a plan, is this one legal? The Plan, how pieces become one, its check and its text form."""

from spindle.plan.assemble import Piece, assemble, relaxed, slots_per_op
from spindle.plan.check import check
from spindle.plan.passes import assemble_passes, slot_links
from spindle.plan.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Pass,
    Plan,
    Slot,
    pass_s,
    read_plan,
    setting_of,
    write_plan,
)
from spindle.plan.text import format_devices, format_plan, parse_plan

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT",
    "WEIGHT",
    "Pass",
    "Piece",
    "Plan",
    "Slot",
    "assemble",
    "assemble_passes",
    "check",
    "format_devices",
    "format_plan",
    "parse_plan",
    "pass_s",
    "read_plan",
    "relaxed",
    "setting_of",
    "slot_links",
    "slots_per_op",
    "write_plan",
]
