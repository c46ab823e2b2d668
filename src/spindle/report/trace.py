"""A timeline as a Chrome trace whose spans carry the names of ops."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import assert_never

from spindle.artifact import write_bytes_atomically
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
from spindle.timeline import Flow, Timeline, chrome_trace


def trace_of(timeline: Timeline, program: Program) -> str:
    """JSON text for ui.perfetto.dev or chrome://tracing, with an arrow from each sender to its receiver."""
    return chrome_trace(timeline, lambda instruction: instruction_name(instruction, program), _flows(timeline, program))


def write_trace(path: Path, timeline: Timeline, program: Program) -> None:
    """Write a trace; compressed if the name ends in .gz, which Perfetto opens, too."""
    content = trace_of(timeline, program).encode()
    write_bytes_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _flows(timeline: Timeline, program: Program) -> Iterator[Flow]:
    """The messages of all exchanges whose sender and receiver have a span."""
    span_of = {
        (number, rank): span
        for span, (number, rank) in enumerate(zip(timeline.instruction.tolist(), timeline.rank.tolist(), strict=True))
        if isinstance(timeline.instructions[number], Exchange)
    }
    for number, instruction in enumerate(timeline.instructions):
        if not isinstance(instruction, Exchange):
            continue
        link = program.links[instruction.link]
        messages = link.backward if instruction.backward else link.forward
        name = instruction_name(instruction, program)
        for source, destination in zip(messages.source.tolist(), messages.destination.tolist(), strict=True):
            if (number, source) in span_of and (number, destination) in span_of:
                yield Flow(span_of[number, source], span_of[number, destination], name)


def instruction_name(instruction: Instruction, program: Program) -> str:
    """The name of an instruction's span: what it does, and for which op."""
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
