"""Which order of passes is good for this batch? Planner `pipeline`, and the pipelines of others.

`chains` cut modules into chunks, `stages` turn a profile of a batch into columns of numbers (`segments`) and schedules
back into plans; the search in between (`search`, with `tree`, `moves`, `evaluate`) interleaves passes (`interleave`,
`gates`) and chooses what stages keep (`memory`, `retime`). `orders` and `baselines` are what others do.
"""

from spindle.planners.pipeline.baselines import baseline_layouts
from spindle.planners.pipeline.planner import pipeline_layout, search_pipeline
from spindle.planners.pipeline.search import SearchResult
from spindle.planners.pipeline.stages import holders_in

__all__ = ["SearchResult", "baseline_layouts", "holders_in", "pipeline_layout", "search_pipeline"]
