"""Events of a fleet, and the scheduler's actions.

Engines and the simulator emit events and execute actions; they decide nothing. Every event has a time in seconds on the
fleet's clock; times never decrease. Events and actions have a JSON form with their type in the first field, so that
they can be stored, and replayed through the scheduler.

    Submitted   a job arrives, with estimates of its cells (bounds suffice)
    Estimated   new estimates of a job: requested plans, or bounds of a workload that has changed
    Started     the ranks of an attempt have taken their first step; its reallocation is over
    Progressed  an attempt reports its step, and the median step time after the 20th
    Stopped     an attempt was stopped; its job resumes from `step`
    Completed   the script ended with exit code 0
    Failed      an attempt ended by itself: the script's own exception, or a signal, out of memory, a hung rank
    Suspended   a user stops a job, which releases its devices
    Resumed     a user resumes it
    NodeJoined  a node is new, or has returned and was checked
    NodeLost    a node is lost, with all attempts on it
    Draining    jobs must leave a node before a deadline
    Occupied    processes outside the fleet hold devices of a node that an attempt waits for (Slurm)
    Ticked      the clock: time for a round (`State.next_round_s` says when the next is due)

Actions. `attempt` counts the starts of a job; only the newest may commit a checkpoint.

    Plan        make a plan for a cell in the background; answered by Estimated
    Start       start an attempt in a cell, on these nodes, as soon as their devices are free
    Stop        SIGTERM, a checkpoint within the grace period, then SIGKILL; answered by Stopped
    Resize      stop attempt - 1, then start `attempt` in another cell or on other nodes; answered by Stopped for
                attempt - 1 and by Started for `attempt`. Attempt - 1 may train on while `attempt` is prepared
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spindle.artifact import from_json, shown, to_json
from spindle.cluster import Island
from spindle.errors import InputError
from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """A number of devices of one node; the engine chooses which."""

    node: str
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    time_s: float
    job: Job
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """With `replaces`, the job's earlier estimates are dropped: its workload has changed."""

    time_s: float
    job: str
    estimates: tuple[Estimate, ...]
    replaces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """`paused_s`: how long the job did not train, if its previous attempt trained on after the action; None if it
    did not train since the action."""

    time_s: float
    job: str
    attempt: int
    paused_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """`step_s` is 0 while fewer than 20 steps have been taken."""

    time_s: float
    job: str
    attempt: int
    step: float
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    time_s: float
    job: str
    attempt: int
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    time_s: float
    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`step` is where it failed, `resume_step` that of its newest checkpoint. `by_script`: its own exception."""

    time_s: float
    job: str
    attempt: int
    step: float
    resume_step: float
    by_script: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    time_s: float
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    time_s: float
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """`island` describes a node that the fleet did not have before."""

    time_s: float
    node: str
    island: Island | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostAttempt:
    """A job that ran on a lost node, and the step of its newest checkpoint."""

    job: str
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    time_s: float
    node: str
    attempts: tuple[LostAttempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """Jobs leave the node before the deadline; a stop takes up to `grace_s`."""

    time_s: float
    node: str
    deadline_s: float
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupied:
    """Processes outside the fleet hold `num_devices` of a node; 0 if they have released them. `jobs`, whose attempts
    wait for these devices, are placed elsewhere."""

    time_s: float
    node: str
    num_devices: int
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    time_s: float


Event = (
    Submitted
    | Estimated
    | Started
    | Progressed
    | Stopped
    | Completed
    | Failed
    | Suspended
    | Resumed
    | NodeJoined
    | NodeLost
    | Draining
    | Occupied
    | Ticked
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    job: str
    cell: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    job: str
    attempt: int
    cell: Cell
    nodes: tuple[NodeShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    job: str
    attempt: int
    cell: Cell
    nodes: tuple[NodeShare, ...]


Action = Plan | Start | Stop | Resize

_EVENTS: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
_ACTIONS: dict[str, type] = {kind.__name__: kind for kind in Action.__args__}


def event_json(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__, **to_json(event)}


def event_from_json(data: Any, where: str) -> Event:
    if not isinstance(data, dict) or data.get("event") not in _EVENTS:
        raise InputError(f"{where}: expected an object whose 'event' is one of {', '.join(_EVENTS)}, got {shown(data)}")
    body = {key: value for key, value in data.items() if key != "event"}
    event: Event = from_json(_EVENTS[data["event"]], body, where)
    return event


def action_json(action: Action) -> dict[str, Any]:
    return {"action": type(action).__name__, **to_json(action)}


def action_from_json(data: Any, where: str) -> Action:
    if not isinstance(data, dict) or data.get("action") not in _ACTIONS:
        raise InputError(
            f"{where}: expected an object whose 'action' is one of {', '.join(_ACTIONS)}, got {shown(data)}"
        )
    body = {key: value for key, value in data.items() if key != "action"}
    action: Action = from_json(_ACTIONS[data["action"]], body, where)
    return action
