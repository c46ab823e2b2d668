"""Programs: the instructions of every rank, lowering from a plan, and `verify`. Knows ranks, not torch."""

from spindle.program.copies import COPIES_AHEAD, OffloadCopies, copies_in, offload_copies
from spindle.program.instances import Instances, cut_by, instances_of, needed_pairs
from spindle.program.instructions import (
    COMPUTE,
    SYNC,
    TRANSFER,
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    SyncGradients,
    are_compute,
    code,
    lane_name,
)
from spindle.program.launch_order import launch_order, launches_collectives
from spindle.program.lower import lower
from spindle.program.memory import Memory, counts_bytes, refuse_overfull
from spindle.program.moves import StateSharding, moves_between, moving_s, state_sharding
from spindle.program.posted import posted_peaks
from spindle.program.program import NUM_LANES, Column, Flows, Link, Program, SlotShape
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
    "COPIES_AHEAD",
    "NUM_LANES",
    "SYNC",
    "TRANSFER",
    "Backward",
    "Box",
    "Column",
    "Exchange",
    "Flows",
    "Forward",
    "GatherParameters",
    "Instances",
    "Instruction",
    "Link",
    "Memory",
    "OffloadCopies",
    "OptimizerStep",
    "Piece",
    "Program",
    "Sharding",
    "Slice",
    "SlotShape",
    "StateSharding",
    "SyncGradients",
    "Transfer",
    "are_compute",
    "code",
    "copies_in",
    "counts_bytes",
    "cut_by",
    "describe_deadlock",
    "flat_pieces",
    "format_program",
    "instances_of",
    "keep_unused",
    "lane_name",
    "launch_order",
    "launches_collectives",
    "lower",
    "main_replicas",
    "moves_between",
    "moving_s",
    "needed_pairs",
    "numbers_by_dtype",
    "offload_copies",
    "optimizer_sharding",
    "parse_program",
    "posted_peaks",
    "refuse_overfull",
    "state_sharding",
    "transfer",
    "verify",
    "weight_sharding",
]
