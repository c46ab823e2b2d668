"""Tables, Gantt charts, figures and explanations: pure functions of plans and timelines.

Nothing is imported here, so that printing a number does not load the drawing code.
"""

from spindle.report.bound import bound_report, limit_sentences
from spindle.report.colocated import (
    ModuleLoad,
    StepBalance,
    module_load_lines,
    module_loads,
    placement_lines,
    step_balance,
)
from spindle.report.compare import REFERENCE, compared, conclusion
from spindle.report.explain import explain, headline, sentences
from spindle.report.fleet_page import FleetReport, fleet_page_data
from spindle.report.gantt import Chart, columns_for, draw, plan_chart, timeline_chart
from spindle.report.html import page_html
from spindle.report.idle import idle_causes, idle_sentences
from spindle.report.measured import profile_facts, profile_table
from spindle.report.page_data import ShownTimeline, StepReport, step_page_data
from spindle.report.pipelines import comparison_figure, search_json, search_tables
from spindle.report.predicted_vs_measured import StepComparison, compare_step, draw_steps, step_charts, step_tables
from spindle.report.run_folder import PROFILER, STEPS, Run, read_run, write_run
from spindle.report.sources import run_report
from spindle.report.step_drawing import curves_drawing, step_drawing, write_figure
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
from spindle.report.trace import instruction_name, trace_of, write_trace

__all__ = [
    "PROFILER",
    "REFERENCE",
    "STEPS",
    "Chart",
    "FleetReport",
    "ModuleLoad",
    "Run",
    "ShownTimeline",
    "StepBalance",
    "StepComparison",
    "StepReport",
    "bound_facts",
    "bound_report",
    "columns_for",
    "compare_step",
    "compared",
    "comparison_figure",
    "comparison_table",
    "conclusion",
    "curves_drawing",
    "draw",
    "draw_steps",
    "explain",
    "fleet_page_data",
    "headline",
    "idle_causes",
    "idle_sentences",
    "instruction_name",
    "largest_differences",
    "limit_sentences",
    "loss_table",
    "loss_text",
    "measure_facts",
    "module_load_lines",
    "module_loads",
    "page_html",
    "pipeline_bound_facts",
    "placement_lines",
    "plan_chart",
    "plan_facts",
    "profile_facts",
    "profile_table",
    "read_run",
    "refusal_lines",
    "run_report",
    "search_json",
    "search_tables",
    "sentences",
    "settings_lines",
    "step_balance",
    "step_charts",
    "step_drawing",
    "step_page_data",
    "step_tables",
    "timeline_chart",
    "trace_of",
    "write_figure",
    "write_run",
    "write_trace",
]
