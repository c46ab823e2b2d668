"""Compute streams of a rank's lanes, and the events between them.

The host launches the instructions of all lanes in the order of the plan, each on the stream of its lane. Where an
instruction depends on one of another lane, its stream waits for an event behind that one. Memory needs no further care
but for tensors that cross lanes: torch's allocator gives memory back to the stream that allocated it, in captures, too,
so whatever another lane reads is held until the step ends.

Autograd runs a node of backward on the stream of its forward, whatever stream is current. Weight gradients therefore
run on a lane of their own only as a CUDA graph, which is captured on the stream of their slot and replayed on any;
launched eagerly, they run on the lane of their slot.

On CPUs lanes are only an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.program import Backward, Forward, Program, needed_pairs
from spindle.run.rank_program import RankProgram, RankSlot
from spindle.run.step import Step
from spindle.run.world import World, compute_stream

Record = Callable[[int, int, frozenset[int]], AbstractContextManager[None]]


class Lanes:
    """The lanes of one rank. With one lane, or on a CPU, all of it does nothing, unless instructions are recorded."""

    def __init__(self, program: Program, rank_program: RankProgram, world: World) -> None:
        self._lane_of = [slot.lane for slot in program.plan.slots]
        self.has_weight_lanes = any(slot.has_weight_lane for slot in program.plan.slots)
        self._is_on = world.device.type == "cuda" and program.plan.num_lanes > 1
        self._streams: list[torch.cuda.Stream] = []
        self._lane_at: dict[int, int] = {}  # by instruction
        self._slot_lane_at: dict[int, int] = {}  # by instruction: the lane of its slot, where autograd launches it
        self._waits: dict[int, list[int]] = {}  # by instruction: those of other lanes that it needs
        self._events: dict[int, torch.cuda.Event] = {}
        self._record: Record | None = None
        self._last_on: dict[int, int] = {}  # by lane: the instruction recorded last
        self._recorded: set[int] = set()
        if program.plan.num_lanes == 1:
            return
        if self._is_on and world.size > 1:
            raise TrainingError(
                "this plan has several lanes, which run on one GPU with one process so far; plan with lanes=1"
            )
        if self._is_on:
            self._streams = [lane_stream(lane) for lane in range(program.plan.num_lanes)]
        for position in rank_program.compute:
            match program.instructions[position]:
                case Backward(slot=slot, makes_inputs=False):
                    self._lane_at[position] = program.plan.slots[slot].lane_of_weights
                    self._slot_lane_at[position] = self._lane_of[slot]
                case Forward(slot=slot) | Backward(slot=slot):
                    self._lane_at[position] = self._slot_lane_at[position] = self._lane_of[slot]
                case _:
                    self._lane_at[position] = self._slot_lane_at[position] = 0
        for before, after in needed_pairs(program).tolist():
            if before in self._lane_at and after in self._lane_at and self._lane_at[before] != self._lane_at[after]:
                self._waits.setdefault(after, []).append(before)

    def begin(self) -> None:
        """Let all lanes wait for what was launched before the step: the last update, and this step's batches."""
        for stream in self._streams[1:] if self._record is None else ():
            stream.wait_stream(self._streams[0])

    @contextmanager
    def on_stream_of(self, position: int) -> Iterator[None]:
        """Launch an instruction on its lane, behind what it needs from other lanes."""
        if self._record is not None:
            lane = self._lane_at[position]
            needs = frozenset(self._waits.get(position, ())) & self._recorded
            needs |= {self._last_on[lane]} if lane in self._last_on else set()
            stream = self._streams[self._slot_lane_at[position]] if self._is_on else None
            with nullcontext() if stream is None else torch.cuda.stream(stream), self._record(position, lane, needs):
                yield
            self._recorded.add(position)
            self._last_on[lane] = position
            return
        if not self._is_on:
            yield
            return
        stream = self._streams[self._lane_at[position]]
        for before in self._waits.get(position, ()):
            if before in self._events:  # else its task takes no part in this step
                stream.wait_event(self._events[before])
        with torch.cuda.stream(stream):
            yield
            self._events[position] = stream.record_event()

    @contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """Inside, an instruction runs in `record(instruction, lane, needed)`, on the stream of its slot; `needed`
        are those that it follows on its lane or waits for, of those recorded before."""
        self._record, self._last_on, self._recorded = record, {}, set()
        try:
            yield
        finally:
            self._record = None

    def hold(self, step: Step, slot: RankSlot) -> None:
        """Keep what a slot reads from other lanes, and the gradients that they will read from it, until the step ends.
        Called after its forward."""
        if not self._is_on and self._record is None:
            return
        for link in slot.inputs:
            if self._lane_of[link.producer] != self._lane_of[link.consumer]:
                crossing: tuple[Any, ...] = (step.outputs.get(link.producer), step.inputs.get(link.number))
                step.crossing.append(crossing)

    def join(self) -> None:
        """Let what follows the step wait for all lanes."""
        for stream in self._streams[1:] if self._record is None else ():
            self._streams[0].wait_stream(stream)
        self._events.clear()


@contextmanager
def on_own_lane(slot: RankSlot, device: torch.device) -> Iterator[None]:
    """Inside, what is launched on the lane of a slot's weight gradients runs on that of the slot, in the same order."""
    if device.type != "cuda" or slot.lane == slot.weight_lane:
        yield
        return
    here, own = torch.cuda.current_stream(), lane_stream(slot.lane)
    own.wait_stream(here)
    with torch.cuda.stream(own):
        yield
    here.wait_stream(own)


def lane_stream(lane: int) -> torch.cuda.Stream:
    """The stream of a lane. Libraries keep a workspace per stream, so plans share them."""
    return compute_stream() if lane == 0 else _further_stream(lane)


@cache
def _further_stream(lane: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
