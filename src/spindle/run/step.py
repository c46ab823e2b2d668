"""What one step holds on one rank, and when its instructions ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from spindle.run.backward_split import WeightPart
from spindle.run.nests import Form
from spindle.run.rank_program import Flow

if TYPE_CHECKING:
    from spindle.run.graphs import Graphs
    from spindle.run.world import World

AHEAD = 3  # instructions


@dataclass(slots=True)
class Piece:
    """A chunk of layers as it ran: the leaves it began with and what it gave, or what gives that `again`."""

    inputs: Any
    outputs: Any
    again: Callable[[], Any] | None = None


@dataclass(slots=True)
class Arrival:
    """What comes over one flow: the leaves' buffers, or nothing yet while their form is still to come."""

    flow: Flow
    tensors: list[torch.Tensor | None] | None
    requests: list[Any]


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One of several passes whose gradients add up before the optimizer's step, each with batches of its own.

    `tasks` are those that had a part in this pass or one before it.
    """

    number: int = 0
    count: int = 1
    tasks: frozenset[str] = frozenset()

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


@dataclass(slots=True)
class Step:
    """What one step holds on one rank. A task without a signature has no part in it."""

    number: int
    batches: Mapping[str, Any]
    signatures: Mapping[str, int]
    check_losses: bool
    held: Mapping[str, tuple[tuple[int, int], ...]]  # by task: the rows of each leaf of a batch that is not all here
    new: frozenset[str]  # tasks whose batch has a shape not seen before
    micro_step: MicroStep
    forms: Mapping[tuple[int, int], Form] = field(default_factory=dict)  # of what crosses cuts, where it is known
    graphs: Graphs | None = None
    pieces: dict[int, list[Piece]] = field(default_factory=dict)  # by slot, in forward order
    later: dict[int, list[WeightPart]] = field(default_factory=dict)  # by slot: what is left of its backward
    inputs: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # by link: leaves that take gradients
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[tuple[int, bool], list[Arrival]] = field(default_factory=dict)
    # By link and direction, with the peer: buffers must live until they are sent.
    sending: dict[tuple[int, bool], list[tuple[int, Any, torch.Tensor]]] = field(default_factory=dict)
    forwarded: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)  # slots whose inputs have their gradients
    done_chunks: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)  # positions of what the compute lane is through with
    syncs: list[tuple[int, int, Any]] = field(default_factory=list)  # position, which sum, request
    next_in: list[int] = field(default_factory=list)  # by lane of communication: which of its instructions comes next


class Losses:
    """This rank's parts of a step's losses. A GPU may still be at the step: reading them waits for it, but not for what
    was started later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._values.tolist()
        return found


class Pace:
    """Keeps the host a few instructions ahead of its GPU and no more. While a launch waits for room in the GPU's queue,
    no other thread of the process gets to the GPU, so collectives of ranks that share it stand still. NCCL has no such
    threads, and needs none of this."""

    def __init__(self, world: World) -> None:
        self._is_needed = world.shares_gpu
        self._launched: deque[torch.cuda.Event] = deque()

    def keep(self) -> None:
        """To be called before each instruction."""
        if not self._is_needed:
            return
        if len(self._launched) == AHEAD:
            self._launched.popleft().synchronize()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._launched.append(event)


@dataclass(frozen=True, slots=True)
class Spans:
    """When this rank's instructions ran, in nanoseconds of its clock: posted, start, end by instruction number."""

    begin: int
    posted: dict[int, int]
    start: dict[int, int]
    end: dict[int, int]


Moment = int | torch.cuda.Event


class Watch:
    """Notes when instructions run.

    On a GPU the moments are those at which its stream of compute gets there, and only `timed` steps note them.
    """

    def __init__(self, device: torch.device, timed: bool = True) -> None:
        self.posted: dict[int, Moment] = {}
        self.start: dict[int, Moment] = {}
        self.end: dict[int, Moment] = {}
        self._on_gpu, self._timed = device.type == "cuda", timed
        self._begin = perf_counter_ns()
        self._first = self.now()

    def now(self) -> Moment:
        if not self._on_gpu:
            return perf_counter_ns()
        if not self._timed:
            return 0
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def spans(self) -> Spans:
        """All moments as numbers. The GPU must have passed them."""
        return Spans(self._begin, *(self._settled(moments) for moments in (self.posted, self.start, self.end)))

    def busy_share(self) -> float:
        """Which share of the step this rank computed. The GPU must have passed it."""
        spans = self.spans()
        whole = max(spans.end.values(), default=spans.begin) - spans.begin
        busy = sum(spans.end[position] - start for position, start in spans.start.items() if position in spans.end)
        return busy / whole if whole else 0.0

    def _settled(self, moments: dict[int, Moment]) -> dict[int, int]:
        return {position: self._number(moment) for position, moment in moments.items()}

    def _number(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        assert isinstance(self._first, torch.cuda.Event)
        since: float = self._first.elapsed_time(moment)
        return self._begin + round(since * 1e6)
