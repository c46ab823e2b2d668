"""Programs: the instructions of every rank, lowering from a plan, and `verify`. Knows ranks, not torch."""

from spindle.program.instances import Instances, instances_of
from spindle.program.instructions import (
    LANES,
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
)
from spindle.program.launch_order import launch_order, launches_collectives
from spindle.program.lower import lower
from spindle.program.memory import Memory, counts_bytes, refuse_overfull
from spindle.program.moves import Holders, Move, held_by, holders_of, moves_between, moving_s
from spindle.program.program import Bucket, Flows, Lane, Link, Program, SlotShape
from spindle.program.text import format_program, parse_program
from spindle.program.verify import verify

__all__ = [
    "LANES",
    "Backward",
    "Bucket",
    "Exchange",
    "Flows",
    "Forward",
    "GatherParameters",
    "Holders",
    "Instances",
    "Instruction",
    "Lane",
    "Link",
    "Memory",
    "Move",
    "OptimizerStep",
    "Program",
    "SlotShape",
    "SyncGradients",
    "counts_bytes",
    "format_program",
    "held_by",
    "holders_of",
    "instances_of",
    "launch_order",
    "launches_collectives",
    "lower",
    "moves_between",
    "moving_s",
    "parse_program",
    "refuse_overfull",
    "verify",
]
