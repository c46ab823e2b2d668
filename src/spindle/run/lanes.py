"""Compute streams of a rank's lanes, and the events between them.

The host launches the instructions of all lanes in the order of the plan, each on the stream of its lane. If an
instruction depends on one of another lane, its stream waits for an event recorded after that one. Torch's allocator
gives freed memory back to the stream that allocated it, also in captures, so tensors that another lane reads are kept
until the step ends.

With several ranks, communication is launched from a stream of its own, in the order that is common to all ranks. It
waits for events recorded after what it sends or reduces, and for nothing else, so that no lane waits for another
through it. What this stream reads, or receives for a lane, is freed only after what both have launched by then.

Autograd runs a node of backward on the stream of its forward, whatever stream is current. Weight gradients therefore
run on a lane of their own only as a CUDA graph, which is captured on the stream of their slot and replayed on any;
launched eagerly, they run on the lane of their slot.

Lanes with quotas have streams on SMs of their own (`green_contexts`); what belongs to no slot runs on all SMs, on the
stream from which the step was started.

On CPUs lanes are only an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.program import Backward, Forward, Program, needed_pairs
from spindle.run.green_contexts import partitions
from spindle.run.rank_program import RankProgram, RankSlot
from spindle.run.regions import Region
from spindle.run.step import Step
from spindle.run.world import World, compute_stream

Record = Callable[[int, int, frozenset[int]], AbstractContextManager[None]]
COMMUNICATION = -1  # the lane from which communication is launched if compute has several lanes
# Streams from which regions are launched in turn, so that a region does not wait for the one before it.
_REGION_LANES = (-2, -3, -4, -5)


class Lanes:
    """The lanes of one rank. With a single lane, or on a CPU, it does nothing, unless instructions are recorded."""

    def __init__(self, program: Program, rank_program: RankProgram, world: World) -> None:
        self._lane_of = [slot.lane for slot in program.plan.slots]
        self.has_weight_lanes = any(slot.has_weight_lane for slot in program.plan.slots)
        self._uses_streams = uses_streams(program, world)
        self._streams: list[torch.cuda.Stream] = []
        self._communication: torch.cuda.Stream | None = None
        # The lane of everything that belongs to no slot: the first one; with quotas, an extra one that has all SMs.
        self._common_lane = program.plan.num_lanes if program.plan.quotas else 0
        self._lane_at: dict[int, int] = {}  # lane by instruction
        self._slot_lane_at: dict[int, int] = {}  # by instruction: the lane of its slot, on which autograd launches it
        self._waits: dict[int, list[int]] = {}  # by instruction: the instructions of other lanes that it needs
        self._messages: dict[int, list[int]] = {}  # by instruction of a compute lane: the communication that it needs
        self._events: dict[int, torch.cuda.Event] = {}
        self._record: Record | None = None
        self._last_on: dict[int, int] = {}  # by lane: the instruction that was recorded last
        self._num_regions = 0  # regions launched so far
        self._recorded: set[int] = set()
        if program.plan.num_lanes == 1:
            return
        if self._uses_streams and world.shares_gpu:
            raise TrainingError(
                f"this plan has {program.plan.num_lanes} lanes, and virtual devices have one: their processes share "
                "the GPU; plan with lanes=1"
            )
        if self._uses_streams and program.plan.quotas and world.size > 1:
            raise TrainingError(
                "this plan has quotas of SMs, which run with one process so far; plan without quotas=True"
            )
        if self._uses_streams and program.plan.quotas:
            self._streams = [*(partition.stream for partition in partitions(program.plan.quotas)), compute_stream()]
        elif self._uses_streams:
            self._streams = [lane_stream(lane) for lane in range(program.plan.num_lanes)]
            self._communication = _stream_of_lane(COMMUNICATION) if world.size > 1 else None
        for position in rank_program.compute:
            match program.instructions[position]:
                case Backward(slot=slot, makes_inputs=False):
                    self._lane_at[position] = program.plan.slots[slot].lane_of_weights
                    self._slot_lane_at[position] = self._lane_of[slot]
                case Forward(slot=slot) | Backward(slot=slot):
                    self._lane_at[position] = self._slot_lane_at[position] = self._lane_of[slot]
                case _:
                    self._lane_at[position] = self._slot_lane_at[position] = self._common_lane
        computed, communication = set(self._lane_at), {*rank_program.transfer, *rank_program.sync}
        if self._communication is not None:
            self._lane_at |= dict.fromkeys(communication, COMMUNICATION)
        for before, after in needed_pairs(program).tolist():
            if before in computed and after in self._lane_at and self._lane_at[before] != self._lane_at[after]:
                self._waits.setdefault(after, []).append(before)
            elif before in communication and after in computed:
                self._messages.setdefault(after, []).append(before)

    def begin(self) -> None:
        """Let all lanes wait for what was launched before the step: the last update, and the batches of this step."""
        for stream in self._other_streams():
            stream.wait_stream(self._streams[self._common_lane])

    @contextmanager
    def on_stream_of(self, position: int) -> Iterator[None]:
        """A context that launches an instruction on its lane, after what it needs from other lanes."""
        if self._record is not None:
            lane = self._lane_at[position]
            needs = frozenset(self._waits.get(position, ())) & self._recorded
            needs |= {self._last_on[lane]} if lane in self._last_on else set()
            stream = self._streams[self._slot_lane_at[position]] if self._uses_streams else None
            with nullcontext() if stream is None else torch.cuda.stream(stream), self._record(position, lane, needs):
                yield
            self._recorded.add(position)
            self._last_on[lane] = position
            return
        if not self._uses_streams:
            yield
            return
        stream = self._streams[self._lane_at[position]]
        self._wait(stream, position)
        with torch.cuda.stream(stream):
            yield
            self._events[position] = stream.record_event()

    def needs_of(self, positions: Sequence[int]) -> dict[int, list[int]]:
        """What each of these instructions, which are all that a step launches on compute lanes, waits for on this rank:
        other instructions, and messages."""
        before_on: dict[int, int] = {}  # by lane
        needs = {}
        for position in positions:
            lane = self._lane_at[position]
            needs[position] = [*self._waits.get(position, ()), *self._messages.get(position, ())]
            needs[position] += [before_on[lane]] if lane in before_on else []
            before_on[lane] = position
        return needs

    def region_of(self, positions: Sequence[int]) -> Region:
        """A region of these instructions."""
        inside = set(positions)
        needs = {position: frozenset(inside.intersection(of)) for position, of in self.needs_of(positions).items()}
        last_on = {self._lane_at[position]: position for position in positions}
        waited_for = {before for after, befores in self._waits.items() if after not in inside for before in befores}
        return Region(needs, sorted(inside & (waited_for | set(last_on.values()))))

    def launch(self, region: Region, replay: Callable[[], bool]) -> None:
        """Launch a region as one graph, after earlier work of the lanes that it uses. Each of these lanes continues
        after its last pass in the region; or, if `replay` returns that it has launched more after the graph, after
        that."""
        if not self._uses_streams:
            replay()
            return
        last_on = {self._lane_at[position]: position for position in region.positions}
        stream = _stream_of_lane(_REGION_LANES[self._num_regions % len(_REGION_LANES)])
        self._num_regions += 1
        for lane in last_on:
            stream.wait_stream(self._streams[lane])
        with torch.cuda.stream(stream):
            has_more = replay()
            events = dict.fromkeys(region.positions, stream.record_event()) if has_more else region.events
        self._events |= events
        for lane, last in last_on.items():
            self._streams[lane].wait_event(events[last])

    @contextmanager
    def on_communication_stream(self, position: int) -> Iterator[None]:
        """A context that launches a transfer or a collective after what it needs from lanes. Its request makes other
        streams wait for it."""
        if self._communication is None:
            yield
            return
        self._wait(self._communication, position)
        with torch.cuda.stream(self._communication):
            yield

    def _wait(self, stream: torch.cuda.Stream, position: int) -> None:
        for before in self._waits.get(position, ()):
            if before in self._events:  # otherwise its task takes no part in this step
                stream.wait_event(self._events[before])

    @contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """A context in which each instruction runs inside `record(instruction, lane, needed)`, on the stream of its
        slot. `needed` are those instructions recorded before that it follows on its lane or waits for."""
        self._record, self._last_on, self._recorded = record, {}, set()
        try:
            yield
        finally:
            self._record = None

    def keep_for_other_lanes(self, step: Step, slot: RankSlot) -> None:
        """Until the step ends, keep what a slot reads from other lanes, and the gradients that they will read from it.
        Call it after the slot's forward."""
        if not self._uses_streams and self._record is None:
            return
        for link in slot.inputs:
            if self._lane_of[link.producer] != self._lane_of[link.consumer]:
                crossing: tuple[Any, ...] = (step.outputs.get(link.producer), step.inputs.get(link.number))
                step.kept_for_lanes.append(crossing)

    def join(self) -> None:
        """Let whatever follows the step wait for all lanes."""
        for stream in self._other_streams():
            self._streams[self._common_lane].wait_stream(stream)
        self._events.clear()

    def _other_streams(self) -> list[torch.cuda.Stream]:
        """All streams except that of the common lane, on which a step starts and ends."""
        if self._record is not None:
            return []
        others = [stream for lane, stream in enumerate(self._streams) if lane != self._common_lane]
        return others if self._communication is None else [*others, self._communication]


@contextmanager
def on_slot_lane(slot: RankSlot, device: torch.device) -> Iterator[None]:
    """A context in which work launched on the lane of a slot's weight gradients runs on the lane of the slot, in the
    same order."""
    if device.type != "cuda" or slot.lane == slot.weight_lane:
        yield
        return
    current, stream = torch.cuda.current_stream(), lane_stream(slot.lane)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def uses_streams(program: Program, world: World) -> bool:
    """Whether lanes are streams: the plan has several lanes, and the device is a GPU."""
    return world.device.type == "cuda" and program.plan.num_lanes > 1


def release_behind_current_stream(tensor: torch.Tensor | None) -> None:
    """Let the memory of a tensor of another stream be reused only after what the current stream has launched by the
    time the tensor is freed."""
    if tensor is not None:
        tensor.record_stream(torch.cuda.current_stream())


def lane_stream(lane: int) -> torch.cuda.Stream:
    """The stream of a lane. All plans share it, because libraries keep a workspace per stream."""
    return compute_stream() if lane == 0 else _stream_of_lane(lane)


@cache
def _stream_of_lane(lane: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
