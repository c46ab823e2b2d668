"""Which job gets which machines? Cells, policies, the scheduler, and the simulator of whole traces.

The scheduler is a pure function, `schedule(state, event) -> (state, actions)`. Engines (Ray, Slurm) and the simulator
only execute its actions and emit events.
"""

from spindle.fleet.cells import GRADES, Cell, Estimate, better
from spindle.fleet.events import (
    Action,
    Completed,
    Draining,
    Estimated,
    Event,
    Failed,
    LostAttempt,
    NodeJoined,
    NodeLost,
    NodeShare,
    Plan,
    Progressed,
    Resize,
    Resumed,
    Start,
    Started,
    Stop,
    Stopped,
    Submitted,
    Suspended,
    Ticked,
    action_from_json,
    action_json,
    event_from_json,
    event_json,
)
from spindle.fleet.fleet import DeviceCount, Fleet, Team
from spindle.fleet.job import PRIORITIES, Job
from spindle.fleet.scheduler import schedule
from spindle.fleet.state import Allocation, JobState, RoundReport, SchedulerOptions, State

__all__ = [
    "GRADES",
    "PRIORITIES",
    "Action",
    "Allocation",
    "Cell",
    "Completed",
    "DeviceCount",
    "Draining",
    "Estimate",
    "Estimated",
    "Event",
    "Failed",
    "Fleet",
    "Job",
    "JobState",
    "LostAttempt",
    "NodeJoined",
    "NodeLost",
    "NodeShare",
    "Plan",
    "Progressed",
    "Resize",
    "Resumed",
    "RoundReport",
    "SchedulerOptions",
    "Start",
    "Started",
    "State",
    "Stop",
    "Stopped",
    "Submitted",
    "Suspended",
    "Team",
    "Ticked",
    "action_from_json",
    "action_json",
    "better",
    "event_from_json",
    "event_json",
    "schedule",
]
