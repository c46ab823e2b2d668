"""Tables for people: rich renderables, each a pure function of what it shows."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from spindle.plan import Plan, slots_per_op
from spindle.profile import Profile
from spindle.program import counts_bytes
from spindle.report.bound import BoundReport
from spindle.report.compare import ComparedPlan, Comparison, RefusedPlan
from spindle.report.quantities import count_of, figures, listed, milliseconds, num_bytes, percent, seconds
from spindle.timeline import Measures


def facts(rows: list[tuple[str, str]]) -> Table:
    """Names and values, without lines."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def memory(peak_bytes: int, profile: Profile) -> str:
    if not counts_bytes(profile):
        return "not known for an abstract graph"
    limit = profile.cluster.kind.memory_bytes
    return f"{num_bytes(peak_bytes)} of {num_bytes(limit)} ({percent(peak_bytes / limit)}) on the fullest device"


def plan_facts(plan: Plan, measures: Measures, profile: Profile) -> Table:
    """What a person wants to know of a plan first."""
    rows = [
        ("workload", f"{plan.workload} on {plan.cluster}"),
        ("planner", _planner(plan)),
        ("step, simulated", f"{seconds(measures.makespan_s)}, {times_bound(measures.makespan_s, plan.bound_s)}"),
        ("folded", f"{seconds(plan.folded_s)}, {times_bound(plan.folded_s, plan.bound_s)}"),
        ("bound", f"{seconds(plan.bound_s)}, below which no plan of this kind comes"),
        ("idle", percent(measures.idle_share)),
        ("slots", f"{len(plan.slots)} in {_waves(plan)}, {slots_per_op(plan):.2f} for each op"),
        ("peak memory", memory(measures.peak_bytes, profile)),
    ]
    if counts_bytes(profile):
        shares = f"{percent(measures.transfer_share)} send and receive, {percent(measures.sync_share)} synchronisation"
        rows.insert(6, ("not hidden", shares))
    sharded = [f"{module} {degree}" for module, degree in plan.tensor_degrees if degree > 1]
    if sharded:
        rows.append(("tensor degree", ", ".join(sharded)))
    if plan.recompute:
        everything = len(plan.recompute) == len(profile.graph.metaops)
        rows.append(("recomputed", "every op" if everything else listed(plan.recompute, at_most=8)))
    if plan.num_rounds > 1:
        rows.append(("rounds", f"{plan.num_rounds}, one after another, to save memory"))
    return facts(rows)


def _planner(plan: Plan) -> str:
    searched = f", {plan.evaluations:,} schedules tried, seed {plan.seed}" if plan.evaluations else ""
    cut = "" if plan.cut_s is None else f", cut at {seconds(plan.cut_s)}"
    return plan.planner + searched + cut


def _waves(plan: Plan) -> str:
    return count_of(len({slot.wave for slot in plan.slots}), "wave")


def times_bound(time_s: float, bound_s: float) -> str:
    return f"{time_s / bound_s:.3f} × the bound"


def measure_facts(plan: Plan, measures: Measures, profile: Profile, bound_s: float) -> Table:
    """What a simulated step came to, beside the bound on this cluster, which need not be the one planned for."""
    return facts(
        [
            ("workload", f"{plan.workload} on {profile.cluster.name}"),
            ("plan", f"{plan.planner}, {count_of(len(plan.slots), 'slot')} in {_waves(plan)}"),
            ("step", f"{seconds(measures.makespan_s)}, {times_bound(measures.makespan_s, bound_s)}"),
            ("compute", percent(measures.compute_share)),
            ("send, receive", f"{percent(measures.transfer_share)} that compute does not hide"),
            ("synchronise", f"{percent(measures.sync_share)} that compute does not hide"),
            ("idle", percent(measures.idle_share)),
            ("peak memory", memory(measures.peak_bytes, profile)),
        ]
    )


def comparison_table(comparison: Comparison, profile: Profile) -> Table:
    """Planners as rows, fastest first."""
    title = f"{comparison.workload} on {comparison.cluster}: one step"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("planner", no_wrap=True)
    for name in ("ms", "speedup", "idle %", "send/\nrecv %", "sync %", "peak GiB", "× bound"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        match row:
            case ComparedPlan():
                known = counts_bytes(profile)
                table.add_row(
                    row.planner,
                    milliseconds(row.makespan_s),
                    "-" if row.speedup is None else f"{row.speedup:.2f}",
                    f"{100 * row.idle_share:.1f}",
                    f"{100 * row.transfer_share:.1f}",
                    f"{100 * row.sync_share:.1f}",
                    f"{row.peak_bytes / 2**30:.1f}" if known else "-",
                    f"{row.over_bound:.3f}",
                )
            case RefusedPlan():
                table.add_row(row.planner, "none", *["-"] * 6, style="dim")
    if comparison.plans:
        table.add_section()
        bound = comparison.plans[0].bound_s
        sequential = next((row for row in comparison.plans if row.planner == "sequential"), None)
        allowed = "-" if sequential is None else f"{sequential.makespan_s / bound:.2f}"
        table.add_row("LP bound", milliseconds(bound), allowed, *["-"] * 4, "1.000", style="dim")
    return table


def refusal_lines(comparison: Comparison) -> list[Text]:
    """Why planners have no plan, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in comparison.rows:
        if isinstance(row, RefusedPlan):
            reasons.setdefault(row.refusal, []).append(row.planner)
    return [
        Text.assemble((listed(planners), "bold"), f" {'has' if len(planners) == 1 else 'have'} no plan: {reason}")
        for reason, planners in reasons.items()
    ]


def bound_facts(report: BoundReport) -> Table:
    """The bounds, one under the other."""
    levels = " + ".join(figures(level * 1e3) for level in report.level_s[:8])
    more = f" + {len(report.level_s) - 8} more" if len(report.level_s) > 8 else ""
    return facts(
        [
            ("workload", f"{report.workload} on {count_of(report.num_devices, 'device')}"),
            ("LP bound", f"{seconds(report.lp_s)} for the whole graph, folded"),
            ("paper's C*", f"{seconds(report.paper_s)} = {levels}{more} ms, level by level"),
        ]
    )
