"""Programs: the instructions of every rank, lowering from a plan, and `verify`. Knows ranks, not torch."""

from spindle.program.instances import Instances, cut_by, instances_of
from spindle.program.instructions import (
    COMPUTE,
    LANES,
    SYNC,
    TRANSFER,
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
    code,
)
from spindle.program.launch_order import launch_order, launches_collectives
from spindle.program.lower import lower
from spindle.program.memory import Memory, counts_bytes, refuse_overfull
from spindle.program.moves import Move, StateSharding, moves_between, moving_s, state_sharding
from spindle.program.posted import posted_peaks
from spindle.program.program import Bucket, Column, Flows, Lane, Link, Program, SlotShape
from spindle.program.sharding import (
    Box,
    Piece,
    Sharding,
    Slice,
    Transfer,
    flat_pieces,
    keep_unused,
    main_replicas,
    numbers_by_dtype,
    optimizer_sharding,
    transfer,
    weight_sharding,
)
from spindle.program.text import format_program, parse_program
from spindle.program.verify import describe_deadlock, verify

__all__ = [
    "COMPUTE",
    "LANES",
    "SYNC",
    "TRANSFER",
    "Backward",
    "Box",
    "Bucket",
    "Column",
    "Exchange",
    "Flows",
    "Forward",
    "GatherParameters",
    "Instances",
    "Instruction",
    "Lane",
    "Link",
    "Memory",
    "Move",
    "OptimizerStep",
    "Piece",
    "Program",
    "Sharding",
    "Slice",
    "SlotShape",
    "StateSharding",
    "SyncGradients",
    "Transfer",
    "code",
    "counts_bytes",
    "cut_by",
    "describe_deadlock",
    "flat_pieces",
    "format_program",
    "instances_of",
    "keep_unused",
    "launch_order",
    "launches_collectives",
    "lower",
    "main_replicas",
    "moves_between",
    "moving_s",
    "numbers_by_dtype",
    "optimizer_sharding",
    "parse_program",
    "posted_peaks",
    "refuse_overfull",
    "state_sharding",
    "transfer",
    "verify",
    "weight_sharding",
]
