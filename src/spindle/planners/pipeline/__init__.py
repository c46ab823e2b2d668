"""Which order of passes is good for this batch? Planner `pipeline`, and the pipelines of others.

`chains` cut modules into chunks, `stages` turn a profile of a batch into columns of numbers (`segments`) and schedules
back into plans; the search in between (`search`, with `moves` and `evaluate`) interleaves passes (`interleave`,
`gates`) and chooses what stages keep (`memory`, `retime`). `orders` and `baselines` are what others do. What other
packages use comes from `spindle.planners`.
"""
