"""Which order of passes is good for this batch? Planner `pipeline`, and the pipelines of others.

`chains` cut modules into chunks, `stages` turn a profile of a batch into columns of numbers (`segments`) and schedules
back into plans; the search in between (`search`, with `tree`, `moves`, `evaluate`) interleaves passes (`interleave`,
`gates`) and chooses what stages keep (`memory`, `retime`). `orders` and `baselines` are what others do.
"""

from spindle.planners.pipeline.baselines import BASELINES, TaskVariants, baseline_ways, plan_baseline
from spindle.planners.pipeline.chains import Chain, Layout
from spindle.planners.pipeline.planner import pipeline_layout, plan_pipeline, search_pipeline
from spindle.planners.pipeline.search import Found
from spindle.planners.pipeline.stages import owning_ranks_in

__all__ = [
    "BASELINES",
    "Chain",
    "Found",
    "Layout",
    "TaskVariants",
    "baseline_ways",
    "owning_ranks_in",
    "pipeline_layout",
    "plan_baseline",
    "plan_pipeline",
    "search_pipeline",
]
