"""What executes the scheduler's actions: Ray or Slurm. An engine decides nothing.

    LiveFleet ── start, stop, discard ──▶ Engine ── agents, ranks
    LiveFleet ◀── reports, nodes ──────── Engine

`start` returns at once; the attempt waits until its devices are free. What has ended is reported until it is discarded,
so that nothing is lost if the scheduler dies in between. Attempts outlive the scheduler: `adopt` finds them again.
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
    """How far an attempt is.

    `phase` is pending (it waits for devices), starting, running, ended, or lost: its processes are gone without a word.
    `step` is how many steps are done, `num_taken` how many of them by this attempt; `tasks` is a digest of what it
    trains, which it has written beside its logs. `reason` says why it waits, or why
    it failed (`outcome`, as of an agent); `by_script`: by its own exception.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node that is there. `identity` changes when it was lost and is back; `drain_s` is how many seconds are left
    until it leaves, where the cluster says so. A node that `is_checked` can run Spindle; None: not known yet.
    `island` describes it, where the fleet may not know it."""

    identity: str
    is_checked: bool | None = True
    island: Island | None = None
    drain_s: float | None = None


class Engine(Protocol):
    """Executes actions. Methods return at once."""

    def nodes(self) -> Mapping[str, NodeStatus]:
        """The fleet's nodes that are there."""

    def adopt(self) -> Sequence[Key]:
        """Attempts that were started before this scheduler and still have processes, or have ended unnoticed."""

    def start(self, start: AttemptStart) -> None:
        """Start an attempt as soon as its devices are free."""

    def stop(self, key: Key, grace_s: float) -> None:
        """SIGTERM, a checkpoint within the grace period, then SIGKILL."""

    def discard(self, key: Key) -> None:
        """Forget an attempt, and free whatever is left of it."""

    def poll(self) -> Sequence[AttemptReport]:
        """Every attempt that was started or adopted and is not discarded."""

    def recover(self) -> bool:
        """After an EngineLostError: restart what can be restarted; whether it answers again."""

    def close(self, *, end_machines: bool) -> None:
        """Let go of the cluster; `end_machines` ends what this engine started."""
