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
    Occupied,
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
    action_json,
    event_from_json,
    event_json,
)
from spindle.fleet.fleet import DeviceCount, Fleet, Team
from spindle.fleet.fleet_timeline import FleetMeasures, FleetTimeline, JobRecord, JobSpan, measure_fleet
from spindle.fleet.job import PRIORITIES, Job
from spindle.fleet.policies import COMPARED, POLICIES
from spindle.fleet.public_traces import arena_fleet, arena_trace, elasticflow_trace
from spindle.fleet.scheduler import schedule
from spindle.fleet.simulator import SimulatedFleet, simulate_fleet
from spindle.fleet.state import Allocation, JobState, RoundReport, SchedulerOptions, State
from spindle.fleet.trace import Injection, StepTime, Trace, TraceJob, read_trace

__all__ = [
    "COMPARED",
    "GRADES",
    "POLICIES",
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
    "FleetMeasures",
    "FleetTimeline",
    "Injection",
    "Job",
    "JobRecord",
    "JobSpan",
    "JobState",
    "LostAttempt",
    "NodeJoined",
    "NodeLost",
    "NodeShare",
    "Occupied",
    "Plan",
    "Progressed",
    "Resize",
    "Resumed",
    "RoundReport",
    "SchedulerOptions",
    "SimulatedFleet",
    "Start",
    "Started",
    "State",
    "StepTime",
    "Stop",
    "Stopped",
    "Submitted",
    "Suspended",
    "Team",
    "Ticked",
    "Trace",
    "TraceJob",
    "action_json",
    "arena_fleet",
    "arena_trace",
    "better",
    "elasticflow_trace",
    "event_from_json",
    "event_json",
    "measure_fleet",
    "read_trace",
    "schedule",
    "simulate_fleet",
]
