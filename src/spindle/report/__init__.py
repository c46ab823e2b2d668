"""Tables, Gantt charts, figures and explanations: pure functions of plans and timelines.

Nothing is imported here, so that printing a number does not load the drawing code.
"""

from spindle.report.bound import bound_report, limit_sentences
from spindle.report.colocated import ModuleLoad, module_load_lines, module_loads, placement_lines
from spindle.report.compare import REFERENCE, compared, conclusion
from spindle.report.explain import explain, headline, sentences
from spindle.report.gantt import Chart, columns_for, draw, plan_chart, timeline_chart
from spindle.report.idle import idle_causes, idle_sentences
from spindle.report.measured import profile_facts, profile_table
from spindle.report.pipelines import comparison_figure, search_json, search_tables
from spindle.report.predicted_vs_measured import StepComparison, compare_step, draw_steps, step_charts, step_tables
from spindle.report.summary import largest_differences, loss_table, loss_text
from spindle.report.table import (
    bound_facts,
    comparison_table,
    measure_facts,
    pipeline_bound_facts,
    plan_facts,
    refusal_lines,
    settings_lines,
)
from spindle.report.trace import trace_of

__all__ = [
    "REFERENCE",
    "Chart",
    "ModuleLoad",
    "StepComparison",
    "bound_facts",
    "bound_report",
    "columns_for",
    "compare_step",
    "compared",
    "comparison_figure",
    "comparison_table",
    "conclusion",
    "draw",
    "draw_steps",
    "explain",
    "headline",
    "idle_causes",
    "idle_sentences",
    "largest_differences",
    "limit_sentences",
    "loss_table",
    "loss_text",
    "measure_facts",
    "module_load_lines",
    "module_loads",
    "pipeline_bound_facts",
    "placement_lines",
    "plan_chart",
    "plan_facts",
    "profile_facts",
    "profile_table",
    "refusal_lines",
    "search_json",
    "search_tables",
    "sentences",
    "settings_lines",
    "step_charts",
    "step_tables",
    "timeline_chart",
    "trace_of",
]
