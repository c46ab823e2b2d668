"""Which plan is good? Planners, bounds, and the exhaustive oracle. A planner may simulate to score."""

from __future__ import annotations

from spindle.errors import InputError
from spindle.plan import Plan
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.bounds import LpSolution, graph_bound, graph_bound_s, lp_bound, step_bound_s
from spindle.planners.build import Scheduler, build
from spindle.planners.exhaustive import schedule_exhaustive
from spindle.planners.paper import paper_waves, schedule_paper
from spindle.planners.problem import Problem, Timed, problem_of
from spindle.planners.wavefront import Effort, Progress, plan_wavefront
from spindle.profile import Profile

__all__ = [
    "BASELINES",
    "PLANNERS",
    "Effort",
    "LpSolution",
    "Problem",
    "Progress",
    "Timed",
    "graph_bound",
    "graph_bound_s",
    "lp_bound",
    "make_plan",
    "paper_waves",
    "problem_of",
    "step_bound_s",
]

_SCHEDULERS: dict[str, Scheduler] = {
    "paper": schedule_paper,
    "sequential": schedule_sequential,
    "distmm": schedule_distmm,
    "task-level": schedule_task_level,
    "exhaustive": schedule_exhaustive,
}
BASELINES = ("sequential", "distmm", "task-level")
PLANNERS = ("wavefront", *_SCHEDULERS)


def make_plan(
    profile: Profile,
    planner: str = "wavefront",
    effort: Effort = Effort(),  # noqa: B008
    progress: Progress | None = None,
    shard_optimizer: bool | None = None,
) -> Plan:
    """A finished plan of the named planner: checked, verified, simulated, beside its bound.

    The optimizer is sharded when memory asks for it, unless that is given.
    """
    if planner == "wavefront":
        return plan_wavefront(profile, effort, progress, shard_optimizer)
    if planner not in _SCHEDULERS:
        raise InputError(f"no planner is called {planner!r}; there are {', '.join(PLANNERS)}")
    return build(profile, planner, _SCHEDULERS[planner], shard_optimizer)
