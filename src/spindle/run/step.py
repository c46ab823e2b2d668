"""The state of one step on one rank, and when its instructions ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from spindle.run.backward_split import WeightPart
from spindle.run.items import Lengths
from spindle.run.pytrees import PytreeMeta
from spindle.run.rank_program import Flow

if TYPE_CHECKING:
    from spindle.run.graphs import Graphs
    from spindle.run.world import World

MAX_AHEAD = 3  # instructions
_STATE = (dict, list, set)  # types of the fields that a step changes as it runs


@dataclass(slots=True)
class Piece:
    """A run of layers with an autograd graph of its own: its input leaves, and its outputs or the function that
    recomputes them."""

    inputs: Any
    outputs: Any
    recompute: Callable[[], Any] | None = None
    chunk: int = 0  # the chunk of its slot's layers that it is in


@dataclass(slots=True)
class Arrival:
    """The receive buffers of one flow, one tensor per leaf; None while their shapes are not known yet."""

    flow: Flow
    tensors: list[torch.Tensor | None] | None
    requests: list[Any]


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One of the `count` forward and backward passes of a step whose gradients are accumulated before the optimizer
    steps.

    `tasks` are those that took part in this micro-step or an earlier one of the step. `weights` scale the losses of
    tasks whose batches have different weights, and `token_counts` are what the counts of their losses must be.
    """

    number: int = 0
    count: int = 1
    tasks: frozenset[str] = frozenset()
    weights: Mapping[str, float] = field(default_factory=dict)
    token_counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


@dataclass(slots=True)
class Step:
    """The state of one step on one rank. A task without a signature takes no part in it."""

    number: int
    batches: Mapping[str, Any]
    signatures: Mapping[str, int]
    check_losses: bool
    # By task: the rows of each leaf, if this rank has only some rows of the batch.
    held: Mapping[str, tuple[tuple[int, int], ...]]
    new_shapes: frozenset[str]  # tasks whose batch has a shape that was not seen before
    micro_step: MicroStep
    # Shapes of what crosses cuts, if they are known.
    cuts: Mapping[tuple[int, int], PytreeMeta] = field(default_factory=dict)
    # By task: the number of rows of each item of its batch.
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    # By task: the items of the batch that are here, if not all are.
    held_items: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    loss_scale: torch.Tensor | None = None
    graphs: Graphs | None = None
    pieces: dict[int, list[Piece]] = field(default_factory=dict)  # by slot, in forward order
    # By slot and chunk: parts that compute weight gradients.
    deferred: dict[tuple[int, int], list[WeightPart]] = field(default_factory=dict)
    inputs: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # by link: leaves that take gradients
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot: total and count of each metric
    arrivals: dict[tuple[int, bool], list[Arrival]] = field(default_factory=dict)
    # By link and direction: peer, request and buffer. The buffer must live until it is sent.
    sending: dict[tuple[int, bool], list[tuple[int, Any, torch.Tensor]]] = field(default_factory=dict)
    forward_done: set[int] = field(default_factory=set)  # slots
    input_gradients_done: set[int] = field(default_factory=set)  # slots
    backward_done: set[int] = field(default_factory=set)  # positions of backward instructions
    compute_done: set[int] = field(default_factory=set)  # positions of instructions of the compute lane
    syncs: list[tuple[int, int, Any]] = field(default_factory=list)  # position, number of the flat bucket, request
    next_by_lane: list[int] = field(default_factory=list)  # by communication lane: its next instruction
    kept_for_lanes: list[tuple[Any, ...]] = field(default_factory=list)  # tensors that another lane reads

    def fork(self) -> Step:
        """A copy of this step in the same state. Running the copy does not change this one."""
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        state: dict[str, Any] = {name: copy(value) for name, value in values.items() if isinstance(value, _STATE)}
        return replace(self, **state)


class HostCopy:
    """A small tensor that is copied to the host asynchronously. Reading it waits until the GPU has computed it, but not
    for later work."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values


class LaunchThrottle:
    """Keeps the host at most `MAX_AHEAD` instructions ahead of a GPU that ranks share.

    A launch that blocks because the GPU's queue is full also blocks the other threads of the process. Those threads run
    the collectives of the IPC backend; NCCL has none.
    """

    def __init__(self, world: World) -> None:
        self._is_needed = world.shares_gpu
        self._launched: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Wait until the host may launch another instruction. Call it before each one."""
        if not self._is_needed:
            return
        if len(self._launched) == MAX_AHEAD:
            self._launched.popleft().synchronize()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._launched.append(event)


