"""Which plan is good? The registry of planners, bounds, and the exhaustive oracle. A planner may simulate to score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from spindle.errors import InputError, PlanError
from spindle.plan import Plan
from spindle.planners.balance import group_sequences
from spindle.planners.baselines import schedule_distmm, schedule_sequential, schedule_task_level
from spindle.planners.bounds import (
    LpSolution,
    best_degree_problem,
    graph_bound,
    graph_bound_s,
    lower_hull,
    lp_bound,
    step_bound_s,
)
from spindle.planners.build import Scheduler, plan_with
from spindle.planners.colocate.choose import choose_colocation, compare_placements
from spindle.planners.colocate.planner import SYSTEMS, plan_system
from spindle.planners.compiled import needs_compiling
from spindle.planners.exhaustive import schedule_exhaustive
from spindle.planners.lanes import with_lanes
from spindle.planners.options import SPREAD, Chain, Layout, PlanOptions, Progress
from spindle.planners.paper import paper_waves, schedule_paper
from spindle.planners.pipeline.baselines import BASELINES, baseline_layouts, plan_baseline
from spindle.planners.pipeline.bound import PipelineBound, pipeline_bound, pipeline_bound_s
from spindle.planners.pipeline.choose import choose_layout, pipeline_layout
from spindle.planners.pipeline.planner import plan_pipeline, search_pipeline
from spindle.planners.pipeline.rank_parameters import owning_ranks_in
from spindle.planners.pipeline.search import SearchResult
from spindle.planners.pipeline.worker import Answer, Job, natural_answer, read_frame, write_frame
from spindle.planners.problem import Problem, Timed, problem_of
from spindle.planners.quotas import with_quotas
from spindle.planners.wavefront import plan_wavefront
from spindle.profile import Profile
from spindle.workload import GIVEN_PLAN, OWN_FUNCTION, Workload

__all__ = [
    "PLANNERS",
    "SPREAD",
    "Answer",
    "Chain",
    "Job",
    "Layout",
    "LpSolution",
    "PipelineBound",
    "PlanOptions",
    "Planner",
    "Problem",
    "Progress",
    "SearchResult",
    "Timed",
    "baseline_layouts",
    "best_degree_problem",
    "choose_colocation",
    "choose_layout",
    "compare_placements",
    "graph_bound",
    "graph_bound_s",
    "group_sequences",
    "lower_hull",
    "lp_bound",
    "make_plan",
    "natural_answer",
    "needs_compiling",
    "owning_ranks_in",
    "paper_waves",
    "pipeline_bound",
    "pipeline_bound_s",
    "pipeline_layout",
    "planner_of",
    "planners_of",
    "problem_of",
    "read_frame",
    "search_pipeline",
    "step_bound_s",
    "write_frame",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """One entry of the registry: a function from a profile and options to a finished plan.

    Planners of pipelines order the passes of microbatches. Those that split encoders' microbatches take a profile of
    sub-microbatches, and those that replicate encoders take a profile of parts. `search` returns the plan, and for each
    replica how the search improved it. `is_compared` says whether `spindle compare` runs the planner.
    """

    name: str
    description: str
    plan: Callable[[Profile, PlanOptions, Progress | None], Plan]
    search: Callable[[Profile, PlanOptions, Progress | None], tuple[Plan, list[SearchResult]]] | None = None
    is_pipeline: bool = False
    splits_microbatches: bool = False
    takes_parts: bool = False
    shares_items: bool = False  # long items, on sequence groups
    is_compared: bool = True


def _scheduled(name: str, schedule: Scheduler, description: str, is_compared: bool = True) -> Planner:
    return Planner(name=name, description=description, plan=partial(plan_with, name, schedule), is_compared=is_compared)


_ALL = (
    Planner(
        name="wavefront",
        description="waves without barriers, annealed: any number of devices for any layers",
        plan=plan_wavefront,
    ),
    _scheduled("paper", schedule_paper, "the Spindle paper's: level by level, in waves with barriers"),
    _scheduled("sequential", schedule_sequential, "every module on the whole cluster in turn, as Megatron-LM users do"),
    _scheduled("distmm", schedule_distmm, "task after task, its towers side by side"),
    _scheduled("task-level", schedule_task_level, "every task on devices of its own for the whole step"),
    _scheduled("exhaustive", schedule_exhaustive, "the best there is, for a handful of layers", is_compared=False),
    Planner(
        name="pipeline",
        description="passes of sub-microbatches interleaved for each batch, stages' memory chosen (DIP)",
        plan=plan_pipeline,
        search=search_pipeline,
        is_pipeline=True,
        splits_microbatches=True,
    ),
    *(
        Planner(
            name=name,
            description=system.description,
            plan=partial(plan_system, name),
            is_pipeline=True,
            takes_parts=True,
            shares_items=system.rules.sequence_groups,
        )
        for name, system in SYSTEMS.items()
    ),
    *(
        Planner(name=name, description=system.description, plan=partial(plan_baseline, name), is_pipeline=True)
        for name, system in BASELINES.items()
    ),
)
PLANNERS: Mapping[str, Planner] = {planner.name: planner for planner in _ALL}


def planners_of(is_pipeline: bool) -> tuple[str, ...]:
    """The names of the planners of pipelines, or of all other planners. The first one is the default."""
    return tuple(name for name, planner in PLANNERS.items() if planner.is_pipeline == is_pipeline)


def planner_of(workload: Workload) -> tuple[str, str]:
    """The planner that plans a workload without its script. If that is not the script's own, also the reason."""
    default, chosen = planners_of(is_pipeline=False)[0], workload.planner
    if not chosen or (chosen in PLANNERS and not PLANNERS[chosen].is_pipeline):
        return chosen or default, ""
    if chosen == OWN_FUNCTION:
        return default, "the script's planner is a function, which only the script can call"
    if chosen == GIVEN_PLAN:
        return default, "the script has a plan of its own, which is for one number of devices"
    if chosen in PLANNERS:
        what = "places encoders by the items" if PLANNERS[chosen].takes_parts else "plans the microbatches"
        return default, f"the script's planner {chosen!r} {what} of each step, which only the running script has"
    return default, f"no planner here is called {chosen!r}, as the script's is"


def make_plan(
    profile: Profile,
    planner: str = "wavefront",
    options: PlanOptions = PlanOptions(),  # noqa: B008
    progress: Progress | None = None,
) -> Plan:
    """Make a plan with the named planner: simulated, checked and verified, with its bound."""
    if planner not in PLANNERS:
        raise InputError(f"no planner is called {planner!r}; there are {', '.join(PLANNERS)}")
    if PLANNERS[planner].is_pipeline and any(first != task for task, first in profile.graph.task_groups.items()):
        raise PlanError(
            f"planner {planner!r}: its microbatches have tasks that do not depend on each other, and trials of a sweep "
            "take outputs of one frozen module; use another planner (wavefront)"
        )
    if PLANNERS[planner].is_pipeline and profile.graph.order_edges:
        first, second = (profile.graph.metaops[position].name for position in profile.graph.order_edges[0])
        raise PlanError(
            f"planner {planner!r}: {second} runs behind {first}, which changes its module, and a pipeline has an order "
            "of its own; use another planner (wavefront)"
        )
    plan = PLANNERS[planner].plan(profile, options, progress)
    plan = with_lanes(plan, profile, options.lanes, seed=options.seed)
    return with_quotas(plan, profile) if options.quotas else plan
