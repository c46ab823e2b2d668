"""What executes the scheduler's actions: Ray or Slurm. An engine decides nothing.

    LiveFleet ── start, stop, discard ──▶ Engine ── agents, ranks
    LiveFleet ◀── reports, nodes ──────── Engine

`start` returns at once; the attempt waits until its devices are free. If an engine can `prepare` an attempt, its ranks
start earlier, while the previous attempt still trains, and do everything that needs no devices. An attempt that has
ended is reported until it is discarded, so its end is not lost if the scheduler dies. Attempts outlive the scheduler:
`adopt` finds them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spindle.cluster import Island
from spindle.errors import FleetError
from spindle.fleet.events import NodeShare
from spindle.fleet.store import Submission

PENDING, STARTING, RUNNING, ENDED, LOST = "pending", "starting", "running", "ended", "lost"
Key = tuple[str, int]  # a job and its attempt


class EngineLostError(FleetError):
    """The engine does not answer: Ray's head is gone, or Slurm's controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """An attempt to be started: which job, where, and with which plan."""

    job: str
    attempt: int
    nodes: tuple[NodeShare, ...]
    submission: Submission
    grace_s: float
    plan: str = ""
    profile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """The progress of an attempt.

    `phase` is pending (it waits for devices), starting, running, ended, or lost (its processes are gone without a
    report). `step` is the number of steps done, `num_taken` how many of them by this attempt. `tasks` is a digest of
    the workload that it trains, which it has written beside its logs. `outcome` is that of an agent; `reason` says why
    the attempt waits or failed, and `by_script` that its own exception ended it. With `is_crowded_out` it has waited
    for long while processes outside the fleet hold its devices.
    """

    job: str
    attempt: int
    phase: str
    step: int | None = None
    num_taken: int = 0
    step_s: float | None = None
    checkpoints: str = ""
    tasks: str = ""
    outcome: str = ""
    by_script: bool = False
    reason: str = ""
    is_crowded_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """An available node. `identity` changes when the node was lost and has returned. `drain_s`: seconds until it
    leaves, if the cluster drains it. `is_checked`: whether it can run Spindle; None while unknown. `island` describes
    the devices of a node that may be new to the fleet. `num_occupied`: devices held by processes outside the fleet, if
    the engine can see them."""

    identity: str
    is_checked: bool | None = True
    island: Island | None = None
    drain_s: float | None = None
    num_occupied: int = 0


class Engine(Protocol):
    """Executes actions. Methods return at once."""

    def nodes(self) -> Mapping[str, NodeStatus]:
        """The available nodes of the fleet, by name."""

    def adopt(self) -> Sequence[Key]:
        """Attempts that an earlier scheduler started, and that still run or whose end was not recorded."""

    def start(self, start: AttemptStart) -> None:
        """Start an attempt as soon as its devices are free."""

    def prepare(self, start: AttemptStart) -> bool:
        """Start an attempt's ranks on standby, without devices: `start` lets them train, `discard` ends them. Returns
        False if this engine cannot prepare this attempt."""

    def is_prepared(self, key: Key) -> bool | None:
        """Whether an attempt's ranks on standby are ready; None while that is unknown."""

    def stop(self, key: Key, grace_s: float) -> None:
        """SIGTERM, a checkpoint within the grace period, then SIGKILL."""

    def discard(self, key: Key) -> None:
        """Remove an attempt, end its processes, and free its devices."""

    def poll(self) -> Sequence[AttemptReport]:
        """Reports of all attempts that were started or adopted and are not discarded."""

    def recover(self) -> bool:
        """After an EngineLostError: restart the cluster if it is ours. Returns whether the engine answers again."""

    def close(self, *, end_machines: bool) -> None:
        """Disconnect from the cluster; `end_machines` ends the processes that this engine started."""
