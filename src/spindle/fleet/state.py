"""The scheduler's state: a frozen value that depends on the recorded events alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from spindle.errors import FleetError
from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.events import NodeShare
from spindle.fleet.fleet import Fleet
from spindle.fleet.job import Job

T = TypeVar("T")
OBJECTIVES = ("jct", "throughput")
# Phases of a job. A starting job holds devices and does not train yet.
WAITING, STARTING, RUNNING, SUSPENDED, COMPLETED, FAILED = (
    "waiting",
    "starting",
    "running",
    "suspended",
    "completed",
    "failed",
)
ACTIVE = frozenset({WAITING, STARTING, RUNNING})
HOLDING = frozenset({STARTING, RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """`policy` names a policy of `fleet.policies`. Times are in seconds.

    `realloc_s` replaces the initial cost of a reallocation where it is not None. `starvation_s` (G) is how long a job
    waits before it gets a lease, of at least `lease_s` (H) of running; `leases` False switches them off. Leases begin
    while they have at most `lease_share` of the devices of a kind.
    """

    policy: str = "price"
    objective: str = "jct"
    min_interval_s: float = 30.0
    max_interval_s: float = 300.0
    realloc_s: float | None = None
    base_realloc_s: float = 60.0
    horizon_s: float = 7200.0
    length_exponent: float = 0.35
    leases: bool = True
    starvation_s: float = 12 * 3600.0
    lease_s: float = 3 * 3600.0
    lease_share: float = 0.6
    max_failures: int = 3

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise FleetError(f"unknown objective {self.objective!r}; expected one of {', '.join(OBJECTIVES)}")
        if not 0 < self.min_interval_s <= self.max_interval_s:
            raise FleetError(
                f"rounds need 0 < min_interval_s <= max_interval_s, got {self.min_interval_s} and {self.max_interval_s}"
            )
        if not 0 < self.lease_share <= 1:
            raise FleetError(f"lease_share must be above 0 and at most 1, got {self.lease_share}")
        if self.realloc_s is not None and not self.realloc_s >= 0:
            raise FleetError(f"realloc_s must not be negative, got {self.realloc_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    cell: Cell
    nodes: tuple[NodeShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindValue:
    kind: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The scheduler's state of one job.

    `step` was reported at `step_time_s`; until the next report a running job is assumed to proceed at its estimated
    rate. `corrections` are ratios of measured to planned step time, by kind. `waiting_since_s` is when it last held
    devices, or arrived. `received_s` is how long it trained, by kind. `realloc_costs_s` are its measured reallocations.
    `planning`: cells whose plans were asked for. `promised`: the deadline will be met in cells no slower than this one.
    `is_opportunistic` is Crius's (§2.4).
    """

    job: Job
    arrival_s: float
    estimates: tuple[Estimate, ...]
    phase: str = WAITING
    attempt: int = 0
    allocation: Allocation | None = None
    step: float = 0.0
    step_time_s: float = 0.0
    corrections: tuple[KindValue, ...] = ()
    waiting_since_s: float = 0.0
    allocated_s: float = 0.0
    received_s: tuple[KindValue, ...] = ()
    lease_until_s: float | None = None
    num_reallocations: int = 0
    initial_realloc_s: float = 60.0
    realloc_costs_s: tuple[float, ...] = ()
    promised: Cell | None = None
    planning: tuple[Cell, ...] = ()
    num_failures: int = 0
    failed_step: float = -1.0
    reason: str = ""
    is_opportunistic: bool = False

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def is_new(self) -> bool:
        """Whether it waits for its first start."""
        return self.phase == WAITING and self.attempt == 0

    @property
    def realloc_s(self) -> float:
        """The cost of stopping and starting it: the median of measured costs, or the initial assumption."""
        return statistics.median(self.realloc_costs_s) if self.realloc_costs_s else self.initial_realloc_s

    def step_at(self, time_s: float) -> float:
        """The step that it has reached if it proceeds as estimated."""
        if self.phase != RUNNING or self.allocation is None or self.estimate(self.allocation.cell) is None:
            return self.step
        step_s = self.step_s(self.allocation.cell)
        return self.step + max(0.0, time_s - self.step_time_s) / step_s

    def estimate(self, cell: Cell) -> Estimate | None:
        """The estimate of a cell; None also for a running job whose new workload has no estimate there."""
        for estimate in self.estimates:
            if estimate.cell.kind == cell.kind and estimate.cell.num_devices == cell.num_devices:
                return estimate
        return None

    def step_s(self, cell: Cell) -> float:
        """The estimated step time of a cell, corrected by what was measured in others."""
        estimate = self.estimate(cell)
        if estimate is None:
            raise FleetError(f"job {self.name!r} has no estimate for {cell.text}")
        return estimate.step_s * (1.0 if estimate.grade == "measured" else self.correction(cell.kind))

    def correction(self, kind: str) -> float:
        """Measured over planned step time on a kind; from other kinds only half of it (in the logarithm) carries
        over."""
        if not self.corrections:
            return 1.0
        for correction in self.corrections:
            if correction.kind == kind:
                return correction.value
        logarithms = [math.log(correction.value) for correction in self.corrections]
        return math.exp(0.5 * sum(logarithms) / len(logarithms))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """How good the last round is: its utility, an upper bound on any allocation's, and the price of a device of each
    kind (0 where no policy computes them)."""

    time_s: float = 0.0
    utility: float = 0.0
    bound: float = 0.0
    prices: tuple[KindValue, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Jobs are in order of arrival; those that have ended stay in `ended` with their last state.

    `unavailable` nodes are lost or drained; of others, devices may be `occupied` by what is not of this fleet. `prices`
    warm-start the next round: one for each kind, then one for each limit of a team. No round is due (`next_round_s`
    None) while only events could change the allocation.
    """

    fleet: Fleet
    options: SchedulerOptions = field(default_factory=SchedulerOptions)
    now_s: float = 0.0
    jobs: tuple[JobState, ...] = ()
    ended: tuple[JobState, ...] = ()
    unavailable: tuple[str, ...] = ()
    occupied: tuple[NodeShare, ...] = ()
    prices: tuple[float, ...] = ()
    last_round_s: float | None = None
    next_round_s: float | None = None
    num_arrived: int = 0
    num_departed: int = 0
    last_round: RoundReport | None = None
    columns: Any = field(init=False, default=None, repr=False, compare=False)  # kept from round to round

    def num_usable(self, node: int) -> int:
        """The devices of a node that the fleet may use now."""
        name = self.fleet.node_names[node]
        if name in self.unavailable:
            return 0
        return self.fleet.size_of_node[node] - sum(share.num_devices for share in self.occupied if share.node == name)

    def find(self, name: str) -> JobState | None:
        """The job of this name that has not ended."""
        for state in self.jobs:
            if state.job.name == name:
                return state
        return None


def evolve(value: T, **changes: Any) -> T:
    """`dataclasses.replace` for a State or a JobState, which have no checks on construction. It is twice as fast, and
    keeps the columns of a state. A trace of 2,000 jobs makes 200,000 copies."""
    kind: Any = type(value)
    read, setters, position = _fields(kind)
    values = list(read(value))
    for name, item in changes.items():
        values[position[name]] = item
    new: T = object.__new__(kind)
    for write, item in zip(setters, values, strict=True):
        write(new, item)
    return new


@cache
def _fields(kind: Any) -> tuple[Callable[[Any], Any], tuple[Callable[[Any, Any], None], ...], dict[str, int]]:
    names = [entry.name for entry in fields(kind)]
    setters = tuple(getattr(kind, name).__set__ for name in names)  # of slots, which know nothing of frozen
    return attrgetter(*names), setters, {name: position for position, name in enumerate(names)}