@dataclass(frozen=True, slots=True)
class Spans:
    """When this rank's instructions ran, in nanoseconds of its clock: posted, start and end, by instruction number."""

    begin: int
    posted: dict[int, int]
    start: dict[int, int]
    end: dict[int, int]


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The memory that a rank holds at the start of a step, and for each instruction of the compute lanes, in the order
    in which they ran: the peak since the previous one, and what is left at its end."""

    begin: int
    instructions: dict[int, tuple[int, int]]


Timestamp = int | torch.cuda.Event
ReadBytes = Callable[[], tuple[int, int]]  # returns the peak since its last call, and the current value


class StepTimer:
    """Records when instructions run.

    On a GPU, events on the current stream are used, and only in `timed` steps. With `in_graph`, events become nodes of
    the CUDA graph that is being captured, and every replay records them anew. With `read_bytes`, it also records the
    memory that is held after each instruction.
    """

    def __init__(
        self, device: torch.device, timed: bool = True, *, in_graph: bool = False, read_bytes: ReadBytes | None = None
    ) -> None:
        self.posted: dict[int, Timestamp] = {}
        self.start: dict[int, Timestamp] = {}
        self.end: dict[int, Timestamp] = {}
        self._on_gpu, self._timed, self._in_graph = device.type == "cuda", timed, in_graph
        self._begin = perf_counter_ns()
        self._first: Timestamp = 0 if in_graph else self.now()
        self._read_bytes = read_bytes
        self.held = None if read_bytes is None else HeldBytes(read_bytes()[1], {})

    @property
    def is_timed(self) -> bool:
        """Whether events on a GPU time the step."""
        return self._on_gpu and self._timed

    def note_end(self, position: int) -> None:
        """Note that an instruction of a compute lane is done, or, on a GPU, launched."""
        self.end[position] = self.now()
        if self._read_bytes is not None and self.held is not None:
            self.held.instructions[position] = self._read_bytes()

    def now(self) -> Timestamp:
        if not self._on_gpu:
            return perf_counter_ns()
        if not self._timed:
            return 0
        event = torch.cuda.Event(enable_timing=True, external=self._in_graph)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take_events(self, graph: StepTimer) -> bool:
        """Take over the events of a graph that was just launched, if this step is timed. They must be read before the
        next replay. Returns whether there are any."""
        if self._timed:
            for timestamps, captured in zip(self._timestamps, graph._timestamps, strict=True):
                timestamps.update(captured)
        return self._on_gpu and self._timed

    def read_events(self) -> None:
        """Wait for all events, and replace them by their times."""
        for timestamps in self._timestamps:
            for position, timestamp in timestamps.items():
                if isinstance(timestamp, torch.cuda.Event):
                    timestamp.synchronize()
                timestamps[position] = self._ns_of(timestamp)

    @property
    def _timestamps(self) -> tuple[dict[int, Timestamp], ...]:
        return self.posted, self.start, self.end

    def spans(self) -> Spans:
        """All times in nanoseconds. The GPU must have finished the step."""
        return Spans(self._begin, *(self._in_ns(timestamps) for timestamps in self._timestamps))

    def busy_share(self) -> float:
        """The share of the step in which this rank computed, on any lane. The GPU must have finished the step."""
        spans = self.spans()
        whole = max(spans.end.values(), default=spans.begin) - spans.begin
        intervals = sorted(
            (start, spans.end[position]) for position, start in spans.start.items() if position in spans.end
        )
        busy, last = 0, spans.begin
        for start, end in intervals:
            busy += max(0, end - max(start, last))
            last = max(last, end)
        return busy / whole if whole else 0.0

    def busy_s(self, positions: Collection[int]) -> float:
        """The seconds that these instructions took. Some of them may not have run. The GPU must have finished the
        step."""
        spans = self.spans()
        ran = [position for position in spans.start if position in positions and position in spans.end]
        return 1e-9 * sum(spans.end[position] - spans.start[position] for position in ran)

    def _in_ns(self, timestamps: dict[int, Timestamp]) -> dict[int, int]:
        return {position: self._ns_of(timestamp) for position, timestamp in timestamps.items()}

    def _ns_of(self, timestamp: Timestamp) -> int:
        if isinstance(timestamp, int):
            return timestamp
        assert isinstance(self._first, torch.cuda.Event)
        since: float = self._first.elapsed_time(timestamp)
        return self._begin + round(since * 1e6)
