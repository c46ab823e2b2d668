"""Orders of passes for one batch: planner `pipeline`, and the known pipeline schedules.

`chains` cuts modules into chunks. `stages` turns the profile of a batch into columns of numbers (`segments`), and
schedules back into plans. The search in between (`search`, with `moves` and `evaluate`) interleaves passes
(`interleave`, `gates`) and chooses which activations stages keep (`memory`, `retime`). `orders` and `baselines` are the
known schedules. Other packages import from `spindle.planners`.
"""
