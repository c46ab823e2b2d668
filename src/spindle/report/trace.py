"""A timeline as a Chrome trace whose spans carry the names of ops."""

from __future__ import annotations

from typing import assert_never

from spindle.display import count_of, num_bytes
from spindle.program import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
)
from spindle.timeline import Timeline, chrome_trace


def trace_of(timeline: Timeline, program: Program) -> str:
    """JSON text for ui.perfetto.dev or chrome://tracing."""
    return chrome_trace(timeline, lambda instruction: instruction_name(instruction, program))


def instruction_name(instruction: Instruction, program: Program) -> str:
    """What an instruction does, with the op it does it for."""
    slots = program.plan.slots
    match instruction:
        case Forward(slot=slot):
            return f"{slots[slot].op} {slots[slot].first}:{slots[slot].last} forward"
        case Backward(slot=slot, first=first, last=last):
            return f"{slots[slot].op} {first}:{last} backward"
        case Exchange(link=link, backward=backward):
            producer, consumer = slots[program.links[link].producer].op, slots[program.links[link].consumer].op
            return f"{consumer} → {producer} gradient" if backward else f"{producer} → {consumer}"
        case SyncGradients(bucket=bucket):
            chosen = program.buckets[bucket]
            return f"synchronise {num_bytes(chosen.num_bytes)} over {len(chosen.ranks)}"
        case GatherParameters(bucket=bucket):
            chosen = program.buckets[bucket]
            return f"gather {count_of(len(chosen.parameters), 'parameter')} over {len(chosen.ranks)}"
        case OptimizerStep():
            return "optimizer"
        case _:
            assert_never(instruction)
