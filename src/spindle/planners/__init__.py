"""The registry of planners, bounds, and the exhaustive oracle. A planner may simulate to score."""

from __future__ import annotations

from spindle.planners.bounds import (
    LpSolution,
    best_degree_problem,
    graph_bound,
    graph_bound_s,
    lower_hull,
    lp_bound,
    step_bound_s,
)
from spindle.planners.compiled import needs_compiling
from spindle.planners.options import Chain, Layout, PlanOptions, Progress
from spindle.planners.paper import paper_waves
from spindle.planners.pipeline.baselines import baseline_layouts
from spindle.planners.pipeline.bound import PipelineBound, pipeline_bound, pipeline_bound_s
from spindle.planners.pipeline.choose import choose_layout, pipeline_layout
from spindle.planners.pipeline.planner import search_pipeline
from spindle.planners.pipeline.search import SearchResult
from spindle.planners.pipeline.stages import owning_ranks_in
from spindle.planners.pipeline.worker import Answer, Job, natural_answer, read_frame, write_frame
from spindle.planners.problem import Problem, Timed, problem_of
from spindle.planners.registry import PLANNERS, Planner, make_plan, planners_of

__all__ = [
    "PLANNERS",
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
    "choose_layout",
    "graph_bound",
    "graph_bound_s",
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
    "planners_of",
    "problem_of",
    "read_frame",
    "search_pipeline",
    "step_bound_s",
    "write_frame",
]
